"""`DALITransform`: decodes and augments the records of a Grain dataset.

`adapters.grain.reading.Reader` reads the records of a batch from Grain's iterator, and
`core.feeding.stream_engine.StreamEngine` feeds the records to the graph through
``fn.external_source``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain
import jax
import numpy as np
from grain._src.python.dataset.transformations.slice import SliceMapDataset
from grain.experimental import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ...core.arguments import (
    checked_arguments,
    knows_its_names,
    own_arguments,
    step_number,
    whole_number,
)
from ...core.arrays.placement import DataShard
from ...core.config import BatchMapArgument, IteratorConfig, OnError
from ...core.errors import StateError
from ...core.feeding.record_reader import Numbers, RecordPosition, RecordReader, Restored
from ...core.feeding.stream_engine import StreamEngine, check_record_graph
from ...core.feeding.stream_part import StreamPart
from ...core.messages import replacements
from ...core.messages.printable import printable_repr
from ...core.pipeline.batch import choose_placement
from ...core.pipeline.pipeline_factory import default_device_id, shard_pipelines
from ...core.random.seeds import ShardSeed
from ...core.state import differences
from ...core.state.agreement import Values
from ...core.state.envelope import Form, brief, damaged
from ...core.state.fingerprint import Fingerprint
from .lengths import number_of_records, parents_of
from .reading import READ_OPTIONS, ParentPosition, Reader, RecordLists
from .record_iterator import Passes, RecordIterator

__all__ = ["DALITransform"]

_INTERLEAVED = "iterators_in_use_indices"  # in Grain's states; lists an item per iterator
_SEVERAL_EPOCHS = "Add .repeat(EPOCHS) before DALITransform, and iterate once"
_DEEPEST = 100  # maximum depth of a nested state; each transformation of Grain adds a level


def check_policy(
    drop_remainder: bool, pad: str | None, sharding: Any, on_error: str = "raise"
) -> None:
    """Raises ValueError if arguments about the last batch exclude each other; see `core.order`.

    Also if ``on_error`` requires ``pad``.
    """
    if pad not in (None, "mask"):
        raise ValueError(f"pad must be None or 'mask', not {pad!r}")
    if pad and drop_remainder:
        raise ValueError("pad='mask' with drop_remainder=True: there is nothing to pad. Omit one")
    if sharding is not None and not pad and not drop_remainder:
        raise ValueError(
            "the last batch may be smaller, which a sharding does not allow. Pass "
            "drop_remainder=True to drop it, or pad='mask' to pad it and mask the padding"
        )
    if on_error == "mask" and not pad:
        raise ValueError(
            "on_error='mask' requires a mask, which marks bad records: pass pad='mask'"
        )


def element_spec(batch: Mapping[str, Any], varies: bool) -> dict[str, Any]:
    """Returns Grain's ShapeDtypeStruct of each array of a batch, by name.

    Args:
        batch: The arrays of a batch, or their specs.
        varies: Whether the last batch may be smaller, so that dimension 0 is None.
    """
    spec: dict[str, Any] = jax.tree.map(
        lambda array: ShapeDtypeStruct(
            (None, *array.shape[1:]) if varies else array.shape, array.dtype
        ),
        dict(batch),
    )
    return spec


def choose_device(call: dict[str, Any]) -> bool:
    """Adds the default ``device_id`` to a call's arguments; returns whether the call uses a GPU.

    Raises:
        RuntimeError: If the call uses a GPU in one of Grain's worker processes.
    """
    from grain._src.python.dataset.transformations import process_prefetch

    # Private in Grain. Without this function, the worker fails with a CUDA error instead.
    in_worker = getattr(process_prefetch, "is_in_worker_process", lambda: False)
    on_gpu = call.setdefault("device_id", default_device_id()) is not None
    if on_gpu and in_worker():
        raise RuntimeError(
            "a GPU pipeline in a worker process of Grain, which can't return its arrays. Decode "
            "after the workers, by ds.mp_prefetch(...).pipe(DALITransform(...)) over the encoded "
            "records or by DALIDataLoader, or pass device_id=None for a CPU pipeline"
        )
    return on_gpu


def check_options(value: object, kind: type, name: str) -> None:
    """Raises TypeError unless an argument is None or an instance of a class of Grain."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} of Grain, or None, not {value!r}")


_PIPE = "it batches the records of a dataset. Write ds.pipe(DALITransform(...))"


class DALITransform(grain.transforms.Map):  # a Map, so that ds.map() and ds.apply() reach map()
    """Decodes and augments the records of a Grain dataset: ``ds.pipe(DALITransform(...))``.

    Grain reads, shards, shuffles and checkpoints the records; DALI batches and processes the
    records ahead of time. The dataset is a MapDataset, whose records are read in whole batches, or
    an IterDataset. Each element of an IterDataset is a record, or the list or `PackedRecords` of a
    batch's records, as from ``.batch(B, batch_fn=pack_records)`` before ``mp_prefetch``. Records
    must not change later, e.g. because the dataset reuses an array for the next record.

    Elements of the result are dicts of arrays [batch, ...]: NumPy arrays of CPU pipelines,
    jax.Arrays of GPU pipelines. Values that bypass the graph are NumPy arrays, with dtype object
    for text and bytes. With ``sharding``, everything but text is a global jax.Array. The state
    consists of the parent's state after the last delivered batch and of the random state, which has
    less than 300 bytes for a graph with ten random operators.

    Args:
        pipeline_fn: The graph function, undecorated. If the records are dicts, each parameter
            receives the value of the same key; the values of other keys bypass the graph, and are
            batched. A record that is bytes, text, a number or an array is passed as the only
            argument. Text is passed as UTF-8 (see `dalijax.fn.read_file` for paths). A parameter
            ``draw`` receives random numbers that depend on the record's index in the stream (see
            `dalijax.Draw` and `dalijax.augment`). These numbers need no state, and do not depend on
            the number of shards.
            Without ``sharding``, processes that read parts of a dataset each need their own
            ``seed``.
        batch_size: Number of records in a batch. With ``sharding``, this is the global batch, of
            which each process feeds the rows that its devices hold.
        output_map: A name for each output of the graph; by default the keys of the dict that it
            returns.
        drop_remainder: Whether to drop an incomplete last batch.
        pad: "mask" pads the last batch with its last record, and adds an array "mask" to batches,
            bool [batch], which is False for padding.
        prefetch: Number of batches that DALI prepares ahead.
        sharding: A jax.sharding.Sharding, or a dict of these by output, for global arrays. A
            PartitionSpec uses the mesh of `jax.set_mesh`. With several processes, each must read a
            slice of the records, by ``ds[jax.process_index()::jax.process_count()]`` before the
            transform. All processes deliver equally many batches: with ``pad``, processes with
            fewer records add batches of padding; with ``drop_remainder``, all stop when the first
            process has no further batch.
        own_records: Whether each process has its own records without such a slice, e.g. its own
            files; otherwise, a dataset without a slice is rejected.
        on_error: Handling of a record that DALI can't decode. "raise": raises a RuntimeError that
            names the record, and the next call returns the next batch. "skip": skips the batch.
            "mask" (with ``pad="mask"``): replaces the record by a neighboring record, and sets the
            mask of its row to False; raises if neither the batch nor the eight following records
            have a record that can be decoded.
        element_spec: An example record of arrays, or of objects with ``shape`` and ``dtype``, for
            streams whose first record does not show the dtypes. A ``dalijax.sources.Field`` also
            declares a layout.
        read_options: grain.ReadOptions for a MapDataset, whose buffer size counts batches. By
            default, two threads read four batches ahead.
        allow_changes: Names of differences that a restore ignores, such as
            ["operators.resize.size"] for progressive resizing; see `dalijax.data_iterator`.
        check_processes: Whether processes that form global batches compare their iterators before
            the first batch; see `dalijax.data_iterator`.
        batch_map: A function of (batch, key), or a list of functions, applied to each placed batch;
            see `dalijax.data_iterator`. The key is derived from epoch 0 and the batch's index
            in the stream.
        writable: Whether NumPy arrays are writable copies. Otherwise, DALI's arrays are read-only
            views of its buffers, which outputs may share.
        **call: Arguments of the graph function and of ``nvidia.dali.pipeline_def``. ``seed``
            defaults to a seed derived from the dataset's (``ds.seed(...)``), or to 0.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
    """

    @knows_its_names
    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        *,
        batch_size: int,
        output_map: Sequence[str] = (),
        drop_remainder: bool = False,
        pad: str | None = None,
        prefetch: int = 2,
        sharding: Any = None,
        own_records: bool = False,
        on_error: OnError = "raise",
        element_spec: Any = None,
        read_options: grain.ReadOptions | None = None,
        allow_changes: Sequence[str] = (),
        check_processes: bool | float = True,
        batch_map: BatchMapArgument = None,
        writable: bool = False,
        **call: Any,
    ):
        check_policy(drop_remainder, pad, sharding, on_error)
        check_options(read_options, grain.ReadOptions, "read_options")
        expected = "a whole number of {}, 1 or more"
        batch_size = whole_number("batch_size", batch_size, expected.format("records"), 1)
        prefetch = whole_number("prefetch", prefetch, expected.format("batches"), 1)
        self.batch_size = batch_size
        self.drop_remainder = drop_remainder
        self.pad = pad
        self.read_options = read_options
        self.writable = writable
        self._fn = pipeline_fn
        self._spec = element_spec
        self._own_records = own_records
        # Validates the arguments now instead of at the first batch.
        self._config = IteratorConfig(
            output_map,
            mask="mask" if pad else None,
            sharding=sharding,
            on_error=on_error,
            allow_changes=allow_changes,
            check_processes=check_processes,
            batch_map=batch_map,
        )
        check_record_graph(pipeline_fn)
        self._config.check_skip()
        call = {"prefetch_queue_depth": prefetch, **call}
        self._call = checked_arguments(pipeline_fn, call, own_arguments(DALITransform))

    def __call__(self, ds: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
        """Returns the dataset of the batches of a dataset's records.

        Raises:
            TypeError: If ``ds`` is not a dataset of Grain.
            ValueError: If ``.batch()`` has already stacked the records, or if each of several
                processes would read all records.
        """
        if not isinstance(ds, (grain.IterDataset, grain.MapDataset)):
            raise TypeError(
                f"a DALITransform requires a dataset, not {printable_repr(ds)}: {_PIPE}"
            )
        if _is_stacked(ds):
            raise ValueError(
                f"{ds} stacks records before the DALITransform, which batches them itself. Omit "
                ".batch(), because batch_size= does it. For samples of several records, such as "
                "clips, pass a batch_fn= to .batch()"
            )
        if not self._is_placed():
            return _UnplacedDataset(ds, self)
        if self._config.over_processes and not self._own_records and not is_sliced(ds):
            raise ValueError(
                f"the sharding is over {jax.process_count()} processes, but {ds} is not sliced: "
                "each process would read all records, so that batches repeat them. Write "
                "ds[jax.process_index()::jax.process_count()] before the transform, or pass "
                "own_records=True if each process has other records"
            )
        rows, records = self._local_rows(), number_of_records(ds)
        batches = None
        if records is not None:
            batches = records // rows if self.drop_remainder else -(-records // rows)
        described = self._described(ds)
        if isinstance(ds, grain.IterDataset):
            return _DecodedDataset(ds, self, False, described, batches)
        lists = RecordLists(ds, rows).to_iter_dataset(self.read_options or READ_OPTIONS)
        return _DecodedDataset(lists, self, True, described, batches)

    def _is_placed(self) -> bool:
        """Returns whether the mesh is known: there is no PartitionSpec, or also a NamedSharding."""
        shardings = self._config.shardings.values()
        specs = [isinstance(value, PartitionSpec) for value in shardings]
        return not any(specs) or any(isinstance(value, NamedSharding) for value in shardings)

    def _placed(self) -> DALITransform:
        """Returns a copy in which PartitionSpecs are shardings over the current mesh.

        Raises:
            ValueError: If there is no current mesh.
        """
        return self if self._is_placed() else self._with(self._config.placed())

    def _for_host(self, index: int, count: int) -> DALITransform:
        """Returns a copy for host ``index`` of ``count``, which share global batches.

        Each host produces its own rows, without a sharding.
        """
        return self._with(dataclasses.replace(self._config, hosts=(index, count)))

    def _with(self, config: IteratorConfig) -> DALITransform:
        transform = copy.copy(self)
        transform._config = config
        return transform

    def _described(self, ds: grain.MapDataset | grain.IterDataset) -> Values:
        """Returns the values that must be equal in all processes, by their names in errors."""
        return {
            "function": getattr(self._fn, "__name__", "the graph"),
            "outputs": ", ".join(self._config.output_map),
            "global batch": self.batch_size,
            "last batch": self._last_batch,
            "on error": self._config.on_error,
            "records": type(ds).__name__ if self._own_records else _lineage(ds),
        }

    def map(self, element: Any) -> Any:
        """Rejects ``ds.map(DALITransform(...))``, which would transform single records.

        Raises:
            TypeError: Always; the message explains how to apply the transform.
        """
        raise TypeError(
            f"a DALITransform can't transform single records: {_PIPE}, or use DALIDataLoader in "
            "place of grain.DataLoader"
        )

    @property
    def _over_processes(self) -> bool:
        """Whether batches are placed over devices of several processes."""
        return self._config.over_processes

    def _shards(self) -> Sequence[DataShard]:
        """Returns the data shards of this process; empty without a sharding."""
        return () if self._config.sharding is None else choose_placement(self._config).shards

    def _local_rows(self) -> int:
        """Returns how many records of each batch this process feeds to its pipelines."""
        shard_arguments = shard_pipelines(self._shards(), self.batch_size, self._call)
        return sum(arguments["batch_size"] for arguments in shard_arguments)

    def _rows(self) -> NDArray[np.int64]:
        """Returns the indices of the rows of a global batch that this process feeds.

        The indices are int64 [rows], in the order of the pipelines.
        """
        shards = self._shards()
        if not shards:
            return np.arange(self.batch_size)
        size = shards[0].batch_size(self.batch_size)
        return np.concatenate([shard.shard_id * size + np.arange(size) for shard in shards])

    def _seed(self, default: int) -> int:
        """Returns the argument ``seed``; if it is None, ``default`` (the dataset's seed)."""
        seed = self._call.get("seed")
        return default if seed is None else int(seed)

    def _takes_seed(self, default: int) -> bool:
        """Returns whether a restored state's seed is used: neither user nor dataset gave a seed."""
        left_out = isinstance(default, ShardSeed) and default.is_default
        return left_out and self._call.get("seed") is None

    @property
    def _last_batch(self) -> str:
        """Handling of an incomplete last batch: "drop", "mask" or "keep"."""
        return "drop" if self.drop_remainder else self.pad or "keep"

    @property
    def _outputs(self) -> list[str]:
        """Names of the outputs of the graph."""
        return list(self._config.output_map)

    def _engine(
        self,
        reader: RecordReader,
        seed: int,
        numbers: Numbers | None,
        draw_seed: int | None = None,
        by_step: bool = False,
        part: StreamPart | None = None,
    ) -> StreamEngine:
        """Returns a new engine, which batches and decodes a reader's records.

        Args:
            reader: The reader.
            seed: The dataset's seed.
            numbers, by_step: As for `StreamEngine`.
            draw_seed: The seed of ``draw``; None for the seed of the graph.
            part: As for `StreamEngine`; the seed is added to its values.

        Raises:
            RuntimeError: If a GPU pipeline would run in a worker process of Grain.
        """
        call, config = {**self._call, "seed": self._seed(seed)}, self._config
        if config.sharding is None:
            config = dataclasses.replace(config, as_numpy=not choose_device(call))
        shard_arguments = shard_pipelines(self._shards(), self.batch_size, call)
        for name in shard_arguments[0]:
            call.pop(name, None)
        if part is not None:
            common_seed = int(self._seed(seed)) if draw_seed is None else draw_seed
            part = dataclasses.replace(part, values={**part.values, "seed": common_seed})
        return StreamEngine(
            self._fn,
            config,
            call,
            shard_arguments,
            shard_arguments[0]["batch_size"],
            reader,
            numbers,
            int(self._seed(seed)) if draw_seed is None else draw_seed,
            self._spec,
            by_step,
            part,
        )


def _is_stacked(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether ``.batch()`` without ``batch_fn`` has stacked the elements of a dataset."""
    from grain._src.python.dataset.transformations import batch

    # Private in Grain. If the classes are missing, stacked batches are not detected.
    kinds = tuple(getattr(batch, name, ()) for name in ("BatchMapDataset", "BatchIterDataset"))
    function = getattr(ds, "_batch_fn", None)
    stacking = function is batch.make_batch or "MakeBatch" in type(function).__name__
    return isinstance(ds, kinds) and stacking


def is_sliced(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a dataset probably reads only records that no other process reads.

    It does if all of its records are from slices that differ between processes. Such a slice has at
    most one process's share of the records, and starts at the first record only in process 0. Other
    slices, e.g. of a part reserved for evaluation, are probably equal in all processes.
    """
    parents = parents_of(ds)
    if isinstance(ds, SliceMapDataset):
        share = -(-len(parents[0]) // jax.process_count())
        if len(ds) <= share and (ds._start > 0 or jax.process_index() == 0):  # private in Grain
            return True
    return bool(parents) and all(map(is_sliced, parents))


def _lineage(ds: Any) -> str:
    """Returns the chain of a dataset's transformations as text, to compare between processes.

    The text includes seeds, and the number of records before the first slice.
    """
    parents = parents_of(ds)
    text = type(ds).__name__.removesuffix("Dataset")
    seeds = [getattr(ds, name, None) for name in ("_seed", "_seed_rng_seed")]  # private in Grain
    text += "".join(f" seed {seed}" for seed in seeds if isinstance(seed, (int, np.integer)))
    before = " + ".join(dict.fromkeys(map(_lineage, parents)))
    if isinstance(ds, SliceMapDataset) and "Slice" not in before:  # lengths of slices may differ
        text += f" of {len(parents[0])} records"
    return f"{before} > {text}" if before else text


def _seed_of(ds: Any) -> int | None:
    """Returns a seed derived from the ``seed()`` calls of a dataset; None if it has no calls.

    Grain's own default seeds are not used, because they also depend on the number of
    transformations after ``seed()``, and ``mp_prefetch`` loses them.
    """
    seeds, nodes = dict[int, None](), [ds]  # distinct seeds: workers read copies of one dataset
    while nodes:
        node = nodes.pop(0)
        seed = getattr(node, "_seed_rng_seed", None)  # private in Grain
        if seed is None:
            nodes += parents_of(node)
        else:
            seeds[int(seed)] = None
    if not seeds:
        return None
    return int(np.random.SeedSequence([*seeds]).generate_state(1)[0])


class BatchDataset(grain.IterDataset):
    """Base class of datasets of batches, whose errors name methods to call before the batching."""

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # of Grain
                raise AttributeError(name)
            owner = f"{type(self).__name__!r} object"
            raise replacements.no_attribute(owner, name, dir(type(self)), replacements.BATCHES)


class _UnplacedDataset(BatchDataset):
    """A dataset of batches whose PartitionSpecs use the mesh that is current at ``iter()``."""

    def __init__(self, parent: grain.MapDataset | grain.IterDataset, transform: DALITransform):
        super().__init__(parent)
        self._transform = transform
        self._passes = Passes(_SEVERAL_EPOCHS)

    def _placed(self) -> grain.IterDataset:
        dataset = self._transform._placed()(self._parents[0])
        dataset._passes = self._passes
        return dataset

    def __iter__(self) -> grain.DatasetIterator:
        return self._placed().__iter__()

    @property
    def _element_spec(self) -> Any:
        return self._placed()._element_spec

    def __str__(self) -> str:
        return f"DALITransform(batch_size={self._transform.batch_size})"


class _DecodedDataset(BatchDataset):
    """The dataset of the batches of a `DALITransform` whose shardings have a mesh.

    Args:
        parent: The dataset of records, or of lists of records.
        transform: The transform.
        lists: Whether ``parent`` is a dataset of `RecordLists`.
        values: Values that must be equal in all processes.
        batches: The number of batches of this process; None if it is unknown.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        transform: DALITransform,
        lists: bool,
        values: Values,
        batches: int | None,
    ):
        super().__init__(parent)
        self._transform = transform
        self._lists = lists
        self._part = StreamPart(values, batches, pads=bool(transform.pad))
        self._passes = Passes(_SEVERAL_EPOCHS)

    def __iter__(self) -> DecodedIterator:
        return self._iterator(self._part)

    def _iterator(self, part: StreamPart | None) -> DecodedIterator:
        return DecodedIterator(
            self._parent.__iter__(),
            self._transform,
            ShardSeed.of(_seed_of(self), 0),
            self._lists,
            part,
            self._passes,
        )

    @property
    def _element_spec(self) -> Any:
        iterator = self._iterator(None)  # None: other processes may not create this iterator
        batch = next(iterator, None)
        iterator.close()
        if batch is None:
            raise ValueError("the dataset has no record from which to infer element_spec")
        return element_spec(batch, not (self._transform.drop_remainder or self._transform.pad))

    def __str__(self) -> str:
        return f"DALITransform(batch_size={self._transform.batch_size})"


def _is_like(saved: Any, current: Any, depth: int = 0) -> bool:
    """Returns whether a saved state of a parent has values of the same types as its current state.

    Keys and items that only one of the states has are not compared, because the number of iterators
    may differ; the parent checks them.
    """
    if depth > _DEEPEST or (depth == 0 and type(saved) is not type(current)):
        return False
    if isinstance(saved, dict) and isinstance(current, dict):
        return all(_is_like(saved[k], current[k], depth + 1) for k in {*saved} & {*current})
    if isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)):
        return all(_is_like(a, b, depth + 1) for a, b in zip(saved, current))
    if isinstance(current, (bool, int, float, str)):
        lower = type(saved) is int and isinstance(current, int) and saved < 0 <= current
        return type(saved) is type(current) and not lower
    return True


def _interleaved(saved: Any, current: Any) -> tuple[int, int] | None:
    """Returns how many iterators Grain interleaves in a saved and in the current state.

    Returns None if the two numbers are equal. Grain does not compare the numbers, and would
    continue with different records. The states of the interleaved iterators are not compared,
    because they may belong to any datasets.
    """
    if isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)):
        return next(filter(None, map(_interleaved, saved, current)), None)
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        return None
    indices = [state.get(_INTERLEAVED, ()) for state in (saved, current)]
    before, after = (len(entry) if isinstance(entry, (list, tuple)) else 0 for entry in indices)
    if before or after:
        return None if before == after else (before, after)
    return next(
        filter(None, (_interleaved(saved[k], current[k]) for k in saved if k in current)), None
    )


FORM = Form(
    kind="transform",
    owner="an iterator over a DALITransform",
    # "failed" is a text instead of a list, so that all states have the same tree.
    shown={"parent": object, "step": int, "records": int, "skip": int, "failed": str},
    packed={
        "rows": int,
        "last_batch": str,
        "reads": str,
        "seed": range(-(1 << 63), 1 << 64),
        "outputs": [str],
        "operators": [str],
        "random": str,
    },
)


class DecodedIterator(RecordIterator):
    """Iterates over the batches of a `DALITransform`."""

    def __init__(
        self,
        parent: grain.DatasetIterator,
        transform: DALITransform,
        seed: int,
        lists: bool,
        part: StreamPart | None,
        passes: Passes,
    ):
        super().__init__(parent)
        self._passes = passes
        self._writable = transform.writable
        self._rows = transform._local_rows()
        self._transform = transform
        # A MapDataset's position counts lists, an IterDataset's records.
        self._reads = "lists" if lists else "records"
        self._seed = transform._seed(seed)
        self._takes_seed = transform._takes_seed(seed)
        pads = bool(transform.pad)
        longer = transform._over_processes and pads
        self._reader = Reader(parent, self._rows, lists, transform.drop_remainder, pads, longer)
        if part is not None and pads:
            part = dataclasses.replace(part, padding=self._reader.padding)
        numbers = Numbers(transform._rows(), transform.batch_size)
        self._engine = transform._engine(self._reader, seed, numbers, part=part)

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the last delivered batch, as a dict of JSON values.

        The state consists of the parent's state and the random state.
        """
        snapshot = self._engine.snapshot()
        position = snapshot.after or self._reader.start
        return FORM.encode(
            **{**self._fingerprint(snapshot), "seed": self._seed_at(snapshot)},
            operators=list(self._engine.operators(snapshot)),
            parent=copy.deepcopy(position.parent),
            step=snapshot.step,
            records=position.records,
            skip=position.skip,
            failed=" ".join(map(str, position.failed)),
            random=self._engine.random_state(snapshot),
        )

    def _seed_at(self, position: RecordPosition) -> int:
        """Returns the seed at a position: that of the restored state, or the configured seed."""
        seed = position.restored.seed
        return self._seed if seed is None else seed

    def _fingerprint(self, position: RecordPosition) -> Fingerprint:
        return {
            "rows": self._rows,
            "last_batch": self._transform._last_batch,
            "reads": self._reads,
            "seed": str(self._seed_at(position)),
            "outputs": self._transform._outputs,
        }

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Restores the position that a state describes.

        Raises:
            ValueError: If ``state`` is not a state of this kind, if another transform saved it, or
                if the parent iterator rejects its part; the position is unchanged. If no record was
                read before, the graph is unknown, because its inputs are inferred from the
                first record. If the graph differs or ``random`` is damaged, the following
                ``next()`` then raises instead.
        """
        with self._engine.lock:
            self._restore(FORM.decode(state))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restores the values of a state, by name; see `set_state`."""
        snapshot = self._engine.snapshot()
        saved, current, seed = state["seed"], self._fingerprint(snapshot), snapshot.restored.seed
        if saved != self._seed_at(snapshot) and self._takes_seed and 0 <= saved < 1 << 63:
            seed, current["seed"] = saved, str(saved)
        restored = Restored(state["random"], tuple(state["operators"]), seed)
        self._engine.check(state, current, restored)
        parent, after = state["parent"], self._position(state)

        def move() -> None:
            try:
                self._reader.go_to(after)
            except Exception as error:
                raise StateError(
                    f"the parent rejects its part of the state, {brief(parent)}: {error!r}"
                ) from error

        self._engine.restore(RecordPosition(state["step"], after, None, restored), move)
        self._starts = False

    def _position(self, state: Mapping[str, Any]) -> ParentPosition:
        """Returns the position in the parent that a state describes.

        Raises:
            StateError: If no iterator over these batches can reach the position.
        """
        parent, start = state["parent"], self._reader.start.parent
        if counts := _interleaved(parent, start):
            difference = "iterators that Grain interleaves (num_workers of mp_prefetch): {} -> {}"
            raise differences.different_data_error([difference.format(*counts)])
        if not _is_like(parent, start):
            raise StateError(
                f"parent: {brief(parent)} -> like {brief(start)} (saved -> now): it is the state "
                "of another dataset. Restore it with the original dataset"
            )
        records, skip = state["records"], state["skip"]
        failed = state["failed"].split()
        if not all(number.isdecimal() and len(number) < 17 for number in failed):
            raise damaged(f"failed is {brief(state['failed'])}, not numbers of records")
        return ParentPosition(copy.deepcopy(parent), records, skip, tuple(map(int, failed)))

    def seek_step(self, step: int) -> None:
        """Raises ValueError unless ``step`` is the current step.

        The record at which batch ``step`` begins is unknown, because earlier transformations of the
        dataset may drop or repeat records. Use a `DALIDataLoader`, which knows the record from its
        sampler.
        """
        step = step_number(step)
        if step != self._engine.snapshot().step:
            raise ValueError(
                f"batch {step} can't be reached without its state, which has the random state and "
                "the parent's state. Use get_state() and set_state(), or a DALIDataLoader or a "
                "source (dalijax.sources), which move to any step"
            )

    _set_next_index = seek_step

    def __str__(self) -> str:
        return "DALITransformIterator()"
