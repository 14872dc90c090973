"""`pack_lerobot`: packs LeRobot data sets as RLDS TFRecords."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from ...environment.extras import extra, version_of
from ...formats.atomic_file import atomic_file
from ...formats.progress import progress
from ...messages.printable import printable
from ...threads.workers import call_each
from . import manifest
from .dataset import IMAGE, Episode, LeRobotDataset, open_dataset
from .depth import DepthCodes
from .episode_rows import EpisodeRows
from .image_encoding import ImageEncoding
from .manifest import Manifest
from .processes import call_in_processes
from .rlds_layout import dataset_info_json, features_json, packed_features
from .shard import ShardWriter, check_features, divide, naming_episode

_log = logging.getLogger("dalijax")

_LIBRARIES = ("av", "pillow", "pyarrow", "numpy")  # their versions may change encoded images
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERIFYING_THREADS = 4
_INCOMPLETE = ".incomplete"


@dataclasses.dataclass(frozen=True)
class PackOptions:
    """Options of a packed data set.

    Attributes:
        quality: Quality of JPEGs, 1 to 100.
        subsampling: Chroma subsampling of JPEGs, ``"4:2:0"`` or ``"4:4:4"``.
        tolerance: Largest distance between a step and its frame, in seconds.
        shard_steps: A shard ends with the episode that reaches this number of steps.
        exclude: Names of features to omit.
        name: Name of the data set; empty: the name of its folder.

    Raises:
        ValueError: If a value is outside its range.
    """

    quality: int = 95
    subsampling: str = "4:2:0"
    tolerance: float = 1e-4
    shard_steps: int = 2000
    exclude: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"the quality of JPEGs is 1 to 100, not {self.quality}")
        if not 0 < self.tolerance < float("inf"):
            raise ValueError(f"the tolerance must be positive seconds, not {self.tolerance}")
        if self.shard_steps < 1:
            raise ValueError(f"a shard has at least 1 step, not {self.shard_steps}")
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"the name must be letters, digits and '_', not {self.name!r}")


@dataclasses.dataclass(frozen=True)
class Packed:
    """The result of `pack_lerobot`.

    Attributes:
        episodes: Number of episodes.
        steps: Number of steps.
        shards: Number of files.
        num_bytes: Total size of the files, in bytes.
        num_kept: Number of files that an earlier call had written.
        seconds: Duration of this call, in seconds.
        omitted: The dtypes of the features that are not supported and not packed, by name.
    """

    episodes: int
    steps: int
    shards: int
    num_bytes: int
    num_kept: int
    seconds: float
    omitted: dict[str, str]


def pack_lerobot(root: str, out: str, options: PackOptions, workers: int) -> Packed:
    """Packs a LeRobot data set as RLDS TFRecords, and returns the numbers of files and steps.

    The files are written to ``OUT.incomplete``, which is renamed when all are complete. After an
    interruption, another call verifies the checksums of the finished shards, and writes the other
    shards.
    The output is the same for any number of workers and interruptions.

    Args:
        root: The folder of the data set.
        out: The folder of the packed data set.
        options: Options of the encoding and of the division into files.
        workers: Number of processes.

    Raises:
        OSError: If a file can't be read or written.
        ValueError: If the data set is damaged, the output belongs to other data or options, or
            ``workers`` is less than 1.
        ImportError: If PyAV, pyarrow or Pillow is not installed.
        RuntimeError: If a process was killed.
    """
    start = time.monotonic()
    with extra("lerobot", "av, Pillow or pyarrow"):
        import av  # noqa: F401
        import PIL.Image  # noqa: F401
    root, out = os.path.abspath(root), os.path.abspath(out)
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, not {workers}")
    dataset = _with_depth(open_dataset(root, options.exclude))
    check_features(dataset)
    name = options.name or _name_of(root)
    shards = divide(dataset, name, options.shard_steps)
    plan = _plan(dataset, options, name)
    if os.path.exists(out) and not os.path.exists(os.path.join(out, manifest.NAME)):
        raise ValueError(f"{printable(out)} exists already. Pass a new folder")
    folder = out if os.path.exists(out) else out + _INCOMPLETE
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        listing = Manifest(folder, plan)
        names = [shard.name for shard in shards]
        listed = [name for name in names if name in listing.entries]
        verified = call_each(listing.verified, listed, _VERIFYING_THREADS, "dalijax-verify")
        finished = {name for name, is_valid in zip(listed, verified, strict=True) if is_valid}
        _report_kept(folder, len(finished), len(listed))
        missing = [shard for shard in shards if shard.name not in finished]
        encoding = ImageEncoding(options.quality, options.subsampling)
        writer = ShardWriter(dataset, folder, encoding, options.tolerance)
        steps = sum(
            dataset.episodes[number].length
            for shard in missing
            for number in range(shard.first, shard.stop)
        )
        with progress(f"packing {printable(root)}", steps, "steps") as advance:
            for entry in call_in_processes(writer.write, missing, workers, advance):
                listing.add(entry)
        entries = listing.finish(names)
        sizes = [
            (shard.stop - shard.first, entry["example_bytes"])
            for shard, entry in zip(shards, entries, strict=True)
        ]
        _write(folder, "features.json", features_json(packed_features(dataset)))
        _write(folder, "dataset_info.json", dataset_info_json(name, os.path.basename(root), sizes))
        if folder != out:
            os.rename(folder, out)
    return Packed(
        len(dataset.episodes),
        sum(entry["steps"] for entry in entries),
        len(shards),
        sum(entry["bytes"] for entry in entries),
        len(finished),
        time.monotonic() - start,
        dict(dataset.omitted),
    )


def _name_of(root: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", os.path.basename(root)).lower()
    return name if _NAME.fullmatch(name) else f"dataset_{name}"


def _with_depth(dataset: LeRobotDataset) -> LeRobotDataset:
    """Returns the data set, with gray stored images marked as depth if they have over 8 bits.

    Older versions of LeRobot do not mark depth. The first image of a feature decides.
    """
    gray = {
        name: feature
        for name, feature in dataset.features.items()
        if feature.dtype == IMAGE and feature.shape[2] == 1 and feature.depth is None
    }
    if not gray:
        return dataset
    from PIL import Image

    with naming_episode(dataset.episodes[0], dataset.episodes[0].data):
        columns = EpisodeRows(gray).read(dataset.episodes[0])
    features = dict(dataset.features)
    for name, feature in gray.items():
        with contextlib.suppress(OSError), Image.open(io.BytesIO(columns[name][0])) as image:
            if image.mode in ("F", "I") or image.mode.startswith("I;16"):
                features[name] = dataclasses.replace(feature, depth=DepthCodes())
    return dataclasses.replace(dataset, features=features)


def _plan(dataset: LeRobotDataset, options: PackOptions, name: str) -> dict[str, Any]:
    """Returns the values that determine the output, for the manifest.

    The values are the options, the versions of libraries, and a digest of the data set's metadata
    and of the sizes and times of its files.

    Raises:
        OSError: If a file of the data set is missing.
    """
    digest = hashlib.sha256()
    files: dict[str, Episode] = {}
    for episode in dataset.episodes:
        digest.update(repr(dataclasses.astuple(episode)[:2]).encode())
        digest.update(repr(sorted(episode.metadata.items())).encode())
        digest.update(repr(sorted(start for _, start in episode.videos.values())).encode())
        for path in (episode.data, *(path for path, _ in episode.videos.values())):
            files.setdefault(path, episode)
    for path, episode in files.items():
        try:
            stat = os.stat(path)
        except OSError as error:
            raise OSError(
                f"{printable(path)}: the file of episode {episode.number} can't be read: "
                f"{error.strerror}. Download the whole data set"
            ) from error
        stamp = os.path.relpath(path, dataset.root), stat.st_size, stat.st_mtime_ns
        digest.update(repr(stamp).encode())
    described = dataset.fps, dataset.robot_type, sorted(dataset.features.items())
    digest.update(repr((described, sorted(dataset.tasks.items()))).encode())
    values = dataclasses.asdict(options)
    values |= {"name": name, "exclude": list(options.exclude)}
    libraries = {library: version_of(library) for library in _LIBRARIES}
    # Increased whenever the same data and options give other records.
    return {"format": 2, "data": digest.hexdigest(), **values, **libraries}


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Locks a folder until the block ends.

    Raises:
        OSError: If another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(f"another process is writing {printable(folder)}") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _report_kept(folder: str, num_kept: int, num_listed: int) -> None:
    if num_kept:
        _log.info("%s: %d finished shards are kept", printable(folder), num_kept)
    if num_kept < num_listed:
        _log.warning(
            "%s: %d shards are damaged or missing, and are written again",
            printable(folder),
            num_listed - num_kept,
        )


def _write(folder: str, name: str, text: str) -> None:
    with atomic_file(os.path.join(folder, name)) as file:
        file.write(text.encode())
