"""`DALIDataset`: a DALI pipeline that replaces a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ...core.api import IteratorFunction, iterator_function
from ...core.arguments import check_flags, refuse_positional, whole_number
from .iterator import Array, DatasetIterator, plain, scalar
from .stepped_stream import ChainedStream
from .steps import INFINITE, UNKNOWN, Enumerate, Repeat, Skip, Step, Take
from .stream_factory import StreamFactory

__all__ = ["DALIDataset"]

_COUNT = "a whole number of elements, or -1"
_SELECTION = "use sources.Selection(source, records), or leave samples out of a reader's files"
_IN_THE_GRAPH = {
    "batch": "pass batch_size to DALIDataset",
    "bucket_by_sequence_length": "sort the reader's files by length, and use fn.pad",
    "cache": "the operating system keeps local files in memory, and cache= of a source keeps "
    "remote files on a local disk",
    "concatenate": "give one source or reader the files of both, or use sources.Mixture",
    "filter": _SELECTION,
    "flat_map": "give one source or reader all files",
    "get_single_element": "use next(iter(ds))",
    "group_by_window": "sort the reader's files, and use fn.pad",
    "ignore_errors": "pass on_error='skip' to dalijax.data_iterator",
    "interleave": "give one source or reader all files: a source shuffles all of its records",
    "map": "apply it to the outputs in the pipeline function: DALI's operators, or a Python, JAX "
    "or Numba function",
    "padded_batch": "use fn.pad in the pipeline function, and pass batch_size to DALIDataset",
    "ragged_batch": "use fn.pad in the pipeline function, and pass batch_size to DALIDataset",
    "rebatch": "pass another batch_size to DALIDataset",
    "reduce": "use functools.reduce(function, ds, start)",
    "rejection_resample": "use sources.Mixture of a source for each class, or repeat files of a "
    "reader",
    "save": "write the batches by a loop of yours",
    "scan": "use a loop over the dataset",
    "shuffle": "a source shuffles all of its records (shuffle=True); of a reader, pass "
    "random_shuffle=True (initial_fill is the buffer's size)",
    "snapshot": "write the batches by a loop of yours",
    "sparse_batch": "use fn.pad in the pipeline function",
    "take_while": "use itertools.takewhile(predicate, ds)",
    "unbatch": "index the arrays of a batch, or pass batch_size=1 to DALIDataset",
    "unique": _SELECTION,
    "window": "use sequence_length of the reader (video, sequences)",
    "zip": "use records with the fields of both, or give one pipeline function both readers",
}


class DALIDataset:
    """A dataset of the batches of an iterator function, with the interface of a tf.data.Dataset.

    Each ``iter()`` starts the next epoch, like tf.data's shuffle: the order and the random numbers
    differ from iterator to iterator, and from epoch to epoch within ``repeat()``. The last batch of
    an epoch depends on ``last_batch_policy``:

    - FILL: ``repeat().batch(n)``, with enough batches for all samples of the epoch. With
      pad_last_batch=True of the reader, and ``mask``, the last batch is padded.
    - DROP: ``batch(n, drop_remainder=True)``.
    - PARTIAL: ``batch(n)``; the first dimension of element_spec is None.

    Elements are dicts of `Array` by output name, on the host; outputs of GPU pipelines are copied
    to the host. Arrays stay valid while they are referenced.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`.
        reshuffle_each_iteration: Whether each ``iter()`` starts the next epoch. If False, each
            ``iter()`` and ``repeat()`` repeat the first epoch. A DALI reader can't start in a later
            epoch: each ``iter()`` over it has its own seed instead, but operators with a seed
            argument repeat their numbers.
        **call: Arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`: batch_size, last_batch_policy, mask, ...

    Raises:
        TypeError: If ``iterator_fn`` is not an iterator function, or another argument is
            positional.
        ValueError: For sharding, devices or pmap_compatible. When a batch is requested: for DROP
            or PARTIAL over a reader that fills the last batch with samples of the next epoch.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        *args: NoReturn,
        reshuffle_each_iteration: bool = True,
        **call: Any,
    ):
        refuse_positional("DALIDataset", args)
        check_flags(reshuffle_each_iteration=reshuffle_each_iteration)
        if iterator_function(iterator_fn)._is_placed(call):
            raise ValueError(
                "a DALIDataset returns arrays on the host, like tf.data. Omit sharding, devices "
                "and pmap_compatible, or use the iterator function itself, which places batches"
            )
        iterator_fn._check_names(DALIDataset, call)
        self._streams = StreamFactory(iterator_fn, call, reshuffle_each_iteration)
        self._epochs: int | None = 1
        self._chain: tuple[Step, ...] = ()

    def _then(self, step: Step) -> DALIDataset:
        return self._derived(self._epochs, (*self._chain, step))

    def _derived(self, epochs: int | None, chain: tuple[Step, ...]) -> DALIDataset:
        dataset = object.__new__(type(self))
        dataset._streams, dataset._epochs, dataset._chain = self._streams, epochs, chain
        return dataset

    def take(self, count: int, name: str | None = None) -> DALIDataset:
        """Returns a dataset of the first ``count`` elements; of all elements if ``count`` is -1."""
        del name
        return self._then(Take(whole_number("count", count, _COUNT)))

    def skip(self, count: int, name: str | None = None) -> DALIDataset:
        """Returns a dataset without the first ``count`` elements; an empty dataset if it is -1.

        As in tf.data, the skipped elements are produced and dropped.
        """
        del name
        return self._then(Skip(whole_number("count", count, _COUNT)))

    def repeat(self, count: int | None = None, name: str | None = None) -> DALIDataset:
        """Returns a dataset with the elements ``count`` times; endless if ``count`` is None or -1.

        If this is the first step, the repetitions are further epochs, with new shuffling and
        augmentation. After take, skip or enumerate, and with ``reshuffle_each_iteration=False``,
        the repetitions have the same elements.
        """
        del name
        count = -1 if count is None else whole_number("count", count, _COUNT)
        if self._chain or not self._streams.reshuffles:
            return self._then(Repeat(count))
        if count == 0:
            return self._then(Take(0))
        if count < 0 or self._epochs is None:
            return self._derived(None, ())
        return self._derived(self._epochs * count, ())

    def shard(self, num_shards: int, index: int, name: str | None = None) -> DALIDataset:
        """Returns a dataset of one host's share of a source; must be the first step.

        Each host produces batches of ``batch_size`` records, which are slices of global batches of
        ``num_shards`` times as many records. All hosts have equally many batches. (tf.data's
        shard() would take every ``num_shards``-th batch.)

        Raises:
            NotImplementedError: Over DALI's readers, which shard themselves, or after other steps.
            ValueError: If ``num_shards`` is less than 1, or ``index`` is not below it.
        """
        del name
        streams = self._streams
        first = not self._chain and self._epochs == 1 and "hosts" not in streams.call
        if not (first and streams.iterator_fn._has_source(streams.call)):
            raise NotImplementedError(
                "shard() must be the first step of a DALIDataset over one of dalijax.sources. For "
                "a reader, pass shard_id and num_shards to DALIDataset; the graph function has to "
                "pass them to the reader"
            )
        num_shards = whole_number("num_shards", num_shards, "a number of shards, 1 or more", 1)
        expected = f"the number of one of {num_shards} shards, from 0"
        index = whole_number("index", index, expected, 0, num_shards)
        seed = streams.call.get("seed")
        shard_call = streams.iterator_fn._shard_arguments(index, num_shards, seed, streams.call)
        dataset = self._derived(1, ())
        call = {**streams.call, **shard_call}
        dataset._streams = StreamFactory(streams.iterator_fn, call, streams.reshuffles)
        return dataset

    def enumerate(self, start: int = 0, name: str | None = None) -> DALIDataset:
        """Returns a dataset of pairs of a number (int64, from ``start``) and an element."""
        del name
        return self._then(Enumerate(whole_number("start", start, "a whole number")))

    def prefetch(self, buffer_size: int, name: str | None = None) -> DALIDataset:
        """Returns the dataset itself, because DALI prefetches (prefetch_queue_depth)."""
        del buffer_size, name
        return self

    def with_options(self, options: Any, name: str | None = None) -> DALIDataset:
        """Returns the dataset itself, because tf.data's options do not apply."""
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
                f"{name}() builds a TensorFlow graph, but a DALIDataset has a DALI graph: "
                f"{_IN_THE_GRAPH[name]}. Or use ds.to_tf_dataset().{name}(...)"
            )

        return refuse

    def __iter__(self) -> DatasetIterator:
        stream = ChainedStream(self._streams.stream(self._epochs), self._chain)
        return DatasetIterator(stream, lambda: self.element_spec)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Returns an iterator over the elements with plain NumPy arrays."""
        return map(plain, iter(self))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Returns the number of elements.

        Raises:
            TypeError: If the number is infinite or unknown; the messages are TensorFlow's.
        """
        count = int(self.cardinality())
        if count == INFINITE:
            raise TypeError("The dataset is infinite.")
        if count == UNKNOWN:
            raise TypeError("The dataset length is unknown.")
        return count

    def cardinality(self) -> Array:
        """Returns the number of elements as an int64 scalar.

        Endless datasets return tf.data.INFINITE_CARDINALITY (-1), datasets of unknown length
        tf.data.UNKNOWN_CARDINALITY (-2).
        """
        return scalar(self._streams.cardinality(self._epochs, self._chain))

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with a tf.TensorSpec for each array.

        Without TensorFlow, the specs are jax.ShapeDtypeStructs. The pipelines of the next
        ``iter()`` produce a batch for the specs; the next iterator delivers this batch.
        """
        return self._streams.spec(self._epochs, self._chain)

    def to_tf_dataset(self, element_spec: Any = None) -> Any:
        """Returns a tf.data.Dataset with the same elements.

        By default, tf.data.Dataset.from_generator creates the dataset. Each iteration over it calls
        ``iter()`` of this dataset, so that the epochs of Keras' fit() differ. TensorFlow can't save
        its iterators.

        DALI's TensorFlow plugin (nvidia-dali-tf-plugin) creates the dataset instead if the plugin
        is installed, the batches come from a CPU pipeline without Python functions, and the dataset
        is endless (``repeat()``) or has ``reshuffle_each_iteration=False``. Each iteration then
        starts with the first epoch. ``tf.train.Checkpoint`` can save the iterators.

        Args:
            element_spec: Specs of an element, if shapes differ between batches (with None for
                these dimensions). By default, `DALIDataset.element_spec`.

        Raises:
            ImportError: If TensorFlow is not installed.
        """
        from .to_tf import by_generator, by_plugin

        # The plugin's pipeline repeats itself in each pass.
        repeats = self._epochs is None or not self._streams.reshuffles
        if element_spec is None and repeats:
            dataset = by_plugin(self._streams, self._epochs, self._chain)
            if dataset is not None:
                return dataset
        if element_spec is None:
            element_spec = self.element_spec
        skips = self._streams.config.on_error == "skip"
        count = UNKNOWN if skips else int(self.cardinality())
        return by_generator(self.as_numpy_iterator, element_spec, count)

    def __repr__(self) -> str:
        name = self._streams.iterator_fn.__name__
        return f"<DALIDataset of {name}, epochs={self._epochs}, steps={list(self._chain)}>"
