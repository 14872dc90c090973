"""The parts of indexes of TFRecord files: numbers, and byte ranges of byte strings and lists."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.dtypes import as_scalars, narrow, out_of_range
from ..messages.printable import printable, printable_repr
from ..remote.storage import Storage
from . import example, index_checks
from .buffered_reader import BufferedReader
from .field import Field
from .index import Index
from .paths import object_names
from .tfrecord_headers import Intact, is_intact_or_large

MISSING = 0  # offset of a value that a record lacks: a file begins with a header, not with a value
EMPTY = 1  # offset of an empty list of numbers, never used by a payload
KINDS = {
    example.BYTES: "bytes",
    example.FLOATS: "floats",
    example.INTS: "integers",
}


class MissingFeatureError(ValueError):
    """Error about a feature that a record lacks.

    Attributes:
        features: All features of the first record; empty if another record lacks the feature.
    """

    def __init__(self, message: str, features: Collection[bytes] = ()):
        super().__init__(message)
        self.features = features


class FieldColumn:
    """The arrays of the index of one field, with a row for each record that was added.

    Args:
        name: The field.
        feature: The feature of the records.
        field: The kind of the field, if given by the user.
        default: Value for records without the feature. None: such records raise an error, unless
            the field is a list, which is then empty.
        number: The number of the field's value in the list of byte strings of each record, which
            may have fewer; None for a single value.

    Attributes:
        name: As above.
        feature: As above.
        kind: "value" (a single number), "bytes", "floats" or "integers" (lists), from the first
            record that has the feature; "" before.
        offsets: Offsets of byte strings or lists in their files.
        sizes: Sizes of byte strings or lists in bytes.
        values: Single numbers.
        number: As above.
        counts: With ``number``, the number of byte strings of each record.
    """

    def __init__(
        self,
        name: str,
        feature: bytes,
        field: Field | None,
        default: Any,
        number: int | None = None,
    ):
        self.number = number
        self.counts: Any = array.array("q")
        self.name = name
        self.feature = feature
        self.kind = ""
        self.offsets: Any = array.array("q")
        self.sizes: Any = array.array("q")
        self.values: Any = array.array("q")
        self._wire = 0
        self._field = field
        self._default = default
        self._early = 0  # number of records before the first that has the feature

    def add(self, feature: example.Feature | None, take: BufferedReader) -> None:
        """Adds a row with a record's feature, or with the default if the record lacks the feature.

        Args:
            feature: The feature; None if the record lacks it.
            take: Reads the file.

        Raises:
            KeyError: If the record lacks the feature and there is no default.
            ValueError: If the kind or the number of the values differs from earlier records, or the
                encoding of the values is not supported.
        """
        if self.number is not None:
            self.counts.append(0 if feature is None else len(feature.ranges))
        if feature is None or not feature.kind:
            self._add_missing()
            return
        if feature.kind not in KINDS:
            raise ValueError(
                f"has a value of kind {feature.kind}, which tf.train.Feature does not define. "
                "Write the records as tf.train.Example, with lists of bytes, floats or integers"
            )
        if not self.kind:
            is_bytes = feature.kind == example.BYTES
            single = not is_bytes and len(example.numbers(take, feature)) == 1
            self.set_kind(feature.kind, single)
        elif feature.kind != self._wire:
            kind = KINDS[feature.kind]
            raise ValueError(
                f"has {kind}, but the first record has {KINDS[self._wire]}. Write all records alike"
            )
        if self.kind == "value":
            values = example.numbers(take, feature)
            if len(values) != 1:
                raise ValueError(
                    f"has {len(values)} numbers, but the first record has one. Declare a list by "
                    "kinds={name: Field(dtype, ndim=1)}"
                )
            self.values.extend(values)
            return
        if feature.loose:
            raise ValueError(
                "has numbers that are not packed. Write the file with a newer protobuf"
            )
        count, is_bytes = len(feature.ranges), self.kind == "bytes"
        if self.number is not None:
            if self.number >= count:
                self._add_missing()
                return
            feature = dataclasses.replace(feature, ranges=[feature.ranges[self.number]])
        elif count != 1 and (is_bytes or count):
            has_several = is_bytes and count and not self.feature.startswith(b"steps/")
            feature_name = printable_repr(_text(self.feature))
            cure = f". To read all, pass fields={{{self.name!r}: ({feature_name}, range({count}))}}"
            raise ValueError(f"has {count} values instead of one" + cure * bool(has_several))
        offset, size = feature.ranges[0] if feature.ranges else (EMPTY, 0)
        self.offsets.append(offset)
        self.sizes.append(size)

    def set_kind(self, wire: int, is_single: bool) -> None:
        """Sets the kind of the field from the first record that has the feature.

        Args:
            wire: BYTES, FLOATS or INTS of `dalijax.core.formats.example`.
            is_single: Whether the feature of this record is a single number.

        Raises:
            ValueError: If the kind or the default that the user gave does not fit.
        """
        field = self._field
        self._wire = wire
        if self.number is not None and wire != example.BYTES:
            raise ValueError(f"is {KINDS[wire]}, but fields= can only number byte strings")
        if wire == example.BYTES:
            self.kind = "bytes"
            fit = field is None or field.dtype is None or field == Field(np.dtype(np.uint8), 1)
        else:
            several = not is_single if field is None else field.ndim > 0
            list_kind = "floats" if wire == example.FLOATS else "integers"
            self.kind = list_kind if several else "value"
            fit = field is None or (field.dtype is not None and field.ndim <= 1)
            if field is not None and field.dtype is not None:
                fit = fit and field.dtype.kind in ("f" if wire == example.FLOATS else "iuf")
        if not fit and field is not None:
            kind = f"{field.dtype or 'text'} with {field.ndim} dimensions"
            raise ValueError(f"is {KINDS[wire]}, not {kind}. Change its entry in kinds=")
        if self.kind == "value":
            self.values = array.array("d" if wire == example.FLOATS else "q")
        self._check_default()
        early, self._early = self._early, 0
        for _ in range(early):
            self._add_missing()

    def _check_default(self) -> None:
        """Raises ValueError if the default is not a value of the field."""
        default, kind = self._default, self.kind
        if default is None:
            return
        field = self._field
        fit, expected = isinstance(default, (bytes, str)), "bytes or text"
        if kind == "bytes" and field is not None and field.dtype is None:
            expected = "text in UTF-8"
            fit = fit and _is_text(default)
        elif kind != "bytes":
            is_list, is_integer = kind != "value", self._wire == example.INTS
            dtype = np.dtype(np.int64 if is_integer else np.float32)
            if field is not None and field.dtype is not None:
                dtype = field.dtype
            fit = _are_numbers(default, int(is_list), is_integer, dtype)
            noun = "integer" if is_integer else "number"
            expected = f"a{'n' * is_integer} {noun} that fits into {dtype}"
            if is_list:
                expected = f"a list of {noun}s that fit into {dtype}"
        if not fit:
            raise ValueError(
                f"requires {expected} as its default in defaults=, not {printable_repr(default)}"
            )

    @property
    def is_required(self) -> bool:
        """Returns whether a record without the feature is an error, given the kind so far."""
        is_list = self.kind in ("floats", "integers")
        if not self.kind:
            field = self._field
            is_list = field is not None and field.dtype is not None and field.ndim == 1
        return self._default is None and not is_list and self.number is None

    def _add_missing(self) -> None:
        """Adds a row for a record without the feature; raises KeyError if it is required."""
        if self.is_required:
            raise KeyError(self.name)
        if not self.kind:
            self._early += 1
        elif self.kind == "value":
            self.values.append(self._default)
        else:
            self.offsets.append(MISSING)
            self.sizes.append(0)

    def arrays(self, label: Callable[[int], str]) -> dict[str, NDArray[Any]]:
        """Returns the arrays of the index: "NAME.value", or "NAME.offset" and "NAME.size".

        With ``number``, also returns "NAME.count".

        Args:
            label: Returns the name of the record of a row, for errors.

        Raises:
            ValueError: If a number does not fit into the dtype that the user gave, or no record has
                as many values as ``number`` requires.
        """
        if self.kind != "value":
            arrays = {
                f"{self.name}.offset": np.array(self.offsets, np.int64),
                f"{self.name}.size": np.array(self.sizes, np.int64),
            }
            if self.number is not None:
                counts = arrays[f"{self.name}.count"] = narrow(np.array(self.counts, np.int64))
                if counts.max() <= self.number:
                    raise ValueError(
                        f"no record has more than {counts.max()} values of "
                        f"{_text(self.feature)!r}, but fields= requires {self.number + 1}"
                    )
            return arrays
        values = np.array(self.values)
        if self._field is not None and self._field.dtype is not None:
            try:
                values = as_scalars(values, self._field.dtype)
            except ValueError as error:
                row = _first_unfit(values, self._field.dtype)
                raise ValueError(
                    f"{_text(self.feature)!r} of {label(row)} {error}. Change its entry in kinds="
                ) from None
        else:
            values = narrow(values) if values.dtype == np.int64 else values.astype(np.float32)
        return {f"{self.name}.value": values}


def _first_unfit(values: NDArray[Any], dtype: np.dtype[Any]) -> int:
    """Returns the index of the first number that a dtype can't represent, which must exist."""
    first, end = 0, len(values)
    while end - first > 1:
        middle = (first + end) // 2
        try:
            as_scalars(values[first:middle], dtype)
            first = middle
        except ValueError:
            end = middle
    return first


def _is_text(default: bytes | str) -> bool:
    try:
        default.decode() if isinstance(default, bytes) else default.encode()
    except ValueError:
        return False
    return True


def _are_numbers(default: Any, ndim: int, integer: bool, dtype: np.dtype[Any]) -> bool:
    """Returns whether a default is a number, or a list of numbers, that a dtype can represent.

    Args:
        default: The user's default.
        ndim: 0 for a number, 1 for a list.
        integer: Whether the numbers must be integers.
        dtype: The dtype of the field.
    """
    try:
        values = np.asarray(default)
    except ValueError:  # lists of different lengths
        return False
    allowed = "iu" if integer and values.size else "iuf"
    if values.ndim != ndim or values.dtype.kind not in allowed:
        return False
    return not values.size or not out_of_range(values, dtype).any()


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The wanted features of records.

    Attributes:
        fields: Maps each field to a feature.
        kinds: Kinds of fields, if given by the user.
        defaults: Values of fields for records that lack the feature.
        storage: Access to remote files.
        verify: Whether to verify the checksums of records.
        numbers: The numbers of fields that are one of several byte strings of a record.
    """

    fields: Mapping[str, bytes]
    kinds: Mapping[str, Field]
    defaults: Mapping[str, Any]
    storage: Storage
    verify: bool = True
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def intact(self) -> Intact | None:
        """The function that verifies a record; None if records are not verified."""
        return is_intact_or_large if self.verify else None

    def columns(self) -> list[FieldColumn]:
        """Returns a new column for each field, without records."""
        return [
            FieldColumn(
                name,
                feature,
                self.kinds.get(name),
                self.defaults.get(name),
                self.numbers.get(name),
            )
            for name, feature in self.fields.items()
        ]


def check_some_intact(paths: Sequence[str], damaged: NDArray[np.bool_]) -> None:
    """Raises ValueError if all records of some files are damaged.

    Args:
        paths: The files.
        damaged: Whether each record has a wrong checksum, bool [records].
    """
    if len(damaged) and damaged.all():
        raise ValueError(
            f"every record of {', '.join(map(printable, paths[:3]))} has a wrong checksum. If the "
            "program that wrote the files did not compute checksums, pass verify=False"
        )


def with_gaps(
    arrays: Mapping[str, NDArray[Any]], are_gaps: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Returns arrays with additional rows of 0.

    Args:
        arrays: Arrays with a row for each False in ``are_gaps``.
        are_gaps: Whether each row of the results is an additional row, bool [rows].
    """
    gaps = np.flatnonzero(are_gaps)
    if not len(gaps):
        return dict(arrays)
    before = gaps - np.arange(len(gaps))
    return {name: np.insert(array, before, 0, axis=0) for name, array in arrays.items()}


def about_records(
    paths: Sequence[str],
    sizes: Sequence[int],
    first: Sequence[int],
    arrays: Mapping[str, NDArray[Any]],
    columns: Collection[FieldColumn],
) -> dict[str, Any]:
    """Returns the ``about`` of an index of TFRecord files.

    Args:
        paths: The files.
        sizes: The sizes of the files in bytes.
        first: Number of records before each file, and in total.
        arrays: The arrays of the index.
        columns: The columns of the fields.
    """
    return {
        "names": object_names(paths),
        "sizes": list(sizes),
        "first": list(first),
        "columns": index_checks.column_digest(arrays),
        "kinds": {column.name: column.kind for column in columns},
    }


def no_feature(feature: bytes, has: Collection[bytes]) -> MissingFeatureError:
    """Returns the error about a feature that no record has.

    Args:
        feature: The name of the feature.
        has: The names of the features of the first record.
    """
    return MissingFeatureError(
        f"no record has {_text(feature)!r}. The first record has {sorted(map(_text, has))}", has
    )


class LocatedRecord(NamedTuple):  # created faster than a dataclass, once for each record
    """A record of a TFRecord file.

    Attributes:
        label: The name of the record in errors.
        take: Reads the file.
        at: Offset of the record's content.
        size: Size of the content in bytes.
    """

    label: str
    take: BufferedReader
    at: int
    size: int


def missing_feature(
    record: LocatedRecord, column: FieldColumn, is_first: bool
) -> MissingFeatureError:
    """Returns the error about a record that lacks the feature of a column.

    Args:
        record: The record.
        column: The column of the feature.
        is_first: Whether the record is the first of all files.
    """
    has, feature = features_of(record, None), column.feature
    problem = (
        f"no value of {_text(feature)!r}"
        if feature in has
        else f"no {_text(feature)!r}. It has {sorted(map(_text, has))}"
    )
    return MissingFeatureError(
        f"{record.label} has {problem}. If records may lack it, pass defaults={{{column.name!r}: "
        f"...}}, or declare it as a list of numbers, which is then empty: kinds={{{column.name!r}: "
        "Field(dtype, ndim=1)}",
        set(has) if is_first else (),
    )


def features_of(
    record: LocatedRecord, names: Collection[bytes] | None
) -> dict[bytes, example.Feature]:
    """Returns the located features of a record, by name.

    Args:
        record: The record.
        names: The wanted features; None: all.

    Raises:
        ValueError: If the record is not a tf.train.Example.
    """
    try:
        return example.features(record.take, record.at, record.at + record.size, names)
    except ValueError as error:
        raise ValueError(f"{record.label} is not a tf.train.Example: {error}") from error


def add_record(record: LocatedRecord, columns: Sequence[FieldColumn], is_first: bool) -> None:
    """Adds the features of a record to the columns.

    Args:
        record: The record.
        columns: The column of each field.
        is_first: Whether the record is the first of all files.

    Raises:
        MissingFeatureError: If the record lacks a feature without a default.
        ValueError: If the record is not a tf.train.Example, or a feature does not fit.
    """
    values = features_of(record, {column.feature for column in columns})
    for column in columns:
        feature = column.feature
        try:
            column.add(values.get(feature), record.take)
        except KeyError:
            raise missing_feature(record, column, is_first) from None
        except ValueError as error:
            is_of_steps = feature.startswith(b"steps/")
            cure = ". dalijax.sources.RLDS reads steps of episodes" * is_of_steps
            raise ValueError(f"{_text(feature)!r} of {record.label} {error}{cure}") from error


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def is_valid(index: Index, fields: Collection[str], numbers: Collection[str] = ()) -> bool:
    """Returns whether a stored index has the fields, and its ranges lie within the files.

    Args:
        index: The index.
        fields: The fields.
        numbers: The fields that are one of several byte strings of a record.
    """
    kinds = index.about.get("kinds")
    if not isinstance(kinds, dict) or kinds.keys() != set(fields):
        return False
    columns = {"start", "damaged", *(f"{name}.count" for name in numbers)}
    for name, kind in kinds.items():
        if kind not in ("bytes", "floats", "integers", "value"):
            return False
        columns |= {f"{name}.value"} if kind == "value" else {f"{name}.offset", f"{name}.size"}
    return index_checks.is_valid(index, columns, {})
