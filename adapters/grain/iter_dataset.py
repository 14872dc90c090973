"""`DALIIterDataset`: a DALI reader as a ``grain.IterDataset``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grain
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.api import IteratorFunction, data_iterator
from ...core.arguments import function_parameters, refuse_positional, whole_number
from ...core.config import EpochRules
from ...core.iterator.batch_stream import BatchStream
from ...core.messages.printable import printable_repr
from ...core.pipeline.batch import Batch
from ..stream_adapter import StreamAdapter
from .record_iterator import GrainIterator, Passes
from .transform import BatchDataset, check_policy, choose_device, element_spec

__all__ = ["DALIIterDataset"]


# Arguments of dalijax.data_iterator that the adapter sets itself.
_RESERVED = {"auto_reset", "last_batch_policy", "mask", "sharding", "devices", "epoch_rules"}

_NO_INDEX = "the position counts samples, not batches, whose size may have changed. Use get_state()"


class DALIIterDataset(BatchDataset):
    """A DALI reader, or a source of records, as a Grain dataset of batches.

    Elements are dicts of NumPy arrays for CPU pipelines and of jax.Arrays for GPU pipelines.
    Iterators build their pipelines when the first batch is requested. States have about 1 KiB.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`, or a plain graph function
            together with the arguments ``output_map`` and ``reader_name``.
        num_epochs: Number of epochs, which are batched separately; None for an endless dataset.
        drop_remainder: Whether to drop an epoch's incomplete last batch. False delivers a smaller
            last batch, or, with ``pad="mask"``, a full batch with a mask.
        pad: "mask" pads all batches to full size, and adds an array "mask", bool [batch], which is
            False for padding.
        shard_options: The grain.ShardOptions of the shard that the reader reads in every epoch;
            None for all data. Over a source, each shard reads its rows of global batches of
            shard_count times batch_size records.
        sharding: A jax.sharding.Sharding for global batches, which determines the shards.
        writable: As for `DALITransform`.
        **call: Arguments of the graph function and of ``nvidia.dali.pipeline_def``:
            batch_size, num_threads, seed, ...

    Raises:
        TypeError: If an argument after ``iterator_fn`` is positional.
        ValueError: If arguments exclude each other or contradict arguments of ``iterator_fn``. When
            the first batch is requested: if the reader lacks pad_last_batch=True, and fills the
            last batch with samples of the next epoch, or lacks stick_to_shard=True, and rotates
            shards.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction | Callable[..., Any],
        *args: NoReturn,
        num_epochs: int | None = 1,
        drop_remainder: bool = False,
        pad: str | None = None,
        shard_options: grain.sharding.ShardOptions | None = None,
        sharding: Any = None,
        writable: bool = False,
        **call: Any,
    ):
        super().__init__()
        refuse_positional("DALIIterDataset", args)
        if num_epochs is not None:
            expected = "at least 1, a whole number, or None for no end"
            num_epochs = whole_number("num_epochs", num_epochs, expected, 1)
        if not isinstance(iterator_fn, IteratorFunction):
            names = {k: call.pop(k) for k in ("output_map", "reader_name") if k in call}
            if "output_map" not in names:
                raise ValueError(
                    f"{printable_repr(iterator_fn)} is not an iterator function. Decorate it with "
                    "dalijax.data_iterator, or pass output_map= and reader_name="
                )
            iterator_fn = data_iterator(iterator_fn, **names)
        iterator_fn._check_names(DALIIterDataset, call)
        reserved = sorted(_RESERVED & set(call) - function_parameters(iterator_fn.pipeline_fn))
        if reserved:
            raise ValueError(
                f"{reserved} can't be passed to DALIIterDataset. Use drop_remainder, pad and "
                "num_epochs for the end of an epoch, shard_options or sharding for the data to read"
            )
        if iterator_fn._config.devices is not None:
            raise ValueError("devices= is pmap's layout, unsupported by Grain. Pass sharding=")
        sharding = iterator_fn._config.sharding if sharding is None else sharding
        check_policy(drop_remainder, pad, sharding)
        policy = LastBatchPolicy.FILL if pad else LastBatchPolicy.PARTIAL
        options = shard_options or grain.sharding.NoSharding()
        if sharding is not None and options.shard_count > 1:
            raise ValueError(
                "shard_options together with sharding, which determines the shards. Omit one"
            )
        # A source's epochs are batched separately; for readers, this depends on their arguments.
        padding = {"last_batch_padded": True} if iterator_fn._has_source(call) else {}
        self._iterator_fn = iterator_fn._adapted(
            "DALIIterDataset",
            **padding,
            auto_reset=False,
            last_batch_policy=LastBatchPolicy.DROP if drop_remainder else policy,
            mask="mask" if pad else None,
            sharding=sharding,
            epoch_rules=EpochRules(
                num_epochs, options.shard_count if options.drop_remainder else 1, per_shard=True
            ),
        )
        self._num_epochs = num_epochs
        self._passes = Passes("Pass num_epochs=EPOCHS to DALIIterDataset, and iterate once")
        self._writable = writable
        self._shard = (options.shard_index, options.shard_count)
        self._call = call

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restricts the dataset to a part of its shard, for one of Grain's worker processes.

        Args:
            sl: ``slice(i, None, n)`` for part i of n.
            sequential_slice: Ignored.

        Raises:
            ValueError: If the dataset has a sharding, whose global batches can't be divided.
        """
        del sequential_slice
        if self._iterator_fn._config.sharding is not None:
            raise ValueError(
                "DALIIterDataset(sharding=...) makes global batches, which can't be split among "
                "Grain's worker processes or threads. Omit mp_prefetch() and similar steps: DALI "
                "reads in its own threads (num_threads)"
            )
        index, count = self._shard
        step = sl.step or 1
        self._shard = (index * step + (sl.start or 0), count * step)

    def __iter__(self) -> DALIDatasetIterator:
        over_source = self._iterator_fn._has_source(self._call)
        return DALIDatasetIterator(self._stream(), over_source, self._passes, self._writable)

    def _stream(self) -> BatchStream:
        call, iterator_fn = dict(self._call), self._iterator_fn
        if iterator_fn._config.sharding is None:
            on_gpu = choose_device(call)
            if iterator_fn._config.as_numpy is None:
                if "as_numpy" not in function_parameters(iterator_fn.pipeline_fn):
                    call.pop("as_numpy", None)  # determined by the device
                iterator_fn = iterator_fn._adapted("DALIIterDataset", as_numpy=not on_gpu)
            self._add_shard(call)
        return iterator_fn.stream(self._num_epochs, **call)

    def _add_shard(self, call: dict[str, Any]) -> None:
        index, count = self._shard
        if count > 1:
            if {"shard_id", "num_shards"} & set(call):
                raise ValueError("shard_id and num_shards are set by shard_options. Omit them")
            parameters = function_parameters(self._iterator_fn.pipeline_fn)
            seed = None if "seed" in parameters else call.pop("seed", None)
            call |= self._iterator_fn._shard_arguments(index, count, seed, call)

    @property
    def _element_spec(self) -> Any:
        with self._stream() as stream:
            spec = stream.element_spec
        varies = self._iterator_fn._config.last_batch_policy is LastBatchPolicy.PARTIAL
        return element_spec(spec, varies)

    def __str__(self) -> str:
        index, count = self._shard
        return f"DALIIterDataset({self._iterator_fn.__name__}, shard {index} of {count})"


class DALIDatasetIterator(StreamAdapter, GrainIterator):
    """Iterates over the batches of a `DALIIterDataset`.

    Attributes:
        over_source: Whether the dataset reads a source, so that states are equal in all processes.
    """

    _stream: BatchStream

    def __init__(self, stream: BatchStream, over_source: bool, passes: Passes, writable: bool):
        super().__init__()
        self._stream = stream
        self._passes = passes
        self._writable = writable
        self.over_source = over_source

    def _next(self) -> Batch:
        return next(self._stream)

    def _draws_numbers(self) -> bool:
        return self._core._engine.draws_numbers()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        yield
        self._starts = False

    def seek_step(self, step: int) -> None:
        self._assert_not_closed()
        super().seek_step(step)

    _set_next_index = seek_step

    def _get_next_index(self) -> int:
        raise ValueError(_NO_INDEX)

    def start_prefetch(self) -> None:
        self._assert_not_closed()
        super().start_prefetch()

    # Grain calls close() at the exit of the program, when the names of modules are gone.
    _close_in_grain = grain.DatasetIterator.close

    def close(self) -> None:
        self._close_in_grain()
        super().close()

    def __str__(self) -> str:
        return "DALIDatasetIterator()"
