"""Builds DALI pipelines, adding fixes to errors, and inspects their operators and generators."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, TypeVar

import numpy as np
from nvidia.dali import OperatorConcurrency, Pipeline, backend

from ..arguments import arguments_of
from ..environment import cuda_queues
from ..errors import StateError
from ..messages.user_warnings import warn_user
from ..state.operators import calls_function, kind_of, operators
from ..state.random_state import to_other_device
from . import advice, alternatives, function_notes

# DALI's errors about a checkpoint of another graph.
_OF_ANOTHER = re.compile(
    "might come from another pipeline|no checkpoint for operator|match the graph structure|"
    "superfluous operator states|Failed to deserialize|Philox state"
)
_UNMAPPABLE = re.compile("File mapping failed: (.*)")
_LONGEST_WAIT = 0.1  # seconds
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

T = TypeVar("T")


def queue_depth(pipeline: Pipeline) -> int:
    """Returns the number of batches that a pipeline may have scheduled at a time."""
    if not pipeline.exec_pipelined:
        return 1
    if pipeline.exec_separated:
        return max(pipeline.cpu_queue_size, pipeline.gpu_queue_size)
    depth: int = pipeline.prefetch_queue_depth
    return depth


# Pipelines that must not be freed before the exit of the process, in its main thread.
kept_to_the_end: list[Pipeline] = []


class FreedAnywhere(Pipeline):
    """A pipeline that Python's garbage collector can free in any thread.

    Python functions of a graph run in DALI's threads. If the garbage collector runs there and frees
    a pipeline, the thread must not wait for the end of the pipeline, so that a new thread does.
    """

    def _shutdown(self) -> None:
        # Private in Python: the class of threads that Python did not start.
        if not isinstance(threading.current_thread(), threading._DummyThread):
            super()._shutdown()  # type: ignore[no-untyped-call]
            return
        try:
            threading.Thread(target=Pipeline._shutdown, args=(self,), daemon=True).start()
        except RuntimeError:  # at exit, Python starts no threads
            kept_to_the_end.append(self)


def free(pipeline: Pipeline) -> None:
    """Frees a pipeline and its threads; arrays of its outputs stay valid."""
    # Private in DALI: without it, the pipeline is freed when Python collects its cycles.
    getattr(pipeline, "_shutdown", lambda: None)()
    # The outputs are part of the pipeline's reference cycles.
    for outputs in vars(pipeline).pop(function_notes.LIVE_OUTPUTS, ()):
        outputs.clear()


def defined_without_random(define: Callable[[], T], function: Any, name: str) -> T:
    """Returns the graph that ``define`` creates; rejects functions that draw random numbers.

    If the state of a generator has changed, the graph is defined a second time: a function that
    seeds the generator itself, e.g. to shuffle its files, then leaves the same state and is
    accepted. Generators that change without the function are used by other threads, and ignored.

    Args:
        define: Defines the graph, by calling the function.
        function: The function. The generators that it refers to are checked, too.
        name: Name of the function for errors.

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
                "happens once: every batch would get the same numbers. Use draw.uniform() etc. "
                "over a source (docs/randomness.md), or nvidia.dali.fn.random. Shuffle lists, e.g. "
                "of files, before calling the function"
            )
    return result


def _generators(function: Any) -> dict[str, Any]:
    """Returns, by name, the random generators to which a function refers.

    The generators are global and nonlocal variables, defaults of arguments, arguments of a partial
    function, and attributes of a method's object. Functions of the same module that the function
    uses are searched, too.
    """
    module = _module(function)
    generators: dict[str, Any] = {}
    seen: set[int] = set()
    todo = [function]
    while todo:
        value = inspect.unwrap(todo.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        named: dict[str, Any] = {}
        if isinstance(value, functools.partial):
            named = {"the partial function": value.func, **value.keywords}
            named |= {f"argument {k}": argument for k, argument in enumerate(value.args)}
        elif isinstance(value, MethodType):
            named = {value.__name__: value.__func__, **getattr(value.__self__, "__dict__", {})}
        elif isinstance(value, FunctionType):
            variables = inspect.getclosurevars(value)
            named = {**variables.globals, **variables.nonlocals, **(value.__kwdefaults__ or {})}
            names = value.__code__.co_varnames[: value.__code__.co_argcount]
            named |= zip(reversed(names), reversed(value.__defaults__ or ()))
        for name, part in named.items():
            if isinstance(part, _GENERATORS):
                generators.setdefault(name, part)
            is_own = isinstance(part, FunctionType) and part.__module__ == module
            if is_own or isinstance(part, (functools.partial, MethodType)):
                todo.append(part)
    return generators


def _module(function: Any) -> str | None:
    """Returns the name of the module of a function, or of the function of a partial function."""
    while isinstance(function, functools.partial):
        function = function.func
    module: str | None = getattr(inspect.unwrap(function), "__module__", None)
    return module


def random_states(generators: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns, by name, the states of NumPy's and Python's global and of given generators."""
    states: dict[str, Any] = {"numpy.random": _comparable(np.random.get_state(legacy=False))}
    states["random"] = random.getstate()
    for name, generator in generators.items():
        if isinstance(generator, np.random.Generator):
            states[name] = _comparable(generator.bit_generator.state)
        elif isinstance(generator, np.random.RandomState):
            states[name] = _comparable(generator.get_state(legacy=False))
        else:
            states[name] = generator.getstate()
    return states


def _comparable(state: Any) -> Any:
    """Returns a state of a NumPy generator as values that ``==`` can compare."""
    if isinstance(state, Mapping):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def changed_states(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Returns the names of the generators whose states differ."""
    return {name for name, state in before.items() if state != after[name]}


def build_pipeline(pipeline: Pipeline, name: str = "the pipeline") -> None:
    """Builds a pipeline; errors with a known cause include the fix.

    Args:
        pipeline: The pipeline.
        name: Name of the function that defined it, for errors.
    """
    if pipeline.device_id is not None and backend.GetCUDADeviceCount() > 0:
        cuda_queues.warn_if_too_late()
    if _forks_workers(pipeline):
        warn_user(advice.FORKED)
    try:
        name_erased_axes(pipeline)
    except AttributeError:  # invalid outputs, which building reports
        pass
    else:
        run_concurrently(pipeline)
        alternatives.choose(pipeline)
    try:
        pipeline.build()
    except (NotImplementedError, TypeError, ValueError) as error:
        if cure := advice.outputs_cure(error, name):
            raise (ValueError if isinstance(error, ValueError) else TypeError)(cure) from error
        raise
    except RuntimeError as error:
        text = str(error)
        if backend.GetCUDADeviceCount() == 0 and ("CUDA" in text or "GPU" in text):
            raise RuntimeError(
                f"the pipeline needs a GPU (device_id={pipeline.device_id}), but DALI finds none "
                "on this machine. To use the CPU, pass device='cpu' to decoders, remove .gpu(), "
                f"and omit device_id or pass None. DALI says: {text}"
            ) from error
        cure = advice.workers_cure(error) or advice.omitted_cure(error)
        if cure := cure or advice.readers_cure(error, pipeline):
            raise RuntimeError(f"{cure} DALI says: {text}") from error
        raise


def run_concurrently(pipeline: Pipeline) -> None:
    """Lets independent operators of a graph run at the same time.

    By default, DALI starts the operators of a GPU one after another, in one thread, which takes
    longer than the GPU if there are many. Operators of a CPU run one after another unless DALI uses
    its new thread pool. A graph that calls functions of Python or Numba keeps the default, because
    they may not support calls from several threads. So does a graph with ``concurrency=``.

    Args:
        pipeline: A pipeline that was defined and is not built, before `alternatives.choose`.
    """
    if pipeline.concurrency is not None or not pipeline.exec_dynamic:
        return
    graph = operators(pipeline)  # empty if a subclass of Pipeline defines it when it is built
    if not graph or any(map(calls_function, graph)):
        return
    # Private in DALI: the argument ``concurrency``, as the graph is known only after the call.
    pipeline._concurrency = OperatorConcurrency.FULL
    pipeline._executor_flags |= OperatorConcurrency.FULL.value


def _forks_workers(pipeline: Pipeline) -> bool:
    """Returns whether building forks workers of ``fn.external_source(parallel=True)``."""
    if pipeline.py_start_method != "fork" or getattr(pipeline, "_py_pool_started", False):
        # Private in DALI: the pool of workers, and the groups of external sources.
        return False
    try:
        groups = [getattr(operator, "_group", None) for operator in operators(pipeline)]
    except AttributeError:  # invalid outputs, which building reports
        return False
    return any(getattr(group, "parallel", False) for group in groups)


def at_checkpoint(make: Callable[[bytes | None], Pipeline], checkpoint: bytes | None) -> Pipeline:
    """Returns a pipeline built at a checkpoint, which the graph may have saved on another device.

    Args:
        make: A function that builds a pipeline at a checkpoint, or at its start for None.
        checkpoint: The checkpoint; None: the start.

    Raises:
        StateError: If the checkpoint belongs to another graph.
    """
    try:
        return make(checkpoint)
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
        if checkpoint is None or not _OF_ANOTHER.search(refusal):
            raise
    start = make(None)
    first = start.checkpoint()
    del start  # a GPU may not have memory for two pipelines
    try:
        return make(to_other_device(checkpoint, first))
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, StateError) and not _OF_ANOTHER.search(str(error)):
            raise
        raise StateError(
            f"the state belongs to other operators: {error}. Recreate the iterator with its "
            f"original graph. DALI says: {refusal}"
        ) from None


def is_unmappable(error: Exception) -> bool:
    """Returns whether DALI could not map an existing file, e.g. because it is empty."""
    failed = _UNMAPPABLE.search(str(error))
    return failed is not None and os.path.exists(failed[1])


def operator_name(operator: Any) -> str:
    """Returns an operator's name as users write it, "fn.decoders.image", or "function flip"."""
    function = function_notes.name_of(operator)
    if function:
        return f"function {function}"
    kind = kind_of(operator)
    return "indexing" if kind == "_tensor_subscript" else f"fn.{kind}"  # e.g. x[0], or a draw


def runs_python(operator: Any) -> bool:
    """Returns whether an operator calls Python: a function, or an ``external_source``."""
    kind = kind_of(operator)
    return bool(function_notes.name_of(operator)) or "function" in kind or kind == "external_source"


def unmap_readers(pipeline: Pipeline) -> None:
    """Sets the readers of an unbuilt pipeline to read files instead of mapping them."""
    for instance in operators(pipeline):
        schema = getattr(getattr(instance, "_op", None), "schema_name", None)
        if schema and backend.GetSchema(schema).HasArgument("dont_use_mmap"):
            with contextlib.suppress(RuntimeError):  # the graph function has set it already
                instance.spec.AddArg("dont_use_mmap", True)


def name_erased_axes(pipeline: Pipeline) -> None:
    """Passes the default axes, "HW", to each ``fn.erase`` of an unbuilt pipeline that has no axes.

    The results are the same, but images without a layout raise an error. With its own default, DALI
    divides by zero and ends the process.
    """
    for instance in operators(pipeline):
        operator = getattr(instance, "_op", None)
        if getattr(operator, "schema_name", "") == "Erase" and not (
            {"axes", "axis_names"} & {*arguments_of(instance)}
        ):
            instance.spec.AddArg("axis_names", "HW")


def can_checkpoint(pipeline: Pipeline) -> bool:
    """Returns whether a built pipeline has enable_checkpointing (there is no property for it)."""
    try:
        pipeline.checkpoint()
    except RuntimeError:
        return False
    return True
