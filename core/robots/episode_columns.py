"""Reads the episodes of a TFRecord file: the byte ranges of images, and all other values.

Each record is an episode: a tf.train.Example whose features are lists of the values of all steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.dtypes import narrow, out_of_range
from ..formats import example
from ..formats.buffered_reader import BufferedReader
from ..formats.byte_files import LocalFile
from ..formats.progress import counted
from ..formats.tfrecord_headers import is_intact, records
from ..formats.tfrecord_index import KINDS, LocatedRecord, features_of, with_gaps
from ..remote.storage import Storage
from .rlds_features import ENCODED, IMAGE, NUMBER, RAGGED, STEPS, TEXT, Spec

STEP_PREFIX = f"{STEPS}/"
# Features with one value for each step, so that the length of a list is the number of steps.
COUNTERS = (b"steps/is_first", b"steps/is_last", b"steps/is_terminal")
_RAGGED = ("/ragged_flat_values", "/ragged_row_lengths_")
_MOST_BYTES = 1 << 32  # records must be smaller, because sizes in the index have 32 bits
HEAD = 4  # bytes at the start of a value that tell images from texts
# Bytes of a read of a local file. Small reads between the images would need less CPU, but each may
# wait for a network file system, and threads contend for the GIL after each.
_LOCAL_BUFFER = 1 << 20
_REPORTED = 16  # episodes between two updates of the progress bar
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG"

# Offset and size in bytes of an episode's record, and its features in the order of the file; None
# instead of the features if the record has a wrong checksum.
Episode = tuple[int, int, Iterable[tuple[bytes, example.Feature]] | None]


@dataclasses.dataclass(frozen=True)
class EpisodeFeatures:
    """The wanted features of episodes.

    Attributes:
        names: Names of the wanted features, e.g. "steps/action".
        specs: The descriptions of features in features.json, by name; may lack features.
        storage: Access to remote files.
        verify: Whether to verify the checksums of episodes.
    """

    names: tuple[str, ...]
    specs: Mapping[str, Spec]
    storage: Storage
    verify: bool = True

    @property
    def needed(self) -> set[str]:
        """The names of the features to read: the wanted features, and `COUNTERS`."""
        return {*self.names, *map(bytes.decode, COUNTERS)}


def is_of_steps(feature: str) -> bool:
    """Returns whether a feature has a value for each step, instead of one for each episode."""
    return feature.startswith(STEP_PREFIX)


def has_row_of_step(feature: str, kind: str) -> bool:
    """Returns whether the index has a row of a feature for each step, instead of each episode.

    Args:
        feature: The feature.
        kind: Its kind: IMAGE, TEXT or NUMBER.
    """
    return kind == IMAGE or is_of_steps(feature)


def kind_of(head: bytes) -> str:
    """Returns IMAGE or TEXT, given the first bytes of a value."""
    return IMAGE if head.startswith((_JPEG, _PNG)) else TEXT


class _Column:
    """The values of a feature in all episodes of a file.

    Args:
        name: The feature.
        spec: The description of the feature in features.json, if there is one.
        texts: Maps each distinct text of the file to an index; `load` adds new texts.

    Attributes:
        name: As above.
        kind: IMAGE, TEXT or NUMBER; "" if it is not known yet.
        is_png: Whether the feature's first image in the file is a PNG.
    """

    def __init__(self, name: str, spec: Spec | None, texts: dict[bytes, int]):
        self.name = name
        self.kind = spec.kind if spec else ""
        self.is_png = False
        self._is_first_image = True
        self._spec, self._texts = spec, texts
        self._shape = spec.shape if spec else None  # of a value; None: not known yet
        self._wire = 0
        self._parts: list[NDArray[Any]] = []

    @property
    def width(self) -> int:
        """The number of values of a step, or of an episode; 0 if it is not known yet."""
        if self.kind in (IMAGE, TEXT):
            return 1
        return 0 if self._shape is None else int(np.prod(self._shape, dtype=np.int64))

    def check(self, path: str) -> None:
        """Raises ValueError if steps have different numbers of values, or tensors are encoded.

        Args:
            path: The file, for errors.
        """
        if self.kind == RAGGED or any(part in self.name for part in _RAGGED):
            raise _ragged(self.name, path)
        if self._spec and self.kind == ENCODED:
            raise ValueError(
                f"{self.name!r} of {path} is a tensor with encoding={self._spec.dtype!r}. Write it "
                "with encoding='none', or as an image"
            )

    def load(self, feature: example.Feature, take: BufferedReader) -> NDArray[Any]:
        """Returns the values of the feature in an episode.

        Args:
            feature: The located feature of the episode.
            take: Reads the file.

        Returns:
            For images, offsets and sizes in bytes, int64 [images, 2]. For texts, indices into
            ``texts``, int32 [texts]. For numbers, an array [numbers] of float32, int64 or the dtype
            in features.json.

        Raises:
            ValueError: If the values are not supported, or are of another kind than in earlier
                episodes or in features.json.
        """
        is_empty = not (feature.ranges or feature.loose)
        if feature.kind not in KINDS and (feature.kind or not is_empty):
            raise ValueError(
                f"has a value of kind {feature.kind}, which tf.train.Feature does not define"
            )
        if is_empty:
            return np.zeros(0, np.int64)
        if self._wire and feature.kind != self._wire:
            raise ValueError(f"has {KINDS[feature.kind]}, but earlier {KINDS[self._wire]}")
        self._wire = feature.kind
        is_bytes = feature.kind == example.BYTES
        if self.kind and is_bytes != (self.kind in (IMAGE, TEXT)):
            raise ValueError(f"has {KINDS[feature.kind]}, but features.json describes {self.kind}s")
        if not is_bytes:
            self.kind = NUMBER
            return self._cast(_numbers(feature, take))
        if not self.kind or (self.kind == IMAGE and self._is_first_image):
            at, size = feature.ranges[0]
            head = take(at, min(HEAD, size))
            self.is_png, self._is_first_image = head == _PNG, False
            self.kind = self.kind or kind_of(head)
        if self.kind == IMAGE:
            return np.array(feature.ranges, np.int64)
        return np.array([self._text(take(at, size)) for at, size in feature.ranges], np.int32)

    def add(self, values: NDArray[Any], num_steps: int) -> None:
        """Appends the values of an episode to the column.

        Args:
            values: The result of `load`.
            num_steps: Number of steps of the episode.

        Raises:
            ValueError: If the number of values does not fit the number of steps.
        """
        is_of_episode = not is_of_steps(self.name)
        rows = 1 if is_of_episode else num_steps
        unit = "the episode" if is_of_episode else _steps(num_steps)
        noun = "numbers" if self.kind == NUMBER else "values"
        if not rows and not len(values):
            return
        if not self.kind:
            raise ValueError(f"has no values for {unit}")
        if self._shape is None and self.kind == NUMBER:
            width, remainder = divmod(len(values), max(1, rows))
            if remainder or not width:
                raise ValueError(f"has {len(values):,} numbers for {unit}")
            self._shape = () if width == 1 else (width,)
        if len(values) != rows * self.width:
            reason = ""
            if self.width > 1:
                is_described = self._spec and self._spec.shape is not None
                reason = (
                    f" instead of {rows * self.width:,}, the shape {self._shape} "
                    f"{'of features.json' if is_described else 'of the first episode'} in each step"
                )
            raise ValueError(f"has {len(values):,} {noun} for {unit}{reason}")
        if self.kind == NUMBER and self._shape is not None:
            values = values.reshape(rows, *self._shape)
        elif self.kind == IMAGE and is_of_episode:
            values = np.repeat(values, num_steps, axis=0)
        self._parts.append(values)

    def _text(self, data: bytes) -> int:
        """Returns the index of a text in ``texts``; adds the text if it is new.

        Raises:
            ValueError: If the bytes are not text.
        """
        number = self._texts.get(data)
        if number is None:
            try:
                if b"\0" in data and self._spec is None:
                    raise ValueError("a text has no NULs")
                data.decode()
            except ValueError as error:
                raise ValueError(
                    f"has bytes that are neither a JPEG, a PNG nor text in UTF-8: {data[:16]!r}. "
                    "Only images, texts and lists of numbers are supported"
                ) from error
            number = self._texts[data] = len(self._texts)
        return number

    def _cast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns numbers in the dtype of features.json.

        Returns the unchanged numbers if features.json does not describe the feature, or its dtype
        has 64 bits.

        Raises:
            ValueError: If a number does not fit into the dtype, or features.json describes floats
                as integers or integers as floats.
        """
        if self._spec is None:
            return values
        dtype, is_float = np.dtype(self._spec.dtype), values.dtype.kind == "f"
        if is_float != (dtype.kind == "f"):
            raise ValueError(
                f"has {'floats' if is_float else 'integers'}, but features.json describes {dtype}"
            )
        is_bool = dtype.kind == "b"
        outside = (values < 0) | (values > 1) if is_bool else out_of_range(values, dtype)
        if outside.any():
            number = values[int(np.argmax(outside))]
            raise ValueError(f"has the number {number}, which does not fit into {dtype}")
        return values if dtype.itemsize == 8 else values.astype(dtype)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the feature's arrays of the index; texts are represented by indices."""
        if not self._parts:
            return {}
        values = np.concatenate(self._parts)
        if self.kind == IMAGE:
            return {
                f"{self.name}.offset": values[:, 0].copy(),
                f"{self.name}.size": values[:, 1].astype(np.uint32),
            }
        if values.dtype == np.int64:
            values = narrow(values)
        return {f"{self.name}.value": values}


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _ragged(name: str, label: str) -> ValueError:
    """Returns the error about a feature whose steps have different numbers of values."""
    return ValueError(
        f"{name!r} of {label} is ragged: steps have different numbers of values. Pad it when you "
        "write the data"
    )


def _numbers(feature: example.Feature, take: BufferedReader) -> NDArray[Any]:
    """Returns the numbers of a feature in an episode, as float32 or int64 [numbers]."""
    is_float = feature.kind == example.FLOATS
    if feature.loose:
        return np.array(example.numbers(take, feature), np.float32 if is_float else np.int64)
    data = np.frombuffer(b"".join(take(at, size) for at, size in feature.ranges), np.uint8)
    if is_float and len(data) % 4:
        raise ValueError("has a list of floats that is cut off")
    return example.floats(data) if is_float else example.integers(data)


def _length(feature: example.Feature, values: NDArray[Any] | None, take: BufferedReader) -> int:
    """Returns the number of values of a feature in an episode.

    Args:
        feature: The located feature.
        values: The values, if they were read already.
        take: Reads the file.
    """
    if feature.count is not None:
        return feature.count
    if feature.kind == example.BYTES:
        return len(feature.ranges)
    return len(_numbers(feature, take) if values is None else values)


def _located(
    label: str, take: BufferedReader, at: int, size: int, names: Collection[bytes]
) -> Iterator[tuple[bytes, example.Feature]]:
    """Yields the name and the location of each wanted feature of an episode, in the file's order.

    Args:
        label: The name of the episode in errors.
        take: Reads the file.
        at: Offset of the record's content.
        size: Size of the content in bytes.
        names: The wanted features.

    Raises:
        ValueError: If the record is not a tf.train.Example.
    """
    located = example.located_features(take, at, at + size, names)
    while True:
        try:
            item = next(located, None)
        except ValueError as error:
            raise ValueError(f"{label} is not a tf.train.Example: {error}") from error
        if item is None:
            return
        yield item


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


@dataclasses.dataclass
class EpisodeColumns:
    """The values of the wanted features in the episodes of a file.

    Attributes:
        path: The file, for errors.
        lengths: The number of steps of each episode, int64 [episodes].
        damaged: Whether each episode has a wrong checksum, bool [episodes]. Such an episode has one
            step, whose values are 0.
        arrays: The arrays of the features, by name; see `dalijax.core.robots.episode_index`.
            Texts are represented by indices into ``texts``.
        texts: The distinct texts of the file.
        kinds: IMAGE, TEXT or NUMBER for each feature that has values.
        png: The features whose first image is a PNG.
        digest: A digest of the lengths, the arrays except offsets, and the texts.
    """

    path: str
    lengths: NDArray[np.int64]
    damaged: NDArray[np.bool_]
    arrays: dict[str, NDArray[Any]]
    texts: list[bytes]
    kinds: dict[str, str]
    png: set[str]
    digest: str


def read_episodes(
    take: BufferedReader,
    features: EpisodeFeatures,
    advance: Callable[[int], object] = lambda count: None,
) -> EpisodeColumns:
    """Returns the wanted features of a file's episodes, but only the byte ranges of images.

    Args:
        take: Reads the file.
        features: The wanted features.
        advance: Is called with the number of bytes processed since the last call.

    Raises:
        ValueError: If the file is damaged, or an episode can't be read as steps.
    """
    file = take.file
    if isinstance(file, LocalFile):
        take = BufferedReader(file, _LOCAL_BUFFER)
    names = {name.encode() for name in features.needed}

    def located() -> Iterator[Episode]:
        """Yields the episodes, and reports their bytes to the progress bar."""
        walk = counted(records(take, file.size, file.shown), file.size, advance, _REPORTED)
        for number, (at, size) in enumerate(walk):
            if features.verify and size < _MOST_BYTES and not is_intact(take, at, size):
                yield at, size, None
            else:
                yield at, size, _located(f"{file.shown}: episode {number}", take, at, size, names)

    return columns_of(located(), take, features)


def columns_of(
    episodes: Iterable[Episode], take: BufferedReader, features: EpisodeFeatures
) -> EpisodeColumns:
    """Returns the wanted features of a file's episodes, given the locations of the features.

    Args:
        episodes: The episodes in the order of the file, with the locations of the wanted features
            and of `COUNTERS`, which tell the number of steps.
        take: Reads the file.
        features: The wanted features.

    Raises:
        ValueError: If an episode can't be read as steps.
    """
    file, texts = take.file, dict[bytes, int]()
    columns = {
        name.encode(): _Column(name, features.specs.get(name), texts) for name in features.names
    }
    for column in columns.values():
        column.check(file.shown)
    lengths: list[int] = []
    damaged: list[bool] = []
    for number, (at, size, located) in enumerate(episodes):
        label = f"{file.shown}: episode {number}"
        if size >= _MOST_BYTES:
            raise ValueError(
                f"{label} has {size:,} bytes, but at most {_MOST_BYTES - 1:,} are supported. Write "
                "shorter episodes"
            )
        damaged.append(located is None)
        if located is None:
            lengths.append(1)
            continue
        loaded: dict[bytes, NDArray[Any]] = {}
        counts: dict[bytes, int] = {}
        # Values are read in the order of the file, because remote files are read in large parts.
        for name, feature in located:
            try:
                if name in columns:
                    loaded[name] = columns[name].load(feature, take)
                if feature.kind:
                    counts[name] = _length(feature, loaded.get(name), take)
            except ValueError as error:
                raise ValueError(f"{_text(name)!r} of {label} {error}") from error
        missing = [name for name in columns if name not in loaded]
        if missing:
            has = set(features_of(LocatedRecord(label, take, at, size), None))
            raise _missing(label, missing[0], has)
        try:
            num_steps = _num_steps(counts, columns)
        except ValueError as error:
            raise ValueError(f"{label} {error}") from error
        for name, column in columns.items():
            try:
                column.add(loaded[name], num_steps)
            except ValueError as error:
                raise ValueError(f"{column.name!r} of {label} {error}") from error
        lengths.append(num_steps)
    num_steps_of, are_damaged = np.array(lengths, np.int64), np.array(damaged, np.bool_)
    arrays: dict[str, NDArray[Any]] = {}
    for column in columns.values():
        has_steps = has_row_of_step(column.name, column.kind)
        gaps = np.repeat(are_damaged, num_steps_of) if has_steps else are_damaged
        arrays |= with_gaps(column.arrays(), gaps)
    return EpisodeColumns(
        file.shown,
        num_steps_of,
        are_damaged,
        arrays,
        list(texts),
        {column.name: column.kind for column in columns.values() if column.kind},
        {column.name for column in columns.values() if column.is_png},
        _digest(num_steps_of, arrays, texts),
    )


def _missing(label: str, name: bytes, existing: set[bytes]) -> ValueError:
    """Returns the error about a feature that an episode does not have."""
    text = _text(name)
    if name + _RAGGED[0].encode() in existing:
        return _ragged(text, label)
    return ValueError(f"{label} has no {text!r}. It has {sorted(map(_text, existing))}")


def _num_steps(counts: Mapping[bytes, int], columns: Mapping[bytes, _Column]) -> int:
    """Returns the number of steps of an episode.

    Args:
        counts: The number of values of each feature in the episode.
        columns: The columns of the wanted features.

    Raises:
        ValueError: If no feature determines the number of steps.
    """
    for name in COUNTERS:
        if name in counts:
            return counts[name]
    step_columns = {name: column for name, column in columns.items() if is_of_steps(column.name)}
    for name, column in step_columns.items():
        if name in counts and column.width:
            return counts[name] // column.width
    if step_columns and not any(map(counts.get, step_columns)):
        return 0
    raise ValueError(
        f"has neither {_text(COUNTERS[0])!r} nor a wanted feature of images or texts, so that its "
        "number of steps is unknown. Add a feature of images or texts to fields="
    )


def _digest(
    lengths: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]], texts: Mapping[bytes, int]
) -> str:
    """Returns a digest of the lengths of episodes, the arrays except offsets, and the texts."""
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=16)
    for name, array in sorted(arrays.items()):
        if not name.endswith(".offset"):
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    for text in texts:
        digest.update(b"%d %s" % (len(text), text))
    return digest.hexdigest()
