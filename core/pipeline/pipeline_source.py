"""Where an iterator's pipelines come from: the base, and a function that defines them."""

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

from nvidia.dali import Pipeline, backend, pipeline_def
from nvidia.dali.data_node import DataNode

from ..config import checked_arguments, function_parameters, is_pipeline_def, name_of
from ..errors import StateError
from ..random.seeds import DEFAULT_SEED, ShardSeed, shard_seed
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

Define = Callable[[bytes | None], Pipeline]
# Documented as "not to be considered optimised", in DALI's plugin as here.
DEFAULT_NUM_THREADS = 4

_UNUSED = re.compile(r"external source node .* is not used")
_SOURCE_CURE = (
    "Give fn.external_source a callable with one argument (sample info, batch info or the batch's "
    "index), use a reader, or keep the position yourself"
)
_NO_SOURCE_STATE = "Checkpointing enabled in a pipeline with external source"
# What DALI says of a graph that it has no checkpoints of. Its errors quote the user's files and
# lines, too, which may well have the word "checkpoint".
_UNSUPPORTED = re.compile(r"Checkpointing is not (supported|implemented)|not support checkpointing")


def default_device_id() -> int | None:
    """0 where DALI sees a GPU, None (a CPU-only pipeline) where it does not."""
    return 0 if backend.GetCUDADeviceCount() > 0 else None


class PipelineSource(abc.ABC):
    """A source of an iterator's pipelines.

    Args:
        name: What to call it in messages.

    Attributes:
        rebuildable: Whether `build` may be called again.
        serialized: What DALI serialises of each pipeline, where they are built of it.
        restored: The checkpoints at which the caller made the pipelines.
        owned: Whether the pipelines built last are not the caller's, and may be freed.
    """

    def __init__(self, name: str):
        self.name = name
        self.rebuildable = True
        self.serialized: list[bytes] = []
        self.restored: list[bytes] = []
        self.owned = True
        self._unresumable = ""
        # Weak: who runs the pipelines decides when they end.
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._before: list[list[Any]] = []  # what their functions noted in the first build

    @property
    def unresumable(self) -> str:
        """Why a checkpoint can't tell where the pipelines stand, or "" where it can."""
        self._unresumable = self._unresumable or self._kept_state()
        return self._unresumable

    @abc.abstractmethod
    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Built pipelines, at their start or where DALI's ``checkpoints`` say (one for each)."""

    def _add(self, pipelines: Sequence[Pipeline]) -> None:
        """Notes pipelines that were built: their functions are compared with the first build's."""
        notes = [vars(pipeline).get(NOTES, []) for pipeline in pipelines]
        self._before = self._before or [[note.before for note in each] for each in notes]
        # What was changed between two builds is state, too.
        for each, known in zip(notes, self._before):
            for note, before in zip(each, known):
                note.before = before
        self._pipelines.update(pipelines)

    def _kept_state(self) -> str:
        """Why a function of the graph prevents resuming; "" if none is seen to."""
        for pipeline in list(self._pipelines):
            for note in vars(pipeline).get(NOTES, ()):
                if why := note.kept_state(note.before):
                    return (
                        f"its function {note.name}() keeps state ({why}), which DALI's checkpoints "
                        "do not have. Let it depend on its arguments alone (a keyword-only `key`, "
                        "or `rng` of DLPack functions, has random numbers that resume), or pass "
                        "stateful=False where that is so"
                    )
        return ""

    # Known to sources that define their pipelines

    @property
    def seed(self) -> int | None:
        """The seed that the seeds of the shards follow from; None where each has its own."""
        return None

    def takes_seed(self) -> bool:
        """Whether the seed is the default, which a state's may replace."""
        return False

    def set_seed(self, seed: int | None) -> int | None:
        """Sets the seed of the next pipelines to that of a state; None: the default.

        Returns:
            The seed that was set before.
        """
        return None

    def shards(self) -> list[tuple[int, int] | None]:
        """Shard and number of shards of each pipeline, None where unknown; empty if all are."""
        return []

    def of_another_shard(self) -> Pipeline | None:
        """The first pipeline as defined for another shard, not built; None where unknown."""
        return None

    def definitions(self) -> list[Define]:
        """A function for each pipeline that defines another like it, at a checkpoint, not built.

        Empty where pipelines can't be defined without being built.
        """
        return []

    def unmap(self) -> bool:
        """Has the next pipelines read files instead of mapping them; False if it can't."""
        return False


def check_resumable(source: PipelineSource) -> None:
    """Raises StateError where a source has no state to resume from, with the way out."""
    if source.unresumable:
        raise StateError(f"the pipelines have no state to resume from: {source.unresumable}")


class FunctionSource(PipelineSource):
    """Pipelines from a graph function, rebuilt as often as needed.

    Args:
        pipeline_fn: A function of the graph, plain or decorated by `nvidia.dali.pipeline_def`.
        args: Its positional arguments.
        kwargs: Its keyword arguments, and arguments of `nvidia.dali.pipeline_def`.
        each: Arguments that differ between the pipelines (device_id, shard_id, ...), one mapping
            for each pipeline.
        on_host: Whether the pipeline copies outputs on a GPU to the host, where its executor can.
        function: The caller's function, if ``pipeline_fn`` wraps it.

    Raises:
        TypeError: If a keyword belongs neither to the function nor to pipeline_def.
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        each: Sequence[Mapping[str, Any]] = ({},),
        on_host: bool = False,
        function: Callable[..., Any] | None = None,
    ):
        super().__init__(getattr(pipeline_fn, "__name__", type(pipeline_fn).__name__))
        self._function = pipeline_fn if function is None else function
        self._on_host = on_host
        self._mapped = True  # whether readers map their files, where the graph leaves it open
        self._fn = pipeline_fn
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        for name in ("seed", "num_threads"):  # None is the default: left out
            if self._kwargs.get(name, "") is None and name not in function_parameters(pipeline_fn):
                del self._kwargs[name]
        self._kwargs = checked_arguments(pipeline_fn, self._kwargs)
        self._each = [checked_arguments(pipeline_fn, one) for one in each]
        decorated = is_pipeline_def(pipeline_fn)
        if not decorated and "batch_size" in function_parameters(pipeline_fn):
            raise _no_batch_size(pipeline_fn)
        if not decorated and self._first_call.get("batch_size") is None:
            raise _no_batch_size(pipeline_fn)
        self._own_seed = "seed" in function_parameters(pipeline_fn)
        self._saved_seed: int | None = None
        self._decorated_seed: int | None = None
        # Unless asked for by name, checkpointing falls back to none where DALI refuses it.
        asked = self._kwargs.pop("enable_checkpointing", None)
        self._may_fall_back = asked is None
        self._checkpointing = True if asked is None else bool(asked)
        if not self._checkpointing:
            self._unresumable = "enable_checkpointing=False was passed"

    @property
    def _first_call(self) -> dict[str, Any]:
        """The arguments of the first pipeline."""
        return {**self._kwargs, **self._each[0]}

    @property
    def seed(self) -> int | None:  # noqa: D102
        if self._saved_seed is not None:
            return self._saved_seed
        seed = self._first_call.get("seed")
        return seed.seed if isinstance(seed, ShardSeed) else None

    def takes_seed(self) -> bool:  # noqa: D102
        seed = self._first_call.get("seed")
        if self._own_seed or seed is not None:
            return isinstance(seed, ShardSeed) and seed.is_default
        # The function's own decorator may have set it.
        decorated = is_pipeline_def(self._fn)
        if decorated and self._decorated_seed is None:
            pipeline = self._fn(*self._args, **self._first_call)
            self._decorated_seed = pipeline.seed
        return self._decorated_seed is None

    def set_seed(self, seed: int | None) -> int | None:  # noqa: D102
        before, self._saved_seed = self._saved_seed, seed
        return before

    def shards(self) -> list[tuple[int, int] | None]:  # noqa: D102
        shards: list[tuple[int, int] | None] = []
        for one in self._each:
            values = self._bound(one).arguments
            both = [values.get(name) for name in ("shard_id", "num_shards")]
            numbers = [operator.index(n) for n in both if isinstance(n, SupportsIndex)]
            shards.append((numbers[0], numbers[1]) if len(numbers) == 2 else None)
        return shards

    def _bound(self, one: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments of the function itself for one pipeline."""
        names = function_parameters(self._fn)
        call = {k: v for k, v in {**self._kwargs, **one}.items() if k in names}
        return inspect.signature(self._fn).bind_partial(*self._args, **call)

    def of_another_shard(self) -> Pipeline:  # noqa: D102
        shard, count = self.shards()[0] or (0, 1)
        bound = self._bound(self._each[0])
        bound.arguments["shard_id"] = (shard + 1) % count
        rest = {k: v for k, v in self._first_call.items() if k not in function_parameters(self._fn)}
        other = copy.copy(self)
        other._args, other._kwargs = bound.args, rest | bound.kwargs
        return other.define()

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:  # noqa: D102
        if checkpoints and not self._checkpointing:
            check_resumable(self)
        try:
            built = self._build_all(checkpoints)
        except RuntimeError as error:  # a reader at a checkpoint has files open
            if not is_unmappable(error) or not self.unmap():
                raise
            built = self._build_all(checkpoints)
        self._add(built)
        return built

    def _build_all(self, checkpoints: Sequence[bytes] | None) -> list[Pipeline]:
        chosen: Sequence[bytes | None] = checkpoints or [None] * len(self._each)
        built = []
        for one, checkpoint in zip(self._each, chosen, strict=True):
            with calls:
                built.append(self._build_one(one, checkpoint))
        return built

    def unmap(self) -> bool:  # noqa: D102
        before, self._mapped = self._mapped, False
        return before

    def _build_one(self, one: Mapping[str, Any], checkpoint: bytes | None) -> Pipeline:
        def built(checkpoint: bytes | None) -> Pipeline:
            pipeline = self.define(one, checkpoint)
            build_pipeline(pipeline, name_of(self._fn))
            return pipeline

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pipeline = at_checkpoint(built, checkpoint)
            except RuntimeError as error:
                if not self._may_fall_back or not _UNSUPPORTED.search(str(error)):
                    raise
                why = f"DALI can't checkpoint this graph: {error}"
                if checkpoint is not None:
                    self._unresumable = why
                    check_resumable(self)
                self._checkpointing = False
                try:
                    pipeline = built(None)
                except BaseException:
                    self._checkpointing = True  # it was not that alone
                    raise
                self._may_fall_back, self._unresumable = False, why
        # Not public: without it nothing waits where Python collects a pipeline.
        if type(pipeline) is Pipeline and hasattr(Pipeline, "_shutdown"):
            pipeline.__class__ = FreedAnywhere
        self._warn_again(caught)
        return pipeline

    def _warn_again(self, caught: Sequence[warnings.WarningMessage]) -> None:
        """Gives warnings of a build, each once, but for two kinds.

        A source that DALI can't checkpoint is said where a state is asked for, since its pipeline
        iterates well without one. A record's key that the graph leaves is no mistake.
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
        return [functools.partial(self.define, one) for one in self._each]

    def define(self, one: Mapping[str, Any] = {}, checkpoint: bytes | None = None) -> Pipeline:
        """A pipeline that is not built.

        Args:
            one: Arguments of this pipeline alone.
            checkpoint: The checkpoint to start at.
        """
        state: dict[str, Any] = {
            "enable_checkpointing": self._checkpointing,
            "checkpoint": checkpoint,
        }
        call = {**self._kwargs, **one}
        seed = call.get("seed")
        if not self._own_seed and self._saved_seed is not None:
            shard = seed.shard if isinstance(seed, ShardSeed) else 0
            call["seed"] = shard_seed(self._saved_seed, shard)
        elif isinstance(seed, ShardSeed):
            call["seed"] = int(seed)

        pipeline = defined_without_random(
            lambda: self._defined(state, call), self._function, name_of(self._fn)
        )
        if self._on_host and pipeline.exec_dynamic:
            # Not public; without it the arrays are copied when they are taken.
            outputs = getattr(pipeline, "_graph_out", None) or ()
            if any(isinstance(node, DataNode) and node.device == "gpu" for node in outputs):
                pipeline.set_outputs(*(n.cpu() if isinstance(n, DataNode) else n for n in outputs))
        if not self._mapped:
            unmap_readers(pipeline)
        return pipeline

    def _defined(self, state: Mapping[str, Any], call: dict[str, Any]) -> Pipeline:
        try:
            return self._called(state, call)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if "batch size must be set" in str(error):  # nor did a pipeline_def of its own
                raise _no_batch_size(self._fn) from None
            if cure := advice.of_definition(error, (*self._args, *call.values())):
                # DALI's KeyError of an unknown argument would print its text in quotation marks.
                text = error.args[0] if isinstance(error, KeyError) else error
                kinds = (k for k in (AttributeError, RuntimeError) if isinstance(error, k))
                kind: type[Exception] = next(kinds, TypeError)
                raise kind(f"{name_of(self._fn)}: {text}\n{cure}") from error
            raise

    def _called(self, state: Mapping[str, Any], call: dict[str, Any]) -> Pipeline:
        defaults: dict[str, Any] = {"num_threads": DEFAULT_NUM_THREADS, "seed": DEFAULT_SEED}
        if not is_pipeline_def(self._fn):
            # Of external_source(parallel=True): where JAX is up, forked workers may hang.
            defaults["py_start_method"] = "spawn"
            return pipeline_def(**defaults, **state)(self._fn)(*self._args, **call)
        # Its own decorator may have set the defaults: only those that it left out are ours.
        pipeline = self._fn(*self._args, **state, **call)
        left_out = {k: v for k, v in defaults.items() if getattr(pipeline, k) is None}
        if left_out:
            pipeline = self._fn(*self._args, **state, **call, **left_out)
        return pipeline


def _no_batch_size(pipeline_fn: Callable[..., Any]) -> ValueError:
    if "batch_size" in function_parameters(pipeline_fn):
        return ValueError(
            f"{name_of(pipeline_fn)} has a parameter batch_size, which hides the argument "
            "batch_size= of the call: rename the parameter"
        )
    return ValueError(
        f"batch_size is missing: pass the number of samples of a batch where the iterator is made, "
        f"as by {getattr(pipeline_fn, '__name__', 'iterator_fn')}(..., batch_size=128)"
    )
