"""Infers the kinds of fields from values, and converts values to the kind of a field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.ma import MaskedArray

from ..arrays.dtypes import KINDS, as_scalars, cast_to, narrow_dtype
from ..formats.field import Field, array_field
from ..messages.printable import printable_repr
from ..order.shuffle import Indices

_TEXT = (str, bytes, bytearray, memoryview)


class UnfitValueError(ValueError):
    """Raised for a value that is no array, or is of another kind than its field."""


class StoredArrays(list[np.ndarray]):
    """Arrays in memory that no other record reuses: bytes, or arrays in a list of records."""


def leaf(value: Any) -> np.ndarray:
    """Converts a value of a record to an array; bytes and text (as UTF-8) become uint8 [length].

    Raises:
        TypeError: If DALI has no type for the value.
        UnfitValueError: If the value has lists of different lengths, or masked elements.
    """
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 0:
        value = value.item()  # how bytes with trailing NULs pass through NumPy
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not (isinstance(value, memoryview) and value.c_contiguous and value.readonly):
            value = bytes(value)  # the caller may modify the memory later
        return np.frombuffer(value, np.uint8) if len(value) else np.zeros(0, np.uint8)
    if isinstance(value, (list, tuple)):
        check_unmasked(value)
    elif isinstance(value, MaskedArray):
        check_unmasked([value])
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UnfitValueError(
            f"its lists differ in length. Pad them, or convert the value to text. {error}"
        ) from error
    if array.dtype == object and not array.size:  # an empty list, as HuggingFace formats it
        array = array.astype(np.float64)
    if array.dtype.char not in KINDS:
        cure = f"{cast_to(array.dtype)}, or do not use it in the graph"
        if array.ndim and any(isinstance(part, (str, bytes, Mapping)) for part in array.flat):
            cure = (
                "several images or texts need an input each. Pass their numbers to Records, e.g. "
                "fields={'images': ('images', range(2))} for the inputs images_0 and images_1, or "
                "return {'images_0': images[0], 'images_1': images[1]} from a map(). If it is a "
                "batch of files or texts, do not batch before DALI"
            )
        elif isinstance(value, (list, tuple)) and any(part is None for part in array.flat):
            cure = "replace None by a number, or do not use it in the graph"
        raise TypeError(
            f"{printable_repr(value, 60)} (dtype {array.dtype}) is not supported by DALI: {cure}"
        )
    if not (array.flags.c_contiguous and array.dtype.isnative):  # DALI requires both
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return array


def check_unmasked(values: Sequence[Any]) -> None:
    """Raises UnfitValueError if a value is a ``np.ma.MaskedArray`` with masked elements."""
    may_be_masked = any(issubclass(kind, MaskedArray) for kind in set(map(type, values)))
    if may_be_masked and any(map(np.ma.is_masked, values)):
        raise UnfitValueError(
            "it has masked elements, which would become the numbers under the mask. Replace them "
            "by .filled(value)"
        )


def is_empty(value: Any) -> bool:
    """Returns whether a value is a list or array without elements, such as [] or [[], []].

    The dtype of such an array is often NumPy's default, and its number of dimensions may be 1, as
    of ``np.array([])``.
    """
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    return 0 in getattr(value, "shape", ())


def without_type(value: Any) -> str:
    """Returns why a value has no DALI type, and what to return instead, for errors."""
    if isinstance(value, str):
        return (
            f"it is text, {printable_repr(value, 40)}; for the path of a file, return path.encode()"
        )
    if isinstance(value, Mapping):
        return (
            f"it is a dict with the keys {printable_repr(list(value))}. Name a part of it, as "
            "Records does by fields={'data': 'image/bytes'}"
        )
    if is_empty(value):
        return (
            "it is an empty list in the first records, which has neither a dtype nor a number of "
            "dimensions. Declare them, as Records does by kinds={'boxes': Field(np.float32, 2)}"
        )
    try:
        return f"the source declares Field(None) for it, but it is {leaf(value).dtype}"
    except (TypeError, UnfitValueError) as error:
        return str(error)


def kind_of(value: Any) -> Field:
    """Returns the kind of a field, inferred from a value; 64-bit scalars get 32 bits, as in JAX.

    The kind is ``Field(None)`` if DALI has no type for the value.

    Raises:
        UnfitValueError: If the value has lists of different lengths, or masked elements.
    """
    if isinstance(value, (str, Mapping)) or value is None:
        return Field(None)
    try:
        array = leaf(value)
    except TypeError:
        return Field(None)
    if array.ndim == 0:
        return Field(narrow_dtype(array.dtype))
    return array_field(array.dtype, array.shape)


def infer_kind(
    field: Field | None, sizes: Sequence[int | None], values: Iterable[Any]
) -> tuple[Field, tuple[int, ...]]:
    """Returns the kind of a field, and the sizes of the dimensions after the first.

    Lists without elements get these sizes. () stands for zeros. The kind is ``Field(None)`` if it
    is unknown, and all values are lists without elements.

    Args:
        field: The kind; None if it is unknown.
        sizes: The sizes; None for an unknown size, () if all are unknown.
        values: The values of some records. The first value with elements shows the kind and the
            sizes. If all are empty, the first array of two or more dimensions shows them.

    Raises:
        UnfitValueError: If the first value with elements has lists of different lengths, or
            masked elements.
    """
    if field is not None and len(sizes) == field.ndim - 1 and None not in sizes:
        return field, tuple(size for size in sizes if size is not None)
    shaped: Any = None
    for value in values if field is None or field.ndim > 1 else ():
        if is_empty(value):
            if shaped is None and len(getattr(value, "shape", ())) > 1:
                shaped = value
            continue
        if field is None:
            field = kind_of(value)
        if field.ndim < 2:
            break
        try:
            shape = leaf(value).shape
        except (TypeError, ValueError):
            continue
        if len(shape) == field.ndim:
            return field, shape[1:]
    if field is None and shaped is not None:
        return kind_of(shaped), tuple(shaped.shape[1:])
    return field or Field(None), ()


def fitted(
    value: Any,
    array: np.ndarray,
    field: Field,
    sizes: Sequence[int] = (),
    casts: bool = False,
) -> np.ndarray:
    """Converts an array to the kind of a field.

    Python's lists get the dtype of the field, which may round floats. Arrays without elements get
    the dtype and the number of dimensions.

    Args:
        value: The value of the record.
        array: The result of `leaf` for the value.
        field: The kind, with a dtype.
        sizes: The sizes of the dimensions after the first, for lists without elements.
        casts: Whether to convert the dtypes of all arrays.

    Raises:
        UnfitValueError: If the value is of another kind, or a number does not fit into the dtype.
            The message begins with a verb.
    """
    added = field.ndim - array.ndim
    if added == 0 and array.dtype == field.dtype:
        return array
    has_shape = added == 0 or (added > 0 and array.ndim and array.shape[-1] == 0)
    if not array.size and has_shape and not isinstance(value, _TEXT):
        sizes = sizes or [0] * (field.ndim - 1)
        return np.zeros((*array.shape, *sizes[len(sizes) - added :]), field.dtype)
    casts = casts and not isinstance(value, _TEXT)
    if added == 0 and (casts or isinstance(value, (list, tuple))):
        try:
            return as_scalars(array, np.dtype(field.dtype))
        except (TypeError, ValueError) as error:
            raise UnfitValueError(str(error)) from error
    raise UnfitValueError(
        f"is {array.dtype} with {array.ndim} dimensions, not {field.dtype} with {field.ndim}"
    )


def joined(
    parts: Sequence[tuple[Indices, Mapping[str, Any]]], names: Sequence[str], count: int
) -> dict[str, Any]:
    """Joins the columns of several reads.

    Args:
        parts: For each read, the positions of its records in the result, and its columns.
        names: The fields.
        count: The number of records.

    Returns:
        The values of each field: an array if all reads have arrays of one shape, otherwise a list.
    """
    if len(parts) == 1:
        return dict(parts[0][1])
    columns: dict[str, Any] = {}
    for name in names:
        values = [part[name] for _, part in parts]
        column: Any = [None] * count
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if len(arrays) == len(values) and len({array.shape[1:] for array in arrays}) == 1:
            column = np.empty((count, *arrays[0].shape[1:]), np.result_type(*arrays))
            for (rows, _), array in zip(parts, arrays):
                column[rows] = array
        else:
            for (rows, _), value in zip(parts, values):
                for row, item in zip(rows.tolist(), value, strict=True):
                    column[row] = item
        columns[name] = column
    return columns
