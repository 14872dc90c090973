"""`data_iterator` and its iterator functions, which compose engines, sources and iterators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from . import replacements
from .config import (
    CONFIG_DEFAULTS,
    CONFIG_NAMES,
    OF_DATA_ITERATOR,
    FunctionIteratorArguments,
    IteratorConfig,
    check_call,
    check_filled,
    checked_arguments,
    function_parameters,
    is_pipeline_def,
    own_arguments,
    takes,
)
from .feeding.binding import bind
from .iterator.epoch_stream import BatchStream
from .iterator.iterator import DALIGenericIterator
from .pipeline.batch import choose_placement
from .pipeline.engine import MakeEngine
from .pipeline.pipeline_source import DEFAULT_NUM_THREADS, FunctionSource, default_device_id
from .pipeline.shards import shard_pipelines
from .placement import DataShard
from .random.seeds import DEFAULT_SEED, ShardSeed, shard_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class _LeftOut:
    """The default of an argument for which None says something else.

    Args:
        meaning: What happens then, for ``help()``.
    """

    def __init__(self, meaning: str):
        self._meaning = meaning

    def __repr__(self) -> str:
        return f"<{self._meaning}>"


LEFT_OUT: Any = _LeftOut("left out")
_OF_PIPELINE_DEF = _LeftOut("the pipeline_def's")
_DEFAULTS = {
    "batch_size": inspect.Parameter.empty,
    "num_threads": DEFAULT_NUM_THREADS,
    "device_id": _LeftOut("0 with a GPU, else None"),  # counting GPUs starts CUDA
    "seed": DEFAULT_SEED,
    "prefetch_queue_depth": 2,
    "exec_dynamic": True,
    "enable_conditionals": False,
}


class IteratorFunction:
    """Makes iterators; `data_iterator` returns it.

    It takes the arguments of the pipeline function, of ``nvidia.dali.pipeline_def`` (batch_size,
    num_threads, device_id, seed, ...) and ``checkpoints``: its ``help()`` and
    ``inspect.signature()`` have all of them. It pickles where its pipeline function does.

    Attributes:
        pipeline_fn: The function of the graph.
        config: The iterator's arguments, as given to `data_iterator`.
    """

    _iterator = DALIGenericIterator

    def __init__(self, pipeline_fn: Callable[..., Any], config: IteratorConfig):
        functools.update_wrapper(self, pipeline_fn)
        self.__name__: str = getattr(pipeline_fn, "__name__", type(pipeline_fn).__name__)
        self.__qualname__: str = getattr(pipeline_fn, "__qualname__", self.__name__)
        self.pipeline_fn = pipeline_fn
        self._config = config
        self.__signature__ = _signature(pipeline_fn)
        self.__doc__ = _documented(pipeline_fn, f"{self.__name__}{self.__signature__}")

    def __call__(
        self,
        *args: Any,
        batch_size: int = LEFT_OUT,
        num_threads: int | None = LEFT_OUT,
        device_id: int | None = LEFT_OUT,
        seed: int | None = LEFT_OUT,
        prefetch_queue_depth: int | Mapping[str, int] = LEFT_OUT,
        exec_dynamic: bool = LEFT_OUT,
        enable_conditionals: bool = LEFT_OUT,
        checkpoints: Sequence[bytes] | None = None,
        **more: Any,
    ) -> DALIGenericIterator:
        """Makes an iterator, at the start or where ``checkpoints`` say.

        Args:
            *args: Positional arguments of the pipeline function.
            batch_size: Number of samples in a batch; with sharding or devices the global one.
            num_threads: Threads of DALI's for each pipeline; 4 where it is left out, or None.
            device_id: The GPU of the pipeline, None for the CPU. Left out, 0 where DALI sees a
                GPU and None where not. With sharding or devices, which say it, None alone: the
                pipelines are then on the CPU.
            seed: Of the random operators and the shuffling; 0 where it is left out, or None, so
                that two iterators that are made alike deliver alike. With sharding or devices the
                pipelines have seeds of their own (shard 0 this one), so that they draw different
                numbers. A state that is restored brings its own where it is left out. Of a negative
                one DALI draws one (deprecated there).
            prefetch_queue_depth: Batches that DALI prepares ahead, at the cost of their memory;
                2 where it is left out.
            exec_dynamic: Whether DALI's newer executor runs the pipeline (its default); False
                costs a copy of each batch, and nothing runs after a batch that fails.
            enable_conditionals: Whether ``if`` of the pipeline function chooses for each sample.
            checkpoints: What an iterator's ``checkpoints()`` gave, to go on from.
            **more: Further arguments of the pipeline function, of ``nvidia.dali.pipeline_def``, and
                those of `data_iterator` that it was not given. An argument of the pipeline
                function's own goes to it, whatever its name.

        Returns:
            A `DALIGenericIterator`, whose first batches are scheduled.

        Raises:
            TypeError: For an unknown argument.
            ValueError: For one given here and to `data_iterator`, or that excludes another.
        """
        named = {
            "batch_size": batch_size,
            "num_threads": num_threads,
            "device_id": device_id,
            "seed": seed,
            "prefetch_queue_depth": prefetch_queue_depth,
            "exec_dynamic": exec_dynamic,
            "enable_conditionals": enable_conditionals,
        }
        call = {k: v for k, v in named.items() if not isinstance(v, _LeftOut)} | more
        source, config = self._prepared(args, call)
        return self._iterator._from_source(source, config, checkpoints=checkpoints)

    def stream(self, num_epochs: int | None = None, *args: Any, **kwargs: Any) -> BatchStream:
        """Makes a stream of batches that goes from epoch to epoch, for loops that count steps.

            stream = train.stream(source=source, batch_size=256)
            for step, batch in zip(range(num_steps), stream):
                state = train_step(state, batch)

        Its pipelines are built when they are first used.

        Args:
            num_epochs: Number of epochs; None for no end.
            *args: Positional arguments of the graph function, after ``num_epochs``.
            **kwargs: As for a call, without ``checkpoints``.

        Raises:
            TypeError, ValueError: As for a call.
        """

        def make() -> DALIGenericIterator:
            source, config = self._prepared(args, dict(kwargs))
            # The stream goes from epoch to epoch.
            config = dataclasses.replace(config, auto_reset=False, endless=num_epochs is None)
            return DALIGenericIterator._from_source(source, config, lazy=True)

        return BatchStream(make, num_epochs)

    def _adapted(self, adapter: str, **settings: Any) -> IteratorFunction:
        """The same function with settings that an adapter makes.

        Args:
            adapter: The adapter's name, for errors.
            **settings: Arguments of `data_iterator`.

        Raises:
            ValueError: If `data_iterator` was given another value for one of them.
        """
        for name, value in settings.items():
            before = getattr(self._config, name)
            if before not in (CONFIG_DEFAULTS[name], value):
                raise ValueError(
                    f"{name}={before!r} was given to data_iterator of {self.__name__}(), but "
                    f"{adapter} needs {name}={value!r} here: leave it out there"
                )
        return type(self)(self.pipeline_fn, dataclasses.replace(self._config, **settings))

    def _check_names(self, adapter: type, call: Mapping[str, Any]) -> None:
        """Raises TypeError for arguments of a call that neither this nor an adapter has."""
        others = {**own_arguments(adapter), **OF_DATA_ITERATOR}
        check_call(self.pipeline_fn, {*call} - {"hosts"}, others)

    def _is_placed(self, call: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments gives arrays over a sharding, or of pmap's layout."""
        names = ("sharding", "devices", "pmap_compatible")
        return any(call.get(n, getattr(self._config, n)) not in (None, False) for n in names)

    def _for_host(self, call: Mapping[str, Any]) -> IteratorFunction:
        """The same function, for a call whose batches are wanted as NumPy arrays.

        Outputs on the CPU are then not made jax.Arrays on the way; DALI copies outputs on a GPU to
        the host ahead of time.
        """
        said = "as_numpy" in call and "as_numpy" not in function_parameters(self.pipeline_fn)
        if self._is_placed(call) or said or self._config.as_numpy is not None:
            return self
        config = dataclasses.replace(self._config, as_numpy=True, on_host=True)
        return type(self)(self.pipeline_fn, config)

    def _has_source(self, call: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments is over one of `dalijax.sources`."""
        if "source" in function_parameters(self.pipeline_fn):
            return self._config.source is not None
        return call.get("source", self._config.source) is not None

    def _of_shard(
        self,
        shard_id: int,
        num_shards: int,
        seed: int | None = None,
        call: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The arguments of a call for one shard of several without a sharding: for one host, say.

        Args:
            shard_id: The shard.
            num_shards: Number of shards; where it is 1 the pipeline function need not take it.
            seed: A seed for all of them; None for the default. Each gets one of its own, so that
                they draw different numbers. Over a source all have the same: its numbers belong to
                the records.
            call: The other arguments.

        Raises:
            ValueError: If the pipeline function takes no shard.
        """
        if self._has_source(call or {}):
            return {"hosts": (shard_id, num_shards), "seed": ShardSeed.of(seed, 0)}
        shard: dict[str, Any] = dict(self._named(shard_id, num_shards))
        shard["hosts"] = (shard_id, num_shards)
        if "seed" not in function_parameters(self.pipeline_fn):
            shard["seed"] = ShardSeed.of(seed, shard_id)
        elif seed is not None:
            shard["seed"] = shard_seed(seed, shard_id)
        return shard

    def _named(self, shard_id: int, num_shards: int) -> dict[str, int]:
        """The shard, by those arguments that the pipeline function takes; see `of_shard`."""
        missing = sorted({"shard_id", "num_shards"} - function_parameters(self.pipeline_fn))
        if missing and num_shards > 1:
            raise ValueError(
                f"{self.__name__}() has no argument {missing}, which its reader needs to read one "
                f"of {num_shards} shards: add shard_id=0 and num_shards=1 to it, and pass both on "
                "to the reader"
            )
        said = {"shard_id": shard_id, "num_shards": num_shards}
        return {k: v for k, v in said.items() if k not in missing}

    def _check_in_step(self, call: Mapping[str, Any], hosts: int) -> None:
        """Raises ValueError where hosts that evaluate together may differ in batches."""
        if hosts > 1 and call.get("on_error", self._config.on_error) == "skip":
            raise ValueError(
                "on_error='skip' with several hosts: one that skips a batch has fewer than the "
                "others, which wait for it. Leave it out for evaluation"
            )

    def _prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[FunctionSource | MakeEngine, IteratorConfig]:
        """Returns what makes the pipelines or the engine of a call, and the iterator's config."""
        parameters = function_parameters(self.pipeline_fn)
        named = {k: kwargs.pop(k) for k in CONFIG_NAMES - parameters if k in kwargs}
        config = self._configured(named).placed()
        hosts = kwargs.pop("hosts", (0, 1))
        config = dataclasses.replace(config, hosts=hosts)
        if config.source is not None:
            bound = bind(config.source, self.pipeline_fn, args, kwargs, config, hosts)
            return bound, config
        kwargs = checked_arguments(self.pipeline_fn, kwargs, OF_DATA_ITERATOR)
        shards = choose_placement(config).shards
        each: list[dict[str, Any]] = [{}]
        if shards:
            each = self._of_shards(shards, kwargs)
        elif "device_id" not in parameters:
            kwargs.setdefault("device_id", default_device_id())
        check_filled(self.pipeline_fn, args, {*kwargs, *each[0]})
        if not config.shuffle:
            raise ValueError(
                f"shuffle=False of {self.__name__}() without a source: it is for dalijax.sources. "
                "A reader of DALI shuffles only with random_shuffle=True of its own: leave it out"
            )
        return FunctionSource(self.pipeline_fn, args, kwargs, each, config.on_host), config

    def _of_shards(
        self, shards: Sequence[DataShard], kwargs: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Arguments in which the pipelines of the shards differ; takes them out of ``kwargs``."""
        set_here = sorted({"shard_id", "num_shards"} & set(kwargs))
        if set_here:
            raise ValueError(f"{set_here} come from the sharding or the devices: leave them out")
        if not isinstance(kwargs.get("batch_size"), int):
            raise ValueError("batch_size, the global one, must be passed with sharding or devices")
        each = shard_pipelines(shards, kwargs.pop("batch_size"), kwargs)
        kwargs.pop("device_id", None)
        for shard, arguments in zip(shards, each):
            arguments |= self._named(shard.shard_id, shard.num_shards)
            if "seed" in function_parameters(self.pipeline_fn):
                del arguments["seed"]
        return each

    def _configured(self, arguments: dict[str, Any]) -> IteratorConfig:
        """The arguments of `data_iterator` and of the call together."""
        both = sorted(
            name for name in arguments if getattr(self._config, name) != CONFIG_DEFAULTS[name]
        )
        if both:
            raise ValueError(
                f"{both} given both to data_iterator and to the call of {self.__name__}(): "
                "pass each of them once"
            )
        return dataclasses.replace(self._config, **arguments) if arguments else self._config

    if not TYPE_CHECKING:  # which knows that there is no such method

        def __iter__(self) -> Any:
            raise TypeError(self._not_called())

        __next__ = __iter__

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not hasattr(DALIGenericIterator, name):
                names = [*dir(type(self)), *vars(self)]
                raise replacements.no_attribute(
                    f"{type(self).__name__!r} object", name, names, replacements.ITERATOR
                )
            raise AttributeError(f"{self._not_called()}, which has {name!r}")

    def _not_called(self) -> str:
        name = self.__name__
        return (
            f"{name} is an iterator function: call it for an iterator, {name}(..., batch_size=128)"
        )

    def __deepcopy__(self, memo: Any) -> IteratorFunction:
        return self  # nothing of it changes, and a copied configuration stays equal to its source

    def __reduce__(self) -> Any:
        # Where the decorated name is this object, its function can't be found by that name.
        value: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            value = getattr(value, part, None)
        if value is self:
            return self.__qualname__
        return type(self), (self.pipeline_fn, self._config)

    def __repr__(self) -> str:
        return f"<data_iterator of {self.__module__}.{self.__qualname__}>"


def _signature(pipeline_fn: Callable[..., Any]) -> inspect.Signature:
    """A pipeline function's own parameters, and what its iterator function takes beside them."""
    signature = inspect.signature(pipeline_fn)
    parameters = {
        name: one for name, one in signature.parameters.items() if one.kind != one.VAR_KEYWORD
    }
    # Those that a pipeline_def has set are not known here.
    of_def = is_pipeline_def(pipeline_fn)
    defaults = dict.fromkeys(_DEFAULTS, _OF_PIPELINE_DEF) if of_def else _DEFAULTS
    for name, one in _call_signature().parameters.items():
        if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD):
            parameter = one.replace(default=defaults.get(name, one.default))
            parameters.setdefault(name, parameter)
    return signature.replace(
        parameters=list(parameters.values()), return_annotation=DALIGenericIterator
    )


@functools.cache
def _call_signature() -> inspect.Signature:
    return inspect.signature(IteratorFunction.__call__, eval_str=True)


def _documented(pipeline_fn: Callable[..., Any], call: str) -> str:
    """A pipeline function's own text, and how its iterator function is called."""
    called = inspect.getdoc(IteratorFunction.__call__) or ""
    return "\n\n".join([*filter(None, [inspect.getdoc(pipeline_fn)]), call, called])


def iterator_function(value: object) -> IteratorFunction:
    """Returns an argument that must be an iterator function.

    Raises:
        TypeError: If it is none.
    """
    if isinstance(value, DALIGenericIterator):
        raise TypeError(
            f"{value!r} is an iterator already: pass the iterator function that made it, and its "
            "arguments here"
        )
    if not isinstance(value, IteratorFunction):
        raise TypeError(
            f"{value!r} is not an iterator function: decorate it with dalijax.data_iterator"
        )
    return value


@overload
def data_iterator(
    pipeline_fn: Callable[..., Any],
    output_map: Iterable[str] = ...,
    *in_dalis_order: Any,
    **arguments: Unpack[FunctionIteratorArguments],
) -> IteratorFunction: ...


@overload
def data_iterator(
    pipeline_fn: None = None,
    output_map: Iterable[str] = ...,
    *in_dalis_order: Any,
    **arguments: Unpack[FunctionIteratorArguments],
) -> Callable[[Callable[..., Any]], IteratorFunction]: ...


@takes(FunctionIteratorArguments)
def data_iterator(
    pipeline_fn: Callable[..., Any] | None = None,
    output_map: Iterable[str] = [],
    *in_dalis_order: Any,  # empty: `takes` gives them their names
    **arguments: Unpack[FunctionIteratorArguments],
) -> IteratorFunction | Callable[[Callable[..., Any]], IteratorFunction]:
    """Turns a function of a DALI graph into one that makes iterators.

    Works as a decorator in parentheses and as a plain call, with the names and the order of
    ``nvidia.dali.plugin.jax.data_iterator``. (A bare ``@data_iterator`` is refused: the outputs
    need names, without which DALI's gives empty batches.) ::

        @data_iterator(output_map=["images", "labels"], reader_name="reader")
        def iterator_fn(data_dir):
            jpegs, labels = fn.readers.file(file_root=data_dir, name="reader")
            images = fn.decoders.image(jpegs, device="mixed")
            labels = fn.squeeze(labels, axes=0)  # the reader gives [batch, 1]
            return fn.resize(images, size=(224, 224)), labels.gpu()

        for batch in iterator_fn("train", batch_size=128):
            step(batch["images"], batch["labels"])

    Args:
        pipeline_fn: The function of the graph. For several devices it takes ``shard_id`` and
            ``num_shards`` and hands them to its reader.
        output_map, size, reader_name, auto_reset: As for `dalijax.DALIGenericIterator`.
        last_batch_padded, last_batch_policy, prepare_first_batch, pmap_compatible: The same.
        mask, as_numpy, on_error: The same.
        sharding: A jax.sharding.Sharding, or a PartitionSpec of the mesh that `jax.set_mesh` has
            set when the iterator is made, or a dict of them for each output: batches are global
            arrays placed by it.
        devices: jax devices, one pipeline for each: batches have pmap's layout
            [devices, batch, ...].
        allow_changes: Names of differences that states go on with, where a trainer restores them
            for you; see ``set_state``'s ``allow``.
        source: One of `dalijax.sources`, whose records the graph gets: parameters of the function
            that are named like its fields are these, ``draw`` has random numbers that belong to
            the records (`dalijax.Draw`), and all others are passed by keyword
            in the call. Batches then depend on the seed and the position alone: a state goes on
            with any sharding, number of devices or processes, and batch size.
        shuffle: Whether each epoch of a source has an order of its own.
        check_processes: Whether processes that make a global batch together compare their
            iterators before the first batch, and after a restore. A number is the seconds to wait
            for the others (True: 300), False skips the check.
        batch_map: A function ``f(batch, key) -> batch``, or a list of them, applied in order to
            each placed batch, such as MixUp. They see the global batch with all of its arrays of
            numbers, the mask included, which they must return; text and objects bypass them. They
            are compiled together, as by ``jax.jit``, and may add, change or drop arrays. Results
            are placed like the outputs if their first dimension is the batch. ``key`` is a
            jax.random.key that depends on the seed, the epoch and the step alone. With
            ``as_numpy=True`` they run on the CPU and give NumPy arrays. A batch that they fail for
            stays the next one.

    Returns:
        An `IteratorFunction`, or a decorator that makes one where ``pipeline_fn`` is None.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
    """
    if pipeline_fn is not None and not callable(pipeline_fn):
        named = "output_map" if isinstance(pipeline_fn, (list, tuple)) else "source"
        raise TypeError(
            f"pipeline_fn must be the function of a DALI graph, not {pipeline_fn!r:.80}: pass "
            f"other arguments by keyword, such as {named}=..."
        )
    config = IteratorConfig(
        output_map,  # type: ignore[arg-type] # it becomes a tuple
        **arguments,
    )
    if pipeline_fn is None:
        return lambda decorated: IteratorFunction(decorated, config)
    return IteratorFunction(pipeline_fn, config)
