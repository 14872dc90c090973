"""Indexes of TFRecord files: where the payloads of each record lie, and its labels."""

from __future__ import annotations

import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..state.reader_files import below_common_root
from . import example, sound_index
from .byte_files import Window, open_file
from .index import Index
from .progress import progress
from .source import Field
from .tfrecord_headers import records
from .values import as_scalars, narrow

_REPORTED = 1000  # records between two steps of the progress
_KINDS = {
    example.BYTES: "bytes",
    example.FLOATS: "floats",
    example.INTS: "whole numbers",
    0: "nothing",
}


class _Column:
    """One field of the records as they come.

    Args:
        name: The field.
        feature: The feature of the first record.
        take: Reads the file.
        field: Its kind, where the user says it.
    """

    def __init__(self, name: str, feature: example.Feature, take: Window, field: Field | None):
        self.name = name
        self.wire = feature.kind
        if feature.kind not in _KINDS or not feature.kind:
            raise ValueError("has no value in the first record")
        if feature.kind == example.BYTES:
            self.kind = "bytes"
            fit = field is None or field.dtype is None or field == Field(np.dtype(np.uint8), 1)
        else:
            several = len(example.numbers(take, feature)) != 1 if field is None else field.ndim > 0
            listed = "floats" if feature.kind == example.FLOATS else "integers"
            self.kind = listed if several else "value"
            fit = field is None or (field.dtype is not None and field.ndim <= 1)
        if not fit:
            raise ValueError(f"is {_KINDS[feature.kind]}, which is not {field}")
        self._field = field
        self.values: array.array[Any] = array.array("d" if feature.kind == example.FLOATS else "q")
        self.offsets, self.sizes = array.array("q"), array.array("q")

    def add(self, feature: example.Feature, take: Window) -> None:
        """Adds a record's feature.

        Raises:
            ValueError: If it is of another kind.
        """
        if feature.kind not in (
            (self.wire,) if self.kind in ("bytes", "value") else (self.wire, 0)
        ):
            kind = _KINDS.get(feature.kind, "something unknown")
            raise ValueError(f"has {kind}, and the first record {_KINDS[self.wire]}")
        if self.kind == "value":
            values = example.numbers(take, feature)
            if len(values) != 1:
                raise ValueError(
                    f"has {len(values)} numbers, and the first record one: say that it is a list "
                    "by kinds={name: Field(dtype, ndim=1)}"
                )
            self.values.extend(values)
            return
        if feature.loose:
            raise ValueError("has numbers that are not packed: write it with a newer protobuf")
        if len(feature.ranges) != 1 and (self.kind == "bytes" or feature.ranges):
            raise ValueError(f"has {len(feature.ranges)} values instead of one")
        offset, size = feature.ranges[0] if feature.ranges else (0, 0)
        self.offsets.append(offset)
        self.sizes.append(size)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The columns of the index."""
        if self.kind != "value":
            return {
                f"{self.name}.offset": np.array(self.offsets, np.int64),
                f"{self.name}.size": np.array(self.sizes, np.int64),
            }
        values = np.array(self.values)
        if self._field is not None and self._field.dtype is not None:
            values = as_scalars(values, self._field.dtype)
        else:
            values = narrow(values) if values.dtype == np.int64 else values.astype(np.float32)
        return {f"{self.name}.value": values}


def index_records(
    paths: Sequence[str], wanted: Mapping[bytes, str], kinds: Mapping[str, Field]
) -> Index:
    """The index of some files; see `dalijax.core.sources.byte_records` for what it has.

    Args:
        paths: The files.
        wanted: The field of each feature.
        kinds: The kinds of fields, where the user says them.
    """
    sizes = [open_file(path).size for path in paths]
    columns: dict[bytes, _Column] = {}
    starts, first = array.array("q"), [0]
    with progress(f"Indexing {len(paths)} TFRecord files", sum(sizes)) as done:
        for path in paths:
            file = open_file(path)
            take, reported = Window(file), 0
            for number, (at, size) in enumerate(records(take, file.size, path)):
                _add(f"{path}: record {number}", take, at, size, wanted, kinds, columns)
                starts.append(at)
                if number % _REPORTED == 0:
                    done(at - reported)
                    reported = at
            done(file.size - reported)
            first.append(len(starts))
    if not len(starts):
        raise ValueError(f"{', '.join(paths[:3])} has no records")
    arrays = {"start": np.array(starts, np.int64)}
    for column in columns.values():
        arrays |= column.arrays()
    about = {
        "names": below_common_root(paths),
        "sizes": sizes,
        "first": first,
        "columns": sound_index.column_digest(arrays),
        "kinds": {column.name: column.kind for column in columns.values()},
    }
    return Index(about, arrays)


def _add(
    label: str,
    take: Window,
    at: int,
    size: int,
    wanted: Mapping[bytes, str],
    kinds: Mapping[str, Field],
    columns: dict[bytes, _Column],
) -> None:
    """Adds the features of a record to the columns, which the first one makes."""

    def read(names: Mapping[bytes, str] | None) -> dict[bytes, example.Feature]:
        try:
            return example.features(take, at, at + size, names)
        except ValueError as error:
            raise ValueError(f"{label} is no tf.train.Example: {error}") from error

    values = read(wanted)
    for feature, name in wanted.items():
        try:
            if feature not in columns:
                columns[feature] = _Column(name, values[feature], take, kinds.get(name))
            columns[feature].add(values[feature], take)
        except KeyError:
            names = [other.decode(errors="replace") for other in sorted(read(None))]
            raise ValueError(f"{label} has no {feature.decode()!r}, but {names}") from None
        except ValueError as error:
            raise ValueError(f"{feature.decode()!r} of {label} {error}") from error


def is_sound(index: Index, fields: Collection[str]) -> bool:
    """Tells if a stored index has the fields, and its ranges lie within the files."""
    kinds = index.about.get("kinds")
    if not isinstance(kinds, dict) or kinds.keys() != set(fields):
        return False
    columns = {"start"}
    for name, kind in kinds.items():
        if kind not in ("bytes", "floats", "integers", "value"):
            return False
        columns |= {f"{name}.value"} if kind == "value" else {f"{name}.offset", f"{name}.size"}
    return sound_index.is_sound(index, columns, {})
