"""Arguments of iterators and of graph functions, and their validation.

`IteratorConfig` contains the arguments of iterators, for every way to create one. Errors name the
argument and its fix, before DALI sees a value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .batch_map import BatchMap, MapFunction
from .messages import replacements
from .order.epochs import EpochPlan
from .placement import over_current_mesh
from .random.seeds import ShardSeed

F = TypeVar("F", bound=Callable[..., Any])
Shardings: TypeAlias = Sharding | PartitionSpec | Mapping[str, Sharding | PartitionSpec]
OnError: TypeAlias = Literal["raise", "skip", "mask"]
BatchMapArgument: TypeAlias = MapFunction | Sequence[MapFunction] | None


class IteratorArguments(TypedDict, total=False):
    """Types of the arguments that every iterator takes after ``output_map``.

    `IteratorConfig` defines their order and defaults, and validates them.
    """

    size: int
    reader_name: str | None
    auto_reset: str | bool | None
    last_batch_padded: bool | None
    last_batch_policy: LastBatchPolicy
    prepare_first_batch: bool
    sharding: Shardings | None
    pmap_compatible: bool | None
    mask: str | None
    as_numpy: bool | None
    check_processes: bool | float
    batch_map: BatchMapArgument


class PipelineIteratorArguments(IteratorArguments, total=False):
    """Types of the arguments of `DALIGenericIterator`."""

    on_error: Literal["raise", "skip"]


class FunctionIteratorArguments(IteratorArguments, total=False):
    """Types of the arguments of `data_iterator`."""

    devices: Sequence[jax.Device] | None
    on_error: OnError
    allow_changes: Sequence[str]
    source: Any
    shuffle: bool


def difference_names(allow: object, argument: str) -> tuple[str, ...]:
    """Validates names of differences that a restore may ignore; TypeError if they are invalid."""
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(f"{argument} must be a list of names, not {allow!r}. Pass [{allow!r}]")
    names = tuple(allow)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must contain names, not {name!r}")
    return names


def _parse_auto_reset(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("yes", "no"):
        return value.lower() == "yes"
    raise ValueError(f"auto_reset must be 'yes', 'no', True, False or None, not {value!r}")


def _check_seconds(value: object) -> None:
    """Validates ``check_processes``: a flag, or a number of seconds."""
    if isinstance(value, bool):
        return
    if not isinstance(value, (int, float)):
        raise TypeError(
            f"check_processes must be True, False, or a number of seconds, not {value!r}"
        )
    if not 0 < value < math.inf:
        raise ValueError(
            "check_processes must be a positive number of seconds to wait for other processes, not "
            f"{value!r}. Pass False to disable the check"
        )


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
    """Formats a function's name with parentheses, for messages."""
    return f"{getattr(function, '__name__', function)!s}()"


def is_pipeline_def(function: Callable[..., Any]) -> bool:
    """Returns whether a function was decorated by ``nvidia.dali.pipeline_def``."""
    # Private in DALI: the mark of its decorator. Without it, a function counts as a plain function.
    return bool(getattr(function, "_is_pipeline_def", False))


def function_parameters(pipeline_fn: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a graph function that may be passed by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(pipeline_fn).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)


def check_filled(pipeline_fn: Callable[..., Any], args: Sequence[Any], names: set[str]) -> None:
    """Checks that a call without ``source=`` passes every argument of the graph function.

    Args:
        pipeline_fn: The graph function.
        args: Its positional arguments.
        names: Names of its keyword arguments.

    Raises:
        TypeError: If an argument is missing, or a record source was passed by position.
    """
    for value in args:
        if hasattr(value, "read_threads") and hasattr(value, "fields"):
            raise TypeError(
                f"{name_of(pipeline_fn)} got {value!r:.80} as a positional argument. Pass a source "
                "by keyword, source=..."
            )
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
            cure = f"source=dalijax.{replacements.source_call(paths[0])} instead of {paths[0]!r}"
        if "draw" in missing:
            cure += (
                ". draw supplies random numbers of a source's records; a graph over a reader uses "
                "nvidia.dali.fn.random"
            )
        raise TypeError(
            f"{name_of(pipeline_fn)} gets no value for {missing}. Pass them in the call, or a "
            f"{cure}"
        )


def own_arguments(adapter: type) -> dict[str, frozenset[str]]:
    """Names of an adapter's own arguments, in the form of ``extra`` of `check_call`."""
    names = function_parameters(vars(adapter)["__init__"]) - {"self", "iterator_fn"}
    return {f"those of {adapter.__name__}": names}


def check_call(
    pipeline_fn: Callable[..., Any],
    names: Collection[str],
    extra: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Rejects unknown arguments.

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
    """Validates the keyword arguments of a call, and converts NumPy numbers to Python numbers.

    Args:
        pipeline_fn: The graph function; its own arguments are not checked.
        call: The arguments.
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
    """Converts an integer of any type, such as NumPy's, to an int.

    Args:
        name: The argument's name.
        value: Its value.
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
    """Raises TypeError for values other than True, False and None."""
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
    """Decorates a function; its errors about unknown arguments then suggest similar names."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    by_keyword = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    most = len(parameters) - len(by_keyword)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        most = sys.maxsize

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not names.issuperset(kwargs):
            later = sorted(_DEF_ARGS.difference(names).intersection(kwargs))
            if later:
                raise TypeError(
                    f"{later} are arguments of the pipelines. Pass them to the iterator function "
                    "that data_iterator returns, as in train(..., batch_size=128), or to the "
                    "result of a pipeline_def"
                )
            check_names(plain_name(function), kwargs, {"its arguments": names - {"self"}})
        if len(args) > most and by_keyword:
            surplus = ", ".join(f"{value!r:.40}" for value in args[most:])
            raise TypeError(
                f"{plain_name(function)} does not take {surplus} by position. Pass it by keyword, "
                f"as one of {by_keyword}"
            )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _number(name: str, value: Any) -> Any:
    expected, least = _NUMBERS[name]
    if name == "prefetch_queue_depth" and isinstance(value, Mapping):
        if set(value) != {"cpu_size", "gpu_size"}:
            raise ValueError(f"{name} must be {expected}, not {value!r}")
        return {key: _number(name, depth) for key, depth in value.items()}
    if isinstance(value, ShardSeed):  # converting to int would lose its shard
        return value
    return whole_number(name, value, expected, least, 1 << (63 if name == "seed" else 31))


@dataclasses.dataclass(frozen=True)
class EpochRules:
    """Requirements of an adapter: no batch has samples of two epochs, and shards do not rotate.

    DALI's readers by default fill an epoch's last batch with samples of the next epoch, and read
    another shard in each epoch. `check` rejects them.

    Attributes:
        num_epochs: Number of epochs to read; None: no end.
        equal_shards: A number of shards that must divide the samples.
        per_shard: Whether shards may have different numbers of batches, if no array is placed over
            several of them.
    """

    num_epochs: int | None = 1
    equal_shards: int = 1
    per_shard: bool = False

    def check(self, reader: str, plan: EpochPlan | None) -> None:
        """Validates the epochs of a reader, or of a record source if the name is "".

        Raises:
            ValueError: If batches mix epochs, or shards rotate or are unequal.
        """
        reader_or_source = f"reader {reader!r}" if reader else "the source"
        if plan is None:
            raise ValueError(
                "the end of an epoch is unknown. Pass reader_name (or size) together with "
                "output_map"
            )
        samples, shards, batch = plan.num_samples, plan.num_shards, plan.batch_size
        sizes = {plan.shard_size(shard) for shard in range(shards)}
        drops = plan.policy is LastBatchPolicy.DROP
        fits = self.num_epochs == 1 or all(size % batch == 0 for size in sizes)
        if not plan.padded and not (drops and fits):
            raise ValueError(
                f"{reader_or_source} fills an epoch's last batch with samples of the next epoch. "
                f"Pass {'pad_last_batch=True to it' if reader else 'last_batch_padded=True'}, "
                "which adds only rows that are masked, cut off or dropped"
            )
        if samples % self.equal_shards:
            raise ValueError(
                f"{self.equal_shards} shards do not divide the {samples} samples of "
                f"{reader_or_source}, and DALI does not drop samples to equalize shards. Omit "
                "drop_remainder from the shard options, or use another number of files"
            )
        if shards > 1 and not plan.stick:
            raise ValueError(
                f"{reader_or_source} assigns each of {shards} shards other samples in each epoch. "
                "Pass stick_to_shard=True to it"
            )


@dataclasses.dataclass(frozen=True)
class IteratorConfig:
    """Arguments of an iterator, in DALI's names; see `dalijax.DALIGenericIterator`.

    Raises:
        ValueError: If a value is not allowed, or two arguments exclude each other.
        TypeError: If a value has the wrong type.
    """

    output_map: Sequence[str]
    size: int = -1
    reader_name: str | None = None
    auto_reset: Any = False
    last_batch_padded: bool | None = None
    last_batch_policy: LastBatchPolicy = LastBatchPolicy.FILL
    prepare_first_batch: bool = True
    sharding: Any = None
    devices: Sequence[Any] | None = None
    pmap_compatible: bool | None = None
    _: dataclasses.KW_ONLY
    mask: str | None = None
    as_numpy: bool | None = None
    on_error: OnError = "raise"
    allow_changes: Sequence[str] = ()
    check_processes: bool | float = True
    source: Any = None
    shuffle: bool = True
    batch_map: Any = None  # becomes a BatchMap
    # Set by adapters only.
    epoch_rules: EpochRules | None = None
    on_host: bool = False  # whether DALI copies GPU outputs to the host
    hosts: tuple[int, int] = (0, 1)  # index of this host, and number of hosts with batch slices
    epochs: int | None = 1  # number of successive epochs of a stream; None: no end

    @property
    def shardings(self) -> dict[str, Any]:
        """Returns the values of ``sharding`` by output; the name "" stands for all outputs."""
        return {**self.sharding} if isinstance(self.sharding, Mapping) else {"": self.sharding}

    @property
    def over_processes(self) -> bool:
        """Returns whether batches are placed over devices of several processes."""
        values = self.shardings.values()
        return any(isinstance(s, Sharding) and not s.is_fully_addressable for s in values)

    def check_skip(self, on_error: str) -> None:
        """Raises ValueError if batches can't be skipped, since other processes wait for them."""
        if on_error == "skip" and (self.over_processes or self.hosts[1] > 1):
            raise ValueError(
                "on_error='skip' over several processes or hosts: a process that skips a batch "
                "would be a batch ahead of the others. Omit it, or use 'mask', which requires a "
                "source of dalijax.sources or Grain's records"
            )

    def placed(self) -> IteratorConfig:
        """Resolves PartitionSpecs with the current mesh.

        Raises:
            ValueError: If there is no current mesh.
        """
        if self.sharding is None:
            return self
        sharding = over_current_mesh(self.sharding)
        return self if sharding is self.sharding else dataclasses.replace(self, sharding=sharding)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "auto_reset", _parse_auto_reset(self.auto_reset))
        set_field(self, "output_map", self._checked_names())
        expected = "a positive number of samples, or -1"
        set_field(self, "size", whole_number("size", self.size, expected, -1))
        names = difference_names(self.allow_changes, "allow_changes")
        set_field(self, "allow_changes", names)
        if self.size == 0:
            raise ValueError(f"size must be {expected}, not 0")
        check_flags(
            last_batch_padded=self.last_batch_padded,
            prepare_first_batch=self.prepare_first_batch,
            pmap_compatible=self.pmap_compatible,
            as_numpy=self.as_numpy,
            shuffle=self.shuffle,
        )
        if self.shuffle is None:  # it would not shuffle, unlike an omitted shuffle=
            raise TypeError("shuffle must be True or False, not None")
        _check_seconds(self.check_processes)
        if not (self.batch_map is None or isinstance(self.batch_map, BatchMap)):
            is_given = self.batch_map not in ([], ())
            set_field(self, "batch_map", BatchMap(self.batch_map) if is_given else None)
        is_class = isinstance(self.source, type)
        if self.source is not None and (is_class or not hasattr(self.source, "read_threads")):
            raise TypeError(
                f"source must be one of dalijax.sources, not {self.source!r:.80}: "
                f"{replacements.suggest_source(self.source)}"
            )
        if self.reader_name is not None and not isinstance(self.reader_name, str):
            raise TypeError(
                f"reader_name must be the name of a reader, or None, not {self.reader_name!r}"
            )
        if not isinstance(self.last_batch_policy, LastBatchPolicy):
            raise ValueError(
                "last_batch_policy must be one of LastBatchPolicy.FILL, DROP and PARTIAL, "
                f"not {self.last_batch_policy!r}"
            )
        if self.on_error not in ("raise", "skip", "mask"):
            raise ValueError(f"on_error must be 'raise', 'skip' or 'mask', not {self.on_error!r}")
        if self.on_error == "mask" and self.mask is None:
            raise ValueError(
                "on_error='mask' requires a mask, which marks bad records. Pass mask='mask'"
            )
        self._check_exclusive()

    def _checked_names(self) -> tuple[str, ...]:
        if isinstance(self.output_map, str):
            raise TypeError(
                f"output_map must be a list of names, not a string. "
                f"Pass [{self.output_map!r}] for a pipeline with one output"
            )
        ordered = isinstance(self.output_map, Iterable)
        if not ordered or isinstance(self.output_map, (set, frozenset)):
            raise TypeError(
                "output_map must be a list of names in the order of the pipeline's outputs, not "
                f"{self.output_map!r}"
            )
        names = tuple(self.output_map)
        if not names:
            raise ValueError(
                "output_map is empty. Name each output of the pipeline, "
                "e.g. @data_iterator(output_map=['images', 'labels'])"
            )
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"output_map must contain names, not {name!r}")
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(
                f"output_map contains {duplicates} more than once. Names must be unique"
            )
        if self.mask is not None and not isinstance(self.mask, str):
            raise TypeError(f"mask must be the mask's name, not {self.mask!r}. Pass mask='mask'")
        if self.mask in names:
            raise ValueError(
                f"mask must be a name that is not in output_map {list(names)}, not {self.mask!r}"
            )
        return names

    def _check_exclusive(self) -> None:
        if self.reader_name is not None and self.size != -1:
            raise ValueError(
                f"size={self.size} together with reader_name={self.reader_name!r}: the reader "
                "determines the size. Omit size"
            )
        if self.sharding is not None and self.devices is not None:
            raise ValueError(
                "sharding and devices exclude each other. Pass sharding for global arrays, or "
                "devices for pmap's [devices, batch, ...] layout"
            )
        if self.sharding is not None and self.pmap_compatible:
            raise ValueError(
                "pmap_compatible=True with sharding: a sharded batch has no device axis. Pass "
                "devices for pmap's layout"
            )
        placed = "sharding" if self.sharding is not None else "devices"
        if self.sharding is not None or self.devices is not None:
            if self.as_numpy:
                raise ValueError(f"as_numpy=True with {placed}: only jax.Arrays can be placed")
            if self.last_batch_policy is LastBatchPolicy.PARTIAL:
                raise ValueError(
                    f"LastBatchPolicy.PARTIAL with {placed}: all shards must have equal shapes. "
                    "Use LastBatchPolicy.FILL with mask='mask', which marks the padding"
                )


CONFIG_DEFAULTS = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(IteratorConfig)
}
# The arguments that users pass.
CONFIG_NAMES = frozenset({"output_map", *FunctionIteratorArguments.__annotations__})
OF_DATA_ITERATOR = {"those of dalijax.data_iterator": CONFIG_NAMES}  # for messages


def takes(arguments: type[IteratorArguments]) -> Callable[[F], F]:
    """Decorates a function that takes fields of `IteratorConfig` as ``**arguments``.

    ``help()`` then lists the fields, callers may pass them by position in DALI's order, and errors
    about unknown names suggest others.

    Args:
        arguments: The types of the fields that it takes.
    """

    def decorate(function: F) -> F:
        signature_ = inspect.signature(function)
        named = [p for p in signature_.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        signature = signature_.replace(parameters=[*named, *_parameters(arguments)])

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{plain_name(function)}: {error}") from None
            return function(**call.arguments)

        vars(bound)["__signature__"] = signature
        return knows_its_names(bound)  # type: ignore[return-value]

    return decorate


def _parameters(arguments: type[IteratorArguments]) -> list[inspect.Parameter]:
    """Returns the fields of `IteratorConfig` with these names, as parameters of a function."""
    types = arguments.__annotations__
    parameters = []
    for field in dataclasses.fields(IteratorConfig):
        if field.name in types:
            parameter = inspect.Parameter.POSITIONAL_OR_KEYWORD
            kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else parameter
            annotation = getattr(types[field.name], "__forward_arg__", types[field.name])
            parameters.append(
                inspect.Parameter(field.name, kind, default=field.default, annotation=annotation)
            )
    return parameters
