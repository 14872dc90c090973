"""`DALIDataset`: a DALI pipeline in place of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...core.api import IteratorFunction, iterator_function
from ...core.config import check_flags, whole_number
from .iterator import Array, DatasetIterator, plain, scalar
from .source import Source
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
    "shuffle": "a source shuffles all of its records (shuffle=True); of a reader, pass "
    "random_shuffle=True (initial_fill is the buffer's size)",
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

    Each ``iter()`` starts the next epoch, as tf.data's shuffle does: its order and its random
    numbers differ from those of other iterators, and so do the epochs within ``repeat()``. An
    epoch's last batch depends on ``last_batch_policy``:

    - FILL: ``repeat().batch(n)``, as many batches as hold all samples of the epoch. With
      pad_last_batch=True of the reader, and ``mask``, the last one is padded.
    - DROP: ``batch(n, drop_remainder=True)``.
    - PARTIAL: ``batch(n)``; the first dimension of element_spec is None.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`.
        reshuffle_each_iteration: False repeats the first epoch, in each ``iter()`` and in
            ``repeat()``. Over a reader of DALI's, which can't start in a later epoch, True gives
            each pass a seed of its own; operators with a seed argument repeat their numbers.
        **call: Arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`: batch_size, last_batch_policy, mask, ...

    Elements are dicts of `Array` by the outputs' names, on the host; outputs of GPU pipelines are
    copied there. They stay valid for as long as they are referred to.

    Raises:
        TypeError: If ``iterator_fn`` is no iterator function.
        ValueError: For sharding, devices or pmap_compatible. When a batch is requested: for DROP
            or PARTIAL over a reader that runs on into the next epoch.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        *,
        reshuffle_each_iteration: bool = True,
        **call: Any,
    ):
        check_flags(reshuffle_each_iteration=reshuffle_each_iteration)
        if iterator_function(iterator_fn)._is_placed(call):
            raise ValueError(
                "a DALIDataset gives arrays on the host, as tf.data does: leave sharding, devices "
                "and pmap_compatible out, or use the iterator function itself, which places them"
            )
        iterator_fn._check_names(DALIDataset, call)
        self._source = Source(iterator_fn, call, reshuffle_each_iteration)
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

        As in tf.data, they are produced and dropped.
        """
        del name
        return self._then(Skip(whole_number("count", count, _COUNT)))

    def repeat(self, count: int | None = None, name: str | None = None) -> DALIDataset:
        """The elements ``count`` times over; without end where it is None or -1.

        Directly on the dataset these are further epochs, shuffled and augmented anew. After take,
        skip or enumerate, and with ``reshuffle_each_iteration=False``, they are the same elements.
        """
        del name
        count = -1 if count is None else whole_number("count", count, _COUNT)
        if self._chain or not self._source.reshuffles:
            return self._then(Repeat(count))
        if count == 0:
            return self._then(Take(0))
        if count < 0 or self._epochs is None:
            return self._derived(None, ())
        return self._derived(self._epochs * count, ())

    def shard(self, num_shards: int, index: int, name: str | None = None) -> DALIDataset:
        """The share of one host, over one of `dalijax.sources`: call it first.

        Each host makes batches of ``batch_size``, slices of a global batch of ``num_shards`` times
        as many records, and all have as many batches. (tf.data's shard() would take every
        ``num_shards``-th batch of all.)

        Raises:
            NotImplementedError: Over DALI's readers, which shard by themselves, or behind other
                steps.
            ValueError: If there is no such shard.
        """
        del name
        source = self._source
        first = not self._chain and self._epochs == 1 and "hosts" not in source.call
        if not (first and source.iterator_fn._has_source(source.call)):
            raise NotImplementedError(
                "shard() is the first step of a DALIDataset over one of dalijax.sources. With a "
                "reader, let the pipeline function hand shard_id and num_shards to it, and pass "
                "them to DALIDataset"
            )
        num_shards = whole_number("num_shards", num_shards, "a number of shards, 1 or more", 1)
        what = f"the number of one of {num_shards} shards, from 0"
        index = whole_number("index", index, what, 0, num_shards)
        seed = source.call.get("seed")
        of_host = source.iterator_fn._of_shard(index, num_shards, seed, source.call)
        dataset = self._derived(1, ())
        call = {**source.call, **of_host}
        dataset._source = Source(source.iterator_fn, call, source.reshuffles)
        return dataset

    def enumerate(self, start: int = 0, name: str | None = None) -> DALIDataset:
        """Pairs of a number (int64, counting from ``start``) and an element."""
        del name
        return self._then(Enumerate(whole_number("start", start, "a whole number")))

    def prefetch(self, buffer_size: int, name: str | None = None) -> DALIDataset:
        """The dataset itself: DALI prefetches (prefetch_queue_depth)."""
        del buffer_size, name
        return self

    def with_options(self, options: Any, name: str | None = None) -> DALIDataset:
        """The dataset itself: tf.data's options don't apply."""
        del options, name
        return self

    def apply(self, transformation_func: Callable[[DALIDataset], Any]) -> Any:
        """Calls a function with the dataset, and returns its result."""
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
            TypeError: If it is infinite or its length unknown; the messages are TensorFlow's.
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
        """tf.TensorSpec of each array; jax.ShapeDtypeStruct without TensorFlow.

        Runs the pipelines of the next ``iter()`` for a batch, which that iterator then delivers.
        """
        return self._source.spec(self._epochs, self._chain)

    def to_tf_dataset(self, element_spec: Any = None) -> Any:
        """A tf.data.Dataset of the same elements.

        Args:
            element_spec: The specs of the elements, where shapes differ from batch to batch (with
                None for these dimensions); by default the dataset's.

        Each iteration over it is an ``iter()`` of this dataset, so that the epochs of Keras' fit()
        differ.

        tf.data.Dataset.from_generator makes it, whose iterators TensorFlow can't save. DALI's
        TensorFlow plugin (nvidia-dali-tf-plugin) makes it instead if it is installed, the batches
        come from a CPU pipeline alone, without Python functions, and the dataset has no end
        (``repeat()``) or ``reshuffle_each_iteration=False``. ``tf.train.Checkpoint`` saves its
        iterators, and each of them starts with the first epoch.

        Raises:
            ImportError: If TensorFlow is not installed.
        """
        from .to_tf import by_generator, by_plugin

        # The plugin's pipeline does the same in each pass.
        repeats = self._epochs is None or not self._source.reshuffles
        if element_spec is None and repeats:
            dataset = by_plugin(self._source, self._epochs, self._chain)
            if dataset is not None:
                return dataset
        if element_spec is None:
            element_spec = self.element_spec
        leaves_out = self._source.config.on_error == "skip"
        count = UNKNOWN if leaves_out else int(self.cardinality())
        return by_generator(self.as_numpy_iterator, element_spec, count)

    def __repr__(self) -> str:
        name = self._source.iterator_fn.__name__
        return f"<DALIDataset of {name}, epochs={self._epochs}, steps={list(self._chain)}>"
