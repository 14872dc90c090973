"""Making DALI pipelines: from a decorated function, again and again, or those handed in."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from nvidia.dali import Pipeline, backend, pipeline_def

from .fingerprint import StateError, serialized_operators
from .kept_state import noted
from .together import Build, current

# Documented as "not to be considered optimised", in DALI's plugin as here.
DEFAULT_NUM_THREADS = 4
# Two iterators that are built alike deliver alike; DALI would draw a seed for each build.
DEFAULT_SEED = 0

_UNUSED = re.compile(r"external source node .* is not used")
_SOURCE_CURE = (
    "Give fn.external_source a callable with one argument (sample info, batch info or the batch's "
    "index), use a reader, or keep the position yourself"
)
_NO_SOURCE_STATE = "Checkpointing enabled in a pipeline with external source"
_PIPELINE_ARGS = frozenset(inspect.signature(Pipeline.__init__).parameters) - {"self"}
_DEF_ARGS = _PIPELINE_ARGS | {"enable_conditionals", "debug"}


def default_device_id() -> int | None:
    """0 where DALI sees a GPU, None (a CPU-only pipeline) where it does not."""
    return 0 if backend.GetCUDADeviceCount() > 0 else None


class PipelineSource(Protocol):
    """Where an iterator has its pipelines from.

    Attributes:
        unresumable: Why a checkpoint can't tell where the pipelines stand, or "" where it can.
        rebuildable: Whether `build` may be called again.
        serialized: What DALI serialises of each pipeline, where they were given so.
        restored: The checkpoints that the first pipelines built stand at by themselves.
        owned: Whether the pipelines built last belong to nobody else.
    """

    unresumable: str
    rebuildable: bool
    serialized: list[bytes]
    restored: list[bytes]
    owned: bool

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Built pipelines, at their start or where DALI's ``checkpoints`` say (one for each)."""
        ...


def check_resumable(source: PipelineSource) -> None:
    """Raises StateError where a source has no state to resume from, with the way out."""
    if source.unresumable:
        raise StateError(f"the pipelines have no state to resume from: {source.unresumable}")


class _Owned(Pipeline):
    """A pipeline that Python may collect in a thread of DALI's, which can't wait for its end.

    A Python function of a graph runs there, and so may Python's cyclic gc within it.
    """

    def _shutdown(self) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):
            threading.Thread(target=Pipeline._shutdown, args=(self,), daemon=True).start()
        else:
            super()._shutdown()  # type: ignore[no-untyped-call]


def _build(pipeline: Pipeline) -> None:
    """Builds a pipeline; a missing GPU is said with its cure."""
    try:
        pipeline.build()
    except RuntimeError as error:
        text = str(error)
        if backend.GetCUDADeviceCount() == 0 and ("CUDA" in text or "GPU" in text):
            raise RuntimeError(
                f"the pipeline needs a GPU (device_id={pipeline.device_id}) and DALI sees none "
                "on this machine. For the CPU, use device='cpu' for its decoders, no .gpu(), "
                f"and leave device_id out or pass None. DALI says: {text}"
            ) from error
        raise


class FunctionSource:
    """Pipelines from a graph function, rebuilt as often as needed.

    Args:
        pipeline_fn: A function of the graph, plain or decorated by `nvidia.dali.pipeline_def`.
        args: Its positional arguments.
        kwargs: Its keyword arguments and those of `nvidia.dali.pipeline_def`.
        each: What differs between the pipelines (device_id, shard_id, ...), one mapping
            for each pipeline to build.

    Raises:
        TypeError: If a keyword belongs neither to the function nor to pipeline_def.
    """

    rebuildable = True
    owned = True
    serialized: list[bytes] = []  # noqa: RUF012 - never changed
    restored: list[bytes] = []  # noqa: RUF012 - never changed

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        each: Sequence[Mapping[str, Any]] = ({},),
    ):
        self.unresumable = ""
        self._fn = pipeline_fn
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        for name in ("seed", "num_threads"):  # None is the default: left out
            if self._kwargs.get(name, "") is None and name not in function_parameters(pipeline_fn):
                del self._kwargs[name]
        self._each = [dict(one) for one in each]
        check_arguments(pipeline_fn, {*self._kwargs, *self._each[0]})
        for name in _DEF_ARGS & set(self._kwargs):  # NumPy's numbers are none of JSON's
            if isinstance(self._kwargs[name], np.integer):
                self._kwargs[name] = int(self._kwargs[name])
        # Unless asked for by name, checkpointing falls back to none where DALI refuses it.
        asked = self._kwargs.pop("enable_checkpointing", None)
        self._may_fall_back = asked is None
        self._checkpointing = True if asked is None else bool(asked)
        if not self._checkpointing:
            self.unresumable = "enable_checkpointing=False was passed"

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """New pipelines; see `PipelineSource.build`."""
        chosen: Sequence[bytes | None] = checkpoints or [None] * len(self._each)
        together, built = Build(len(self._each)), []
        for index, (one, checkpoint) in enumerate(zip(self._each, chosen, strict=True)):
            with together.pipeline(index):
                built.append(self._build_one(one, checkpoint))
        return built

    def _build_one(self, one: Mapping[str, Any], checkpoint: bytes | None) -> Pipeline:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pipeline = self.define(one, checkpoint)
                _build(pipeline)
            except RuntimeError as error:
                if not self._may_fall_back or "checkpoint" not in str(error).lower():
                    raise
                self._may_fall_back = False
                self._checkpointing = False
                self.unresumable = f"DALI can't checkpoint this graph: {error}"
                pipeline = self.define(one, None)
                _build(pipeline)
        self.unresumable = self.unresumable or noted(pipeline)
        if type(pipeline) is Pipeline and hasattr(Pipeline, "_shutdown"):
            pipeline.__class__ = _Owned
        for warning in caught:
            # Said where a state is asked for: such a pipeline iterates well without one.
            if str(warning.message).startswith(_NO_SOURCE_STATE):
                self.unresumable = f"{str(warning.message).split('. ')[0]}. {_SOURCE_CURE}"
            elif not _UNUSED.search(str(warning.message)):  # a record's key that the graph leaves
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return pipeline

    def define(self, one: Mapping[str, Any] = {}, checkpoint: bytes | None = None) -> Pipeline:
        """A pipeline that is not built.

        Args:
            one: What differs between the pipelines, of this one.
            checkpoint: Where it is to stand.
        """
        state: dict[str, Any] = {
            "enable_checkpointing": self._checkpointing,
            "checkpoint": checkpoint,
        }
        current().again()
        defaults: dict[str, Any] = {"num_threads": DEFAULT_NUM_THREADS, "seed": DEFAULT_SEED}
        call = {**self._kwargs, **one}
        if not getattr(self._fn, "_is_pipeline_def", False):
            return pipeline_def(**defaults, **state)(self._fn)(*self._args, **call)
        # Its own decorator may have set the defaults: only those that it left out are ours.
        pipeline = self._fn(*self._args, **state, **call)
        left_out = {k: v for k, v in defaults.items() if getattr(pipeline, k) is None}
        if left_out:
            current().again()
            pipeline = self._fn(*self._args, **state, **call, **left_out)
        return pipeline


class GivenSource:
    """Pipelines that the caller made; one or a list of them.

    Those made with ``checkpoint=`` start where the iterator stood that gave it. All are built
    again from what DALI serialises of them, which leaves out Python sources and functions;
    those made without enable_checkpointing at once.

    Raises:
        TypeError: If one of them is no `nvidia.dali.Pipeline`.
        ValueError: If there is none, or their batch sizes differ.
    """

    def __init__(self, pipelines: Pipeline | Sequence[Pipeline]):
        given = [pipelines] if isinstance(pipelines, Pipeline) else list(pipelines)
        if not given:
            raise ValueError("pipelines is empty: pass a Pipeline or a list of them")
        for pipeline in given:
            if not isinstance(pipeline, Pipeline):
                raise TypeError(f"pipelines must hold nvidia.dali.Pipeline, not {pipeline!r}")
        sizes = [pipeline.max_batch_size for pipeline in given]
        if len(set(sizes)) > 1:
            raise ValueError(f"all pipelines must have one batch_size, not {sizes}")
        self.unresumable = ""
        self.rebuildable = False
        self.serialized: list[bytes] = []
        self.restored: list[bytes] = []
        self.owned = False
        self._given = given
        self._arguments: list[dict[str, Any]] = []
        self._used = False

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """The pipelines handed in at first, then new ones like them."""
        if not self._used:
            self._used = True
            given, self._given = self._given, []
            for pipeline in given:
                _build(pipeline)
            # Not public: where a DALI doesn't keep it, the position can't be told, and it is
            # as if the pipelines stood at their start, as in DALI's own iterator.
            kept = [getattr(p, "_checkpoint", None) for p in given if p.is_restored_from_checkpoint]
            self.restored = [one for one in kept if one]
            self._keep_definitions(given)
            self.unresumable = "; ".join({noted(p): 0 for p in given if noted(p)})
            if all(can_checkpoint(pipeline) for pipeline in given):
                return given
            if not self.rebuildable:
                self.unresumable = "pass enable_checkpointing=True to the pipelines"
                return given
        if not self.rebuildable:
            raise RuntimeError(
                "these pipelines can't be built again: DALI does not serialise their Python "
                "sources or functions. Use dalijax.data_iterator, which builds pipelines from "
                "their function"
            )
        self.owned = True
        chosen: Sequence[bytes | None] = checkpoints or [None] * len(self.serialized)
        return [
            self._again(arguments, definition, checkpoint)
            for arguments, definition, checkpoint in zip(
                self._arguments, self.serialized, chosen, strict=True
            )
        ]

    def _keep_definitions(self, given: Sequence[Pipeline]) -> None:
        try:
            self.serialized = [pipeline.serialize() for pipeline in given]
        except (RuntimeError, NotImplementedError):  # Python functions; already deserialised
            return
        kinds = {kind for text in self.serialized for kind, _, _ in serialized_operators(text)}
        self.rebuildable = "external_source" not in kinds
        self._arguments = [
            {
                "batch_size": pipeline.max_batch_size,
                "num_threads": pipeline.num_threads,
                "device_id": pipeline.device_id,
                "seed": DEFAULT_SEED if pipeline.seed is None else pipeline.seed,
                "exec_pipelined": pipeline.exec_pipelined,
                "exec_async": pipeline.exec_async,
                "exec_dynamic": pipeline.exec_dynamic,
                "prefetch_queue_depth": {
                    "cpu_size": pipeline.cpu_queue_size,
                    "gpu_size": pipeline.gpu_queue_size,
                }
                if pipeline.exec_separated
                else pipeline.prefetch_queue_depth,
            }
            for pipeline in given
        ]

    @staticmethod
    def _again(
        arguments: Mapping[str, Any], definition: bytes, checkpoint: bytes | None
    ) -> Pipeline:
        pipeline = Pipeline(**arguments, enable_checkpointing=True, checkpoint=checkpoint)
        pipeline.deserialize_and_build(definition)
        return pipeline


def can_checkpoint(pipeline: Pipeline) -> bool:
    """Whether a built pipeline was made with enable_checkpointing; no property says it."""
    try:
        pipeline.checkpoint()
    except RuntimeError:
        return False
    return True


def check_arguments(pipeline_fn: Callable[..., Any], names: Collection[str]) -> None:
    """Raises TypeError for arguments of neither a graph function nor pipeline_def."""
    own = function_parameters(pipeline_fn)
    unknown = sorted(set(names) - own - _DEF_ARGS)
    if unknown:
        raise TypeError(
            f"{getattr(pipeline_fn, '__name__', pipeline_fn)!s}() has no argument {unknown}: "
            f"its own are {sorted(own)}, the others are those of nvidia.dali.pipeline_def"
        )


def check_outputs(pipeline: Pipeline, output_map: Sequence[str]) -> None:
    """Raises ValueError where a built pipeline has another number of outputs than names."""
    outputs = pipeline.num_outputs
    if outputs != len(output_map):
        raise ValueError(
            f"output_map names {len(output_map)} outputs, {list(output_map)}, "
            f"but the pipeline has {outputs}: give each of them one name"
        )


def function_parameters(pipeline_fn: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a graph function that may be passed by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(pipeline_fn).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)
