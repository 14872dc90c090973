"""Indexes of episodes in TFRecords: the byte ranges of the images of each step, and other values.

The index contains ``episode.first`` (number of steps before each episode, and in total) and
``episode.damaged`` (whether its checksum is wrong; it then has one step, whose values are 0). For a
feature of images it contains ``FEATURE.offset`` and ``FEATURE.size``, for numbers and texts
``FEATURE.value``. The value of a text is an index k: the text is the bytes ``text.ends[k]`` to
``text.ends[k + 1]`` of ``text.bytes``. Features of steps have a row for each step. Features of
episodes have a row for each episode, except that their images have a row for each step.

``about`` contains the entries that `dalijax.core.formats.index_checks` describes, but ``first``
counts steps instead of records. It also contains ``episodes`` (number of episodes before each file,
and in total), ``kinds`` (the kind of each feature), ``png`` (features of PNG images) and
``digests`` (a digest of each file's values).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import index_checks
from ..formats.buffered_reader import BufferedReader
from ..formats.byte_files import Stamp, is_remote, open_files, within
from ..formats.each_file import each_file, in_threads
from ..formats.file_columns import FileColumns
from ..formats.index import Index
from ..formats.paths import object_names
from ..formats.progress import progress
from ..formats.spooled_array import SpooledArray
from ..formats.tfrecord_index import check_some_intact
from ..messages.printable import printable
from ..order.shuffle import Indices
from .episode_columns import EpisodeColumns, EpisodeFeatures, has_row_of_step, read_episodes
from .episode_ranges import LocatedEpisodes
from .rlds_features import IMAGE, NUMBER, TEXT

_WORDS = {"b": "booleans", "i": "integers", "u": "integers", "f": "floats"}  # by kind of a dtype


class _IndexBuilder:
    """The columns of all files, joined in the order of the files.

    Threads add the columns of files in any order.
    """

    def __init__(self) -> None:
        self.first_steps, self.episodes = [0], [0]
        self.digests: list[str] = []
        self.kinds: dict[str, str] = {}
        self.png: set[str] = set()
        self._lengths, self._damaged = SpooledArray(), SpooledArray()
        self._arrays: dict[str, SpooledArray] = {}
        self._num_rows: dict[str, int] = {}
        self._empty: dict[str, NDArray[Any]] = {}  # an array of no rows, by name
        # For each array, the kind of its dtype, the shape of a value, and the first file with it.
        self._shapes: dict[str, tuple[tuple[Any, ...], str]] = {}
        self._texts: dict[bytes, int] = {}
        self._waiting: dict[int, EpisodeColumns] = {}
        self._lock = threading.Lock()

    def add(self, number: int, columns: EpisodeColumns) -> None:
        """Adds the columns of a file, given its number.

        The columns are appended when those of all files with smaller numbers have been appended.

        Raises:
            ValueError: If a feature has another kind or shape than in earlier files.
        """
        with self._lock:
            self._waiting[number] = columns
            while (later := self._waiting.pop(len(self.digests), None)) is not None:
                self._append(later)

    def _append(self, columns: EpisodeColumns) -> None:
        """Appends the columns of the next file; see `add`."""
        numbers = [self._texts.setdefault(text, len(self._texts)) for text in columns.texts]
        for name, kind in columns.kinds.items():
            if self.kinds.setdefault(name, kind) != kind:
                raise ValueError(
                    f"{name!r} of {columns.path} is {kind}, but {self.kinds[name]} in other files"
                )
        for name, array in columns.arrays.items():
            own_shape = array.dtype.kind, *array.shape[1:]
            shape, path = self._shapes.setdefault(name, (own_shape, columns.path))
            if shape != own_shape:
                raise ValueError(
                    f"{name.rpartition('.')[0]!r} has values of the dtype {array.dtype} and the "
                    f"shape {array.shape[1:]} in {columns.path}, but {_WORDS[shape[0]]} of the "
                    f"shape {shape[1:]} in {path}"
                )
            if columns.kinds[name.rpartition(".")[0]] == TEXT:
                array = np.array(numbers, np.int32)[array]
            self._append_rows(name, array)
            self._empty[name] = array[:0].copy()
        self.png |= columns.png
        self._lengths.append(columns.lengths)
        self._damaged.append(columns.damaged)
        self.first_steps.append(self.first_steps[-1] + int(columns.lengths.sum()))
        self.episodes.append(self.episodes[-1] + len(columns.lengths))
        self.digests.append(columns.digest)

    def _append_rows(self, name: str, rows: NDArray[Any]) -> None:
        """Appends the rows of the next file to an array, given its name.

        First appends rows of 0 for the files before, if all of their episodes were damaged.
        """
        feature = name.rpartition(".")[0]
        is_of_steps = has_row_of_step(feature, self.kinds[feature])
        counts = self.first_steps if is_of_steps else self.episodes
        if num_lacking := counts[-1] - self._num_rows.get(name, 0):
            zeros = np.zeros((num_lacking, *rows.shape[1:]), rows.dtype)
            self._arrays.setdefault(name, SpooledArray()).append(zeros)
        self._arrays.setdefault(name, SpooledArray()).append(rows)
        self._num_rows[name] = counts[-1] + len(rows)

    def index(self, paths: Sequence[str], sizes: Sequence[int]) -> Index:
        """Returns the index of the files.

        Args:
            paths: The files.
            sizes: The sizes of the files in bytes.

        Raises:
            ValueError: If the files have no steps.
        """
        damaged = self._damaged.array()
        if self.first_steps[-1] == damaged.sum():  # a damaged episode has one step
            check_some_intact(paths, damaged[damaged])
            raise ValueError(f"{', '.join(map(printable, paths[:3]))} has no steps")
        about = {
            "names": object_names(paths),
            "sizes": list(sizes),
            "first": self.first_steps,
            "episodes": self.episodes,
            "columns": hashlib.blake2b("".join(self.digests).encode(), digest_size=16).hexdigest(),
            "kinds": self.kinds,
            "png": sorted(self.png),
            "digests": self.digests,
        }
        return Index(about, {**self._all_arrays(), "episode.damaged": damaged})

    def _all_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays of the index by name."""
        for name, rows in self._empty.items():
            self._append_rows(name, rows)
        arrays = {name: spooled.array() for name, spooled in self._arrays.items()}
        texts = list(self._texts)
        arrays["text.bytes"] = np.frombuffer(b"".join(texts), np.uint8)
        arrays["text.ends"] = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        arrays["episode.first"] = np.concatenate([[0], np.cumsum(self._lengths.array())])
        return arrays


def index_episodes(paths: Sequence[str], features: EpisodeFeatures) -> Index:
    """Reads TFRecord files in several threads, and returns the index of their episodes.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is damaged, or its episodes can't be read as steps.
    """
    builder = _IndexBuilder()
    sizes, _ = each_file(
        paths,
        "TFRecord files",
        features.storage,
        lambda take, advance: read_episodes(take, features, advance),
        builder.add,
    )
    return builder.index(paths, sizes)


def select_episodes(
    table: FileColumns, paths: Sequence[str], stamps: Sequence[Stamp], features: EpisodeFeatures
) -> Index | None:
    """Returns an index equal to that of `index_episodes`, without reading all of the files.

    Args:
        table: The columns of the files; see `episode_ranges`.
        paths: The files.
        stamps: The stamp of each file.
        features: The wanted features.

    Returns:
        The index; None if the table lacks the column of a feature, or the ranges in damaged
        episodes that are not to be verified.

    Raises:
        OSError: If a file can't be read, or has changed.
        ValueError: If all episodes are damaged, or can't be read as steps.
    """
    names = features.needed
    if table.damaged.any() and not features.verify:
        return None
    if not table.knows(names):
        return None
    builder, located = _IndexBuilder(), LocatedEpisodes(table, paths, stamps, features)

    def read(number: int, advance: Callable[[int], object]) -> None:
        builder.add(number, located.read(number))
        advance(1)

    with progress("Reading the numbers of TFRecord files", len(paths), "files") as advance:
        in_threads(lambda number: read(number, advance), len(paths), any(map(is_remote, paths)))
    return builder.index(paths, [stamp[0] for stamp in stamps])


def has_content(
    features: EpisodeFeatures,
    index: Index,
    paths: Sequence[str],
    build: Callable[[Sequence[str]], Index],
    number: int,
) -> bool:
    """Reads a file, and returns whether it still has the episodes that an index contains.

    Returns False if the file can't be read.

    Args:
        features: The features of the index.
        index: The index.
        paths: The files of the index.
        build: Builds the index of files. Not used, because reading the file's episodes suffices.
        number: The number of the file.
    """
    rows = slice(*index.about["first"][number : number + 2])
    try:
        (file,) = open_files([paths[number]], features.storage)
        columns = read_episodes(BufferedReader(file), features)
    except (OSError, ValueError):
        return False
    same_offsets = all(
        np.array_equal(index.arrays[name][rows], array)
        for name, array in columns.arrays.items()
        if name.endswith(".offset")
    )
    return same_offsets and columns.digest == index.about["digests"][number]


def is_valid(index: Index, features: EpisodeFeatures) -> bool:
    """Returns whether a stored index has the wanted features, and ranges inside the files.

    The ranges are only checked if there are few; see `index_checks.MOST_ROWS`.
    """
    try:
        return _is_valid(index, features)
    except (ValueError, TypeError, LookupError, OverflowError):
        return False


def _is_valid(index: Index, features: EpisodeFeatures) -> bool:
    """Returns the same as `is_valid`, but may raise an exception for damaged content."""
    about, arrays = index.about, index.arrays
    kinds, episodes, first = about["kinds"], about["episodes"], about["first"]
    is_described = index_checks.about_is_valid(index, {"png": list, "digests": list, "kinds": dict})
    if not is_described or kinds.keys() != set(features.names):
        return False
    if len(about["digests"]) != len(first) - 1 or len(episodes) != len(first):
        return False
    starts, ends = arrays["episode.first"], arrays["text.ends"]
    if starts.dtype != np.int64 or ends.dtype != np.int64 or arrays["text.bytes"].dtype != np.uint8:
        return False
    damaged = arrays["episode.damaged"]
    if damaged.shape != (episodes[-1],) or damaged.dtype != np.bool_:
        return False
    if starts.shape != (episodes[-1] + 1,) or starts[episodes].tolist() != first:
        return False
    if episodes != sorted(episodes) or episodes[0] or not len(ends) or ends[0]:
        return False
    if (np.diff(starts) < 0).any() or (np.diff(ends) < 0).any():
        return False
    if ends[-1] != len(arrays["text.bytes"]):
        return False
    names = {"episode.first", "episode.damaged", "text.bytes", "text.ends"}
    for name, kind in kinds.items():
        parts = ("offset", "size") if kind == IMAGE else ("value",)
        names |= {f"{name}.{part}" for part in parts}
        if not _column_is_valid(index, name, kind, len(ends) - 1):
            return False
    return names == arrays.keys()


def _column_is_valid(index: Index, name: str, kind: str, num_texts: int) -> bool:
    """Returns whether the arrays of a feature have valid dtypes, shapes, ranges and texts.

    Args:
        index: The index.
        name: The feature.
        kind: The kind of the feature: IMAGE, TEXT or NUMBER.
        num_texts: The number of texts in the index.
    """
    first, arrays = index.about["first"], index.arrays
    rows = first[-1] if has_row_of_step(name, kind) else index.about["episodes"][-1]
    are_few = rows <= index_checks.MOST_ROWS
    if kind == IMAGE:
        offsets, sizes = arrays[f"{name}.offset"], arrays[f"{name}.size"]
        if offsets.dtype != np.int64 or sizes.dtype != np.uint32:
            return False
        if offsets.shape != (rows,) or sizes.shape != (rows,):
            return False
        if not are_few:
            return True
        limits = np.repeat(np.array(index.about["sizes"], np.int64), np.diff(first))
        return bool(within(offsets, sizes.astype(np.int64), limits).all())
    values = arrays[f"{name}.value"]
    if kind == TEXT:
        is_text = values.shape == (rows,) and values.dtype == np.int32
        are_within = not are_few or not ((values < 0) | (values >= num_texts)).any()
        return is_text and bool(are_within)
    return kind == NUMBER and values.shape[:1] == (rows,) and values.dtype.kind in "biuf"


def text_of(arrays: Mapping[str, NDArray[Any]], numbers: Indices) -> list[str]:
    """Returns texts, given their indices, in the order of the indices.

    Args:
        arrays: The arrays of an index of episodes.
        numbers: The indices of the texts, int [texts], which may be repeated.
    """
    ends, data = arrays["text.ends"], arrays["text.bytes"]
    unique, inverse = np.unique(numbers, return_inverse=True)  # steps of an episode share texts
    bounds = zip(ends[unique].tolist(), ends[unique + 1].tolist(), strict=True)
    texts = [data[start:stop].tobytes().decode() for start, stop in bounds]
    return [texts[number] for number in inverse.tolist()]
