"""The iterator: the protocol that JAX code sees over pipelines at a position."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .batches import Batch, BatchMaker, choose_layout
from .config import IteratorConfig
from .feed import Feed, Taken
from .pipelines import GivenSource, PipelineSource
from .runner import SourceEnded


class DALIGenericIterator:
    """Iterates over DALI pipelines; each batch is a dict of arrays.

    Takes the arguments of ``nvidia.dali.plugin.jax.DALIGenericIterator`` in their order, so
    that existing code changes its import line only, and ``mask`` and ``as_numpy``.

    Args:
        pipelines: A Pipeline or a list of them, all of one batch size.
        output_map: A name for each output of the pipeline, in order.
        size: Number of samples in an epoch (over all pipelines), where no reader says it.
            -1 without ``reader_name``: the epoch ends where the pipeline's source raises
            StopIteration; ``last_batch_policy`` then has no effect.
        reader_name: Name of the reader that says the epoch's size, its shards and padding.
        auto_reset: "yes" or True: raising StopIteration starts the next epoch. "no", False
            or None: ``reset()`` does, or ``iter()`` at the end of an epoch.
        last_batch_padded: Whether the source repeats its last sample to fill the last batch
            (True) or runs on into the next epoch. With ``reader_name`` the reader says it.
        last_batch_policy: FILL delivers every batch whole; DROP leaves out the last one
            where it is not whole; PARTIAL cuts it to the samples of the epoch.
        prepare_first_batch: Whether to schedule the first batches at once.
        sharding: How to place the batches over devices.
        pmap_compatible: Whether arrays have a leading device axis.
        mask: A name: each batch then has a bool array of that name, shape [batch], True
            where the sample belongs to the epoch and is no padding.
        as_numpy: True: CPU outputs are NumPy arrays instead of jax.Arrays: read-only views
            of DALI's buffers, valid for as long as they are referred to. GPU outputs are
            jax.Arrays all the same.

    A batch whose run fails, at a corrupt file say, is raised by ``next()`` as DALI's
    RuntimeError. It counts as a batch of the epoch, and the next call goes on with the next
    one; DALI fails a whole batch, never a single sample. An exception of the pipeline's own
    Python source is raised as it is, and the next call asks for the same batch again.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
        RuntimeError: If the pipelines can't be built.
    """

    def __init__(
        self,
        pipelines: Pipeline | Sequence[Pipeline],
        output_map: Sequence[str],
        size: int = -1,
        reader_name: str | None = None,
        auto_reset: str | bool | None = False,
        last_batch_padded: bool = False,
        last_batch_policy: LastBatchPolicy = LastBatchPolicy.FILL,
        prepare_first_batch: bool = True,
        sharding: jax.sharding.Sharding | None = None,
        pmap_compatible: bool | None = None,
        *,
        mask: str | None = None,
        as_numpy: bool | None = None,
    ):
        config = IteratorConfig(
            output_map=output_map,
            size=size,
            reader_name=reader_name,
            auto_reset=auto_reset,
            last_batch_padded=last_batch_padded,
            last_batch_policy=last_batch_policy,
            prepare_first_batch=prepare_first_batch,
            sharding=sharding,
            pmap_compatible=pmap_compatible,
            mask=mask,
            as_numpy=as_numpy,
        )
        self._start(GivenSource(pipelines), config)

    @classmethod
    def _from_source(cls, source: PipelineSource, config: IteratorConfig) -> DALIGenericIterator:
        """An iterator whose pipelines are built by a source, e.g. from their function."""
        iterator = cls.__new__(cls)
        iterator._start(source, config)
        return iterator

    def _start(self, source: PipelineSource, config: IteratorConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._closed = False
        self._peeked: Taken | None = None
        self._set_state_last = False
        self._feed = Feed(source, config)
        self._make_batch = BatchMaker(config, choose_layout(config))
        runner = self._feed.runner()
        if config.prepare_first_batch:
            runner.schedule()

    # The protocol of an iterator

    def __iter__(self) -> DALIGenericIterator:
        """Itself, in the next epoch where every batch of this one has been delivered.

        In mid-epoch, and just after a state was set, it goes on where it is. With
        ``auto_reset`` it never moves: raising StopIteration does.
        """
        with self._lock:
            self._check_open()
            stays = self._config.auto_reset or self._set_state_last or self._peeked is not None
            if not stays and self._feed.position.step > 0 and self._feed.at_end():
                self._feed.next_epoch()
            return self

    def __next__(self) -> Batch:
        """The next batch: a dict of arrays of shape [batch, ...], by the outputs' names.

        Raises:
            StopIteration: At the end of an epoch, on each call until ``reset()``; with
                ``auto_reset`` only once, and the next epoch has begun.
            ValueError: If an output is ragged, or the iterator is closed.
            TypeError: If JAX would narrow an output's 64-bit dtype.
            RuntimeError: If DALI failed to produce the batch.
        """
        with self._lock:
            self._check_open()
            self._set_state_last = False
            taken = self._take()
            if taken is None:
                if self._config.auto_reset:
                    self._feed.next_epoch()
                raise StopIteration
            self._peeked = None
            self._feed.position = taken.after
            if taken.error is not None:
                raise taken.error
            return taken.value

    def next(self) -> Batch:
        """The next batch; the same as ``next(iterator)``."""
        return self.__next__()

    def peek(self) -> Batch:
        """The batch that ``next()`` will deliver, which stays the next one.

        Raises:
            StopIteration: At the end of an epoch; nothing moves to the next one.
            Exception: What ``next()`` would raise, which it then raises too.
        """
        with self._lock:
            self._check_open()
            taken = self._take()
            if taken is None:
                raise StopIteration
            if taken.error is not None:
                raise taken.error
            return dict(taken.value)

    def _take(self) -> Taken | None:
        """The batch at the position, taken once; None at the end of the epoch."""
        if self._peeked is None and not self._feed.at_end():
            try:
                self._peeked = self._feed.take(self._make_batch)
            except SourceEnded:
                return None
        return self._peeked

    def __len__(self) -> int:
        """Number of batches that the current epoch delivers.

        Raises:
            TypeError: If only the source knows where its epoch ends.
        """
        with self._lock:
            self._check_open()
            total = self._feed.delivered()
            if total is None:
                raise TypeError(
                    "the length is unknown: only the pipeline's source knows where its epoch "
                    "ends. Pass size or reader_name for an iterator with a length"
                )
            return total

    def __bool__(self) -> bool:
        return True

    @property
    def size(self) -> int:
        """Number of samples of the current epoch for each shard; -1 where it is unknown.

        As in DALI: the size passed in, or what the reader says: the smallest shard's under
        DROP, the largest's over a padded reader, else the samples of the epoch's batches.
        """
        with self._lock:
            self._check_open()
            self._feed.runner()
            plan = self._feed.plan
            if plan is None or self._config.size > 0:
                return self._config.size
            if self._config.last_batch_policy is LastBatchPolicy.DROP:
                return plan.num_samples // plan.num_shards
            if plan.padded:
                return -(-plan.num_samples // plan.num_shards)
            return plan.consumed(self._feed.position.epoch) * plan.batch_size

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of each pipeline."""
        with self._lock:
            self._check_open()
            self._feed.runner()
            return self._feed.batch_size

    # Position and lifecycle

    def reset(self) -> None:
        """Starts the next epoch at the end of one, else goes back to the epoch's start.

        Raises:
            RuntimeError: If the pipelines can't go back: see the message for the way out.
        """
        with self._lock:
            self._check_open()
            self._set_state_last = False
            if self._peeked is None and self._feed.at_end():
                self._feed.next_epoch()
            elif self._feed.position.step > 0:
                self._feed.rewind()
                self._peeked = None

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each output, learnt from the next batch, which stays the next.

        Raises:
            StopIteration: Never; at the end of an epoch, ValueError asks for a ``reset()``.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError. May be called again."""
        with self._lock:
            self._closed = True
            self._peeked = None
            self._feed.drop()

    def __enter__(self) -> DALIGenericIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the iterator is closed: make a new one")
