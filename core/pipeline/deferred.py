"""Calls that a graph leaves to be made on the placed batch, in the thread that takes it.

A function of global arrays can't be called while DALI runs: each pipeline has a shard's rows
alone, and a thread of its own. So it is the graph's last step. Its inputs become outputs of the
pipelines, after those that the graph returns, and placeholders stand for its own outputs until
the batch is placed::

    def graph(...):                 pipelines' outputs      batch
        x = ...                     x                       x, placed
        return x, function(x)                               function(x)

The computations of that thread are then started in its own order, which is the same in all
processes that run the same program.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from nvidia.dali import Pipeline
from nvidia.dali import _conditionals as conditionals
from nvidia.dali.data_node import DataNode

from ..config import IteratorConfig
from ..placement import GlobalPlacement
from ..state.fingerprint import operator_line
from ..stats import span

_CURE = "make it the last step of the graph, or apply it to the batch"
_CALLS = "_dalijax_calls"  # attributes of pipelines: a table of ours would keep both for good
_DEFERRED = "_dalijax_deferred"


class FunctionError(RuntimeError):
    """A function of global arrays failed; ``__cause__`` is what it raised."""


class DeferredFunction(Protocol):
    """A function of placed batches.

    Attributes:
        name: Its name, for messages.
        num_outputs: Number of its outputs.
        sharding: How its inputs are placed.
        preserve: Whether it is called even if its outputs are unused.
    """

    name: str
    num_outputs: int
    sharding: jax.sharding.Sharding
    preserve: bool

    def __call__(self, arrays: Sequence[jax.Array], words: jax.Array | None) -> tuple[Any, ...]:
        """Its outputs.

        Args:
            arrays: The inputs, global arrays.
            words: What a key is made of, uint8 of shape [batch, 8]; None without a key.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call in a graph that is being defined."""

    function: DeferredFunction
    inputs: tuple[DataNode, ...]
    words: DataNode | None


class DeferredOutput(DataNode):
    """Stands for an output of a deferred call: a graph may return it, and nothing else.

    It is a DataNode, so that DALI's operators look at its name or device, and get the error.
    """

    def __init__(self, call: _Call, number: int):
        vars(self)["_call"] = call
        vars(self)["_number"] = number

    def __repr__(self) -> str:  # by which DALI tells nodes from one another
        return f"<output {self._number} of {self._call.function.name}() at {id(self):#x}>"

    __str__ = __repr__
    __hash__ = object.__hash__

    def _refuse(self, *_: Any) -> Any:
        name = self._call.function.name
        raise ValueError(
            f"an output of {name}() was used in the graph, and with sharding= {name}() is called "
            f"once the batch is placed: {_CURE}"
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()


_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_OF_PYTHON = ("__bool__", "__iter__", "__len__", "__contains__", "__call__", "__int__", "__float__")
_OF_NODES = ("name", "device", "source", "index", "ndim", "dtype", "layout")
_METHODS = {name for name, one in vars(DataNode).items() if callable(one)} - set(vars(object))
for _name in (*_METHODS, *_COMPARED, *_OF_PYTHON, "__setattr__"):
    setattr(DeferredOutput, _name, DeferredOutput._refuse)
for _name in _OF_NODES:
    setattr(DeferredOutput, _name, property(DeferredOutput._refuse))
_deferring: contextvars.ContextVar[bool] = contextvars.ContextVar("deferring", default=False)


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Lets the pipeline that is defined meanwhile take deferred calls."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def is_deferring() -> bool:
    """Whether the pipeline that is being defined takes deferred calls."""
    return _deferring.get()


def defer(
    function: DeferredFunction, inputs: Sequence[Any], words: DataNode | None
) -> tuple[DeferredOutput, ...]:
    """Leaves a call of a function to the placed batch, in the graph that is being defined.

    Args:
        function: The function.
        inputs: Outputs of operators, or of other deferred calls.
        words: What a key is made of.

    Raises:
        TypeError: For an input that is none of these.
        ValueError: In a branch of ``if``.
    """
    pipeline = Pipeline.current()
    calls: list[_Call] = vars(pipeline).setdefault(_CALLS, [])
    for number, one in enumerate(inputs):
        if not isinstance(one, DataNode):
            raise TypeError(
                f"input {number} of {function.name}() is a {type(one).__name__}, not an output of "
                "an operator: nvidia.dali.types.Constant(..., device='cpu') makes one of a constant"
            )
    branches = conditionals.conditionals_enabled()
    if branches and conditionals.this_condition_stack().stack_depth() > 1:
        raise ValueError(
            f"{function.name}() was called in a branch of if, which takes some samples alone, and "
            f"with sharding= it gets the placed batch: {_CURE}"
        )
    call = _Call(function, tuple(inputs), words)
    calls.append(call)
    outputs = tuple(DeferredOutput(call, number) for number in range(function.num_outputs))
    if branches:
        conditionals.register_data_nodes(list(outputs))
    return outputs


class _Source(NamedTuple):
    """Where a value comes from: an output of the pipelines (call -1), or of an earlier call."""

    call: int
    number: int


@dataclasses.dataclass(frozen=True)
class _PlannedCall:
    """A call with its inputs, and the pipelines' output that is the words of its key."""

    function: DeferredFunction
    inputs: tuple[_Source, ...]
    words: _Source | None


@dataclasses.dataclass(frozen=True)
class DeferredCalls:
    """The calls that a graph leaves to each placed batch, in the order of their definition.

    Attributes:
        outputs: Where each output of the graph comes from.
    """

    outputs: tuple[_Source, ...]
    _calls: tuple[_PlannedCall, ...]

    def described(self) -> list[str]:
        """A line for each call, as `dalijax.core.state.fingerprint` has one for each operator."""
        return [
            operator_line(
                "jax_function",
                f"global_{number}",
                {
                    "num_outputs": one.function.num_outputs,
                    "inputs": ",".join(f"{k}.{n}" for k, n in one.inputs),
                    **({"key": 1} if one.words else {}),
                },
            )
            for number, one in enumerate(self._calls)
        ]

    @property
    def names(self) -> list[str]:
        """The functions' names."""
        return [one.function.name for one in self._calls]

    def check(self, config: IteratorConfig) -> None:
        """Raises ValueError where the batches of an iterator are no global arrays."""
        if config.sharding is None:
            raise ValueError(
                f"{self.names[0]}() has a sharding, for global arrays, and the iterator has "
                f"{'devices=' if config.devices is not None else 'none'}: pass sharding= to the "
                "iterator, or leave it out of the function"
            )

    def check_thread(self) -> None:
        """Raises RuntimeError in a thread that may take batches for another one.

        Only one thread's order is the same in all processes.
        """
        if threading.current_thread() is threading.main_thread():
            return
        for one in self._calls:
            if not one.function.sharding.is_fully_addressable:
                raise RuntimeError(
                    f"{one.function.name}() is a function of arrays of several processes, which "
                    "must be called in the same order among the other computations in all of them, "
                    "and this is not the main thread: take batches there, without a thread that "
                    "prefetches or peeks, or apply it to the batch. The batch is still the next one"
                )

    def batch(
        self,
        names: Sequence[str],
        pieces: Callable[[int, str], list[Any]],
        placement: GlobalPlacement,
        rows: int,
    ) -> dict[str, Any]:
        """The batch: the pipelines' outputs, and those of the functions.

        Args:
            names: The names of the graph's outputs.
            pieces: Each pipeline's rows of one of its outputs, by its number and a name.
            placement: Places them.
            rows: Rows of the global batch.

        Raises:
            FunctionError: If a function failed.
        """
        kept: dict[int, list[Any]] = {}
        placed: dict[tuple[int, Any], jax.Array] = {}
        results: list[tuple[Any, ...]] = []

        def pieces_of(number: int, name: str) -> list[Any]:
            if number not in kept:
                kept[number] = pieces(number, name)
            return kept[number]

        def value(source: _Source, name: str, sharding: Any) -> jax.Array:
            if source.call >= 0:
                return placement.reshard(name, results[source.call][source.number], rows, sharding)
            key = source.number, sharding or placement.sharding(name)
            if key not in placed:  # once, so that a donated one is not delivered
                placed[key] = placement.place(name, pieces_of(source.number, name), sharding)
            return placed[key]

        for one in self._calls:
            function, words = one.function, None
            arrays = [
                value(source, f"input {k} of {function.name}()", function.sharding)
                for k, source in enumerate(one.inputs)
            ]
            if one.words is not None:
                parts = pieces_of(one.words.number, "key")
                local = function.sharding.is_fully_addressable
                words = parts[0] if local else placement.place_mask("key", parts)
            results.append(_called(function, arrays, words))
            del arrays
        return {name: value(one, name, None) for name, one in zip(names, self.outputs)}


def _called(function: DeferredFunction, arrays: list[Any], words: Any) -> tuple[Any, ...]:
    try:
        with span("dalijax.function", function=function.name):
            return function(arrays, words)
    except Exception as error:
        raise FunctionError(f"{function.name}() raised {type(error).__name__}: {error}") from error


def plan_calls(pipeline: Pipeline) -> None:
    """Adds the inputs of deferred calls to the outputs of a pipeline, which is not built.

    Raises:
        ValueError: If nothing of the graph is left for DALI to do.
    """
    calls: list[_Call] = vars(pipeline).pop(_CALLS, [])
    if not calls:
        return
    # Not public, as where DALI's own build reads them.
    returned = getattr(pipeline, "_graph_out", None)
    if returned is None:
        raise RuntimeError("this DALI does not tell a graph's outputs before it is built")
    outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    kept = _needed(calls, outputs)
    nodes = [one for one in outputs if not isinstance(one, DeferredOutput)]

    def source(node: Any) -> _Source:
        if isinstance(node, DeferredOutput):
            call, number = vars(node)["_call"], vars(node)["_number"]
            at = next((k for k, one in enumerate(kept) if one is call), None)
            if at is None:
                raise ValueError(f"{node} is of another pipeline than the one that returns it")
            return _Source(at, number)
        for k, one in enumerate(nodes):
            if one is node:
                return _Source(-1, k)
        nodes.append(node)
        return _Source(-1, len(nodes) - 1)

    planned = tuple(
        _PlannedCall(
            one.function,
            tuple(source(node) for node in one.inputs),
            None if one.words is None else source(one.words),
        )
        for one in kept
    )
    deferred = DeferredCalls(tuple(source(node) for node in outputs), planned)
    if not nodes:
        raise ValueError(
            f"the graph returns what {deferred.names} return alone, and they take nothing of it: "
            "give one of them an output of an operator"
        )
    pipeline.set_outputs(*nodes)
    vars(pipeline)[_DEFERRED] = deferred


def _needed(calls: Sequence[_Call], outputs: Sequence[Any]) -> list[_Call]:
    """The calls whose outputs are used, and those that ask to be made anyway."""
    used = [vars(one)["_call"] for one in outputs if isinstance(one, DeferredOutput)]
    needed: list[_Call] = []
    for call in reversed(calls):
        if call.function.preserve or any(call is one for one in used):
            needed.insert(0, call)
            used += [vars(one)["_call"] for one in call.inputs if isinstance(one, DeferredOutput)]
    return needed


def deferred_of(pipelines: Sequence[Pipeline]) -> DeferredCalls | None:
    """The deferred calls of the pipelines of one iterator; None without any.

    Raises:
        ValueError: If it is not the same in all of them.
    """
    plans: list[DeferredCalls | None] = [vars(one).get(_DEFERRED) for one in pipelines]
    kinds = {(one.outputs, *one.described()) if one else () for one in plans}
    if len(kinds) > 1:
        raise ValueError(
            "the pipelines of the shards have different functions of global arrays: call the same "
            "ones whatever shard_id is"
        )
    return plans[0] if plans else None
