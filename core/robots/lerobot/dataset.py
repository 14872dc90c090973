"""Reads the metadata of LeRobot data sets of the versions 2.0, 2.1 and 3."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...environment.extras import extra
from ...formats.file_kinds import file_fault
from ...messages.printable import printable
from .depth import DepthCodes

VIDEO, IMAGE, TEXT = "video", "image", "string"  # dtypes of LeRobot that are not NumPy's
_NUMBERS = "biuf"
# Prefixes of columns of episodes that contain locations of files, or statistics.
_BOOKKEEPING = ("data/", "videos/", "meta/", "stats/")
# Columns of episodes that `Episode` or the steps contain in another form.
_OWN = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a data set, which has a value in each step of an episode.

    Attributes:
        dtype: VIDEO, IMAGE, TEXT or the name of a NumPy dtype.
        shape: The shape of a value: () for a single value, (height, width, channels) for an image.
        depth: The encoding of depth images; None for other features.
    """

    dtype: str
    shape: tuple[int, ...]
    depth: DepthCodes | None = None

    @property
    def is_image(self) -> bool:
        """Returns whether the values are images, stored in videos or in parquet files."""
        return self.dtype in (VIDEO, IMAGE)


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode of a LeRobot data set.

    Attributes:
        number: The ``episode_index``.
        length: Number of steps.
        data: Path of the parquet file that contains the rows of the episode.
        videos: For each camera, the path of the video, and the time of the episode's first frame in
            the video, in seconds.
        metadata: Other values of the episode, by name.
    """

    number: int
    length: int
    data: str
    videos: Mapping[str, tuple[str, float]]
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class LeRobotDataset:
    """The metadata of a LeRobot data set.

    Attributes:
        root: The folder of the data set.
        fps: Steps per second.
        robot_type: Type of the robot; empty if unknown.
        features: The features of the steps, by name.
        omitted: The dtypes of unsupported features, such as lists of messages, by name.
        tasks: The instruction of each ``task_index``.
        episodes: The episodes in order.
    """

    root: str
    fps: float
    robot_type: str
    features: Mapping[str, Feature]
    omitted: Mapping[str, str]
    tasks: Mapping[int, str]
    episodes: tuple[Episode, ...]


def open_dataset(root: str, exclude: Sequence[str] = ()) -> LeRobotDataset:
    """Reads and returns the metadata of a LeRobot data set.

    Args:
        root: The folder of the data set.
        exclude: Names of features to omit.

    Raises:
        OSError: If a file of the metadata can't be read.
        ValueError: If the metadata is damaged or of another version, or lacks episodes.
        ImportError: If pyarrow is not installed.
    """
    path = os.path.join(root, "meta", "info.json")
    try:
        info = json.loads(_text(path))
        version = str(info["codebase_version"])
        fps, features = float(info["fps"]), dict(info["features"])
        if not (fps > 0 and np.isfinite(fps)):
            raise ValueError(f"fps={fps}")
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"{printable(path)} is not the description of a LeRobot data set: {error!r}"
        ) from error
    if unknown := sorted(set(exclude) - features.keys()):
        raise ValueError(
            f"--exclude {unknown[0]}: there is no such feature. {printable(path)} has "
            f"{', '.join(map(printable, features))}"
        )
    described, omitted = {}, {}
    for name, node in features.items():
        if name in exclude:
            continue
        feature = _feature(path, name, node)
        if feature is None:
            omitted[name] = str(node["dtype"])
        else:
            described[name] = feature
    cameras = [name for name, feature in described.items() if feature.dtype == VIDEO]
    read = {"v2": _episodes_of_lines, "v3": _episodes_of_tables}.get(version.split(".")[0])
    if read is None:
        raise ValueError(
            f"{printable(path)} has the version {version!r}, but only v2.0, v2.1 and v3 can be "
            "read. Convert the data set by LeRobot's scripts"
        )
    try:
        tasks, episodes = read(root, info, cameras)
    except (TypeError, LookupError) as error:
        raise ValueError(
            f"the metadata of {printable(root)} is incomplete: {error!r} in {printable(path)} or "
            "the files of meta/"
        ) from error
    paths = [path for e in episodes for path in (e.data, *(path for path, _ in e.videos.values()))]
    for path in dict.fromkeys(paths):
        _check_content(path)
    numbers = [episode.number for episode in episodes]
    total = info.get("total_episodes", len(numbers))
    if numbers != list(range(len(numbers))) or total != len(numbers) or not numbers:
        raise ValueError(
            f"{printable(root)}/meta has {len(numbers):,} episodes, but {printable(path)} has "
            f"total_episodes={total}. Download the whole data set"
        )
    return LeRobotDataset(
        root, fps, str(info.get("robot_type") or ""), described, omitted, tasks, tuple(episodes)
    )


def _feature(path: str, name: str, node: Any) -> Feature | None:
    """Returns a feature, given its description; returns None if its dtype is not supported.

    Args:
        path: The path of info.json, for errors.
        name: The name of the feature.
        node: The description of the feature in info.json.

    Raises:
        ValueError: If the name or the description is invalid.
    """
    try:
        dtype, shape = node["dtype"], tuple(int(size) for size in node["shape"])
        if "/" in name or not isinstance(dtype, str) or any(size < 1 for size in shape):
            raise ValueError("a name with '/', or a dtype or shape of no array")
        if dtype in (VIDEO, IMAGE):
            return Feature(dtype, _image_shape(shape, node.get("names")), DepthCodes.parse(node))
        if shape == (1,):  # parquet files have these values without a dimension
            shape = ()
        if dtype == TEXT:
            return Feature(TEXT, shape)
        is_number = dtype in np.sctypeDict and np.dtype(dtype).kind in _NUMBERS
        return Feature(str(np.dtype(dtype)), shape) if is_number else None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{printable(path)}: the feature {printable(name)!r} can't be read: {error}"
        ) from error


def _image_shape(shape: tuple[int, ...], names: Any) -> tuple[int, ...]:
    """Returns the height, width and channels of a feature of images.

    Args:
        shape: The shape of the feature in info.json.
        names: The names of the dimensions in info.json, if it has them.

    Raises:
        ValueError: If the order of the dimensions is unknown.
    """
    if len(shape) == 2:
        return (*shape, 1)
    if len(shape) != 3:
        raise ValueError(f"images have 3 dimensions, not {len(shape)}")
    initials = [str(name)[:1].lower() for name in names] if isinstance(names, list) else []
    if sorted(initials) == ["c", "h", "w"]:
        return tuple(shape[initials.index(initial)] for initial in "hwc")
    if shape[2] <= 4:
        return shape
    if shape[0] <= 4:
        return shape[1], shape[2], shape[0]
    raise ValueError(f"none of its dimensions {shape} are channels")


def _episodes_of_tables(
    root: str, info: Mapping[str, Any], cameras: Sequence[str]
) -> tuple[dict[int, str], list[Episode]]:
    """Returns the tasks and the episodes of a data set of version 3, from parquet files."""
    rows = []
    pattern = os.path.join(glob.escape(root), "meta", "episodes", "*", "*.parquet")
    for path in sorted(glob.glob(pattern)):
        rows += read_table(path, lambda name: not name.startswith("stats/"))
    metadata = _metadata(rows)
    episodes = []
    for row, values in zip(rows, metadata, strict=True):
        number = int(row["episode_index"])
        videos = {
            camera: (
                _path_of(
                    root, info, "video_path", video_key=camera, **_file(row, f"videos/{camera}")
                ),
                float(row[f"videos/{camera}/from_timestamp"]),
            )
            for camera in cameras
        }
        data = _path_of(root, info, "data_path", **_file(row, "data"))
        episodes.append(Episode(number, int(row["length"]), data, videos, values))
    path = os.path.join(root, "meta", "tasks.parquet")
    tasks = {}
    for row in read_table(path):
        text = row["task"] if "task" in row else row["__index_level_0__"]  # the index of pandas
        tasks[int(row["task_index"])] = str(text)
    return tasks, sorted(episodes, key=lambda episode: episode.number)


def _file(row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    return {key: int(row[f"{prefix}/{key}"]) for key in ("chunk_index", "file_index")}


def _episodes_of_lines(
    root: str, info: Mapping[str, Any], cameras: Sequence[str]
) -> tuple[dict[int, str], list[Episode]]:
    """Returns the tasks and the episodes of a data set of version 2, from lines of JSON."""
    rows = _lines(os.path.join(root, "meta", "episodes.jsonl"))
    episodes = []
    for row, values in zip(rows, _metadata(rows), strict=True):
        number = int(row["episode_index"])
        keys = {"episode_index": number, "episode_chunk": number // int(info["chunks_size"])}
        videos = {
            camera: (_path_of(root, info, "video_path", video_key=camera, **keys), 0.0)
            for camera in cameras
        }
        data = _path_of(root, info, "data_path", **keys)
        episodes.append(Episode(number, int(row["length"]), data, videos, values))
    tasks = _lines(os.path.join(root, "meta", "tasks.jsonl"))
    return (
        {int(row["task_index"]): str(row["task"]) for row in tasks},
        sorted(episodes, key=lambda episode: episode.number),
    )


def _metadata(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the custom numbers, bools and texts of each episode, by name.

    Values that not all episodes have with the same type are omitted.
    """
    names = [
        name
        for name in (rows[0] if rows else ())
        if name not in _OWN
        and "/" not in name
        and not name.startswith(_BOOKKEEPING)
        and isinstance(rows[0][name], (bool, int, float, str))
        and len({type(row.get(name)) for row in rows}) == 1
    ]
    return [{name: row[name] for name in names} for row in rows]


def _path_of(root: str, info: Mapping[str, Any], key: str, **values: Any) -> str:
    """Returns the path that a template of info.json describes.

    Args:
        root: The folder of the data set.
        info: The contents of info.json.
        key: The key of the template, "data_path" or "video_path".
        **values: The values to insert into the template, such as ``chunk_index``.

    Raises:
        ValueError: If the template is damaged, or leads out of the data set.
    """
    template = info[key]
    named = f"{key}={template!r} in {printable(os.path.join(root, 'meta', 'info.json'))}"
    try:
        relative = os.path.normpath(str(template).format(**values))
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{named} is not a path: {error!r}") from error
    if os.path.isabs(relative) or relative.split(os.sep)[0] == os.pardir:
        raise ValueError(f"{named} leads out of the data set")
    return os.path.join(root, relative)


def read_table(
    path: str, is_wanted: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Returns the rows of a parquet file of metadata, as dicts of values by column.

    Args:
        path: The file.
        is_wanted: Returns whether to read the column with a given name.

    Raises:
        OSError, ValueError: If the file can't be read; the message contains the path.
        ImportError: If pyarrow is not installed.
    """
    with extra("lerobot", "pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    _check_content(path)
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if is_wanted(name)]
            return file.read(names).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{printable(path)} is not a parquet file: {error}") from error


def _lines(path: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in _text(path).splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{printable(path)} is damaged: {error}") from error


def _text(path: str) -> str:
    _check_content(path)
    with open(path, encoding="utf-8") as file:
        return file.read()


def _check_content(path: str) -> None:
    """Raises ValueError if a file is a git-lfs pointer."""
    if fault := file_fault(path):
        raise ValueError(f"{printable(path)} can't be read: {fault}")
