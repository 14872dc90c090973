"""`data_iterator` and `IteratorFunction`, which compose engines, sources and iterators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .arguments import (
    check_call,
    check_filled,
    checked_arguments,
    function_parameters,
    is_pipeline_def,
    own_arguments,
    refuse_sources,
)
from .arrays.placement import DataShard
from .config import (
    CONFIG_DEFAULTS,
    CONFIG_NAMES,
    OF_DATA_ITERATOR,
    FunctionIteratorArguments,
    IteratorConfig,
    policy_named,
    takes,
)
from .feeding.binding import bind
from .iterator.batch_stream import BatchStream
from .iterator.iterator import DALIGenericIterator, make_engine
from .messages import replacements
from .messages.printable import printable_repr
from .messages.redacted_errors import raise_redacted
from .pipeline.batch import choose_placement
from .pipeline.engine import EpochEngine, MakeEngine
from .pipeline.pipeline_factory import (
    DEFAULT_NUM_THREADS,
    GraphPipelineFactory,
    default_device_id,
    shard_pipelines,
)
from .random.seeds import DEFAULT_SEED, ShardSeed, shard_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class _LeftOut:
    """Sentinel for an argument that was not given.

    Args:
        meaning: The resulting default, for ``help()``.
    """

    def __init__(self, meaning: str):
        self._meaning = meaning

    def __repr__(self) -> str:
        return f"<{self._meaning}>"


LEFT_OUT: Any = _LeftOut("left out")
_PIPELINE_DEF_VALUE = _LeftOut("the pipeline_def's")
_DEFAULTS = {
    "batch_size": inspect.Parameter.empty,
    "num_threads": DEFAULT_NUM_THREADS,
    "device_id": _LeftOut("0 with a GPU, else None"),  # not counted here, which would start CUDA
    "seed": DEFAULT_SEED,
    "prefetch_queue_depth": 2,
    "exec_dynamic": True,
    "enable_conditionals": False,
}


class IteratorFunction:
    """Creates iterators over a graph function; returned by `data_iterator`.

    A call takes the arguments of the graph function, those of ``nvidia.dali.pipeline_def``
    (batch_size, num_threads, device_id, seed, ...) and ``checkpoints``; ``help()`` and
    ``inspect.signature()`` list them. The object can be pickled if its graph function can.

    Attributes:
        pipeline_fn: The graph function.
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
        **pipeline_args: Any,
    ) -> DALIGenericIterator:
        """Creates an iterator, at the start or at ``checkpoints``.

        Args:
            *args: Positional arguments of the graph function.
            batch_size: Number of samples in a batch; with sharding or devices in the global batch.
            num_threads: Number of DALI threads of each pipeline; 4 by default, or if None.
            device_id: The GPU of the pipeline, or None for the CPU. By default 0 if DALI finds a
                GPU, otherwise None. With sharding or devices, which determine it, only None is
                allowed, for pipelines on the CPU.
            seed: Seed of random operators and of shuffling; 0 by default, or if None, so that equal
                iterators deliver equal batches. With sharding or devices, each pipeline derives its
                own seed (shard 0 uses this seed). If omitted, a restored state's seed is used. For
                a negative seed, DALI draws one (deprecated in DALI).
            prefetch_queue_depth: Number of batches that DALI prepares ahead, which costs memory; 2
                by default.
            exec_dynamic: Whether DALI's newer executor runs the pipeline (default True). False
                costs a copy of each batch, and no batch can run after a failed batch.
            enable_conditionals: Whether ``if`` in the graph function decides for each sample.
            checkpoints: Result of an iterator's ``checkpoints()``, to resume from.
            **pipeline_args: Further arguments of the graph function and of
                ``nvidia.dali.pipeline_def``, and arguments that were not given to `data_iterator`.
                An argument of the graph function takes precedence over others of the same name.

        Returns:
            A `DALIGenericIterator`, whose first batches are scheduled.

        Raises:
            TypeError: If an argument is unknown.
            ValueError: If an argument was also given to `data_iterator`, or excludes another.
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
        call = {k: v for k, v in named.items() if not isinstance(v, _LeftOut)} | pipeline_args
        try:
            factory, config = self._prepared(args, call)
            return self._iterator._from_factory(factory, config, checkpoints=checkpoints)
        except Exception as error:  # e.g. of the graph, about a URL in a record
            raise_redacted(error)
            raise

    def stream(self, num_epochs: int | None = None, *args: Any, **kwargs: Any) -> BatchStream:
        """Creates a stream of batches across epochs, for loops that count steps.

            stream = train.stream(source=source, batch_size=256)
            for step, batch in zip(range(num_steps), stream):
                state = train_step(state, batch)

        The pipelines of the stream are built when the stream is first used.

        Args:
            num_epochs: Number of epochs; None: no end.
            *args: Positional arguments of the graph function, after ``num_epochs``.
            **kwargs: As for a call, without ``checkpoints``.

        Raises:
            TypeError, ValueError: As for a call.
        """

        refuse_sources("stream()", [num_epochs])

        def make() -> EpochEngine[Any]:
            factory, config = self._prepared(args, dict(kwargs))
            # The stream starts the next epoch itself.
            config = dataclasses.replace(config, auto_reset=False, epochs=num_epochs)
            return make_engine(factory, config)

        return BatchStream(make, num_epochs)

    def _adapted(self, adapter: str, **settings: Any) -> IteratorFunction:
        """Returns a copy of the iterator function with settings that an adapter requires.

        Args:
            adapter: Name of the adapter, for errors.
            **settings: Arguments of `data_iterator`.

        Raises:
            ValueError: If `data_iterator` was given a different value for a setting.
        """
        for name, value in settings.items():
            before = getattr(self._config, name)
            if before not in (CONFIG_DEFAULTS[name], value):
                raise ValueError(
                    f"{name}={before!r} was given to data_iterator of {self.__name__}(), but "
                    f"{adapter} requires {name}={value!r}. Omit it in data_iterator"
                )
        return type(self)(self.pipeline_fn, dataclasses.replace(self._config, **settings))

    def _check_names(self, adapter: type, call: Mapping[str, Any]) -> None:
        """Raises TypeError for arguments that neither this function nor an adapter accepts."""
        accepted = {**own_arguments(adapter), **OF_DATA_ITERATOR}
        check_call(self.pipeline_fn, {*call} - {"hosts"}, accepted)

    def _is_placed(self, call: Mapping[str, Any]) -> bool:
        """Returns whether a call would place batches over a sharding, or in pmap's layout."""
        names = ("sharding", "devices", "pmap_compatible")
        return any(call.get(n, getattr(self._config, n)) not in (None, False) for n in names)

    def _for_host(self, call: Mapping[str, Any]) -> IteratorFunction:
        """Returns an iterator function for a call whose batches are used as NumPy arrays.

        This is a copy that does not convert CPU outputs to jax.Arrays, and whose GPU outputs DALI
        copies to the host ahead of time. If the call places batches or ``as_numpy`` is given,
        it is this iterator function itself.
        """
        is_given = "as_numpy" in call and "as_numpy" not in function_parameters(self.pipeline_fn)
        if self._is_placed(call) or is_given or self._config.as_numpy is not None:
            return self
        config = dataclasses.replace(self._config, as_numpy=True, on_host=True)
        return type(self)(self.pipeline_fn, config)

    def _has_source(self, call: Mapping[str, Any]) -> bool:
        """Returns whether a call would read one of `dalijax.sources`."""
        if "source" in function_parameters(self.pipeline_fn):
            return self._config.source is not None
        return call.get("source", self._config.source) is not None

    def _shard_arguments(
        self,
        shard_id: int,
        num_shards: int,
        seed: int | None = None,
        call: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the arguments by which a call reads one of several shards.

        The call must have no sharding, which would determine the shards.

        Args:
            shard_id: Index of the shard, e.g. of a host.
            num_shards: Number of shards. Unless it is 1, a graph function without a source must
                have the parameters ``shard_id`` and ``num_shards``.
            seed: A common seed; None: the default. Each shard derives its own seed, so that shards
                draw different numbers. Over a source, all shards have the same seed, because
                numbers depend on the records.
            call: The other arguments of the call.

        Raises:
            ValueError: If there are several shards and no source, and the graph function lacks
                ``shard_id`` or ``num_shards``.
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
        """Returns the arguments ``shard_id`` and ``num_shards`` if the graph function has them.

        Raises:
            ValueError: As for `_shard_arguments`.
        """
        missing = sorted({"shard_id", "num_shards"} - function_parameters(self.pipeline_fn))
        if missing and num_shards > 1:
            raise ValueError(
                f"{self.__name__}() has no argument {missing}, which its reader needs to read one "
                f"of {num_shards} shards. Add shard_id=0 and num_shards=1 to it, and pass both to "
                "the reader"
            )
        shard = {"shard_id": shard_id, "num_shards": num_shards}
        return {k: v for k, v in shard.items() if k not in missing}

    def _check_in_step(self, call: Mapping[str, Any], hosts: int) -> None:
        """Raises ValueError if hosts that evaluate together may skip different batches."""
        if hosts > 1 and call.get("on_error", self._config.on_error) == "skip":
            raise ValueError(
                "on_error='skip' with several hosts: a host that skips a batch has fewer than the "
                "others, which wait for it. Omit it for evaluation"
            )

    def _prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[GraphPipelineFactory | MakeEngine, IteratorConfig]:
        """Returns the factory of pipelines, or of a source's engine, and the config for a call."""
        parameters = function_parameters(self.pipeline_fn)
        named = {k: kwargs.pop(k) for k in CONFIG_NAMES - parameters if k in kwargs}
        config = self._configured(named).placed()
        config = dataclasses.replace(config, hosts=kwargs.pop("hosts", (0, 1)))
        if config.source is not None:
            bound = bind(config.source, self.pipeline_fn, args, kwargs, config)
            return bound, config
        kwargs = checked_arguments(self.pipeline_fn, kwargs, OF_DATA_ITERATOR)
        shards = choose_placement(config).shards
        shard_arguments: list[dict[str, Any]] = [{}]
        if shards:
            shard_arguments = self._split_arguments(shards, kwargs)
        elif "device_id" not in parameters:
            kwargs.setdefault("device_id", default_device_id())
        check_filled(self.pipeline_fn, args, {*kwargs, *shard_arguments[0]})
        if not config.shuffle:
            raise ValueError(
                f"shuffle=False of {self.__name__}() requires a source of dalijax.sources. A "
                "reader of DALI shuffles only if it has random_shuffle=True. Omit shuffle"
            )
        return GraphPipelineFactory(
            self.pipeline_fn, args, kwargs, shard_arguments, config.on_host
        ), config

    def _split_arguments(
        self, shards: Sequence[DataShard], kwargs: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the arguments that differ between shards, as a dict for each shard.

        Removes batch_size and device_id from ``kwargs``.

        Raises:
            ValueError: If ``kwargs`` has arguments that the shards determine, or no batch_size.
        """
        reserved = sorted({"shard_id", "num_shards"} & set(kwargs))
        if reserved:
            raise ValueError(f"{reserved} are set by the sharding or the devices. Omit them")
        if not isinstance(kwargs.get("batch_size"), int):
            raise ValueError(
                "sharding or devices require batch_size, the global batch size. Pass it"
            )
        shard_arguments = shard_pipelines(shards, kwargs.pop("batch_size"), kwargs)
        kwargs.pop("device_id", None)
        for shard, arguments in zip(shards, shard_arguments):
            arguments |= self._named(shard.shard_id, shard.num_shards)
            if "seed" in function_parameters(self.pipeline_fn):
                del arguments["seed"]
        return shard_arguments

    def _configured(self, arguments: dict[str, Any]) -> IteratorConfig:
        """Returns the config with the arguments of `data_iterator` and of the call.

        Raises:
            ValueError: If an argument was given to both.
        """
        self._check_policy(arguments)
        repeated = sorted(
            name for name in arguments if getattr(self._config, name) != CONFIG_DEFAULTS[name]
        )
        if repeated:
            raise ValueError(
                f"{repeated} were given both to data_iterator and to the call of "
                f"{self.__name__}(). Pass each of them once"
            )
        return dataclasses.replace(self._config, **arguments) if arguments else self._config

    def _check_policy(self, call: Mapping[str, Any]) -> None:
        """Raises ValueError if a call contradicts the last batch policy of `data_iterator`."""
        given, drop = self._config.last_batch_policy, call.get("drop_remainder")
        if given is LastBatchPolicy.FILL:  # the default
            return
        differs = policy_named(call.get("last_batch_policy", given)) is not given
        names = ["last_batch_policy"] if differs else []
        if isinstance(drop, bool) and drop != (given is LastBatchPolicy.DROP):
            names += ["drop_remainder"]
        if names:
            raise ValueError(
                f"{names[0]}={call[names[0]]!r} in the call of {self.__name__}(), but "
                f"data_iterator was given the policy {given.name}, by last_batch_policy or "
                "drop_remainder. Omit it in data_iterator, and pass it in each call"
            )
        # A mask in the call is for padding, unless it marks bad records. An evaluation by a
        # function that was made for training would lose its last samples.
        is_repeated = drop is True or "last_batch_policy" in call
        is_new = bool(call.get("mask")) and self._config.mask is None
        is_for_padding = is_new and call.get("on_error") != "mask"
        if given is LastBatchPolicy.DROP and is_for_padding and not is_repeated:
            raise ValueError(
                f"mask={call['mask']!r} in the call of {self.__name__}(), but data_iterator was "
                "given the policy DROP, by last_batch_policy or drop_remainder: the last samples "
                "are dropped, not padded and masked. Omit it in data_iterator, and pass "
                "drop_remainder=True only in calls for training"
            )

    if not TYPE_CHECKING:  # type checkers report missing attributes themselves

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
            f"{name} is an iterator function. Call it for an iterator, {name}(..., batch_size=128)"
        )

    def __deepcopy__(self, memo: Any) -> IteratorFunction:
        return self  # immutable; deep copies of a configuration must equal the original

    def __reduce__(self) -> Any:
        # If the decorated name is this object, its graph function can't be found by that name.
        value: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            value = getattr(value, part, None)
        if value is self:
            return self.__qualname__
        return type(self), (self.pipeline_fn, self._config)

    def __repr__(self) -> str:
        return f"<data_iterator of {self.__module__}.{self.__qualname__}>"


def _signature(pipeline_fn: Callable[..., Any]) -> inspect.Signature:
    """Returns a signature with the parameters of a graph function and of `IteratorFunction`."""
    signature = inspect.signature(pipeline_fn)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    }
    # The values that a pipeline_def has set are unknown here.
    is_def = is_pipeline_def(pipeline_fn)
    defaults = dict.fromkeys(_DEFAULTS, _PIPELINE_DEF_VALUE) if is_def else _DEFAULTS
    for name, parameter in _call_signature().parameters.items():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            default = defaults.get(name, parameter.default)
            parameters.setdefault(name, parameter.replace(default=default))
    return signature.replace(
        parameters=list(parameters.values()), return_annotation=DALIGenericIterator
    )


@functools.cache
def _call_signature() -> inspect.Signature:
    return inspect.signature(IteratorFunction.__call__, eval_str=True)


def _documented(pipeline_fn: Callable[..., Any], call: str) -> str:
    """Returns a docstring for an iterator function.

    It contains the docstring of the graph function, the text ``call``, and the docstring of
    `IteratorFunction.__call__`.
    """
    called = inspect.getdoc(IteratorFunction.__call__) or ""
    return "\n\n".join([*filter(None, [inspect.getdoc(pipeline_fn)]), call, called])


def iterator_function(value: object) -> IteratorFunction:
    """Returns ``value`` unchanged if it is an iterator function.

    Raises:
        TypeError: If ``value`` is not an iterator function.
    """
    if isinstance(value, DALIGenericIterator):
        raise TypeError(
            f"{value!r} is an iterator. Pass the iterator function that created it, together with "
            "its arguments"
        )
    if not isinstance(value, IteratorFunction):
        raise TypeError(
            f"{printable_repr(value)} is not an iterator function. Decorate it with "
            "dalijax.data_iterator"
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
    *in_dalis_order: Any,  # empty: `takes` binds positional arguments to their names
    **arguments: Unpack[FunctionIteratorArguments],
) -> IteratorFunction | Callable[[Callable[..., Any]], IteratorFunction]:
    """Converts a graph function to an iterator function.

    Works as a decorator, with or without arguments, and as a plain call, with the names and the
    order of ``nvidia.dali.plugin.jax.data_iterator``. The outputs need names: the keys of a dict
    that the function returns, or ``output_map``. ::

        @data_iterator(output_map=["images", "labels"], reader_name="reader")
        def iterator_fn(data_dir):
            jpegs, labels = fn.readers.file(file_root=data_dir, name="reader")
            images = fn.decoders.image(jpegs, device="mixed")
            labels = fn.squeeze(labels, axes=0)  # the reader gives [batch, 1]
            return fn.resize(images, size=(224, 224)), labels.gpu()

        for batch in iterator_fn("train", batch_size=128):
            step(batch["images"], batch["labels"])

    Args:
        pipeline_fn: The graph function. For several devices, it must take ``shard_id`` and
            ``num_shards`` and pass them to its reader.
        output_map, size, reader_name, auto_reset: As for `dalijax.DALIGenericIterator`.
        last_batch_padded, last_batch_policy, drop_remainder, prepare_first_batch: See there.
        pmap_compatible, mask, as_numpy, on_error: See there.
        sharding: A jax.sharding.Sharding, or a PartitionSpec on the mesh of `jax.set_mesh` when the
            iterator is created, or a dict of these for each output. Batches are global arrays
            with this sharding. In a dict, None keeps the rows of this process on the host, as a
            NumPy array. The dict may have entries for the mask and for fields that bypass the
            graph, too.
        devices: JAX devices, one for each pipeline. Batches have pmap's layout
            [devices, batch, ...].
        allow_changes: Names of differences that a restore ignores, for trainers that restore states
            themselves; see ``allow`` of ``set_state``.
        source: One of `dalijax.sources`, whose records the graph receives. Each parameter of the
            graph function receives the field of the same name, ``draw`` provides random numbers
            that depend only on the record (`dalijax.Draw`), and all other parameters are passed by
            keyword in the call. Batches then depend only on the seed and the position: a state can
            be resumed with any sharding, number of devices or processes, and batch size.
        shuffle: Whether to shuffle each epoch of a source.
        check_processes: Whether processes that form global batches compare their iterators before
            the first batch, and after a restore. A number is the seconds to wait for the other
            processes (True: 300); False disables the check.
        batch_map: A function ``f(batch, key) -> batch``, or a list of functions applied in order,
            e.g. MixUp. They receive the placed global batch with all numeric arrays, including the
            mask, which they must return; text and objects bypass them. They are compiled together,
            as by ``jax.jit``, and may add, change or drop arrays. Results are placed like the
            outputs if their first dimension is the batch. ``key`` is a jax.random.key that depends
            only on the seed, the epoch and the step. With ``as_numpy=True`` they run on the CPU and
            return NumPy arrays. If a function fails for a batch, the batch stays the next batch.

    Returns:
        An `IteratorFunction`; if ``pipeline_fn`` is None, a decorator that returns an iterator
        function.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
    """
    if pipeline_fn is not None and not callable(pipeline_fn):
        named = "output_map" if isinstance(pipeline_fn, (list, tuple)) else "source"
        raise TypeError(
            f"pipeline_fn must be a graph function, not {printable_repr(pipeline_fn)}. Pass other "
            f"arguments by keyword, such as {named}=..."
        )
    config = IteratorConfig(
        output_map,  # type: ignore[arg-type] # it becomes a tuple
        **arguments,  # type: ignore[arg-type] # the policy and the mask are parsed
    )
    if pipeline_fn is None:
        return lambda decorated: _of_graph_function(decorated, config)
    return _of_graph_function(pipeline_fn, config)


def _of_graph_function(pipeline_fn: Callable[..., Any], config: IteratorConfig) -> IteratorFunction:
    """Returns the iterator function of a graph function.

    Raises:
        TypeError: If ``pipeline_fn`` is an iterator function or a class.
    """
    if isinstance(pipeline_fn, (IteratorFunction, type)):
        is_class = isinstance(pipeline_fn, type)
        kind = "a class" if is_class else "an iterator function already"
        raise TypeError(f"{pipeline_fn!r} is {kind}. Pass a plain graph function")
    return IteratorFunction(pipeline_fn, config)
