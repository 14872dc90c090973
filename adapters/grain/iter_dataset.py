"""`DALIIterDataset`: a DALI reader as a ``grain.IterDataset``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.api import IteratorFunction, data_iterator
from ...core.config import EpochRules, function_parameters, whole_number
from ...core.iterator.epoch_stream import BatchStream
from ...core.iterator.iterator import DALIGenericIterator
from ...core.pipeline.batch import writable
from ...core.stats import InputStats
from .transform import check_policy, choose_device, element_spec

__all__ = ["DALIIterDataset"]


# Arguments that the adapter sets.
_SET_HERE = {"auto_reset", "last_batch_policy", "mask", "sharding", "devices", "epoch_rules"}

_NO_INDEX = "the position counts samples, not batches, whose size may have changed: use get_state()"


class DALIIterDataset(grain.IterDataset):
    """A DALI reader, or a source of records, as a Grain dataset of batches.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`, or a plain graph function
            with ``output_map`` and ``reader_name`` among the further arguments.
        num_epochs: Number of epochs, each batched by itself; None for no end.
        drop_remainder: True drops an epoch's last batch that is not whole. False delivers it
            smaller, or, with ``pad="mask"``, whole and with a mask.
        pad: "mask" makes all batches whole and adds an array "mask", bool of shape [batch], False
            at the padding.
        shard_options: grain.ShardOptions: the shard of the data that the reader reads, the same in
            every epoch; all by default. Over a source, the rows of a global batch of shard_count
            times batch_size.
        sharding: A jax.sharding.Sharding for global batches, which determines the shards.
        writable: As for `DALITransform`.
        **call: Arguments of the graph function and of ``nvidia.dali.pipeline_def``:
            batch_size, num_threads, seed, ...

    Elements are dicts of NumPy arrays for CPU pipelines and of jax.Arrays for GPU ones. Iterators
    build their pipelines when the first batch is requested. States have about 1 KiB.

    Raises:
        ValueError: If arguments exclude one another or those of ``iterator_fn``. When the first
            batch is requested: if the reader runs on into the next epoch (pad_last_batch) or from
            shard to shard (stick_to_shard).
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction | Callable[..., Any],
        *,
        num_epochs: int | None = 1,
        drop_remainder: bool = False,
        pad: str | None = None,
        shard_options: grain.sharding.ShardOptions | None = None,
        sharding: Any = None,
        writable: bool = False,
        **call: Any,
    ):
        super().__init__()
        if num_epochs is not None:
            what = "at least 1, a whole number, or None for no end"
            num_epochs = whole_number("num_epochs", num_epochs, what, 1)
        if not isinstance(iterator_fn, IteratorFunction):
            names = {k: call.pop(k) for k in ("output_map", "reader_name") if k in call}
            if "output_map" not in names:
                raise ValueError(
                    f"{iterator_fn!r} is no iterator function: decorate it with "
                    "dalijax.data_iterator, or pass output_map= and reader_name= here"
                )
            iterator_fn = data_iterator(iterator_fn, **names)
        iterator_fn._check_names(DALIIterDataset, call)
        set_here = sorted(_SET_HERE & set(call) - function_parameters(iterator_fn.pipeline_fn))
        if set_here:
            raise ValueError(
                f"{set_here} are not for DALIIterDataset: drop_remainder, pad and num_epochs say "
                "how an epoch ends, shard_options or sharding what is read"
            )
        if iterator_fn._config.devices is not None:
            raise ValueError("devices= is pmap's layout, which Grain has not: pass sharding=")
        sharding = iterator_fn._config.sharding if sharding is None else sharding
        check_policy(drop_remainder, pad, sharding)
        policy = LastBatchPolicy.FILL if pad else LastBatchPolicy.PARTIAL
        options = shard_options or grain.sharding.NoSharding()
        if sharding is not None and options.shard_count > 1:
            raise ValueError(
                "shard_options with sharding, which says the shards by itself: leave one out"
            )
        # A source's epochs are batched by themselves; a reader's arguments say whether its are.
        more = {"last_batch_padded": True} if iterator_fn._has_source(call) else {}
        self._iterator_fn = iterator_fn._adapted(
            "DALIIterDataset",
            **more,
            auto_reset=False,
            last_batch_policy=LastBatchPolicy.DROP if drop_remainder else policy,
            mask="mask" if pad else None,
            sharding=sharding,
            epoch_rules=EpochRules(
                num_epochs, options.shard_count if options.drop_remainder else 1, per_shard=True
            ),
        )
        self._num_epochs = num_epochs
        self._writable = writable
        self._shard = (options.shard_index, options.shard_count)
        self._call = call

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restricts the dataset to every n-th of its shards, for Grain's worker processes."""
        del sequential_slice
        if self._iterator_fn._config.sharding is not None:
            raise ValueError(
                "a dataset over a sharding can't be split among Grain's workers or threads: DALI "
                "has threads of its own (num_threads), leave them out"
            )
        index, count = self._shard
        step = sl.step or 1
        self._shard = (index * step + (sl.start or 0), count * step)

    def __iter__(self) -> DALIDatasetIterator:
        over_source = self._iterator_fn._has_source(self._call)
        return DALIDatasetIterator(self._stream(), self._writable, over_source)

    def _stream(self) -> BatchStream:
        call, iterator_fn = dict(self._call), self._iterator_fn
        if iterator_fn._config.sharding is None:
            on_gpu = choose_device(call)
            if iterator_fn._config.as_numpy is None:
                if "as_numpy" not in function_parameters(iterator_fn.pipeline_fn):
                    call.pop("as_numpy", None)  # the device says it
                iterator_fn = iterator_fn._adapted("DALIIterDataset", as_numpy=not on_gpu)
            self._add_shard(call)
        return iterator_fn.stream(self._num_epochs, **call)

    def _add_shard(self, call: dict[str, Any]) -> None:
        index, count = self._shard
        if count > 1:
            if {"shard_id", "num_shards"} & set(call):
                raise ValueError("shard_id and num_shards come from shard_options: leave them out")
            parameters = function_parameters(self._iterator_fn.pipeline_fn)
            seed = None if "seed" in parameters else call.pop("seed", None)
            call |= self._iterator_fn._of_shard(index, count, seed, call)

    @property
    def _element_spec(self) -> Any:
        with self._stream()._iterator as iterator:
            spec = iterator.element_spec
        varies = self._iterator_fn._config.last_batch_policy is LastBatchPolicy.PARTIAL
        return element_spec(spec, varies)

    def __str__(self) -> str:
        index, count = self._shard
        return f"DALIIterDataset({self._iterator_fn.__name__}, shard {index} of {count})"


class DALIDatasetIterator(grain.DatasetIterator):
    """Iterates over a `DALIIterDataset`.

    Attributes:
        over_source: Whether it is over a source, with the same state in all processes.
    """

    def __init__(self, stream: BatchStream, writable: bool, over_source: bool):
        super().__init__()
        self._stream = stream
        self._writable = writable
        self.over_source = over_source

    def __next__(self) -> Any:
        self._assert_not_closed()
        batch = next(self._stream)
        return writable(batch) if self._writable else batch

    def get_state(self) -> dict[str, Any]:
        """The consumer's position; builds no pipeline."""
        return self._stream.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: If it is no state, or one of other data; nothing has changed.
        """
        self._stream.set_state(state)

    def _get_next_index(self) -> int:
        raise ValueError(_NO_INDEX)

    def seek_step(self, step: int) -> None:
        """Moves to a global step, for loops that save only their step; see `BatchStream`.

        Args:
            step: The number of batches before it, from 0.

        Raises:
            ValueError: If there is no such step, or the batches before it are not known.
        """
        self._assert_not_closed()
        self._stream.seek_step(step)

    _set_next_index = seek_step

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules batches, without waiting for them."""
        self._assert_not_closed()
        self._stream.start_prefetch()

    @property
    def _core(self) -> DALIGenericIterator:
        """The iterator underneath, which `dalijax.profile` measures."""
        return self._stream._iterator

    def watch(self) -> InputStats:
        """Counts batches from now on; `dalijax.adapters.clu.ReportInput` reads the counters."""
        return self._stream.watch()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        super().close()
        self._stream.close()

    def __str__(self) -> str:
        return "DALIDatasetIterator()"
