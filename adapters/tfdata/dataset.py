"""`DALIDataset`: a DALI pipeline in the place of a ``tf.data.Dataset``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.arguments import whole_number
from ...core.config import EpochRules, IteratorConfig
from ...core.iterator.data_iterator import IteratorFunction, iterator_function
from ...core.iterator.epoch_stream import BatchStream
from ...core.pipeline.engine import EngineSource
from ...core.pipeline.pipeline_source import FunctionSource
from .iterator import Array, DatasetIterator, plain, scalar, tf
from .stepped_stream import ChainedStream
from .steps import INFINITE, UNKNOWN, Enumerate, Repeat, Skip, Step, Take

__all__ = ["DALIDataset"]

_COUNT = "a whole number of elements, or -1"
_IN_THE_GRAPH = {
    "batch": "pass batch_size to DALIDataset",
    "bucket_by_sequence_length": "sort the reader's files by length, and use fn.pad",
    "cache": "the operating system keeps the files; fn.decoders.image keeps decoded pictures on "
    "the GPU (cache_size)",
    "concatenate": "give one reader the files of both",
    "filter": "leave its samples out of the reader's files",
    "flat_map": "give one reader all files",
    "get_single_element": "use next(iter(ds))",
    "group_by_window": "sort the reader's files, and use fn.pad",
    "ignore_errors": "pass on_error='skip' to dalijax.data_iterator",
    "interleave": "give one reader all files, with random_shuffle=True",
    "map": "apply it to the outputs in the pipeline function: DALI's operators, or a Python, JAX "
    "or Numba function",
    "padded_batch": "use fn.pad in the pipeline function, and pass batch_size to DALIDataset",
    "ragged_batch": "use fn.pad in the pipeline function, and pass batch_size to DALIDataset",
    "rebatch": "pass another batch_size to DALIDataset",
    "reduce": "use functools.reduce(function, ds, start)",
    "rejection_resample": "repeat files in the reader's list",
    "save": "write the batches by a loop of yours",
    "scan": "use a loop over the dataset",
    "shard": "let the pipeline function hand shard_id and num_shards to its reader, and pass "
    "them to DALIDataset",
    "shuffle": "pass random_shuffle=True to the reader (initial_fill is the buffer's size)",
    "snapshot": "write the batches by a loop of yours",
    "sparse_batch": "use fn.pad in the pipeline function",
    "take_while": "use itertools.takewhile(predicate, ds)",
    "unbatch": "index the arrays of a batch, or pass batch_size=1 to DALIDataset",
    "unique": "leave its samples out of the reader's files",
    "window": "use sequence_length of the reader (video, sequences)",
    "zip": "give one pipeline function both readers",
}


class DALIDataset:
    """The batches of an iterator function, as tf.data has them.

    One epoch, again for each ``iter()``: each begins at the first epoch, so that two are
    independent and alike. Several epochs, each shuffled and augmented anew, are those of
    ``repeat()``. ``last_batch_policy`` says what becomes of an epoch's last batch:

    - FILL: ``repeat().batch(n)``, of which an epoch is as many batches as hold all its
      samples. With pad_last_batch=True of the reader, and ``mask``, the last one is padded.
    - DROP: ``batch(n, drop_remainder=True)``.
    - PARTIAL: ``batch(n)``; the first dimension of element_spec is None.

    Args:
        iterator_fn: What `dalijax.data_iterator` returned.
        **call: Arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`: batch_size, last_batch_policy, mask, ...

    Elements are dicts of `Array` by the outputs' names; of GPU pipelines, copied to the host.
    They stay valid for as long as they are referred to.

    Raises:
        TypeError: If ``iterator_fn`` is none.
        ValueError: For sharding, devices or pmap_compatible. When a batch is asked for: if DROP
            or PARTIAL are over a reader that runs on into the next epoch.
    """

    def __init__(self, iterator_fn: IteratorFunction, **call: Any):
        if iterator_function(iterator_fn).is_placed(call):
            raise ValueError(
                "a DALIDataset gives arrays on the host, as tf.data does: leave sharding, devices "
                "and pmap_compatible out, or use the iterator function itself, which places them"
            )
        self._source = _Source(iterator_fn, call)
        self._epochs: int | None = 1
        self._chain: tuple[Step, ...] = ()

    def _then(self, step: Step) -> DALIDataset:
        return self._derived(self._epochs, (*self._chain, step))

    def _derived(self, epochs: int | None, chain: tuple[Step, ...]) -> DALIDataset:
        dataset = object.__new__(type(self))
        dataset._source, dataset._epochs, dataset._chain = self._source, epochs, chain
        return dataset

    def take(self, count: int, name: str | None = None) -> DALIDataset:
        """The first ``count`` elements; all where it is -1."""
        del name
        return self._then(Take(whole_number("count", count, _COUNT)))

    def skip(self, count: int, name: str | None = None) -> DALIDataset:
        """All but the first ``count`` elements; none where it is -1.

        They are produced and dropped, as tf.data does.
        """
        del name
        return self._then(Skip(whole_number("count", count, _COUNT)))

    def repeat(self, count: int | None = None, name: str | None = None) -> DALIDataset:
        """The elements ``count`` times over; without end where it is None or -1.

        Of the whole dataset, these are its next epochs, which are shuffled and augmented anew;
        behind take, skip and enumerate the same elements again.
        """
        del name
        count = -1 if count is None else whole_number("count", count, _COUNT)
        if self._chain:
            return self._then(Repeat(count))
        if count == 0:
            return self._then(Take(0))
        endless = count < 0 or self._epochs is None
        return self._derived(None if endless else (self._epochs or 1) * count, ())

    def enumerate(self, start: int = 0, name: str | None = None) -> DALIDataset:
        """Pairs of a number, int64 from ``start`` on, and an element."""
        del name
        return self._then(Enumerate(whole_number("start", start, "a whole number")))

    def prefetch(self, buffer_size: int, name: str | None = None) -> DALIDataset:
        """The dataset itself: DALI prefetches (prefetch_queue_depth)."""
        del buffer_size, name
        return self

    def with_options(self, options: Any, name: str | None = None) -> DALIDataset:
        """The dataset itself: there is nothing that tf.data's options could change."""
        del options, name
        return self

    def apply(self, transformation_func: Callable[[DALIDataset], Any]) -> Any:
        """What a function makes of the dataset."""
        return transformation_func(self)

    def __getattr__(self, name: str) -> Any:
        if name not in _IN_THE_GRAPH:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{name}() builds TensorFlow's graph, and a DALIDataset has DALI's: "
                f"{_IN_THE_GRAPH[name]}. Or take ds.to_tf_dataset().{name}(...)"
            )

        return refuse

    def __iter__(self) -> DatasetIterator:
        stream = ChainedStream(self._source.stream(self._epochs), self._chain)
        return DatasetIterator(stream, lambda: self.element_spec)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """An iterator over the elements with plain NumPy arrays."""
        return map(plain, iter(self))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Number of elements.

        Raises:
            TypeError: If it has no end, or its length is not known; in TensorFlow's words.
        """
        count = int(self.cardinality())
        if count == INFINITE:
            raise TypeError("The dataset is infinite.")
        if count == UNKNOWN:
            raise TypeError("The dataset length is unknown.")
        return count

    def cardinality(self) -> Array:
        """Number of elements, tf.data.INFINITE_CARDINALITY (-1) or UNKNOWN (-2): int64 scalar."""
        return scalar(self._source.cardinality(self._epochs, self._chain))

    @property
    def element_spec(self) -> Any:
        """tf.TensorSpec of each array; of jax.ShapeDtypeStruct where there is no TensorFlow.

        It takes a batch of the pipelines of the next ``iter()``, which then delivers it.
        """
        return self._source.spec(self._epochs, self._chain)

    def to_tf_dataset(self, element_spec: Any = None) -> Any:
        """A tf.data.Dataset of the same elements.

        Args:
            element_spec: The specs of the elements, where shapes differ from batch to batch
                (dimensions that do are None); the dataset's own by default.

        Through DALI's TensorFlow plugin (nvidia-dali-tf-plugin) where it is installed and the
        epochs are those of its pipeline alone, on the CPU and without Python functions; its
        iterators are then checkpointed by ``tf.train.Checkpoint``. Else through
        tf.data.Dataset.from_generator, which TensorFlow can't checkpoint.

        Raises:
            ImportError: If TensorFlow is not installed.
        """
        from .to_tf import to_tf_dataset

        return to_tf_dataset(self, element_spec)

    def __repr__(self) -> str:
        name = self._source.iterator_fn.__name__
        return f"<DALIDataset of {name}, epochs={self._epochs}, steps={list(self._chain)}>"


class _Source:
    """The iterator function of datasets that are derived from one another.

    A stream whose pipelines were built to tell a length or a spec is the next iterator's.
    """

    def __init__(self, iterator_fn: IteratorFunction, call: Mapping[str, Any]):
        self.iterator_fn = iterator_fn
        self.call = dict(call)
        self.config = self.prepared()[1]
        self._spare: dict[int | None, BatchStream] = {}
        self._lent: weakref.WeakValueDictionary[int | None, BatchStream] = (
            weakref.WeakValueDictionary()
        )
        self._spec: dict[str, jax.ShapeDtypeStruct] | None = None

    def __reduce__(self) -> Any:
        return _Source, (self.iterator_fn, self.call)  # pipelines stay behind

    def prepared(self) -> tuple[FunctionSource | EngineSource, IteratorConfig]:
        """Where the pipelines come from, and the iterator's arguments."""
        return self.iterator_fn.prepared((), dict(self.call))

    def stream(self, epochs: int | None) -> BatchStream:
        """A stream at its start, of its own."""
        stream = self._spare.pop(epochs, None) or self._new_stream(epochs)
        self._lent[epochs] = stream
        return stream

    def _new_stream(self, epochs: int | None) -> BatchStream:
        iterator_fn = self.iterator_fn
        if self.config.last_batch_policy is not LastBatchPolicy.FILL:
            epoch_rules = EpochRules(epochs, per_shard=True)
            iterator_fn = iterator_fn.adapted("DALIDataset", epoch_rules=epoch_rules)
        return iterator_fn.for_host(self.call).stream(epochs, **self.call)

    def known(self, epochs: int | None) -> BatchStream:
        """A stream to ask for what is the same in all: one that is in use, or the next one."""
        lent = self._lent.get(epochs)
        if lent is not None and not lent.iterator.closed:
            return lent
        if epochs not in self._spare:
            self._spare[epochs] = self._new_stream(epochs)
        return self._spare[epochs]

    def cardinality(self, epochs: int | None, chain: Sequence[Step]) -> int:
        return ChainedStream(self.known(epochs), chain).cardinality()

    def spec(self, epochs: int | None, chain: Sequence[Step]) -> Any:
        if self._spec is None:
            self._spec = self.known(epochs).element_spec
        partial = self.config.last_batch_policy is LastBatchPolicy.PARTIAL
        varies = partial or self.known(epochs).iterator.plan is None
        spec: Any = {name: _spec(array, varies) for name, array in self._spec.items()}
        for step in chain:
            if isinstance(step, Enumerate):
                spec = (_spec(jax.ShapeDtypeStruct((), np.int64), False), spec)
        return spec


def _spec(array: jax.ShapeDtypeStruct, varies: bool) -> Any:
    shape = (None, *array.shape[1:]) if varies else array.shape
    if tf is None:
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return tf.TensorSpec(shape, tf.as_dtype(np.dtype(array.dtype)))
