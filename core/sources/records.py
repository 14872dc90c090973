"""`Records`: a source over a list, or a data source of Grain, TFDS or HuggingFace."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import knows_its_names
from ..arrays.dtypes import KINDS, as_scalars
from ..formats.field import Field
from ..formats.spread import spread
from ..messages.printable import printable_repr
from ..messages.replacements import suggest_table
from ..order.shuffle import Indices
from .arrow_columns import (
    DatasetColumns,
    by_rows,
    column_kind,
    is_plain_dataset,
    with_encoded_images,
)
from .base import BaseSource
from .field_names import (
    are_swapped,
    check_fields,
    check_options,
    is_pair,
    numbered_fields,
    suggest_swapped,
    too_few,
)
from .source import Values
from .values import StoredArrays, UnfitValueError, fitted, infer_kind, leaf

_ARRAY_RECORD_THREADS = 4  # its reads release the GIL
_MOST_EXAMPLES = 64  # the records to search for a list with elements
_NONE = object()  # no example; an example may be None


def is_array_record(records: Any) -> bool:
    """Returns whether an object is a data source of the ArrayRecord library, or Grain's.

    Its ``__getitems__`` starts a thread for each file. Calls for single records take less CPU time:
    two thirds with few files and records of 100 kB, a sixth with 256 files and records of 8 kB.
    """
    library = sys.modules.get("array_record.python.array_record_data_source")
    base: Any = getattr(library, "ArrayRecordDataSource", None)
    is_subclass = base is not None and isinstance(records, base)
    return is_subclass and type(records).__getitems__ is base.__getitems__


class Records(BaseSource):
    """Records of an object with ``__len__`` and ``__getitem__``.

    The first record determines the fields: its keys, or ``data`` if it is not a dict. Bytes become
    uint8 arrays [length], and 64-bit scalars become 32-bit scalars. Text, dicts and other values
    without a DALI type bypass the graph. If the object has the method ``__getitems__``, the method
    is called with many indices at once.

    A list or array without elements gets the dtype and the dimensions after the first from the
    first of up to 64 records that has elements: with boxes [n, 4], ``[]`` becomes an array [0, 4].
    If no record shows the dimensions, they are 0.

    Bytes and numbers of a HuggingFace data set without a format or transform are read from its
    Arrow table, and bytes are not copied. The features of the data set determine the dtypes of
    lists. If ``fields`` names a part of an image or sound, such as ``"image/bytes"``, the data set
    does not decode it.

    Args:
        records: The object, or a table of pyarrow, whose rows are the records. The object's methods
            may be called from several threads concurrently, and must return equal records at each
            call. Otherwise, iterators have no states.
        fields: Maps the name of each field to a key of the records. ``"image/bytes"`` is this key
            of a record, or the key ``bytes`` of the dict at its key ``image``. ``"images/0"`` is
            the first value of the list at its key ``images``. With ``"frames": ("images",
            range(4))``, the fields ``frames_0`` to ``frames_3`` are its first four values. Names
            count positions: with ``[2, 0]``, ``frames_0`` is the value 2. Further values are not
            read, and a record with fewer values is a bad record. Of values that are dicts with the
            key ``bytes``, such as HuggingFace's images, the bytes are read. None: all keys, under
            their own names.
        kinds: Kinds of fields that differ from the first record. Lists and arrays of numbers are
            converted to these dtypes; a number that does not fit makes its record a bad record.
        identity: A string that replaces the digest of 64 records in states.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        ValueError: If there are no records, or the first record lacks a key.
        TypeError: If the object is not a sequence, or its records have no named fields.
    """

    @knows_its_names
    def __init__(
        self,
        records: Any,
        fields: Mapping[str, Any] | None = None,
        *,
        kinds: Mapping[str, Field] | None = None,
        identity: str | None = None,
    ):
        records = by_rows(records)
        call = "" if isinstance(records, Mapping) else suggest_table(records)
        if call:
            kind = type(records).__name__
            raise TypeError(f"Records requires a list of records, not {kind}. Use dalijax.{call}")
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise TypeError(
                f"Records requires __len__ and __getitem__, which a {type(records).__name__} does "
                "not have. Pass a list, e.g. Records(list(...)), or an object with these methods"
            )
        self._records = records
        self._count = len(records)
        if not self._count:
            raise ValueError(f"the {type(records).__name__} has no records")
        if isinstance(records, Mapping):
            splits = [name for name, split in records.items() if is_plain_dataset(split)]
            raise TypeError(
                f"Records requires one of the data sets {splits}, e.g. Records(...[{splits[0]!r}])"
                if splits
                else "Records requires a list of records, or an object with __len__ and "
                "__getitem__, not a dict. Use dalijax.sources.Arrays for a dict of arrays"
            )
        is_dataset = is_plain_dataset(records)
        if is_dataset and isinstance(fields, Mapping):
            keys = [f"{key[0]}/" if is_pair(key) else key for key in fields.values()]
            self._records = records = with_encoded_images(records, keys)
        self._reads_one_by_one = is_array_record(records)
        if self._reads_one_by_one:
            self.read_threads = _ARRAY_RECORD_THREADS
        self._gives_new_arrays = is_dataset  # views of immutable memory, or new objects
        try:
            first = records[0]
        except Exception as error:  # any error of the user's object, including StopIteration
            raise ValueError(
                f"record 0 of the {type(records).__name__}, which determines the fields, can't be "
                f"read: {error!r}"
            ) from error
        if fields is None:
            fields = _keys(first)
        else:
            check_fields(fields, "keys", "{'data': 'image/encoded'}")
        numbered = numbered_fields(fields, lambda key: _has_key(first, key))
        _check_keys(first, {name: key for name, (key, _) in numbered.items()})
        check_options({"kinds": kinds or {}}, numbered)
        self._paths = {
            name: _path(first, key)
            if number is None
            else self._path_of_value(records, _path(first, key), number, is_dataset)
            for name, (key, number) in numbered.items()
        }
        self._given = frozenset(kinds or ())
        schema: dict[str, Field] = {}
        # The sizes of the dimensions after the first, for lists without elements.
        self._sizes_of_empty: dict[str, tuple[int, ...]] = {}
        for name, path in self._paths.items():
            known, sizes = (column_kind(records, path) if is_dataset else None) or (None, ())
            values = self._examples(records, path, is_dataset)
            if name not in self._given and known is None:
                # Record 0 may have fewer values than a numbered field requires.
                example = _NONE if numbered[name][1] is None else next(values, _NONE)
                example = self._value(first, path, 0) if example is _NONE else example
                values = itertools.chain([example], values)
            field = (kinds or {}).get(name, known)
            try:
                schema[name], self._sizes_of_empty[name] = infer_kind(field, sizes, values)
            except UnfitValueError as error:
                raise ValueError(
                    f"{name!r} of the first record with elements can't be converted: {error}"
                ) from error
        super().__init__(schema, identity)
        self._columns: DatasetColumns | None = None
        if is_dataset:
            self._read_from(records, self._paths)

    def _read_from(self, dataset: Any, paths: Mapping[str, tuple[Any, ...]]) -> None:
        """Reads fields from the Arrow table of a plain data set; see `is_plain_dataset`.

        Args:
            dataset: The data set.
            paths: The column of each field, followed by the names of nested fields.
        """
        self._columns = DatasetColumns(dataset, paths, self.fields)
        in_rows = {path[0] for name, path in paths.items() if name not in self._columns.names}
        self._records = dataset.select_columns([*in_rows]) if in_rows else dataset

    def _examples(self, records: Any, path: tuple[Any, ...], is_dataset: bool) -> Iterator[Any]:
        """Yields the values at nested keys in some records.

        The records depend only on the number of records, so that all processes find the same kind.

        Args:
            records: The object with the records.
            path: The keys.
            is_dataset: Whether the object has an Arrow table, so that other columns are not read.
        """
        if is_dataset and path[0] not in records.column_names:
            return
        rows = records.select_columns([path[0]]) if is_dataset else records
        for number in spread(self._count, _MOST_EXAMPLES).tolist():
            # Any error of the user's object; the batch of the record raises it again.
            with contextlib.suppress(Exception):
                yield self._value(rows[number], path, number)

    def _path_of_value(
        self, records: Any, path: tuple[Any, ...], number: int, is_dataset: bool
    ) -> tuple[Any, ...]:
        """Returns the nested keys of a numbered value of a list.

        Args:
            records: The object with the records. The first of some records whose list has values
                shows the place of the list, and whether the values are dicts with bytes.
            path: The keys of the list in ``fields=``.
            number: The number of the value.
            is_dataset: Whether the object has an Arrow table.
        """
        column = path[:1] if is_dataset else ()
        for value in self._examples(records, column, is_dataset):
            if nested := _with_number(value, path[len(column) :], number):
                return (*column, *nested)
        return (*path, str(number))

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Records({type(self._records).__name__} of {self._count:,} records)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        numbers = indices.tolist()
        columns: dict[str, Values] = {}
        records: Sequence[Any] | None = None
        rows: Indices | None = None
        for name in names:
            if self._columns is not None and name in self._columns.names:
                rows = self._columns.rows(indices) if rows is None else rows
                columns[name] = self._read_column(self._columns, name, numbers, rows)
            else:
                records = self._read_rows(numbers) if records is None else records
                path = self._paths[name]
                values = self._at_once(name, path, records)
                if values is None:
                    values = [
                        self._converted(name, number, self._value(record, path, number))
                        for number, record in zip(numbers, records)
                    ]
                columns[name] = values
        return columns

    def _at_once(self, name: str, path: tuple[Any, ...], records: Sequence[Any]) -> Values | None:
        """Returns the values of a field if all are bytes, arrays or numbers, else None.

        This is the same as `_converted` of each `_value`, in a third of the time or less.
        """
        field = self.fields[name]
        if len(path) > 1 or {*map(type, records)} != {dict}:
            return None
        values = [record.get(path[0]) for record in records]
        kind, *others = {*map(type, values)}
        if others:
            return None
        if kind is bytes and field.dtype == np.uint8 and field.ndim == 1 and all(values):
            return StoredArrays([np.frombuffer(value, np.uint8) for value in values])
        if issubclass(kind, (int, float, np.number)) and not field.ndim and field.dtype is not None:
            array = np.array(values)
            is_whole = array.dtype.kind in "iu" or not issubclass(kind, int)  # floats of large ints
            if array.dtype.char not in KINDS or not is_whole:
                return None
            try:
                return as_scalars(array, field.dtype)
            except (TypeError, ValueError):
                return None
        are_fit = kind is np.ndarray and all(
            value.dtype == field.dtype and value.ndim == field.ndim and value.flags.c_contiguous
            for value in values
        )
        if not are_fit or not field.ndim:
            return None
        return StoredArrays(values) if type(self._records) in (list, tuple) else values

    def _read_column(
        self, columns: DatasetColumns, name: str, numbers: Sequence[int], rows: Indices
    ) -> Values:
        """Returns the values of a field of some records, read from the Arrow table.

        Args:
            columns: The columns of the table.
            name: The field.
            numbers: The indices of the records.
            rows: The rows of the records in the table.

        Raises:
            ValueError: If a value is missing, or does not fit the kind of the field.
        """
        path, dtype = self._paths[name], self.fields[name].dtype
        values, missing = columns.read(name, rows)
        for position in missing:
            record = {path[0]: columns.value(name, int(rows[position]))}
            self._converted(name, numbers[position], self._value(record, path, numbers[position]))
        if self.fields[name].ndim or dtype is None:
            return values
        try:
            return as_scalars(np.array(values), dtype)
        except (TypeError, ValueError):
            return [self._converted(name, *pair) for pair in zip(numbers, values)]

    def _read_rows(self, numbers: list[int]) -> Sequence[Any]:
        """Returns whole records, given their indices."""
        read_batch = getattr(self._records, "__getitems__", None)
        if read_batch is None or self._reads_one_by_one:
            return [self._records[number] for number in numbers]
        records = read_batch(numbers)
        if len(records) != len(numbers):
            raise ValueError(
                f"__getitems__ of the {type(self._records).__name__} returned {len(records)} "
                f"records for {len(numbers)} indices"
            )
        return records

    def _converted(self, name: str, number: int, value: Any) -> Any:
        """Converts a value to the kind of its field.

        Raises:
            ValueError: If the value can't be converted, because it is of another kind.
        """
        field = self.fields[name]
        if field.dtype is None:
            return value
        try:
            array = leaf(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name!r} of {self.name(number)} can't be converted: {error}"
            ) from error
        try:
            if array.ndim == field.ndim == 0:
                return as_scalars(array, field.dtype)
            return fitted(value, array, field, self._sizes_of_empty[name], name in self._given)
        except (TypeError, ValueError) as error:
            cure = f", or pass kinds={{{name!r}: Field(...)}}" * (array.ndim == field.ndim)
            raise ValueError(
                f"{name!r} of {self.name(number)} {error}. Give all records the kind of the first "
                f"record{cure}"
            ) from error

    def name(self, index: int) -> str:
        """Returns the name of a record for errors, such as "record 3"."""
        return f"record {index}"

    def _value(self, record: Any, path: tuple[Any, ...], number: int) -> Any:
        """Returns the value at the nested keys of a record.

        Args:
            record: The record.
            path: The keys; () for the record itself.
            number: The index of the record, for errors.

        Raises:
            ValueError: If the record lacks a key.
        """
        for depth, key in enumerate(path):
            if _is_list(record):
                key = self._index(record, path, depth, number)
            elif not isinstance(record, Mapping) or key not in record:
                has = sorted(map(str, record)) if isinstance(record, Mapping) else type(record)
                missing = _key_of(path) if len(path) > 1 else key
                raise ValueError(f"{self.name(number)} has no {missing!r}. It has {has}")
            record = record[key]
        return record

    def _index(self, values: Any, path: tuple[Any, ...], depth: int, number: int) -> int:
        """Returns the index that a part of a path names in a list of values.

        Args:
            values: The values, a list or an array.
            path: The keys.
            depth: The number of keys that lead to the list.
            number: The index of the record, for errors.

        Raises:
            ValueError: If the part is not the index of a value.
        """
        label = f"{_key_of(path[:depth])!r} of {self.name(number)}" if depth else self.name(number)
        part = str(path[depth])
        if not part.isdecimal():
            first = values[0] if len(values) else None
            if isinstance(first, Mapping) and "bytes" not in first:  # not HuggingFace's images
                raise ValueError(
                    f"{label} is a list of {len(values)} dicts. Collect their values {part!r} by a "
                    f"map of the source, e.g. source.map(lambda record: {{**record, {part!r}: "
                    f"np.array([item[{part!r}] for item in record[{path[0]!r}]])}})"
                )
            key = _key_of((*path[:depth], *path[depth + part.startswith("-") :]))
            raise ValueError(
                f"{label} is a list of {len(values)} values. For several images, pass their "
                f"numbers, e.g. fields={{'images': ({key!r}, range({max(1, len(values))}))}}"
            )
        if int(part) >= len(values):
            paths = [p for p in self._paths.values() if p[:depth] == path[:depth] and p[depth:]]
            largest = max(int(p[depth]) for p in paths if str(p[depth]).isdecimal())
            raise ValueError(too_few(label, len(values), 1 + largest))
        return int(part)


def _path(record: Any, key: Any) -> tuple[Any, ...]:
    """Splits a value of ``fields=``, e.g. "image/bytes", into keys of nested dicts and lists.

    Keys of a record may contain slashes themselves.
    """
    if not isinstance(key, str):
        return (key,)
    parts = [part for part in key.split("/") if part]
    if parts and isinstance(record, (list, tuple)) and parts[0].isdecimal():
        value = record[int(parts[0])] if int(parts[0]) < len(record) else None
        deeper = key.partition("/")[2]
        return (parts[0], *(_path(value, deeper) if deeper else ()))
    for stop in (len(key), *(at for at in range(len(key)) if key[at] == "/")):
        if isinstance(record, Mapping) and key[:stop] in record:
            deeper = key[stop + 1 :]
            return (key[:stop], *(_path(record[key[:stop]], deeper) if deeper else ()))
    return tuple(parts)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _with_number(value: Any, path: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Returns nested keys with the number of a value after the keys of its list.

    If the values of the list are dicts with bytes, such as HuggingFace's images, the key of the
    bytes is appended.

    Args:
        value: An object with the list.
        path: The nested keys, without the number.
        number: The number of the value.

    Returns:
        The keys; () if there is no list with values.
    """
    for depth in range(len(path) + 1):
        before, after = path[:depth], path[depth:]
        key = after[0] if after else None
        if _is_list(value) and not (after and str(key).isdecimal()):
            are_dicts = any(isinstance(item, Mapping) and "bytes" in item for item in value)
            after = after or ("bytes",) * are_dicts
            return (*before, str(number), *after) if len(value) else ()
        if _is_list(value) and int(str(key)) < len(value):
            value = value[int(str(key))]
        elif after and isinstance(value, Mapping):
            value = value.get(key)
        else:
            return ()
    return ()


def _key_of(path: Sequence[Any]) -> str:
    """Returns keys as in ``fields=``, such as "image/bytes"."""
    return "/".join(map(str, path))


def _has_key(record: Any, key: Any) -> bool:
    try:
        return isinstance(record, Mapping) and key in record
    except TypeError:  # a list can't be a key
        return False


def _check_keys(record: Any, fields: Mapping[str, Any]) -> None:
    """Checks the user's ``fields=``, a mapping from names of fields to keys of records.

    Raises:
        TypeError: If a key is not hashable, so that it can't be a key of a record.
        ValueError: If names and keys are swapped.
    """
    for name, key in fields.items():
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"fields[{name!r}] must be a key of the records, not {printable_repr(key)}"
            ) from None

    def has(key: Any) -> bool:
        path = _path(record, key)
        return not path or (isinstance(record, Mapping) and path[0] in record)

    if are_swapped(fields, has):
        raise ValueError(suggest_swapped(fields, "keys"))


def _name_of(key: Any) -> str:
    """Returns a suggested name of a field for a key of the records; "" if there is none."""
    text = os.fsdecode(key) if isinstance(key, bytes) else str(key)
    name = text.rpartition("/")[2]
    return f"field_{name}" if name.isdecimal() else name if name.isidentifier() else ""


def _keys(record: Any) -> dict[str, str]:
    """Returns the default ``fields=`` of a record: its keys, under their own names."""
    if isinstance(record, Mapping):
        invalid = [key for key in record if not isinstance(key, str) or "/" in key or not key]
        if invalid or not record:
            names = [_name_of(key) for key in record]
            example = dict(zip(names, record)) if len(set(names)) == len(names) else {}
            hint = f", e.g. fields={example}" if example and all(names) else ""
            raise ValueError(
                f"the keys of records are {list(record)}, not all of which can be names of "
                f"parameters. Name the fields by fields={{name: key}}{hint}"
            )
        return {key: key for key in record}
    if isinstance(record, (tuple, list)) or hasattr(record, "__dataclass_fields__"):
        by_index = ", or name them by fields={'image': 0, 'label': 1}"
        raise TypeError(
            f"records are {type(record).__name__}s, whose parts have no names. Convert them to "
            "dicts such as {'image': record[0], 'label': record[1]}"
            + by_index
            * isinstance(record, (tuple, list))
        )
    return {"data": ""}
