"""Arguments of iterators: `IteratorConfig` defines and validates them, however they are passed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import jax
from jax.sharding import PartitionSpec, Sharding
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .arguments import check_flags, difference_names, knows_its_names, plain_name, whole_number
from .arrays.batch_map import BatchMap, MapFunction
from .arrays.placement import over_current_mesh
from .messages import replacements
from .messages.printable import printable_repr
from .order.epochs import EpochPlan

F = TypeVar("F", bound=Callable[..., Any])
Shardings: TypeAlias = Sharding | PartitionSpec | Mapping[str, Sharding | PartitionSpec | None]
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
    last_batch_policy: LastBatchPolicy | str
    drop_remainder: bool | None
    prepare_first_batch: bool
    sharding: Shardings | None
    pmap_compatible: bool | None
    mask: str | bool | None
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


def _parse_auto_reset(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("yes", "no"):
        return value.lower() == "yes"
    raise ValueError(f"auto_reset must be 'yes', 'no', True, False or None, not {value!r}")


def policy_named(value: Any) -> LastBatchPolicy | None:
    """Returns the `LastBatchPolicy` of a name such as "drop", or the policy that was passed.

    Returns None for any other value.
    """
    if isinstance(value, str):
        return LastBatchPolicy.__members__.get(value.upper())
    return value if isinstance(value, LastBatchPolicy) else None


def _policy(value: Any, drop_remainder: bool | None) -> LastBatchPolicy:
    """Returns the policy that ``last_batch_policy`` and ``drop_remainder`` determine.

    Raises:
        ValueError: If the two arguments disagree, or the policy is unknown.
    """
    policy, drop = policy_named(value), LastBatchPolicy.DROP
    if policy is None:
        raise ValueError(
            "last_batch_policy must be 'fill', 'drop' or 'partial', or a dalijax.LastBatchPolicy, "
            f"not {value!r}"
        )
    if drop_remainder is None:
        return policy
    # FILL may be the default, which drop_remainder replaces.
    is_given = isinstance(value, str) or policy is not LastBatchPolicy.FILL
    if is_given and (policy is drop) != bool(drop_remainder):
        raise ValueError(
            f"drop_remainder={drop_remainder} and last_batch_policy={policy.name} disagree. Pass "
            "only one of them"
        )
    return drop if drop_remainder else policy


def _check_seconds(value: object) -> None:
    """Checks the value of ``check_processes``, a bool or a number of seconds.

    Raises:
        TypeError: If the value is neither.
        ValueError: If the number is not positive and finite.
    """
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


@dataclasses.dataclass(frozen=True)
class EpochRules:
    """Requirements of an adapter: no batch has samples of two epochs, and shards do not rotate.

    By default, a reader of DALI fills an epoch's last batch with samples of the next epoch, and
    reads another shard in each epoch. `check` rejects readers with these defaults.

    Attributes:
        num_epochs: Number of epochs to read; None: no end.
        equal_shards: Number of shards that must divide the number of samples.
        per_shard: Whether shards may have different numbers of batches, if no array is placed over
            several shards.
    """

    num_epochs: int | None = 1
    equal_shards: int = 1
    per_shard: bool = False

    def check(self, reader: str, plan: EpochPlan | None) -> None:
        """Checks that a reader meets the requirements.

        Args:
            reader: Name of the reader; "" for a record source.
            plan: The epochs of the reader; None if they are unknown.

        Raises:
            ValueError: If the end of an epoch is unknown, a batch contains samples of two epochs,
                or shards rotate or are unequal.
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
                f"{reader_or_source} rotates its {shards} shards: each process reads a different "
                "shard in every epoch. Pass stick_to_shard=True to it, so that a process always "
                "reads the same shard"
            )


@dataclasses.dataclass(frozen=True)
class IteratorConfig:
    """Arguments of an iterator, with DALI's names; see `dalijax.DALIGenericIterator`.

    Raises:
        ValueError: If a value is not allowed, or two arguments exclude each other.
        TypeError: If a value has the wrong type.
    """

    output_map: Sequence[str]  # empty: the keys of the dict that the graph function returns
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
    drop_remainder: bool | None = None  # becomes a last_batch_policy
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
    hosts: tuple[int, int] = (0, 1)  # index of this host, and number of hosts that share batches
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

    def check_skip(self) -> None:
        """Raises ValueError if ``on_error`` is "skip" and other processes would wait for a batch.

        A process that skips a batch delivers fewer batches than the other processes.
        """
        if self.on_error == "skip" and (self.over_processes or self.hosts[1] > 1):
            raise ValueError(
                "on_error='skip' over several processes or hosts: a process that skips a batch "
                "would be a batch ahead of the others. Omit it, or use 'mask', which requires a "
                "source of dalijax.sources or Grain's records"
            )

    def placed(self) -> IteratorConfig:
        """Returns a copy whose PartitionSpecs are converted to NamedShardings on the current mesh.

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
        if isinstance(self.mask, bool):
            set_field(self, "mask", "mask" if self.mask else None)
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
            drop_remainder=self.drop_remainder,
        )
        policy = _policy(self.last_batch_policy, self.drop_remainder)
        set_field(self, "last_batch_policy", policy)
        set_field(self, "drop_remainder", None)  # so that a copy has a single policy
        if self.shuffle is None:  # None would not shuffle, unlike an omitted shuffle=
            raise TypeError("shuffle must be True or False, not None")
        _check_seconds(self.check_processes)
        if not (self.batch_map is None or isinstance(self.batch_map, BatchMap)):
            is_given = self.batch_map not in ([], ())
            set_field(self, "batch_map", BatchMap(self.batch_map) if is_given else None)
        is_class = isinstance(self.source, type)
        if self.source is not None and (is_class or not hasattr(self.source, "read_threads")):
            raise TypeError(
                f"source must be one of dalijax.sources, not {printable_repr(self.source)}: "
                f"{replacements.suggest_source(self.source)}"
            )
        if self.reader_name is not None and not isinstance(self.reader_name, str):
            raise TypeError(
                f"reader_name must be the name of a reader, or None, not {self.reader_name!r}"
            )
        if self.on_error not in ("raise", "skip", "mask"):
            raise ValueError(f"on_error must be 'raise', 'skip' or 'mask', not {self.on_error!r}")
        if self.on_error == "mask" and self.mask is None:
            raise ValueError(
                "on_error='mask' requires a mask, which marks bad records. Pass mask=True"
            )
        self._check_exclusive()

    def _checked_names(self) -> tuple[str, ...]:
        """Returns ``output_map`` as a tuple.

        Raises:
            TypeError, ValueError: If ``output_map`` or the name of the mask is invalid.
        """
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
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"output_map must contain names, not {name!r}")
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(
                f"output_map contains {duplicates} more than once. Names must be unique"
            )
        if self.mask is not None and not isinstance(self.mask, str):
            raise TypeError(f"mask must be True for the name 'mask', or a name, not {self.mask!r}")
        if self.mask in names:
            raise ValueError(
                f"an output of the graph is named {self.mask!r} already, like the mask of valid "
                "rows. Rename the output, or pass another name for this mask: mask='valid'"
            )
        return names

    def _check_exclusive(self) -> None:
        """Raises ValueError if two arguments exclude each other."""
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
                    f"last_batch_policy='partial' with {placed}: all shards must have equal "
                    "shapes. Use 'fill' with mask=True, which marks the padding"
                )


CONFIG_DEFAULTS = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(IteratorConfig)
}
# The arguments that users pass.
CONFIG_NAMES = frozenset({"output_map", *FunctionIteratorArguments.__annotations__})
OF_DATA_ITERATOR = {"those of dalijax.data_iterator": CONFIG_NAMES}  # for messages


def takes(arguments: type[IteratorArguments]) -> Callable[[F], F]:
    """Returns a decorator for a function that takes fields of `IteratorConfig` as ``**arguments``.

    Of the decorated function, ``help()`` lists the fields. Callers may pass the fields by position
    in DALI's order, and errors about unknown names suggest similar names.

    Args:
        arguments: A TypedDict of the fields that the function takes.
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
    """Returns a function parameter for each field of `IteratorConfig` that a TypedDict has."""
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
