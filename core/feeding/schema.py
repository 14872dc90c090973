"""Schemas of records: the keys that are inputs of a graph, and those that bypass it.

A record is bytes, a str, a number, an array, or a dict of these, which may be nested. The functions
are pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.field import Field, array_field, has_channels, may_be_images
from ..formats.riff import cut_off
from ..messages.printable import printable_repr
from ..sources.values import (
    UnfitValueError,
    check_unmasked,
    fitted,
    infer_kind,
    is_empty,
    leaf,
)

_LONGEST_TEXT = 160  # characters of a record's text in an error


@dataclasses.dataclass(frozen=True)
class Column:
    """An input of the graph, which takes an array from each record.

    Attributes:
        path: The keys of the array in a (nested) record.
        field: The kind of the arrays; text and bytes are uint8. The dtype is None if DALI has no
            type for the value in the first record; that is an error only if the graph uses the
            input.
        are_images: Whether all arrays, or none, must be images, because the layout follows from
            the first record. None if the layout does not depend on the records.
        sizes: The sizes of the dimensions after the first, for lists without elements; () for
            zeros.
        fault: The reason why the dtype is None.
    """

    path: tuple[str, ...]
    field: Field
    are_images: bool | None = None
    sizes: tuple[int, ...] = ()
    fault: str = ""


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        return [item for key in value for item in _leaves(value[key], (*path, str(key)))]
    return [(path, value)]


@dataclasses.dataclass(frozen=True)
class Schema:
    """Maps the keys of records to the inputs of a graph.

    Attributes:
        columns: The inputs in order.
        argument_keys: The record's keys that the graph takes as arguments; None if its only
            argument is the whole record.
        passed: The record's other keys, which bypass the graph.
    """

    columns: tuple[Column, ...]
    argument_keys: tuple[str, ...] | None
    passed: tuple[str, ...]

    def arguments(self, nodes: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and the keyword arguments of the graph's function.

        Args:
            nodes: DALI's DataNode of each column.
        """
        tree: dict[str, Any] = {}
        for column, node in zip(self.columns, nodes, strict=True):
            if not column.path:
                return [node], {}
            at = tree
            for key in column.path[:-1]:
                at = at.setdefault(key, {})
            at[column.path[-1]] = node
        return ([tree], {}) if self.argument_keys is None else ([], tree)

    @property
    def names(self) -> list[str]:
        """The name of each column: its keys, joined by slashes, as in "camera/image"."""
        return ["/".join(key.replace("/", "//") for key in column.path) for column in self.columns]

    @property
    def nested(self) -> bool:
        """Returns whether the graph's function gets dicts, some values of which may be unused."""
        return any(len(column.path) > (self.argument_keys is not None) for column in self.columns)

    def column(
        self, index: int, records: Sequence[Any], first: int = 0
    ) -> list[np.ndarray] | np.ndarray:
        """Returns the arrays of a column, one for each record.

        Numbers become one array of shape [records], which DALI takes faster than a list.

        Args:
            index: The number of the column.
            records: The records.
            first: The index of the first record in the batch, for errors.

        Raises:
            ValueError: If a record has other keys, an array of another dtype or number of
                dimensions, or a file that was cut off. The message has the record's index in
                the batch.
        """
        arrays = []
        column, values = self.columns[index], records
        dtype, ndim, path = column.field.dtype, column.field.ndim, column.path
        may_be_file = ndim == 1 and dtype == np.uint8
        for key in path:
            values = values_of(values, key, "/".join(path), first)
        for row, value in enumerate(values, first):
            kind = type(value)
            if kind is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
                array = value  # as `leaf` returns it, but faster
            elif kind is bytes and value:
                array = np.frombuffer(value, np.uint8)
            else:
                try:
                    array = leaf(value)
                except (TypeError, UnfitValueError) as error:
                    label = "/".join(path) or "the record"
                    raise ValueError(
                        f"{label} in record {row} of the batch can't be converted: {error}"
                    ) from error
            if ndim and (array.dtype != dtype or array.ndim != ndim):
                with contextlib.suppress(UnfitValueError):
                    array = fitted(value, array, Field(dtype, ndim), column.sizes)
            if array.dtype != dtype or array.ndim != ndim:
                raise ValueError(
                    f"{'/'.join(path) or 'the record'} is {array.dtype} with {array.ndim} "
                    f"dimensions in record {row} of the batch, but {dtype} with {ndim} in the "
                    "first record, or in element_spec. Convert all records to the same dtype and "
                    "number of dimensions"
                    if dtype is not None
                    else column.fault
                )
            if column.are_images is not None and column.are_images != has_channels(array.shape):
                raise ValueError(_other_channels(column, array, row))
            if may_be_file and (fault := cut_off(array)):
                label = "/".join(path) or "the record"
                raise ValueError(f"{label} in record {row} of the batch: {fault}")
            arrays.append(array)
        return arrays if ndim or not arrays else np.stack(arrays)


def _other_channels(column: Column, array: np.ndarray, row: int) -> str:
    """Returns the error text of a record whose array has another layout than the first record's.

    Args:
        column: The input.
        array: The record's array.
        row: The index of the record in the batch.
    """
    field, name = column.field, "/".join(column.path)
    first = "is" if column.are_images else "is not"
    kind = f"sources.Field(np.uint8, {field.ndim}, layout={field.dali_layout!r})"
    return (
        f"{name or 'the record'} has the shape {array.shape} in record {row} of the batch, but "
        f"in the first record, or in element_spec, it {first} an image of 1 to 4 channels, on "
        f"which its layout depends. Pass an element_spec in which it is {kind}"
    )


def values_of(records: Sequence[Any], key: str, label: str = "", first: int = 0) -> list[Any]:
    """Returns the records' values under a key.

    Args:
        records: The records.
        key: The key.
        label: The name of the key in errors.
        first: The index of the first record in the batch, for errors.

    Raises:
        ValueError: If a record lacks the key; the message has the record's index in the batch.
    """
    try:
        return [record[key] for record in records]
    except (KeyError, TypeError, IndexError):
        without_key = (
            i
            for i, record in enumerate(records)
            if not isinstance(record, Mapping) or key not in record
        )
        index = next(without_key, None)
        if index is None:  # the record's own error
            raise
        raise ValueError(
            f"record {first + index} of the batch has no {(label or key)!r}, which the first "
            f"record has: that record is {printable_repr(records[index])}"
        ) from None


def schema_of(
    record: Any,
    pipeline_fn: Callable[..., Any],
    arguments: Mapping[str, Any],
    spec: Any = None,
    further: Iterable[Any] = (),
) -> Schema:
    """Returns the schema of a stream, derived from its first record.

    Args:
        record: The first record.
        pipeline_fn: The graph's function: its parameters are the record's keys, or its only
            parameter without an argument is the record.
        arguments: The arguments that the caller passed to the function.
        spec: The structure of a record, with objects that have ``shape`` and ``dtype``, if the
            first record does not show it.
        further: The next records, which show the kinds of lists that have no elements in the first
            record.

    Raises:
        TypeError: If the function can't be called with these records.
    """
    name = getattr(pipeline_fn, "__name__", repr(pipeline_fn))
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(pipeline_fn).parameters.items()
    parameters = {k: p for k, p in signature if p.kind not in several}
    open_ = [k for k in parameters if k not in arguments]
    example = record if spec is None else spec
    argument_keys: tuple[str, ...] | None = None
    passed: tuple[str, ...] = ()
    needed = [k for k in open_ if parameters[k].default is inspect.Parameter.empty]
    if isinstance(example, Mapping):
        both = sorted(k for k in example if k in arguments and k in parameters)
        if both:
            raise TypeError(
                f"{name}() gets {both} as arguments, but the records have these keys, too"
            )
        argument_keys = tuple(k for k in example if k in open_)
        missing = [k for k in needed if k not in argument_keys]
        if not argument_keys and len(needed) == 1:
            argument_keys, missing = None, []
        if missing or argument_keys == ():
            raise TypeError(
                f"{name}() needs {missing or 'at least one'} of the record's keys, which are "
                f"{sorted(example)}. Name its parameters after keys, or use a single parameter for "
                "the whole record"
            )
        if argument_keys is not None:
            passed = tuple(k for k in example if k not in argument_keys)
    elif _has_parts(record):
        raise TypeError(
            f"records are {type(record).__name__}s, whose parts have no keys for the parameters of "
            f"{name}(). Convert them to dicts: by ds.map({_as_dict(record)}) of a dataset, or by "
            "a grain.transforms.Map in the operations of a loader"
        )
    elif len(needed or open_) != 1:
        raise TypeError(
            f"{name}() must have a single parameter for records that are not dicts, but has the "
            f"parameters {open_} without an argument"
        )
    columns = [
        _column(path, value, spec is not None, len(path) > (argument_keys is not None), further)
        # Sorted, because the order of the inputs is part of the state.
        for path, value in sorted(_leaves(example, ()), key=operator.itemgetter(0))
        if argument_keys is None or path[0] in argument_keys
    ]
    return Schema(tuple(columns), argument_keys, passed)


def _has_parts(record: Any) -> bool:
    """Returns whether a record is a dataclass, or a tuple with values other than numbers."""
    if dataclasses.is_dataclass(record):
        return True
    return isinstance(record, tuple) and any(
        not isinstance(value, (int, float)) for value in record
    )


def _as_dict(record: Any) -> str:
    """Returns Python code, for an error message, of a function that converts a record to a dict."""
    if dataclasses.is_dataclass(record):
        return "vars"
    return "lambda r: r._asdict()" if hasattr(record, "_asdict") else "lambda r: {'image': r[0]}"


def _column(
    path: tuple[str, ...], value: Any, described: bool, may_lack: bool, further: Iterable[Any]
) -> Column:
    """Returns the column of an input.

    Args:
        path: The keys of the value in the record.
        value: The value in the first record, or its description.
        described: Whether ``value`` may be a description, with a shape and a dtype.
        may_lack: Whether the graph may leave the input unused, so that it need not have a type.
        further: The next records.

    Raises:
        TypeError: If the graph takes the value, but the first records show no DALI type for it.
    """
    if described and isinstance(value, Field):
        return Column(path, value, True if value.has_default_layout else None)
    if described and hasattr(value, "shape") and hasattr(value, "dtype"):
        return _like(path, np.dtype(value.dtype), tuple(value.shape))
    label = "/".join(path) or "the record"
    try:
        if not is_empty(value):
            array = leaf(value)
            return _like(path, array.dtype, array.shape)
        field, sizes = infer_kind(None, (), _values_at(path, further))
        if field.dtype is not None:
            return _like(path, field.dtype, (0, *sizes) if field.ndim else ())
        fault = (
            f"{label} is an empty list in the first records, which has neither a dtype nor a "
            "number of dimensions. Convert lists to arrays by a map(), e.g. to np.zeros((0, 4), "
            "np.float32) if an image has no boxes, or pass element_spec="
        )
    except (TypeError, UnfitValueError) as error:
        fault = f"{label} of the first record can't be converted: {error}"
    if not may_lack:
        raise TypeError(fault)
    return Column(path, Field(None), fault=fault)


def _like(path: tuple[str, ...], dtype: np.dtype[Any], shape: tuple[Any, ...]) -> Column:
    """Returns the column of an input whose arrays are like an array of some dtype and shape."""
    are_images = has_channels(shape) if may_be_images(dtype, len(shape)) else None
    sizes = tuple(size or 0 for size in shape[1:])
    return Column(path, array_field(dtype, shape), are_images, sizes)


def _values_at(path: tuple[str, ...], records: Iterable[Any]) -> Iterator[Any]:
    """Yields the values at nested keys of records, except of records without the keys."""
    for record in records:
        with contextlib.suppress(KeyError, TypeError, IndexError):
            for key in path:
                record = record[key]
            yield record


def batched_field(values: Sequence[Any], name: str) -> Any:
    """Returns the values of a record source's field as one array [batch, ...].

    NumPy arrays and scalars are stacked. If there are other values, such as text, the result is an
    object array [batch] of the values.

    Raises:
        ValueError: If the arrays have different shapes.
    """
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    if all(
        isinstance(value, (np.ndarray, np.generic)) and value.dtype != object for value in values
    ):
        return stacked(values, name)
    return _objects(values)


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value.item()
        array[row] = bytes(value) if isinstance(value, memoryview) else value
    return array


def stacked(values: Sequence[Any], name: str) -> Any:
    """Returns a batch of values that bypass a graph: an array [batch, ...].

    Dicts, tuples and lists of values become dicts, tuples and lists of arrays. Bytes, texts and
    None become an object array of shape [batch], which keeps trailing NULs.

    Args:
        values: A value from each record.
        name: The record's key of the values, for errors.

    Raises:
        ValueError: If the values differ in structure or shape, or integers have no common dtype.
    """
    first = values[0]
    nested = [isinstance(value, (Mapping, tuple, list)) for value in values]
    if any(nested) and not nested[0]:
        raise ValueError(
            f"{name!r} of record {nested.index(True)} of the batch is a dict or a list, "
            f"but the first record has {printable_repr(first, 60)}. Make the records alike"
        )
    if isinstance(first, Mapping):
        for row, value in enumerate(values):
            if not isinstance(value, Mapping) or set(value) != set(first):
                raise ValueError(
                    f"{name!r} of record {row} of the batch is {printable_repr(value, 60)}, "
                    f"without the keys {sorted(first)} of the first record. Make the records alike"
                )
        return {k: stacked([v[k] for v in values], f"{name}/{k}") for k in first}
    if isinstance(first, (tuple, list)):
        lengths = {len(value) if isinstance(value, type(first)) else -1 for value in values}
        if len(lengths) > 1:
            raise ValueError(
                f"{name!r} bypasses the graph, and has different lengths or types in a batch. Make "
                "the records alike"
            )
        parts = zip(*values, strict=True)
        batched = [stacked(part, f"{name}/{i}") for i, part in enumerate(parts)]
        return type(first)(*batched) if hasattr(first, "_fields") else type(first)(batched)
    text = (str, bytes, bytearray, memoryview)
    try:
        check_unmasked(values)
    except UnfitValueError as error:
        raise ValueError(f"{name!r} bypasses the graph, but {error}") from None
    arrays = [np.asarray(None if isinstance(value, text) else value) for value in values]
    if any(array.dtype == object for array in arrays):
        return _objects(values)
    if len(shapes := {array.shape for array in arrays}) > 1:
        raise ValueError(
            f"{name!r} bypasses the graph, and has different shapes in a batch, "
            f"{sorted(shapes)[:4]}. Make them equal, remove the key from the records, or use it in "
            "the graph"
        )
    result = np.stack(arrays)
    if result.dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays):
        kinds = sorted({str(array.dtype) for array in arrays})
        raise ValueError(
            f"{name!r} bypasses the graph, and has integers of the dtypes {kinds}, which have no "
            "common integer dtype. Convert them to the same dtype"
        )
    return result


def described(record: Any) -> str:
    """Returns the texts, numbers and first bytes of files of a record, for an error message."""
    parts = []
    for path, value in _leaves(record, ()):
        label = "/".join(path)
        if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 0:
            value = value.item()
        if isinstance(value, (bytes, bytearray, memoryview)):
            parts.append(f"{label or 'bytes'} of {len(value)} bytes, first {bytes(value[:12])!r}")
        elif isinstance(value, (str, int, float, np.generic)):
            text = repr(value)
            if len(text) > _LONGEST_TEXT:  # the end of a path is most informative
                text = f"{text[:20]}...{text[23 - _LONGEST_TEXT :]}"
            parts.append(f"{label or 'value'} {text}")
        elif isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
            head = value[:12].tobytes()
            parts.append(f"{label or 'bytes'} of {value.size} bytes, first {head!r}")
        else:
            try:
                parts.append(f"{label or 'array'} of shape {np.shape(value)}")
            except ValueError:  # lists of different lengths
                parts.append(f"{label or 'value'} {printable_repr(value, 60)}")
    return "; ".join(parts)
