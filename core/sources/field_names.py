"""Validates arguments that name the fields of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..formats.field import Field
from ..messages.printable import printable_repr


def check_fields(fields: Any, parts: str, example: str) -> None:
    """Checks that ``fields=`` is a mapping from names of fields to parts of the records.

    Args:
        fields: The mapping.
        parts: The word for the parts of the records in errors, such as "features".
        example: The text of a valid mapping, for errors.

    Raises:
        TypeError: If the name of a field is not a non-empty string.
        ValueError: If ``fields`` is not a mapping, or is empty.
    """
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError(
            f"fields must map names of fields to {parts}, as in {example}, not "
            f"{printable_repr(fields, 120)}"
        )
    for name in fields:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"the names of fields must be strings, not {printable_repr(name)}. fields maps "
                f"them to {parts}, as in {example}"
            )


def is_pair(value: Any) -> bool:
    """Returns whether a value of ``fields=`` has the form (part of the records, numbers)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def whole_numbers(name: str, numbers: Any, noun: str, examples: str) -> tuple[int, ...]:
    """Returns the numbers of a pair in ``fields=``; see `is_pair`.

    Args:
        name: The field.
        numbers: An integer, or a sequence of integers.
        noun: The word for the numbers in errors, such as "steps".
        examples: Valid numbers, for errors.

    Raises:
        TypeError: If the numbers are not integers.
        ValueError: If there are no numbers.
    """
    is_list = isinstance(numbers, (range, list, tuple, np.ndarray))
    items = list(numbers) if is_list else [numbers]
    if any(isinstance(k, bool) or not isinstance(k, (int, np.integer)) for k in items):
        raise TypeError(
            f"fields[{name!r}] has the {noun} {printable_repr(numbers)}. Pass {examples}"
        )
    if not items:
        raise ValueError(f"fields[{name!r}] has no {noun}: {printable_repr(numbers)} is empty")
    return tuple(map(int, items))


def numbered_names(name: str, numbers: Sequence[int], fields: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fields of several values, NAME_0, NAME_1, ..., and the number of each value.

    Fields are numbered by position: of the numbers [2, 0], NAME_0 has the value 2.

    Args:
        name: The name in ``fields=``.
        numbers: The numbers of the values.
        fields: The user's ``fields=``.

    Raises:
        ValueError: If ``fields`` has another field of such a name.
    """
    names = {f"{name}_{k}": number for k, number in enumerate(numbers)}
    if duplicates := [field for field in names if field in fields]:
        raise ValueError(
            f"fields has {duplicates[0]!r}, which is also the name of a value of {name!r}. Rename "
            "one of them"
        )
    return names


def numbered_fields(
    fields: Mapping[str, Any], is_part: Callable[[Any], bool]
) -> dict[str, tuple[Any, int | None]]:
    """Returns the part of the records of each field, and the number of its value in a list.

    Args:
        fields: The user's ``fields=``. A value is a part of the records, or a pair of a part, which
            is a list of values, and their numbers: an integer, or a sequence of integers for a
            field for each.
        is_part: Returns whether a pair is itself a part of the records.

    Returns:
        The part, and the number of the value; None for fields without a number.

    Raises:
        TypeError: If the numbers are not integers.
        ValueError: If there are no numbers, a number is negative, or a name is repeated.
    """
    parts: dict[str, tuple[Any, int | None]] = {}
    for name, value in fields.items():
        if not is_pair(value) or is_part(value):
            parts[name] = value, None
            continue
        part = value[0]
        numbers = whole_numbers(name, value[1], "numbers", "an integer such as 0, or range(4)")
        if min(numbers) < 0:
            raise ValueError(
                f"fields[{name!r}] has the number {min(numbers)}, but the values of a list are "
                "numbered from 0"
            )
        if isinstance(value[1], (int, np.integer)):
            parts[name] = part, numbers[0]
        else:
            names = numbered_names(name, numbers, fields)
            parts |= {name: (part, number) for name, number in names.items()}
    return parts


def too_few(label: str, count: int, needed: int) -> str:
    """Returns the text of errors about a record with fewer values than ``fields=`` requires.

    Args:
        label: The list and its record.
        count: The number of values.
        needed: The number of values that ``fields`` requires.
    """
    return f"{label} has {count} value{'s' * (count != 1)}, but fields= requires {needed}"


def are_swapped(fields: Mapping[str, Any], is_part: Callable[[Any], bool]) -> bool:
    """Returns whether the keys of ``fields=`` are parts of the records, and the values are not.

    Fields with the name of their part don't count.

    Args:
        fields: The mapping from names of fields to parts of the records.
        is_part: Returns whether the records have a part.
    """
    renamed = [(name, part) for name, part in fields.items() if name != part]
    return bool(renamed) and all(
        isinstance(part, str) and is_part(name) and not is_part(part) for name, part in renamed
    )


def suggest_swapped(fields: Mapping[str, Any], parts: str) -> str:
    """Returns the text of errors about ``fields=`` whose keys and values are swapped.

    Args:
        fields: The swapped mapping.
        parts: The word for the parts of the records, such as "features".
    """
    swapped = {part: name for name, part in fields.items()}
    others = [part for name, part in fields.items() if name != part]
    return (
        f"fields maps names of fields to {parts}, not {parts} to names. Did you mean "
        f"{printable_repr(swapped, 200)}? If not, correct {printable_repr(others, 100)}"
    )


def check_options(options: Mapping[str, Any], names: Any) -> None:
    """Checks arguments that map some of the fields to values, such as ``kinds=``.

    Args:
        options: The value of each argument, by the argument's name.
        names: The names of all fields.

    Raises:
        TypeError: If a value is not a mapping, or an item of ``kinds`` or ``fields`` is not a
            `Field`.
        ValueError: If a field does not exist.
    """
    for argument, values in options.items():
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{argument} must be a dict with names of fields, not {printable_repr(values)}"
            )
        if unknown := [name for name in values if name not in names]:
            raise ValueError(f"{argument} has {unknown}, but the fields are {list(names)}")
        for name, kind in values.items():
            if argument in ("kinds", "fields") and not isinstance(kind, Field):
                raise TypeError(
                    f"{argument}[{name!r}] must be a dalijax.sources.Field, such as "
                    f"Field(np.float32, ndim=1), not {printable_repr(kind)}"
                )
