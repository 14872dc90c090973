"""`TFRecord`: records of TFRecord files with random access."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..arrays.dtypes import as_scalars
from ..formats import example
from ..formats.byte_files import Stamp
from ..formats.cached_index import cached_index
from ..formats.field import Field
from ..formats.index import Index
from ..formats.paths import Path, Paths, path_list
from ..formats.shared_index import shared_columns
from ..formats.spread import spread
from ..formats.tfrecord_columns import (
    has_columns,
    index_records,
    select_records,
    tfrecord_columns,
)
from ..formats.tfrecord_headers import HEADER, has_checksum
from ..formats.tfrecord_index import MissingFeatureError, Wanted, is_valid
from ..messages.printable import printable_repr, printable_text
from ..order.shuffle import Indices
from ..remote.storage import open_storage
from .byte_records import ByteRecords, Decode, as_text
from .field_names import (
    are_swapped,
    check_fields,
    check_options,
    is_pair,
    numbered_fields,
    suggest_swapped,
    too_few,
)

_EXAMPLE = "{'data': 'image/encoded', 'label': 'image/class/label', 'frames': ('frames', range(4))}"
_MOST_MEASURED = 1000  # records whose sizes are compared with the sizes of the fields


class TFRecord(ByteRecords):
    """Records of tf.train.Example (or the context of SequenceExamples) with random access.

    The files are read once, and an index of byte ranges and numbers is stored; ``python -m
    dalijax.sources index`` stores it next to the files, for all users. Reading records does not
    parse them, and TensorFlow is not needed. The first record that has a feature determines its
    kind: bytes become uint8 arrays, a single number a 32-bit scalar, several numbers an array.
    A missing list of numbers is empty, as with ``tf.io.VarLenFeature``. For other features, pass
    ``defaults=``, like the ``default_value`` of ``tf.io.FixedLenFeature``.

    Args:
        paths: A path or several, or URLs. Patterns such as ``*.tfrecord`` and
            ``{000..127}.tfrecord`` are expanded.
        fields: Maps the name of each field to a feature, or to a feature and numbers. With
            ``"frames": ("image/encoded", range(4))``, the fields ``frames_0`` to ``frames_3`` are
            the first four values of a list of bytes. Further values are not read. A record with
            fewer values is a bad record, unless ``defaults`` has the missing fields.
        kinds: Kinds of fields that differ from the first record: ``Field(None)`` is text in UTF-8,
            which bypasses the graph; ``ndim=1`` is a list of numbers of any length.
        defaults: Values of fields for records that lack the feature: bytes, text, a number or a
            list of numbers.
        cache_dir: Directory of stored indexes; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        identity: A string that replaces the digest of names, sizes and 64 records in states.
        storage_options: Credentials and settings of remote files; see docs/sources.md.
        read_ahead: Number of bytes of remote files that are requested before they are needed.
        cache: A folder on a local disk that stores the bytes that were read from remote files, for
            later epochs and runs; see docs/sources.md.
        cache_bytes: Largest size of this folder, such as ``"200GB"``; None: all but a tenth of the
            disk.
        verify: Whether to verify the checksum of each record when it is indexed, and again when it
            is read, if the fields are at least half of its bytes. A record with a wrong checksum is
            a bad record. False reads only the values of the fields, and accepts damaged records.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is cut off, has no records, or all records are damaged; or if a record
            is not an Example or lacks a feature without a default.
    """

    @knows_its_names
    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, Any],
        *,
        kinds: Mapping[str, Field] | None = None,
        defaults: Mapping[str, Any] | None = None,
        cache_dir: Path | None = None,
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_ahead: int | str = "128MB",
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
        verify: bool = True,
    ):
        numbered = _checked_features(fields)
        kinds = {} if kinds is None else kinds
        defaults = {} if defaults is None else defaults
        check_options({"kinds": kinds, "defaults": defaults}, numbered)
        storage = open_storage(storage_options, read_ahead, cache, cache_bytes)
        files = path_list(paths, storage)
        features = {name: feature.encode() for name, (feature, _) in numbered.items()}
        numbers = {name: number for name, (_, number) in numbered.items() if number is not None}
        self._features, self._numbers = features, numbers
        wanted = Wanted(features, kinds, defaults, storage, verify, numbers)
        try:
            index = cached_index(
                cache_dir,
                "tfrecord 5",
                files,
                [features, numbers, sorted(kinds.items()), sorted(defaults.items()), verify],
                lambda: index_records(files, wanted),
                lambda index: is_valid(index, features, numbers),
                storage,
                functools.partial(_from_shared, files, wanted),
            )
        except MissingFeatureError as error:
            existing = error.features
            names = {name: feature for name, (feature, _) in numbered.items()}
            if are_swapped(names, lambda name: name.encode() in existing):
                raise ValueError(suggest_swapped(names, "features")) from error
            raise
        schema: dict[str, Field] = {}
        decoders: dict[str, Decode] = {}
        for name, kind in index.about["kinds"].items():
            field = kinds.get(name)
            if kind == "value":
                schema[name] = Field(index.arrays[f"{name}.value"].dtype)
            elif kind == "bytes":
                schema[name] = field or Field(np.dtype(np.uint8), 1)
                if schema[name].dtype is None:
                    decoders[name] = as_text
            else:
                decode, dtype = _DECODERS[kind]
                schema[name] = field or Field(dtype, 1)
                decoders[name] = functools.partial(_decoded, decode, schema[name].dtype or dtype)
        values = {name: _as_value(value, schema[name]) for name, value in defaults.items()}
        index_again = functools.partial(
            index_records, wanted=dataclasses.replace(wanted, kinds=schema)
        )
        super().__init__(
            index,
            files,
            schema,
            decoders,
            identity,
            values,
            index_again=index_again,
            storage=storage,
        )
        self._verify = verify
        self._whole: dict[tuple[str, ...], bool] = {}  # results of `_reads_records`

    def _reads_records(self, names: Sequence[str]) -> bool:
        """Returns whether to read whole records, and to verify them, for the given fields.

        They must be at least half of the bytes of the records, estimated from 1,000 records.
        """
        names = tuple(self._in_files(names))
        if not self._verify or not names:
            return False
        if names not in self._whole:
            rows = spread(len(self), _MOST_MEASURED)
            _, _, wanted = super()._byte_ranges(rows, names)
            _, _, total = self._records(rows)
            self._whole[names] = bool(2 * wanted.sum() >= total.sum())
        return self._whole[names]

    def _records(self, indices: Indices) -> tuple[Indices, Indices, Indices]:
        """Returns the file of each record, and offset and size of its content and checksum."""
        files, starts = self._files_and_offsets(indices)
        nexts = np.asarray(self._index.arrays["start"][np.minimum(indices + 1, len(self) - 1)])
        is_last = indices + 1 == self._first_records[files + 1]
        ends = np.where(is_last, self._files.limits[files], nexts - HEADER)
        return files, starts, ends - starts

    def _byte_ranges(
        self, indices: Indices, names: Sequence[str]
    ) -> tuple[Indices, Indices, Indices]:
        if self._reads_records(names):
            return self._records(indices)
        return super()._byte_ranges(indices, names)

    def _values(
        self, pieces: list[NDArray[np.uint8]], indices: Indices, names: Sequence[str]
    ) -> list[NDArray[np.uint8]]:
        if not self._reads_records(names):
            return pieces
        for record, index in zip(pieces, indices.tolist(), strict=True):
            if not has_checksum(record):
                raise self._damaged(index)
        _, offsets, sizes = super()._byte_ranges(indices, names)
        begins = offsets - np.tile(self._files_and_offsets(indices)[1], len(names))
        # A missing value has the size 0 and an offset before the record.
        begins[sizes == 0] = 0
        ranges = zip(pieces * len(names), begins.tolist(), (begins + sizes).tolist(), strict=True)
        return [record[begin:end] for record, begin, end in ranges]

    def _check_intact(self, indices: Indices, names: Sequence[str]) -> None:
        super()._check_intact(indices, names)
        for name in names:
            if name not in self._numbers or name in self._defaults:
                continue
            counts = self._index.arrays[f"{name}.count"][indices]
            lacking = counts <= self._numbers[name]
            if lacking.any():
                row, feature = int(np.argmax(lacking)), self._features[name]
                largest = max(n for k, n in self._numbers.items() if self._features[k] == feature)
                label = (
                    f"{os.fsdecode(feature)!r} of {printable_text(self.name(int(indices[row])))}"
                )
                raise ValueError(too_few(label, int(counts[row]), 1 + largest))

    def _content(self) -> tuple[Any, ...]:
        defaults = [value for item in sorted(self._defaults.items()) for value in item]
        return (*super()._content(), *defaults)

    def name(self, index: int) -> str:
        """Returns the file, and the record's index in it."""
        number, _ = self._file_and_offset(index)
        return f"{self._files.name(number)}: record {index - int(self._first_records[number])}"


def _checked_features(fields: Any) -> dict[str, tuple[str, int | None]]:
    """Returns the feature of each field, and the number of its value, from the user's ``fields=``.

    Raises:
        TypeError: If a feature or the name of a field is not a string.
        ValueError: If ``fields`` is not a mapping, or is empty; see also `numbered_fields`.
    """
    check_fields(fields, "features", _EXAMPLE)
    for name, value in fields.items():
        if not isinstance(value[0] if is_pair(value) else value, str):
            raise TypeError(
                f"fields[{name!r}] must be a feature, or a pair of a feature and numbers, as in "
                f"{_EXAMPLE}, not {printable_repr(value)}"
            )
    return numbered_fields(fields, lambda pair: False)


def _from_shared(files: Sequence[str], wanted: Wanted, stamps: Sequence[Stamp]) -> Index | None:
    """Returns the index of files from the shared indexes of their folders, or None without them.

    Args:
        files: The files.
        wanted: The wanted features.
        stamps: The stamps of the files.
    """
    names, storage = {os.fsdecode(name) for name in wanted.fields.values()}, wanted.storage
    table = shared_columns(
        "tfrecord",
        files,
        stamps,
        names,
        storage,
        lambda few: tfrecord_columns(few, storage, intact=wanted.intact)[1],
    )
    if table is None or not has_columns(table, wanted):
        return None
    sizes = [stamp[0] for stamp in stamps]
    return select_records(table, files, sizes, wanted)


def _as_value(default: Any, field: Field) -> Any:
    """Converts the user's default of a field to the value that `TFRecord.read` returns."""
    if isinstance(default, (bytes, str)):
        data = default.encode() if isinstance(default, str) else default
        return data.decode() if field.dtype is None else np.frombuffer(data, np.uint8)
    array = np.asarray(default)
    dtype = field.dtype
    return array.astype(dtype) if not array.size or dtype is None else as_scalars(array, dtype)


_DECODERS: Mapping[str, tuple[Any, np.dtype[Any]]] = {
    "floats": (example.floats, np.dtype(np.float32)),
    "integers": (example.integers, np.dtype(np.int64)),
}


def _decoded(decode: Any, dtype: np.dtype[Any], data: NDArray[np.uint8]) -> NDArray[Any]:
    """Decodes a list of numbers to an array [numbers] of the dtype of its field."""
    try:
        return as_scalars(decode(data), dtype)
    except TypeError as error:
        raise ValueError(str(error)) from error
