"""`PipelineFactory`, the base class of factories of DALI pipelines, and `GraphPipelineFactory`."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import operator
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np
from nvidia.dali import Pipeline, backend, pipeline_def
from nvidia.dali.data_node import DataNode

from ..arguments import checked_arguments, function_parameters, is_pipeline_def, name_of
from ..arrays.placement import DataShard
from ..errors import StateError
from ..random.seeds import DEFAULT_SEED, ShardSeed, shard_seed
from ..state.operators import kind_of, operator_inputs, operators
from . import advice
from .calls import calls
from .dali_pipeline import (
    FreedAnywhere,
    at_checkpoint,
    build_pipeline,
    defined_without_random,
    is_unmappable,
    unmap_readers,
)
from .function_notes import NOTES
from .output_notes import note_outputs

Define = Callable[[bytes | None], Pipeline]
# Documented as "not to be considered optimised" in DALI's plugin, and here.
DEFAULT_NUM_THREADS = 4

_UNUSED = re.compile(r"external source node .* is not used")
_SOURCE_CURE = (
    "Give fn.external_source a callable with one argument (sample info, batch info or the batch's "
    "index), use a reader, or keep the position yourself"
)
_NO_SOURCE_STATE = "Checkpointing enabled in a pipeline with external source"
# DALI's errors about graphs that it can't checkpoint. Its errors also quote the user's files and
# code, which may contain the word "checkpoint".
_UNSUPPORTED = re.compile(r"Checkpointing is not (supported|implemented)|not support checkpointing")


def default_device_id() -> int | None:
    """Returns 0 if DALI finds a GPU, otherwise None (a CPU-only pipeline)."""
    return 0 if backend.GetCUDADeviceCount() > 0 else None


class PipelineFactory(abc.ABC):
    """Base class of factories of an iterator's pipelines.

    Args:
        name: Name of the pipelines for messages.

    Attributes:
        rebuildable: Whether `build` may be called again.
        serialized: DALI's serialization of each pipeline, if pipelines are rebuilt from it.
        restored: DALI's checkpoints with which the caller created the pipelines, if any.
        owned: Whether the iterator may free the last built pipelines, because the caller did not
            create them.
    """

    def __init__(self, name: str):
        self.name = name
        self.rebuildable = True
        self.serialized: list[bytes] = []
        self.restored: list[bytes] = []
        self.owned = True
        self._unresumable = ""
        # Weak, because the user of the pipelines decides when they are freed.
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._before: list[list[Any]] = []  # `FunctionNote.before`, by pipeline

    @property
    def unresumable(self) -> str:
        """The reason why DALI's checkpoints do not determine the position; "" if they do."""
        self._unresumable = self._unresumable or self.kept_state()
        return self._unresumable

    @abc.abstractmethod
    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Returns pipelines, built at their start or at DALI's ``checkpoints`` (one for each)."""

    def _add(self, pipelines: Sequence[Pipeline]) -> None:
        """Registers built pipelines, to compare their functions' state with the first build."""
        notes = [vars(pipeline).get(NOTES, []) for pipeline in pipelines]
        self._before = self._before or [
            [note.before for note in pipeline_notes] for pipeline_notes in notes
        ]
        # A value that was changed between two builds is state, too.
        for pipeline_notes, states in zip(notes, self._before):
            for note, before in zip(pipeline_notes, states):
                note.before = before
        self._pipelines.update(pipelines)

    def kept_state(self) -> str:
        """Returns the reason why a function of the graph prevents resuming; "" if none does."""
        for pipeline in list(self._pipelines):
            for note in vars(pipeline).get(NOTES, ()):
                if reason := note.kept_state(note.before):
                    return (
                        f"its function {note.name}() keeps state ({reason}), which is not in "
                        "DALI's checkpoints. Let it depend only on its arguments (a keyword-only "
                        "`key`, or `rng` of DLPack functions, provides random numbers that "
                        "resume), or pass stateful=False if it is pure"
                    )
        return ""

    # Methods that only factories of graph functions implement

    @property
    def seed(self) -> int | None:
        """The seed from which each shard derives its own seed; None if there is no such seed."""
        return None

    def has_default_seed(self) -> bool:
        """Returns whether the seed is the default, which a state's seed may replace."""
        return False

    def set_seed(self, seed: int | None) -> None:  # noqa: B027
        """Sets the seed of the next pipelines to a state's seed; None: the default."""

    def shards(self) -> list[tuple[int, int] | None]:
        """Returns (shard, number of shards) of each pipeline, or None; [] if all are unknown."""
        return []

    def define_other_shard(self) -> Pipeline | None:
        """Returns an unbuilt first pipeline, defined for another shard; None if unsupported."""
        return None

    def definitions(self) -> list[Define]:
        """Returns a function for each pipeline that defines it again, without building it.

        Empty if pipelines can't be defined without being built.
        """
        return []

    def unmap(self) -> bool:
        """Makes the next pipelines read files instead of mapping them into memory.

        Returns:
            False if this is unsupported, or was called before.
        """
        return False


def check_resumable(factory: PipelineFactory) -> None:
    """Raises StateError if the state of a factory's pipelines can't be saved."""
    _check(factory.unresumable)


def check_functions(factory: PipelineFactory) -> None:
    """Raises StateError if a function of a factory's graph keeps state."""
    _check(factory.kept_state())


def _check(reason: str) -> None:
    if reason:
        raise StateError(f"the state of the pipelines can't be saved: {reason}")


class GraphPipelineFactory(PipelineFactory):
    """A factory of pipelines of a graph function.

    Args:
        pipeline_fn: A graph function, plain or decorated by `nvidia.dali.pipeline_def`.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function, and of `nvidia.dali.pipeline_def`.
        per_pipeline: A mapping for each pipeline, of the arguments that differ between pipelines
            (device_id, shard_id, ...).
        on_host: Whether the pipeline copies GPU outputs to the host, if its executor supports it.
        function: The caller's function, if ``pipeline_fn`` wraps it.

    Raises:
        TypeError: If an argument is unknown to the function and to pipeline_def.
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        per_pipeline: Sequence[Mapping[str, Any]] = ({},),
        on_host: bool = False,
        function: Callable[..., Any] | None = None,
    ):
        super().__init__(getattr(pipeline_fn, "__name__", type(pipeline_fn).__name__))
        self._function = pipeline_fn if function is None else function
        self._on_host = on_host
        self._mapped = True  # whether readers map files, unless the graph specifies it
        self._fn = pipeline_fn
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        for name in ("seed", "num_threads"):  # None means the default
            if self._kwargs.get(name, "") is None and name not in function_parameters(pipeline_fn):
                del self._kwargs[name]
        self._kwargs = checked_arguments(pipeline_fn, self._kwargs)
        self._per_pipeline = [
            checked_arguments(pipeline_fn, arguments) for arguments in per_pipeline
        ]
        decorated = is_pipeline_def(pipeline_fn)
        if not decorated and "batch_size" in function_parameters(pipeline_fn):
            raise _no_batch_size(pipeline_fn)
        if not decorated and self._first_call.get("batch_size") is None:
            raise _no_batch_size(pipeline_fn)
        self._own_seed = "seed" in function_parameters(pipeline_fn)
        self._saved_seed: int | None = None
        self._decorated_seed: int | None = None
        # If not requested explicitly, checkpointing is disabled when DALI does not support it.
        requested = self._kwargs.pop("enable_checkpointing", None)
        self._may_fall_back = requested is None
        self._checkpointing = True if requested is None else bool(requested)
        if not self._checkpointing:
            self._unresumable = "enable_checkpointing=False was passed"

    @property
    def _first_call(self) -> dict[str, Any]:
        """The keyword arguments of the first pipeline."""
        return {**self._kwargs, **self._per_pipeline[0]}

    @property
    def seed(self) -> int | None:  # noqa: D102
        if self._saved_seed is not None:
            return self._saved_seed
        seed = self._first_call.get("seed")
        return seed.seed if isinstance(seed, ShardSeed) else None

    def has_default_seed(self) -> bool:  # noqa: D102
        seed = self._first_call.get("seed")
        if self._own_seed or seed is not None:
            return isinstance(seed, ShardSeed) and seed.is_default
        # The function's own decorator may have set the seed.
        decorated = is_pipeline_def(self._fn)
        if decorated and self._decorated_seed is None:
            pipeline = self._fn(*self._args, **self._first_call)
            self._decorated_seed = pipeline.seed
        return self._decorated_seed is None

    def set_seed(self, seed: int | None) -> None:  # noqa: D102
        self._saved_seed = seed

    def shards(self) -> list[tuple[int, int] | None]:  # noqa: D102
        shards: list[tuple[int, int] | None] = []
        for arguments in self._per_pipeline:
            values = self._bound(arguments).arguments
            numbers_or_none = [values.get(name) for name in ("shard_id", "num_shards")]
            numbers = [operator.index(n) for n in numbers_or_none if isinstance(n, SupportsIndex)]
            shards.append((numbers[0], numbers[1]) if len(numbers) == 2 else None)
        return shards

    def _bound(self, arguments: Mapping[str, Any]) -> inspect.BoundArguments:
        """Returns the graph function's bound arguments for one pipeline, without pipeline_def's."""
        names = function_parameters(self._fn)
        call = {k: v for k, v in {**self._kwargs, **arguments}.items() if k in names}
        return inspect.signature(self._fn).bind_partial(*self._args, **call)

    def define_other_shard(self) -> Pipeline:  # noqa: D102
        shard, count = self.shards()[0] or (0, 1)
        bound = self._bound(self._per_pipeline[0])
        bound.arguments["shard_id"] = (shard + 1) % count
        pipeline_args = {
            k: v for k, v in self._first_call.items() if k not in function_parameters(self._fn)
        }
        factory = copy.copy(self)
        factory._args, factory._kwargs = bound.args, pipeline_args | bound.kwargs
        return factory.define()

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:  # noqa: D102
        if checkpoints and not self._checkpointing:
            check_resumable(self)
        try:
            built = self._build_all(checkpoints)
        except RuntimeError as error:  # a reader maps its files when it is restored
            if not is_unmappable(error) or not self.unmap():
                raise
            built = self._build_all(checkpoints)
        self._add(built)
        return built

    def _build_all(self, checkpoints: Sequence[bytes] | None) -> list[Pipeline]:
        chosen: Sequence[bytes | None] = checkpoints or [None] * len(self._per_pipeline)
        built = []
        for arguments, checkpoint in zip(self._per_pipeline, chosen, strict=True):
            with calls:
                built.append(self._build_one(arguments, checkpoint))
        return built

    def unmap(self) -> bool:  # noqa: D102
        before, self._mapped = self._mapped, False
        return before

    def _build_one(self, arguments: Mapping[str, Any], checkpoint: bytes | None) -> Pipeline:
        """Returns a built pipeline, without checkpointing if DALI can't checkpoint its graph.

        Raises:
            StateError: If such a graph has a checkpoint to restore.
            RuntimeError: If the caller requested checkpointing of such a graph.
        """

        def built(checkpoint: bytes | None) -> Pipeline:
            pipeline = self.define(arguments, checkpoint)
            build_pipeline(pipeline, name_of(self._fn))
            return pipeline

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pipeline = at_checkpoint(built, checkpoint)
            except RuntimeError as error:
                if not self._may_fall_back or not _UNSUPPORTED.search(str(error)):
                    raise
                reason = f"DALI can't checkpoint this graph: {error}"
                if checkpoint is not None:
                    self._unresumable = reason
                    check_resumable(self)
                self._checkpointing = False
                try:
                    pipeline = built(None)
                except BaseException:
                    self._checkpointing = True  # checkpointing was not the only problem
                    raise
                self._may_fall_back, self._unresumable = False, reason
        # Private in DALI: without `_shutdown`, freeing a pipeline does not wait.
        if type(pipeline) is Pipeline and hasattr(Pipeline, "_shutdown"):
            pipeline.__class__ = FreedAnywhere
        self._warn_again(caught)
        return pipeline

    def _warn_again(self, caught: Sequence[warnings.WarningMessage]) -> None:
        """Issues the recorded warnings of a build, each once, except for two kinds.

        An ``external_source`` that DALI can't checkpoint is reported when a state is requested,
        because iterating does not need it. An unused key of the records is not a mistake.
        """
        for warning in {(str(w.message), w.lineno, w.filename): w for w in caught}.values():
            text = str(warning.message)
            if text.startswith(_NO_SOURCE_STATE):
                self._unresumable = f"{text.split('. ')[0]}. {_SOURCE_CURE}"
            elif not _UNUSED.search(text):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )

    def definitions(self) -> list[Define]:  # noqa: D102
        return [functools.partial(self.define, arguments) for arguments in self._per_pipeline]

    def define(
        self, arguments: Mapping[str, Any] = {}, checkpoint: bytes | None = None
    ) -> Pipeline:
        """Returns a pipeline that is defined and not built.

        Args:
            arguments: Arguments of this pipeline only.
            checkpoint: DALI's checkpoint to start at; None: the start.
        """
        state: dict[str, Any] = {
            "enable_checkpointing": self._checkpointing,
            "checkpoint": checkpoint,
        }
        call = {**self._kwargs, **arguments}
        seed = call.get("seed")
        if not self._own_seed and self._saved_seed is not None:
            shard = seed.shard if isinstance(seed, ShardSeed) else 0
            call["seed"] = shard_seed(self._saved_seed, shard)
        elif isinstance(seed, ShardSeed):
            call["seed"] = int(seed)

        pipeline = defined_without_random(
            lambda: self._defined(state, call), self._function, name_of(self._fn)
        )
        self._check_constants(pipeline, (*self._args, *call.values()))
        note_outputs(pipeline, name_of(self._fn))
        if self._on_host and pipeline.exec_dynamic:
            # Private in DALI; without it, arrays are copied when they are taken.
            outputs = getattr(pipeline, "_graph_out", None) or ()
            if any(isinstance(node, DataNode) and node.device == "gpu" for node in outputs):
                pipeline.set_outputs(*(n.cpu() if isinstance(n, DataNode) else n for n in outputs))
        if not self._mapped:
            unmap_readers(pipeline)
        return pipeline

    def _check_constants(self, pipeline: Pipeline, arguments: Sequence[Any]) -> None:
        """Raises TypeError if arrays were passed as data, which each sample would repeat."""
        arrays = [x for x in arguments if isinstance(x, (np.ndarray, jax.Array)) and x.ndim]
        starts = [op for op in operators(pipeline) if not operator_inputs(op)] if arrays else []
        if arrays and all(kind_of(op).lower() == "constant" for op in starts):
            raise TypeError(
                f"{name_of(self._fn)} got an array of shape {arrays[0].shape} as an argument, and "
                "its graph reads no other data: each sample would be the whole array. To iterate "
                "over rows of arrays, pass source=dalijax.sources.Arrays({'x': array})"
            )

    def _defined(self, state: Mapping[str, Any], call: dict[str, Any]) -> Pipeline:
        """Returns the pipeline that the graph function defines; adds known fixes to errors.

        Args:
            state: The arguments of ``pipeline_def`` about checkpoints.
            call: The other keyword arguments of the function and of ``pipeline_def``.
        """
        try:
            return self._called(state, call)
        except Exception as error:
            if "batch size must be set" in str(error):  # pipeline_def sets none, either
                raise _no_batch_size(self._fn) from None
            if cure := advice.definition_cure(error, (*self._args, *call.values())):
                # A KeyError would print its text in quotation marks.
                text = error.args[0] if isinstance(error, KeyError) else error
                kinds = (k for k in (AttributeError, RuntimeError) if isinstance(error, k))
                kind: type[Exception] = next(kinds, TypeError)
                raise kind(f"{name_of(self._fn)}: {text}\n{cure}") from error
            raise

    def _called(self, state: Mapping[str, Any], call: dict[str, Any]) -> Pipeline:
        """Returns the pipeline of the graph function, with defaults for omitted arguments."""
        defaults: dict[str, Any] = {"num_threads": DEFAULT_NUM_THREADS, "seed": DEFAULT_SEED}
        if not is_pipeline_def(self._fn):
            # For external_source(parallel=True): forked workers may hang if JAX is initialized.
            defaults["py_start_method"] = "spawn"
            return pipeline_def(**defaults, **state)(self._fn)(*self._args, **call)
        # The function's own decorator may have set these arguments: defaults replace only omitted
        # arguments.
        pipeline = self._fn(*self._args, **state, **call)
        left_out = {k: v for k, v in defaults.items() if getattr(pipeline, k) is None}
        if left_out:
            pipeline = self._fn(*self._args, **state, **call, **left_out)
        return pipeline


def _no_batch_size(pipeline_fn: Callable[..., Any]) -> ValueError:
    if "batch_size" in function_parameters(pipeline_fn):
        return ValueError(
            f"{name_of(pipeline_fn)} has a parameter batch_size, which hides the argument "
            "batch_size= of the call. Rename the parameter"
        )
    return ValueError(
        f"batch_size is missing. Pass the number of samples in a batch when creating the iterator: "
        f"{getattr(pipeline_fn, '__name__', 'iterator_fn')}(..., batch_size=128)"
    )


def shard_pipelines(
    shards: Sequence[DataShard], batch_size: int, call: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the arguments that differ between the pipelines of this process, a dict for each.

    Args:
        shards: Data shards of this process; empty without a sharding, for one pipeline.
        batch_size: Global batch size with a sharding, otherwise that of this process.
        call: Arguments of ``nvidia.dali.pipeline_def``.

    Raises:
        ValueError: If the global batch can't be divided equally among the shards, or ``call``
            contains a device_id although the shards determine it.
    """
    if not shards:
        return [{"batch_size": batch_size}]
    if isinstance(call.get("device_id"), int):
        raise ValueError(
            f"device_id={call['device_id']} together with sharding or devices, which determine it. "
            "Omit device_id, or pass None for pipelines on the CPU"
        )
    on_cpu = "device_id" in call
    return [
        {
            "batch_size": shard.batch_size(batch_size),
            "device_id": None if on_cpu else shard.device_id,
            # With a common seed, all shards would have the same random augmentations.
            "seed": ShardSeed.of(call.get("seed"), shard.shard_id),
        }
        for shard in shards
    ]
