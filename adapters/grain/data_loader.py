"""`DALIDataLoader`: Grain's sampler and data source with DALI as the last stage."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ...core.arguments import (
    checked_arguments,
    knows_its_names,
    own_arguments,
    step_number,
    whole_number,
)
from ...core.arrays.placement import over_current_mesh
from ...core.errors import StateError
from ...core.feeding.record_reader import Numbers, RecordBatch, RecordPosition, Restored
from ...core.messages.printable import printable_repr
from ...core.random.seeds import DEFAULT_SEED, shard_seed
from ...core.state.envelope import COUNT, Form, digest
from ...core.state.fingerprint import Fingerprint
from .batch_operation import DALIBatch
from .loader_steps import LoaderConfig, Steps, row_name
from .packing import unpacked
from .reading import READ_OPTIONS
from .record_iterator import Passes, RecordIterator
from .transform import DALITransform, check_options

__all__ = ["DALIDataLoader"]

FORM = Form(
    kind="loader",
    owner="an iterator over a DALIDataLoader",
    shown={
        "step": int,
        "shards": range(1, len(COUNT)),
        "batch_size": int,
        "sampler": str,
        "data_source": str,
        "seed": range(-(1 << 63), 1 << 63),
    },
    packed={"random": range(-1, 2), "outputs": [str], "operators": [str]},
)


class DALIDataLoader:
    """A `grain.DataLoader` with DALI as its last stage, and global batches over a mesh.

    The state is the global step: a run saved on two processes with two devices can resume on one
    process with four, with the same records in the same order. Pixels are also equal if random
    numbers are drawn for each record (by ``draw``, which uses the record's index in the sampler's
    order, or by `RandomInputs`) or not at all. DALI's random operators depend on (seed, global
    step, shard): a graph with such operators resumes bit for bit on the same number of shards, and
    is rejected on a different number unless ``other_randomness`` is set.

    Args:
        data_source: As for grain.DataLoader; a random access data source.
        sampler: As for grain.DataLoader, but without shards.
        operations: grain.transforms.Map and RandomMap, applied to each record.
        pipeline_fn, output_map: The graph; see `DALITransform`.
        batch_size: The global batch size, over all processes.
        sharding: Placement of batches over devices; each process reads and decodes the rows that
            its devices hold.
        shard_options: The share of each global batch that this process reads, if there is no
            ``sharding``.
        drop_remainder: Whether to drop an incomplete last batch.
        pad: "mask" pads the last batch, and adds an array "mask" to batches.
        worker_count: Number of worker processes that read records, and return the records of a
            batch in shared memory (see `pack_records`). With 0, threads read the records.
        worker_buffer_size: Number of batches that each worker reads ahead.
        read_options: grain.ReadOptions, whose buffer size counts batches. By default, two threads
            read four batches ahead.
        other_randomness: Whether a state may be restored on a different number of shards, although
            DALI's random operators then draw different numbers.
        prefetch, on_error, element_spec, allow_changes, batch_map, writable, **call: As for
            `DALITransform`.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
    """

    @knows_its_names
    def __init__(
        self,
        data_source: Any,
        sampler: Any,
        operations: Sequence[Any] = (),
        *,
        pipeline_fn: Callable[..., Any],
        output_map: Sequence[str] = (),
        batch_size: int,
        sharding: Any = None,
        shard_options: grain.sharding.ShardOptions | None = None,
        drop_remainder: bool = False,
        pad: str | None = None,
        worker_count: int = 0,
        worker_buffer_size: int = 1,
        read_options: grain.ReadOptions | None = None,
        other_randomness: bool = False,
        **call: Any,
    ):
        _check_data_source(data_source)
        _check_sampler(sampler)
        _check_operations(operations)
        check_options(read_options, grain.ReadOptions, "read_options")
        check_options(shard_options, grain.sharding.ShardOptions, "shard_options")
        expected = "a whole number of {}, {} or more"
        batch_size = whole_number("batch_size", batch_size, expected.format("records", 1), 1)
        worker_count = whole_number("worker_count", worker_count, expected.format("workers", 0), 0)
        call = checked_arguments(pipeline_fn, call, _OWN_ARGUMENTS)
        options = shard_options or grain.sharding.NoSharding()
        shard, shards = options.shard_index, options.shard_count
        if shards > 1:
            if sharding is not None:
                raise ValueError(
                    "shard_options together with sharding, which determines the shards. Omit one"
                )
            if batch_size % shards:
                raise ValueError(
                    f"the {shards} shards don't divide batch_size={batch_size}. Choose a multiple"
                )
            if not (drop_remainder or pad):
                raise ValueError(
                    "the last batch may have no record for a shard. Pass drop_remainder=True or "
                    "pad='mask'"
                )
            if call.get("on_error") == "skip":
                raise ValueError(
                    "on_error='skip' with several shards: a shard that skips a batch would be a "
                    "batch ahead of the others. Use 'mask'"
                )
        config = LoaderConfig(
            data_source,
            sampler,
            tuple(operations),
            batch_size=batch_size,
            shard_options=options,
            drop_remainder=drop_remainder,
            pad=bool(pad),
            workers=grain.MultiprocessingOptions(worker_count, worker_buffer_size),
            read_options=read_options or READ_OPTIONS,
            skips=call.get("on_error") == "skip",
            seed=operator.index(call.get("seed") or DEFAULT_SEED),
            takes_seed=call.get("seed") is None,
            other_randomness=other_randomness,
            described={
                "outputs": list(output_map),
                "batch_size": batch_size,
                "sampler": _short_repr(sampler),
                "data_source": _short_repr(data_source),
            },
        )
        call["seed"] = shard_seed(config.seed, shard)  # shards draw different numbers
        self._transform = DALITransform(
            pipeline_fn,
            batch_size=batch_size // shards,
            output_map=output_map,
            drop_remainder=drop_remainder,
            pad=pad,
            sharding=over_current_mesh(sharding),
            **call,
        )._for_host(shard, shards)
        rows = shard * (batch_size // shards) + self._transform._rows()
        self._steps = Steps(config, rows)
        self._passes = Passes("Pass num_epochs=EPOCHS to the sampler, and iterate once")

    def __iter__(self) -> DALIDataLoaderIterator:
        return DALIDataLoaderIterator(self._steps, self._transform, self._passes)

    @property
    def num_steps(self) -> int:
        """Number of global batches, including batches that ``on_error="skip"`` skips."""
        return len(self._steps)


_OWN_ARGUMENTS = {
    "those of DALIDataLoader": frozenset().union(
        *own_arguments(DALIDataLoader).values(), *own_arguments(DALITransform).values()
    )
}


def _check_data_source(data_source: Any) -> None:
    if hasattr(data_source, "__getitem__") or hasattr(data_source, "__getitems__"):
        return
    cure = "Pass a list of records, or an object with __len__ and __getitem__"
    if hasattr(data_source, "read_threads"):
        cure = "Pass it as source= to DALIIterDataset or data_iterator, which define its order"
    raise TypeError(f"data_source has no __getitem__: {printable_repr(data_source)}. {cure}")


def _check_sampler(sampler: Any) -> None:
    is_indexed = hasattr(sampler, "__getitem__")
    if is_indexed and hasattr(sampler, "__len__") and not len(sampler):
        return
    if not is_indexed or not hasattr(sampler[0], "record_key"):
        raise TypeError(
            f"sampler must be a sampler of Grain, not {printable_repr(sampler)}. Pass "
            "grain.samplers.IndexSampler(len(data_source), shuffle=True, seed=0, num_epochs=1)"
        )
    # Private in Grain: without it, a sharded sampler is not detected.
    options = getattr(sampler, "_shard_options", None)
    if isinstance(options, grain.sharding.ShardOptions) and options.shard_count > 1:
        raise ValueError(
            f"the sampler is sharded ({options}). Omit its shard_options: the loader's sharding or "
            "shard_options determine what each process reads"
        )


def _check_operations(operations: Sequence[Any]) -> None:
    if not isinstance(operations, Sequence):
        raise TypeError(f"operations must be a list, not {operations!r}. Pass [{operations!r}]")
    for operation in operations:
        is_map = isinstance(operation, (grain.transforms.Map, grain.transforms.RandomMap))
        if is_map and not isinstance(operation, DALITransform):
            continue
        if isinstance(operation, (DALITransform, DALIBatch)):
            cure = "The loader does this itself: pass the graph function as pipeline_fn="
        elif isinstance(operation, grain.transforms.Batch):
            cure = "Omit it: batch_size= and drop_remainder= of the loader replace it"
        elif isinstance(operation, type):
            cure = f"Pass an instance, {operation.__name__}()"
        elif callable(operation):
            cure = "Define a subclass of grain.transforms.Map that calls it in its method map"
        else:
            cure = (
                "Operations that drop or add records can't be resumed by the step. Use "
                "ds.pipe(DALITransform(...)) for them"
            )
        raise ValueError(
            f"operation {operation!r} is not a grain.transforms.Map or RandomMap of single "
            f"records. {cure}"
        )


def _short_repr(value: object) -> str:
    """Returns the repr of a value without memory addresses, which differ between processes.

    If the repr has more than 200 characters, the result is the first 180 and a digest.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 200 else f"{text[:180]}... #{digest(text.encode())}"


class _StepReader:
    """Reads this process's records of each global batch; see `RecordReader`."""

    def __init__(self, steps: Steps):
        self._steps = steps
        self._step = 0
        self._records: grain.DatasetIterator | None = None

    def next_records(self) -> RecordBatch:
        """Returns this process's records of the next step."""
        if self._records is None:
            self._records = self._steps.read_from(self._step)
        try:
            element, valid = next(self._records)
            rows = unpacked(element)
        except StopIteration:
            raise
        except BaseException:  # restart Grain's reader, which would continue after the failed step
            self.stop()
            raise
        self._step += 1
        mask = None if all(valid[: len(rows)]) else np.array(valid)
        return RecordBatch(
            [row["record"] for row in rows], None, lambda row: row_name(rows[row]), mask
        )

    def seek(self, position: RecordPosition) -> None:
        """Moves to the step of a position."""
        self.stop()
        self._step = position.step

    def stop(self) -> None:
        """Stops reading ahead, until `next_records` is called again."""
        records, self._records = self._records, None
        if records is not None:
            records.close()


class DALIDataLoaderIterator(RecordIterator):
    """Iterates over the batches of a `DALIDataLoader`."""

    def __init__(self, steps: Steps, transform: DALITransform, passes: Passes):
        super().__init__()
        self._passes = passes
        self._writable = transform.writable
        self._steps = steps
        self._config = config = steps.config
        shards = transform._shards()
        self._num_shards = shards[0].num_shards if shards else config.shard_options.shard_count
        self._reader = _StepReader(steps)
        numbers = Numbers(steps.rows, config.batch_size)
        self._engine = transform._engine(
            self._reader, 0, numbers, config.seed, by_step=True, part=steps.part()
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the state: the global step and a description of the data, as JSON values.

        The states of all processes are equal.
        """
        position = self._engine.snapshot()
        # 1 if the graph has random operators of DALI, 0 if not, -1 if unknown. It counts as unknown
        # at step 0, so that the first state does not depend on whether the pipelines were built.
        random = -1 if position.restored.note is None else position.restored.note
        if position.step and self._engine.was_built(position):
            random = int(bool(self._engine.stateful()))
        fingerprint = self._fingerprint(position)
        return FORM.encode(
            **{**fingerprint, "seed": self._seed(position)},
            operators=list(self._engine.operators(position)),
            step=position.step,
            random=random,
            shards=self._num_shards,
        )

    def _seed(self, position: RecordPosition) -> int:
        seed = position.restored.draw_seed
        return self._config.seed if seed is None else seed

    def _fingerprint(self, position: RecordPosition) -> Fingerprint:
        return {**self._config.described, "seed": str(self._seed(position))}

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Restores a state that any number of processes have saved.

        Raises:
            ValueError: If ``state`` is not a state, is of different data, or if DALI's random
                operators draw different numbers on this number of shards and ``other_randomness``
                is False; the position is unchanged.
        """
        with self._engine.lock:
            self._restore(FORM.decode(state))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restores the values of a state, by name; see `set_state`."""
        seed = draw_seed = None
        saved, current = state["seed"], self._fingerprint(self._engine.snapshot())
        if saved != self._config.seed:
            draw_seed = saved
            seed = shard_seed(saved, self._config.shard_options.shard_index)
        if self._config.takes_seed and 0 <= saved < 1 << 63:
            current["seed"] = str(saved)
        restored = Restored("", tuple(state["operators"]), seed, draw_seed, state["random"])
        self._engine.check(state, current, restored)
        if state["step"] > len(self._steps):
            raise StateError(
                f"step: {state['step']} -> at most {len(self._steps)} (saved -> now). Create "
                "the loader with its original number of epochs, or start without the state"
            )
        before, after = state["shards"], self._num_shards
        if before != after and state["random"] == 1 and not self._config.other_randomness:
            raise StateError(
                f"shards: {before} -> {after} (saved -> now), for which the graph's random "
                "operators draw different numbers. Draw numbers for each record (by draw.uniform() "
                "etc., or RandomInputs), or pass other_randomness=True to restore it anyway"
            )
        self._move_to(state["step"], restored)

    def _move_to(self, step: int, restored: Restored) -> None:
        self._engine.restore(RecordPosition(step, restored=restored))
        self._starts = False
        self._reader.stop()  # the next read starts at the new position

    def seek_step(self, step: int) -> None:
        """Moves to a global step in constant time, for loops that save only the step.

        Args:
            step: Number of batches before the position.

        Raises:
            ValueError: If the loader has fewer batches; or with ``on_error="skip"``, for any step
                but 0, because the number of skipped batches is unknown.
        """
        step = step_number(step)
        if step > len(self._steps):
            raise ValueError(f"seek_step({step}): the loader has only {len(self._steps)} batches")
        if step and self._config.skips:
            raise ValueError(
                f"seek_step({step}) with on_error='skip': a step counts delivered batches, but the "
                "number of skipped batches before it is unknown. Restore a state by set_state(), "
                "or use on_error='mask', which delivers every batch"
            )
        with self._engine.lock:
            self._move_to(step, self._engine.snapshot().restored)

    _set_next_index = seek_step

    def close(self) -> None:
        """Frees the pipelines and readers; later calls of ``next()`` raise ValueError."""
        super().close()
        self._reader.stop()

    def __str__(self) -> str:
        return "DALIDataLoaderIterator()"
