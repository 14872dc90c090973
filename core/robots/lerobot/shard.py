"""Writes shards: TFRecord files that contain some episodes each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...formats.atomic_file import atomic_file
from ...formats.example_message import example_message, record_parts
from ...messages.printable import printable
from .dataset import IMAGE, VIDEO, Episode, LeRobotDataset
from .episode_rows import Column, EpisodeRows
from .image_encoding import ImageEncoding
from .rlds_layout import (
    FIRST,
    INSTRUCTION,
    LAST,
    METADATA,
    STEPS,
    TASK_INDEX,
    TIMESTAMP,
    episode_values,
    packed_features,
    step_key,
)
from .video_frames import frames_at

_LARGEST = (1 << 31) - 1  # bytes of a message that protobuf can parse


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive episodes that are written to one file.

    Attributes:
        name: The name of the file.
        first: The number of the first episode.
        stop: The number of the first episode of the next shard.
    """

    name: str
    first: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of a packed data set.

    Args:
        dataset: The LeRobot data set.
        folder: The folder in which the files are written.
        encoding: Encodes the images.
        tolerance: Largest distance between a step and its frame, in seconds.
    """

    dataset: LeRobotDataset
    folder: str
    encoding: ImageEncoding
    tolerance: float

    def write(self, shard: Shard, advance: Callable[[int], object]) -> dict[str, Any]:
        """Writes the file of a shard, and returns the shard's entry in the manifest.

        If an error is raised, no file is written.

        Args:
            shard: The shard.
            advance: Is called after each episode with the episode's number of steps.

        Returns:
            The entry of the shard in the manifest.

        Raises:
            OSError: If a file can't be read or written.
            ValueError: If the data is damaged; the message names file and episode.
        """
        digest, num_bytes, example_bytes, num_steps = hashlib.sha256(), 0, 0, 0
        rows = EpisodeRows(self.dataset.features)
        with atomic_file(os.path.join(self.folder, shard.name)) as file:
            for number in range(shard.first, shard.stop):
                data = example_message(self._features(rows, number))
                if len(data) > _LARGEST:
                    raise ValueError(
                        f"episode {number} has {len(data):,} bytes, but TensorFlow parses at most "
                        f"{_LARGEST:,}. Pass a lower --quality, or --exclude cameras"
                    )
                for part in record_parts(data):
                    file.write(part)
                    digest.update(part)
                    num_bytes += len(part)
                example_bytes += len(data)
                num_steps += self.dataset.episodes[number].length
                advance(self.dataset.episodes[number].length)
            file.flush()
            os.fsync(file.fileno())  # before the manifest lists the file as complete
        return {
            "name": shard.name,
            "bytes": num_bytes,
            "sha256": digest.hexdigest(),
            "episodes": [shard.first, shard.stop],
            "steps": num_steps,
            "example_bytes": example_bytes,
        }

    def _features(self, rows: EpisodeRows, number: int) -> dict[str, Column]:
        """Returns the columns of the record of an episode, by key."""
        dataset, episode = self.dataset, self.dataset.episodes[number]
        with naming_episode(episode, episode.data):
            columns = rows.read(episode)
            times = np.asarray(columns[TIMESTAMP], np.float64)
            if (np.diff(times) <= 0).any() or not np.isfinite(times).all():
                raise ValueError("the column 'timestamp' is not increasing")
            tasks = _tasks(dataset, columns)
        packed: dict[str, Column] = {}
        for name, feature in dataset.features.items():
            if feature.dtype == IMAGE:
                with naming_episode(episode, episode.data, name):
                    packed[step_key(name)] = [
                        self.encoding.encode_stored(data, feature) for data in columns[name]
                    ]
            elif feature.dtype == VIDEO:
                path, start = episode.videos[name]
                with naming_episode(episode, path, name):
                    frames = frames_at(path, (start + times).tolist(), self.tolerance, dataset.fps)
                    packed[step_key(name)] = [
                        self.encoding.encode_frame(frame, feature) for frame in frames
                    ]
            else:
                packed[step_key(name)] = columns[name]
        ends = np.zeros((2, episode.length), bool)
        ends[0, :1] = ends[1, -1:] = True
        derived = {FIRST: ends[0], LAST: ends[1], **({INSTRUCTION: tasks} if tasks else {})}
        for name, column in derived.items():
            packed.setdefault(f"{STEPS}/{name}", column)
        values = episode_values(dataset, number)
        if tasks:
            values["task"] = tasks[0]
        return {**packed, **{f"{METADATA}/{name}": _column(v) for name, v in values.items()}}


def _tasks(dataset: LeRobotDataset, columns: Mapping[str, Column]) -> list[bytes]:
    """Returns the instruction of each step in UTF-8; empty if the data set has no instructions."""
    if TASK_INDEX not in columns:
        return []
    numbers = np.asarray(columns[TASK_INDEX]).tolist()
    for number in numbers:
        if number not in dataset.tasks:
            raise ValueError(f"has the task_index {number}, which is not a task of meta/")
    return [dataset.tasks[number].encode() for number in numbers]


def _column(value: Any) -> Column:
    if isinstance(value, (str, bytes)):
        return [value.encode() if isinstance(value, str) else value]
    return np.array([value])


@contextlib.contextmanager
def naming_episode(episode: Episode, path: str, camera: str = "") -> Iterator[None]:
    """Context manager that adds file, episode and camera to the messages of errors in its block.

    Raises:
        OSError, ValueError: If the block raises such an error.
    """
    label = f"{printable(path)}: episode {episode.number}"
    if camera:
        label += f", camera {printable(camera)!r}"
    try:
        yield
    except OSError as error:
        raise OSError(f"{label} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{label}: {printable(str(error))}") from error


def divide(dataset: LeRobotDataset, name: str, shard_steps: int) -> list[Shard]:
    """Returns the shards of a data set, each of which has consecutive episodes.

    Args:
        dataset: The LeRobot data set.
        name: Name of the packed data set, for the names of the files.
        shard_steps: A shard ends with the episode that reaches this number of steps.
    """
    lengths = [episode.length for episode in dataset.episodes]
    bounds, steps = [0], 0
    for number, length in enumerate(lengths, 1):
        steps += length
        if steps >= shard_steps or number == len(lengths):
            bounds.append(number)
            steps = 0
    count = len(bounds) - 1
    return [
        Shard(f"{name}-train.tfrecord-{number:05d}-of-{count:05d}", first, stop)
        for number, (first, stop) in enumerate(itertools.pairwise(bounds))
    ]


def check_features(dataset: LeRobotDataset) -> None:
    """Checks that a data set can be packed.

    Raises:
        ValueError: If the data set has no timestamps or episode indices, or a name of a feature
            can't be a key of records.
    """
    if TIMESTAMP not in dataset.features or "episode_index" not in dataset.features:
        raise ValueError(
            f"{printable(dataset.root)} has no features 'timestamp' and 'episode_index', which "
            "LeRobot writes for each step. Do not exclude them"
        )
    packed_features(dataset)
