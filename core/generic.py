"""`DALIGenericIterator`: DALI's own name and arguments for an iterator over pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .arguments import knows_its_names
from .config import IteratorConfig, OnError, Shardings
from .given import GivenSource
from .iterator import BatchIterator
from .source import PipelineSource


class DALIGenericIterator(BatchIterator):
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
        on_error: What ``next()`` does with a batch that DALI fails to produce, at a corrupt
            file say. "raise": a RuntimeError with what DALI says; the next call goes on with
            the next batch. "skip": it is logged, listed in ``errors``, and the next batch is
            delivered. Either way it counts as a batch of the epoch. DALI fails a whole
            batch, never a single sample: "skip" loses the good samples beside a bad one.
            The files are named (``files`` of the error, and of what ``errors`` lists) for the
            first eight batches of an iterator of `data_iterator`: its reader is run again
            alone, which takes as long as a restore, and pictures are decoded one by one.

    What a source can't give is never skipped nor counted: an exception of the pipeline's own
    Python source, or a RuntimeError of a reader (a missing file), is raised by each call until
    the source gives the batch.

    States are plain JSON values: `get_state` is where the consumer stands, whatever was
    peeked or scheduled, and `set_state` goes on from there bit by bit, on this iterator, a
    new one, or in another process. All methods may be called from any thread.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
        RuntimeError: If the pipelines can't be built.
    """

    @knows_its_names
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
        sharding: Shardings | None = None,
        pmap_compatible: bool | None = None,
        *,
        mask: str | None = None,
        as_numpy: bool | None = None,
        on_error: OnError = "raise",
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
            on_error=on_error,
        )
        super().__init__(GivenSource(pipelines), config)

    @classmethod
    def _from_source(
        cls,
        source: PipelineSource,
        config: IteratorConfig,
        lazy: bool = False,
        checkpoints: Sequence[bytes] | None = None,
    ) -> DALIGenericIterator:
        """An iterator whose pipelines are built by a source; see `BatchIterator`."""
        iterator = cls.__new__(cls)
        BatchIterator.__init__(iterator, source, config, lazy, checkpoints)
        return iterator
