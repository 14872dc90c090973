"""Checks of arguments before DALI sees them, with errors that name the argument and the cure."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from nvidia.dali import Pipeline

from . import replacements
from .random.seeds import ShardSeed

F = TypeVar("F", bound=Callable[..., Any])

# Arguments of pipeline_def: the last two are its own.
_DEF_ARGS = frozenset(inspect.signature(Pipeline.__init__).parameters) - {"self"} | {
    "enable_conditionals",
    "debug",
}
# What a number counts, and its smallest allowed value.
_NUMBERS = {
    "batch_size": ("a whole number of samples, 1 or more", 1),
    "num_threads": ("a whole number of threads, 1 or more", 1),
    "device_id": ("the number of a GPU, 0 or more, or None for a pipeline on the CPU", 0),
    "seed": ("a whole number of at most 64 bits", -(1 << 63)),
    "prefetch_queue_depth": (
        "a whole number of batches, 1 or more, or a dict of them with the keys cpu_size and "
        "gpu_size",
        1,
    ),
}

_FLAGS = frozenset(
    {
        "debug",
        "enable_checkpointing",
        "enable_conditionals",
        "exec_async",
        "exec_dynamic",
        "exec_pipelined",
    }
)


def name_of(function: Callable[..., Any]) -> str:
    """A function's name with parentheses, for messages."""
    return f"{getattr(function, '__name__', function)!s}()"


def is_pipeline_def(function: Callable[..., Any]) -> bool:
    """Whether a function was decorated by ``nvidia.dali.pipeline_def``."""
    # Not public, the mark of DALI's decorator: without it a function counts as a plain one.
    return bool(getattr(function, "_is_pipeline_def", False))


def function_parameters(pipeline_fn: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a graph function that may be passed by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(pipeline_fn).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)


def check_filled(pipeline_fn: Callable[..., Any], args: Sequence[Any], names: set[str]) -> None:
    """Checks that a call without a source passes every argument of the graph's function.

    Args:
        pipeline_fn: The graph's function.
        args: Its positional arguments.
        names: Names of its keyword arguments.

    Raises:
        TypeError: If an argument is missing, or a source was passed by position.
    """
    for value in args:
        if hasattr(value, "read_threads") and hasattr(value, "fields"):
            raise TypeError(
                f"{name_of(pipeline_fn)} got {value!r:.80} as a positional argument: pass a source "
                "by keyword, source=..."
            )
    parameters = list(inspect.signature(pipeline_fn).parameters.values())
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    by_place = {p.name for p in parameters[: len(args)] if p.kind is not p.KEYWORD_ONLY}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in open_kinds and p.name not in by_place | names
    ]
    if missing:
        paths = [value for value in args if isinstance(value, (str, os.PathLike))]
        cure = "source= (see dalijax.sources) whose records have fields of these names"
        if paths:
            cure = f"source=dalijax.{replacements.for_path(paths[0])} instead of {paths[0]!r}"
        if "draw" in missing:
            cure += (
                ". draw has random numbers of a source's records; a graph over a reader uses "
                "nvidia.dali.fn.random"
            )
        raise TypeError(
            f"nothing gives {missing} of {name_of(pipeline_fn)}: pass them in the call, or a {cure}"
        )


def own_arguments(adapter: type) -> dict[str, frozenset[str]]:
    """Names of the arguments that an adapter takes itself, as `check_call` has others."""
    own = function_parameters(vars(adapter)["__init__"]) - {"self", "iterator_fn"}
    return {f"those of {adapter.__name__}": own}


def check_call(
    pipeline_fn: Callable[..., Any],
    names: Collection[str],
    others: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Raises TypeError for an argument of neither the function, pipeline_def nor the caller.

    Args:
        pipeline_fn: The graph's function.
        names: The arguments' names.
        others: Further names that the caller takes, by what they are: "those of DALITransform".
    """
    known = {"its own": function_parameters(pipeline_fn), **others}
    known["those of nvidia.dali.pipeline_def"] = _DEF_ARGS
    check_names(name_of(pipeline_fn), names, known)


def checked_arguments(
    pipeline_fn: Callable[..., Any],
    call: Mapping[str, Any],
    others: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The keyword arguments of a call, with Python's numbers in place of NumPy's.

    Args:
        pipeline_fn: The graph's function; its own arguments are not checked.
        call: The arguments.
        others: As for `check_call`.

    Raises:
        TypeError: For an argument of none of them, or of a wrong type.
        ValueError: For a number that is too small or too large.
    """
    check_call(pipeline_fn, call, others)
    parameters = function_parameters(pipeline_fn)
    checked = dict(call)
    for name in set(call) & _DEF_ARGS - parameters:
        if name in _NUMBERS and call[name] is not None:
            checked[name] = _number(name, call[name])
        elif name in _FLAGS:
            check_flags(**{name: call[name]})
        elif isinstance(call[name], np.integer):  # JSON has no NumPy numbers
            checked[name] = int(call[name])
    return checked


def without_fraction(value: Any) -> Any:
    """Converts a float like 2.0 to an int; all other values stay.

    Positions are often computed by a division, which gives floats.
    """
    is_float = isinstance(value, (float, np.floating))
    return int(value) if is_float and value % 1 == 0 else value


def whole_number(
    name: str, value: Any, what: str, least: int | None = None, below: int | None = None
) -> int:
    """Converts a whole number of any type, such as NumPy's, to an int.

    Args:
        name: The argument's name.
        value: Its value.
        what: A phrase for the message: "a whole number of threads, 1 or more".
        least: The smallest allowed value.
        below: The smallest value that is too large.

    Raises:
        TypeError: If it is no whole number, or a bool.
        ValueError: If it is too small or too large.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {what}, not {value!r}") from None
    if (least is not None and number < least) or (below is not None and number >= below):
        raise ValueError(f"{name} must be {what}, not {value!r}")
    return number


def check_flags(**flags: Any) -> None:
    """Raises TypeError for arguments other than True, False and None."""
    for name, value in flags.items():
        number = isinstance(value, (int, np.integer, np.bool_)) and value in (0, 1)
        if value is not None and not number:
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_names(
    function: str, names: Collection[str], known: Mapping[str, Collection[str]]
) -> None:
    """Raises TypeError for unknown names, with a replacement for each.

    Args:
        function: The function's name.
        names: The names.
        known: The names that exist, grouped by owner.
    """
    every = sorted({name for group in known.values() for name in group})
    unknown = sorted(set(names) - set(every))
    if unknown:
        cures = filter(None, (replacements.for_argument(name, every) for name in unknown))
        meant = f" ({'; '.join(cures)})".replace(" ()", "")
        listed = "; ".join(f"{what} are {sorted(group)}" for what, group in known.items() if group)
        raise TypeError(f"{function} has no argument {unknown}{meant}: {listed}")


def knows_its_names(function: F) -> F:
    """Adds suggestions to a function's errors about unknown keyword arguments."""
    parameters = set(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not parameters.issuperset(kwargs):
            later = sorted(_DEF_ARGS.difference(parameters).intersection(kwargs))
            if later:
                raise TypeError(
                    f"{later} belong to the pipelines: pass them to what data_iterator returns, "
                    "as by train(..., batch_size=128), or to what a pipeline_def returns"
                )
            name = function.__qualname__.removesuffix(".__init__")
            check_names(f"{name}()", kwargs, {"its arguments": parameters - {"self"}})
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _number(name: str, value: Any) -> Any:
    what, least = _NUMBERS[name]
    if name == "prefetch_queue_depth" and isinstance(value, Mapping):
        if set(value) != {"cpu_size", "gpu_size"}:
            raise ValueError(f"{name} must be {what}, not {value!r}")
        return {key: _number(name, one) for key, one in value.items()}
    if isinstance(value, ShardSeed):  # an int would lose its shard
        return value
    return whole_number(name, value, what, least, 1 << (63 if name == "seed" else 31))
