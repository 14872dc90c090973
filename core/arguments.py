"""Checks of arguments: unknown names, flags, numbers, and the arguments of graph functions.

The last functions return the arguments of DALI's operators.

Public functions and adapters of every layer use them, so this module imports only messages. Errors
name the argument and its fix, before DALI sees a value.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from nvidia.dali import Pipeline

from .messages import replacements
from .messages.printable import printable, printable_repr
from .messages.redacted_errors import raise_redacted

F = TypeVar("F", bound=Callable[..., Any])

# Arguments of pipeline_def: those of Pipeline, and two of its own.
_DEF_ARGS = frozenset(inspect.signature(Pipeline.__init__).parameters) - {"self"} | {
    "enable_conditionals",
    "debug",
}
# Description and smallest allowed value of numeric arguments.
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
# Fixes for missing arguments, in place of their descriptions.
_CURES = {
    "draw": "Add a parameter named draw to the graph function, and pass it on, as in flip(images, "
    "draw=draw). It needs a source (source=) or Grain's records"
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


def difference_names(allow: object, argument: str) -> tuple[str, ...]:
    """Returns the names of differences that a restore may ignore, as a tuple.

    Args:
        allow: The names, such as ["operators.resize.size"].
        argument: Name of the argument that contains the names, for messages.

    Raises:
        TypeError: If ``allow`` is not a list of strings.
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(f"{argument} must be a list of names, not {allow!r}. Pass [{allow!r}]")
    names = tuple(allow)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must contain names, not {name!r}")
    return names


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name with parentheses, such as "train()", for messages."""
    return f"{getattr(function, '__name__', function)!s}()"


def qualified_name(function: Any) -> str:
    """Returns the name of a function with its classes, "Mask.decode", or of an object's class."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def is_pipeline_def(function: Callable[..., Any]) -> bool:
    """Returns whether a function was decorated by ``nvidia.dali.pipeline_def``."""
    # Private in DALI: the mark of its decorator. Without it, a function counts as a plain function.
    return bool(getattr(function, "_is_pipeline_def", False))


def function_parameters(pipeline_fn: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a graph function's arguments that may be passed by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(pipeline_fn).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)


def check_filled(pipeline_fn: Callable[..., Any], args: Sequence[Any], names: set[str]) -> None:
    """Checks that a call without ``source=`` passes every required argument of a graph function.

    Args:
        pipeline_fn: The graph function.
        args: The positional arguments of the call.
        names: Names of the keyword arguments of the call.

    Raises:
        TypeError: If an argument is missing, or a record source was passed by position.
    """
    refuse_sources(name_of(pipeline_fn), args)
    parameters = list(inspect.signature(pipeline_fn).parameters.values())
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    passed = {p.name for p in parameters[: len(args)] if p.kind is not p.KEYWORD_ONLY}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in open_kinds and p.name not in passed | names
    ]
    if missing:
        paths = [value for value in args if isinstance(value, (str, os.PathLike))]
        cure = "source= (see dalijax.sources) whose records have fields of these names"
        if paths:
            source, path = replacements.source_call(paths[0]), printable(paths[0])
            cure = f"source=dalijax.{source} instead of {path!r}"
        if "draw" in missing:
            cure += (
                ". draw supplies random numbers of a source's records; a graph over a reader uses "
                "nvidia.dali.fn.random"
            )
        raise TypeError(
            f"{name_of(pipeline_fn)} gets no value for {missing}. Pass them in the call, or a "
            f"{cure}"
        )


def refuse_sources(name: str, args: Sequence[Any]) -> None:
    """Raises TypeError if a positional argument is a record source; ``name`` has parentheses."""
    for value in args:
        if hasattr(value, "read_threads") and hasattr(value, "fields"):
            raise TypeError(
                f"{name} got {printable_repr(value)} as a positional argument. Pass a source by "
                "keyword, source=..."
            )


def call_fault(function: Callable[..., Any], *arguments: Any) -> str:
    """Returns why a function can't be called with some positional arguments; "" if it can.

    Returns "" also for functions in C without a signature.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def refuse_positional(name: str, args: Sequence[Any]) -> None:
    """Rejects positional arguments after the iterator function of an adapter.

    Args:
        name: Name of the adapter.
        args: The positional arguments.

    Raises:
        TypeError: If ``args`` is not empty.
    """
    if args:
        raise TypeError(
            f"{name}() got {printable_repr(args[0])} as a positional argument. Pass everything "
            "after the iterator function by keyword, such as source=..."
        )


def own_arguments(adapter: type) -> dict[str, frozenset[str]]:
    """Returns the names of an adapter's own arguments, for ``extra`` of `check_call`.

    The result has the form {"those of DALIDataset": names}.
    """
    names = function_parameters(vars(adapter)["__init__"]) - {"self", "iterator_fn"}
    return {f"those of {adapter.__name__}": names}


def check_call(
    pipeline_fn: Callable[..., Any],
    names: Collection[str],
    extra: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Rejects arguments that neither a graph function nor pipeline_def nor ``extra`` accepts.

    Args:
        pipeline_fn: The graph function.
        names: Names of the passed arguments.
        extra: Additional accepted names, grouped by owner, e.g. "those of DALITransform".

    Raises:
        TypeError: If an argument is unknown.
    """
    accepted = {"its own": function_parameters(pipeline_fn), **extra}
    accepted["those of nvidia.dali.pipeline_def"] = _DEF_ARGS
    check_names(name_of(pipeline_fn), names, accepted)


def checked_arguments(
    pipeline_fn: Callable[..., Any],
    call: Mapping[str, Any],
    extra: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the validated keyword arguments of a call, with NumPy integers as Python integers.

    Args:
        pipeline_fn: The graph function. Values of its own parameters are not checked.
        call: The keyword arguments by name.
        extra: As in `check_call`.

    Raises:
        TypeError: If an argument is unknown or has a wrong type.
        ValueError: If a number is out of range.
    """
    check_call(pipeline_fn, call, extra)
    parameters = function_parameters(pipeline_fn)
    checked = dict(call)
    for name in set(call) & _DEF_ARGS - parameters:
        if name in _NUMBERS and call[name] is not None:
            checked[name] = _number(name, call[name])
        elif name in _FLAGS:
            check_flags(**{name: call[name]})
        elif isinstance(call[name], np.integer):  # not JSON-serializable
            checked[name] = int(call[name])
    return checked


def without_fraction(value: Any) -> Any:
    """Converts a float such as 2.0 to an int, and returns all other values unchanged.

    Positions are often computed by a division, which returns floats.
    """
    is_float = isinstance(value, (float, np.floating))
    return int(value) if is_float and value % 1 == 0 else value


def whole_number(
    name: str, value: Any, expected: str, least: int | None = None, below: int | None = None
) -> int:
    """Converts an integer of any type, e.g. of NumPy, to an int.

    Args:
        name: The argument's name.
        value: The argument's value.
        expected: A description for the message: "a whole number of threads, 1 or more".
        least: The smallest allowed value.
        below: Upper bound, exclusive.

    Raises:
        TypeError: If the value is not an integer, or is a bool.
        ValueError: If the value is out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {expected}, not {value!r}") from None
    if (least is not None and number < least) or (below is not None and number >= below):
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return number


def step_number(step: Any, unit: str = "batches") -> int:
    """Converts the argument of ``seek_step`` to an int; it may be a float without a fraction."""
    return whole_number("step", without_fraction(step), f"a whole number of {unit}, 0 or more", 0)


def check_flags(**flags: Any) -> None:
    """Raises TypeError for values other than True, False, 1, 0 and None."""
    for name, value in flags.items():
        number = isinstance(value, (int, np.integer, np.bool_)) and value in (0, 1)
        if value is not None and not number:
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_names(
    function: str, names: Collection[str], accepted: Mapping[str, Collection[str]]
) -> None:
    """Raises TypeError for unknown names, suggesting replacements.

    Args:
        function: The function's name.
        names: The passed names.
        accepted: The accepted names, grouped by owner.
    """
    all_accepted = sorted({name for group in accepted.values() for name in group})
    unknown = sorted(set(names) - set(all_accepted))
    if unknown:
        cures = filter(
            None, (replacements.suggest_argument(name, all_accepted) for name in unknown)
        )
        suggestions = f" ({'; '.join(cures)})".replace(" ()", "")
        listed = "; ".join(
            f"{owner} are {sorted(group)}" for owner, group in accepted.items() if group
        )
        raise TypeError(f"{function} has no argument {unknown}{suggestions}: {listed}")


def plain_name(function: Callable[..., Any]) -> str:
    """Returns the name by which users call a function or class, with parentheses."""
    return f"{function.__qualname__.removesuffix('.__init__')}()"


def knows_its_names(function: F) -> F:
    """Decorates a function so that errors about its arguments suggest names and describe them.

    Errors about missing arguments quote their descriptions in the docstring of the function, or of
    its class.
    """
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    kinds = {p.kind for p in parameters.values()}
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_keyword = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in open_kinds and p.name != "self"
    ]
    most = sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else len(by_position)
    takes_others = inspect.Parameter.VAR_KEYWORD in kinds

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not takes_others and not names.issuperset(kwargs):
            later = sorted(_DEF_ARGS.difference(names).intersection(kwargs))
            if later:
                raise TypeError(
                    f"{later} are arguments of the pipelines. Pass them to the iterator function "
                    "that data_iterator returns, as in train(..., batch_size=128), or to the "
                    "result of a pipeline_def"
                )
            check_names(plain_name(function), kwargs, {"its arguments": names - {"self"}})
        if len(args) > most and by_keyword:
            surplus = ", ".join(printable_repr(value, 40) for value in args[most:])
            raise TypeError(
                f"{plain_name(function)} does not take {surplus} by position. Pass it by keyword, "
                f"as one of {by_keyword}"
            )
        passed = {*by_position[: len(args)], *kwargs}
        if not passed.issuperset(required):
            missing = [name for name in required if name not in passed]
            owner = args[0] if function.__name__ == "__init__" else function
            raise TypeError(_missing(plain_name(function), missing, inspect.getdoc(owner) or ""))
        try:
            return function(*args, **kwargs)
        except Exception as error:  # it may be of another library
            options = kwargs.get("storage_options")
            raise_redacted(error, options=options if isinstance(options, Mapping) else {})
            raise

    return checked  # type: ignore[return-value]


def _missing(function: str, names: Sequence[str], documentation: str) -> str:
    """Returns the text of the error about missing arguments.

    Args:
        function: The function's name.
        names: The missing arguments.
        documentation: The docstring that describes the arguments.
    """
    lines = [f"{function} needs {' and '.join(names)}"]
    for name in names:
        # A description ends at a line that is indented less than its second line.
        entry = rf"^    (?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{8}}.*)*)"
        described = re.search(entry, documentation, re.MULTILINE)
        cure = _CURES.get(name) or (" ".join(described[1].split()) if described else "")
        lines += [f"{name}: {cure}"] if cure else []
    return "\n  ".join(lines)


def _number(name: str, value: Any) -> Any:
    expected, least = _NUMBERS[name]
    if name == "prefetch_queue_depth" and isinstance(value, Mapping):
        if set(value) != {"cpu_size", "gpu_size"}:
            raise ValueError(f"{name} must be {expected}, not {value!r}")
        return {key: _number(name, depth) for key, depth in value.items()}
    number = whole_number(name, value, expected, least, 1 << (63 if name == "seed" else 31))
    return value if isinstance(value, int) else number  # a ShardSeed must keep its shard


def arguments_of(instance: Any) -> dict[str, Any]:
    """Returns the arguments of an operator object of DALI, without inputs.

    Arguments of the call of an object of ``nvidia.dali.ops``, which its constructor did not get,
    are printed texts.
    """
    # Private in DALI: the arguments of the constructor, which ``nvidia.dali.fn`` passes, too.
    given: dict[str, Any] = getattr(getattr(instance, "_op", None), "_init_args", {})
    return printed_arguments(str(getattr(instance, "spec", ""))) | given


def printed_arguments(spec: str) -> dict[str, Any]:
    """Returns the arguments in DALI's printed description of an operator, as texts by name.

    The arguments are the lines "    name: value" after "Arguments:".
    """
    lines = spec.partition("Arguments:")[2].splitlines()
    pairs = (line.strip().partition(": ") for line in lines if ": " in line)
    return {name: value for name, _, value in pairs}


def turns_images(arguments: Mapping[str, Any]) -> bool:
    """Returns whether a decoder of images follows their EXIF orientation.

    Args:
        arguments: The arguments of the decoder, which may be printed texts.
    """
    return str(arguments.get("adjust_orientation")) not in ("False", "0")
