"""Validates arguments that name the fields of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        TypeError: If a value is not a mapping, or an item of ``kinds`` is not a `Field`.
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
            if argument == "kinds" and not isinstance(kind, Field):
                raise TypeError(
                    f"kinds[{name!r}] must be a dalijax.sources.Field, such as Field(np.float32, "
                    f"ndim=1), not {printable_repr(kind)}"
                )
