"""DALI's pipelines, with cures in their errors: building, checkpoints, queues, operators."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

import numpy as np
from nvidia.dali import Pipeline, backend

from ..environment import cuda_queues
from ..errors import StateError
from ..random.draw import described_draws, draw_inputs
from ..state.fingerprint import fingerprint, operator_line
from ..state.operators import kind_of, operator_inputs
from ..state.random_state import to_other_device
from . import advice, function_notes

# What DALI says of a checkpoint of another graph.
_OF_ANOTHER = re.compile(
    "might come from another pipeline|no checkpoint for operator|match the graph structure|"
    "superfluous operator states|Failed to deserialize|Philox state"
)
_UNMAPPABLE = re.compile("File mapping failed: (.*)")
_LONGEST_WAIT = 0.1  # seconds

T = TypeVar("T")


def queue_depth(pipeline: Pipeline) -> int:
    """Batches that DALI schedules ahead of the consumer."""
    if not pipeline.exec_pipelined:
        return 1
    if pipeline.exec_separated:
        return max(pipeline.cpu_queue_size, pipeline.gpu_queue_size)
    depth: int = pipeline.prefetch_queue_depth
    return depth


# Pipelines that only the end of the process may free, in its main thread.
kept_to_the_end: list[Pipeline] = []


class FreedAnywhere(Pipeline):
    """A pipeline that Python may collect in a thread of DALI's, which can't wait for its end.

    A Python function of a graph runs there, and so may Python's cyclic gc within it.
    """

    def _shutdown(self) -> None:
        # Not public: the class of threads that Python did not start.
        if not isinstance(threading.current_thread(), threading._DummyThread):
            super()._shutdown()  # type: ignore[no-untyped-call]
            return
        try:
            threading.Thread(target=Pipeline._shutdown, args=(self,), daemon=True).start()
        except RuntimeError:  # Python ends, and starts no thread any more
            kept_to_the_end.append(self)


def defined_without_random(define: Callable[[], T], function: Any, name: str) -> T:
    """Defines a graph, and refuses functions that draw from a generator meanwhile.

    The graph is defined a second time if a state has changed: a function that seeds the generator
    itself, say to shuffle its files, leaves the same state and passes. Generators that change
    without the function belong to other threads, and are ignored.

    Args:
        define: Calls the function.
        function: The function, whose global and outer variables may be generators, too.
        name: What to call it.

    Raises:
        RuntimeError: If the function draws random numbers.
    """
    generators = _generators(function)
    before, start = random_states(generators), time.perf_counter()
    result = define()
    after, took = random_states(generators), time.perf_counter() - start
    if after != before:
        time.sleep(min(took, _LONGEST_WAIT))
        idle = random_states(generators)
        define()
        drawn = changed_states(before, after) & changed_states(idle, random_states(generators))
        drawn -= changed_states(after, idle)
        if drawn:
            raise RuntimeError(
                f"{name} draws from {', '.join(sorted(drawn))} while the graph is defined, which "
                "happens once: every batch would get the same numbers. Use draw.uniform() and the "
                "like over a source (docs/randomness.md), or nvidia.dali.fn.random. Lists, say of "
                "files, are to be shuffled before the function is called"
            )
    return result


def _generators(function: Any) -> dict[str, Any]:
    """Generators that a function refers to by global and outer variables."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return {}
    variables = inspect.getclosurevars(function)
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    named = {**variables.globals, **variables.nonlocals}
    return {name: value for name, value in named.items() if isinstance(value, kinds)}


def random_states(generators: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The states of NumPy's and Python's global generators, and of further ones."""
    states: dict[str, Any] = {"numpy.random": _of_numpy(np.random.get_state(legacy=False))}
    states["random"] = random.getstate()
    for name, generator in generators.items():
        if isinstance(generator, np.random.Generator):
            states[name] = _of_numpy(generator.bit_generator.state)
        elif isinstance(generator, np.random.RandomState):
            states[name] = _of_numpy(generator.get_state(legacy=False))
        else:
            states[name] = generator.getstate()
    return states


def _of_numpy(state: Any) -> Any:
    """A state of NumPy as values that can be compared."""
    if isinstance(state, Mapping):
        return {key: _of_numpy(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def changed_states(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names of the generators whose states differ."""
    return {name for name, state in before.items() if state != after[name]}


def build_pipeline(pipeline: Pipeline, name: str = "the pipeline") -> None:
    """Builds a pipeline; errors with a known cause have the cure.

    Args:
        pipeline: The pipeline.
        name: What defined it, for messages.
    """
    if pipeline.device_id is not None and backend.GetCUDADeviceCount() > 0:
        cuda_queues.warn_if_too_late()
    if _forks_workers(pipeline):
        warnings.warn(advice.FORKED, RuntimeWarning, stacklevel=2)
    try:
        pipeline.build()
    except (NotImplementedError, TypeError) as error:
        if cure := advice.of_outputs(error, name):
            raise TypeError(cure) from error
        raise
    except RuntimeError as error:
        text = str(error)
        if backend.GetCUDADeviceCount() == 0 and ("CUDA" in text or "GPU" in text):
            raise RuntimeError(
                f"the pipeline needs a GPU (device_id={pipeline.device_id}) and DALI sees none "
                "on this machine. For the CPU, use device='cpu' for its decoders, no .gpu(), "
                f"and leave device_id out or pass None. DALI says: {text}"
            ) from error
        if cure := advice.of_workers(error) or advice.of_readers(error, pipeline):
            raise RuntimeError(f"{cure} DALI says: {text}") from error
        raise


def _forks_workers(pipeline: Pipeline) -> bool:
    """Whether building a pipeline forks workers of ``fn.external_source(parallel=True)``."""
    if pipeline.py_start_method != "fork" or getattr(pipeline, "_py_pool_started", False):
        return False
    try:
        groups = [getattr(operator, "_group", None) for operator in operators(pipeline)]
    except AttributeError:  # outputs that are none: building it says so
        return False
    return any(getattr(group, "parallel", False) for group in groups)


def at_checkpoint(make: Callable[[bytes | None], Pipeline], checkpoint: bytes | None) -> Pipeline:
    """A built pipeline that stands at a checkpoint, be it one of the same graph on another device.

    Args:
        make: Builds one, at a checkpoint or at its start.
        checkpoint: The checkpoint; None for the start.

    Raises:
        StateError: If the checkpoint is one of another graph.
    """
    try:
        return make(checkpoint)
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
        if checkpoint is None or not _OF_ANOTHER.search(refusal):
            raise
    start = make(None)
    first = start.checkpoint()
    del start  # a GPU may not have room for two
    try:
        return make(to_other_device(checkpoint, first))
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, StateError) and not _OF_ANOTHER.search(str(error)):
            raise
        raise StateError(
            f"the state is one of other operators: {error}. Make the iterator as it was when the "
            f"state was saved. DALI says: {refusal}"
        ) from None


def is_unmappable(error: Exception) -> bool:
    """Whether DALI could not map a file that is there, as it can't an empty one."""
    failed = _UNMAPPABLE.search(str(error))
    return failed is not None and os.path.exists(failed[1])


def operators(pipeline: Pipeline) -> list[Any]:
    """The operators of a pipeline that is not built, each behind what it depends on."""
    # Not public: of a DALI without these nothing is known.
    ends = [*(getattr(pipeline, "_graph_out", None) or ()), *getattr(pipeline, "_sinks", ())]
    ordered: dict[int, Any] = {}
    # An operator lies there twice: below its inputs, and again to be noted once they were.
    todo = [(getattr(node, "source", None), False) for node in reversed(ends)]
    while todo:
        operator, ready = todo.pop()
        if operator is None or id(operator) in ordered:
            continue
        if ready:
            ordered[id(operator)] = operator
            continue
        inputs = [getattr(node, "source", None) for node in operator_inputs(operator)]
        todo += [(operator, True), *((one, False) for one in reversed(inputs))]
    return list(ordered.values())


def operator_name(operator: Any) -> str:
    """An operator's name as users write it, "fn.decoders.image", or "function flip"."""
    function = function_notes.name_of(operator)
    if function:
        return f"function {function}"
    kind = kind_of(operator)
    return "indexing" if kind == "_tensor_subscript" else f"fn.{kind}"  # x[0], of a draw, too


def runs_python(operator: Any) -> bool:
    """Whether an operator calls Python: a function, or a source of its outputs."""
    kind = kind_of(operator)
    return bool(function_notes.name_of(operator)) or "function" in kind or kind == "external_source"


def graph_lines(pipelines: Sequence[Pipeline], batch_map: Sequence[str] = ()) -> list[str]:
    """A line for each draw, operator and function of ``batch_map``, by which states know them."""
    first = pipelines[0]
    drawn = draw_inputs(first)
    known = fingerprint(pipelines, None, (), drawn=drawn, batch_map=batch_map)
    draws = [operator_line(*draw) for draw in described_draws(first)]
    return [*draws, *known["operators"]]


def unmap_readers(pipeline: Pipeline) -> None:
    """Has the readers of a pipeline that is not built read their files instead of mapping them."""
    for instance in operators(pipeline):
        schema = getattr(getattr(instance, "_op", None), "schema_name", None)
        if schema and backend.GetSchema(schema).HasArgument("dont_use_mmap"):
            with contextlib.suppress(RuntimeError):  # it is there: the graph's function says it
                instance.spec.AddArg("dont_use_mmap", True)


def can_checkpoint(pipeline: Pipeline) -> bool:
    """Whether a built pipeline was made with enable_checkpointing; no property says it."""
    try:
        pipeline.checkpoint()
    except RuntimeError:
        return False
    return True


def check_outputs(pipeline: Pipeline, output_map: Sequence[str]) -> None:
    """Raises ValueError where a built pipeline has another number of outputs than names."""
    outputs = pipeline.num_outputs
    if outputs != len(output_map):
        raise ValueError(
            f"output_map names {len(output_map)} outputs, {list(output_map)}, "
            f"but the pipeline has {outputs}: give each of them one name"
        )
