"""`DALIDataLoader`: Grain's sampler and data source, DALI as the last stage, elastic states."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from ...core.config import whole_number
from ...core.errors import StateError
from ...core.feeding.record_queue import Numbers, RecordBatch, RecordPosition, Restored
from ...core.feeding.stream_part import StreamPart, describe
from ...core.placement import over_current_mesh
from ...core.random.seeds import DEFAULT_SEED, shard_seed
from ...core.state.envelope import brief, digest
from .loader_steps import Steps, pack_rows, row_name
from .packing import unpacked
from .reading import READ_OPTIONS
from .record_iterator import RecordIterator
from .transform import DALITransform

__all__ = ["DALIDataLoader"]


class DALIDataLoader:
    """`grain.DataLoader` with DALI as its last stage, and global batches over a mesh.

    The state is the global step: a run saved on two processes of two devices continues on one of
    four, with the same records in the same order. The pixels are the same, too, if random numbers
    are drawn for each record (``draw``, by its index in the sampler's order; or `RandomInputs`) or
    not at all. DALI's random operators follow from (seed, global step, shard): a graph with them
    continues bit by bit on the same number of shards, and is refused on another one without
    ``other_randomness``.

    Args:
        data_source: As for grain.DataLoader; a random access data source.
        sampler: As for grain.DataLoader, without shards of its own.
        operations: grain.transforms.Map and RandomMap, applied to each record.
        pipeline_fn, output_map: The graph; see `DALITransform`.
        batch_size: The global batch, over all processes.
        sharding: The placement of batches over devices; each process reads and decodes the rows
            that its devices hold.
        shard_options: Without ``sharding``, the part of each batch that this process gets.
        drop_remainder: True drops a last batch that is not whole.
        pad: "mask" fills up the last batch, and adds an array "mask" to batches.
        worker_count: Number of processes that read records, and hand them over like
            `pack_records`; 0 reads in threads.
        worker_buffer_size: Batches that each of them reads ahead.
        read_options: grain.ReadOptions, counted in batches; None for two threads that read four
            batches ahead.
        other_randomness: Whether a state may be restored on another number of shards although
            DALI's random operators then draw other numbers.
        prefetch, on_error, element_spec, allow_changes, batch_map, writable, **call: As for
            `DALITransform`.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
    """

    def __init__(
        self,
        data_source: Any,
        sampler: Any,
        operations: Sequence[Any] = (),
        *,
        pipeline_fn: Callable[..., Any],
        output_map: Sequence[str],
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
        _check_sampler(sampler)
        _check_operations(operations)
        options = shard_options or grain.sharding.NoSharding()
        parts, index = options.shard_count, options.shard_index
        if parts > 1:
            if sharding is not None:
                raise ValueError(
                    "shard_options with sharding, which says the shards: leave one out"
                )
            if batch_size % parts:
                raise ValueError(f"the {parts} shards don't divide batch_size={batch_size}")
            if not (drop_remainder or pad):
                raise ValueError(
                    "the last batch may have no record for a shard: pass drop_remainder=True, or "
                    "pad='mask'"
                )
            if call.get("on_error") == "skip":
                raise ValueError(
                    "on_error='skip' with several shards, one of which would then be a batch ahead "
                    "of the others: use 'mask'"
                )
        sharding = over_current_mesh(sharding)
        batch_size = operator.index(batch_size)
        local_batch_size = batch_size // parts
        self.skips = call.get("on_error") == "skip"
        self.takes_seed = call.get("seed") is None
        self.seed = operator.index(call.get("seed") or DEFAULT_SEED)
        call["seed"] = shard_seed(self.seed, index)  # shards draw different numbers
        self._transform = DALITransform(
            pipeline_fn,
            batch_size=local_batch_size,
            output_map=output_map,
            drop_remainder=drop_remainder,
            pad=pad,
            sharding=sharding,
            **call,
        ).of_host(index, parts)
        shards = self._transform.shards()
        self.num_shards = shards[0].num_shards if shards else parts
        self.shard = index
        self._rows = index * local_batch_size + self._transform.rows()
        self._batch_size = batch_size
        self._steps = Steps(
            data_source,
            sampler,
            tuple(operations),
            batch_size,
            self._rows.tolist(),
            drop_remainder,
            bool(pad),
        )
        self._workers = grain.MultiprocessingOptions(worker_count, worker_buffer_size)
        self._read = read_options or READ_OPTIONS
        self.other_randomness = other_randomness
        self.described = {
            "batch_size": batch_size,
            "sampler": _short(repr(sampler)),
            "data_source": _short(repr(data_source)),
        }

    def __iter__(self) -> DALIDataLoaderIterator:
        return DALIDataLoaderIterator(self, self._transform)

    @property
    def num_steps(self) -> int:
        """Number of global batches."""
        return len(self._steps)

    def part(self) -> StreamPart:
        """This process's part of the batches, of which all processes have the same number."""
        values = describe(
            loader="DALIDataLoader",
            sampler=self.described["sampler"],
            number_of_records=self._steps.records,
            batches=self.num_steps,
            global_batch=self._batch_size,
            pad=self._steps.pad,
        )
        return StreamPart(values, self.num_steps, agreed=True)

    def numbers(self) -> Numbers:
        """A function of a step to the indices in the sampler's order of this process's records."""
        rows, batch_size = self._rows, self._batch_size
        return lambda step: step * batch_size + rows

    def records(self, step: int) -> grain.DatasetIterator:
        """An iterator over the records of the batches, from a step on."""
        steps = self._steps[step:] if step else self._steps
        workers = self._workers.num_workers
        ds: Any = (steps.map(pack_rows) if workers else steps).to_iter_dataset(self._read)
        if workers:
            ds = ds.mp_prefetch(self._workers)
        iterator: grain.DatasetIterator = ds.__iter__()
        return iterator


def _check_sampler(sampler: Any) -> None:
    options = getattr(sampler, "_shard_options", None)
    if isinstance(options, grain.sharding.ShardOptions) and options.shard_count > 1:
        raise ValueError(
            f"the sampler is sharded ({options}): give it no shard_options, the loader's "
            "sharding or shard_options say what each process reads"
        )


def _check_operations(operations: Sequence[Any]) -> None:
    for operation in operations:
        if not isinstance(operation, (grain.transforms.Map, grain.transforms.RandomMap)):
            raise ValueError(
                f"operation {operation!r} is no grain.transforms.Map or RandomMap: what drops, "
                "adds or batches records can't be resumed by the step alone. Use "
                "ds.pipe(DALITransform(...)) for it"
            )


def _short(text: str) -> str:
    """A short repr, without addresses, which differ between processes."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 200 else f"{text[:180]}... #{digest(text.encode())}"


class _StepReader:
    """Reads this process's records of the global batches; see `RecordReader`."""

    def __init__(self, loader: DALIDataLoader):
        self._loader = loader
        self._step = 0
        self._records: grain.DatasetIterator | None = None

    def next_records(self) -> RecordBatch:
        """The records of the next step."""
        if self._records is None:
            self._records = self._loader.records(self._step)
        try:
            element, valid = next(self._records)
            rows = unpacked(element)
        except StopIteration:
            raise
        except BaseException:  # Grain's reader continues behind the failed step: read it again
            self.stop()
            raise
        self._step += 1
        mask = None if all(valid[: len(rows)]) else np.array(valid)
        return RecordBatch(
            [row["record"] for row in rows], None, lambda row: row_name(rows[row]), mask
        )

    def seek(self, position: RecordPosition) -> None:
        """Goes to a step."""
        self.stop()
        self._step = position.step

    def stop(self) -> None:
        """Stops reading ahead; the next read starts it anew."""
        records, self._records = self._records, None
        if records is not None:
            records.close()


class DALIDataLoaderIterator(RecordIterator):
    """Iterates over a `DALIDataLoader`."""

    def __init__(self, loader: DALIDataLoader, transform: DALITransform):
        super().__init__()
        self._loader = loader
        self._reader = _StepReader(loader)
        self._engine = transform.engine(
            self._reader, 0, loader.numbers(), loader.seed, by_step=True, part=loader.part()
        )
        self._deliver = transform.delivered

    def get_state(self) -> dict[str, Any]:
        """The global step and a description of the data; the same in all processes."""
        here = self._engine.snapshot()
        seed = here.restored.draw_seed
        # Whether the graph has random operators (0, 1); -1 if that is unknown. The first state is
        # the same before and after the pipelines are built.
        drawing = -1 if here.restored.note is None else here.restored.note
        if here.step and self._engine.was_built(here):
            drawing = int(bool(self._engine.stateful()))
        return {
            "version": 1,
            "step": here.step,
            "random": drawing,
            "graph": self._engine.graph(here),
            "shards": self._loader.num_shards,
            **self._loader.described,
            "seed": self._loader.seed if seed is None else seed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved global step, from any number of processes.

        Raises:
            ValueError: If it is no state, of other data, or of another number of shards while the
                graph draws random numbers; nothing has changed.
        """
        with self._engine.lock:
            self._restore(state)

    def _restore(self, state: Any) -> None:
        now = self.get_state()
        if not isinstance(state, dict) or {k: type(v) for k, v in state.items()} != {
            k: type(v) for k, v in now.items()
        }:
            raise StateError(f"no state of a DALIDataLoader: {brief(state)}")
        takes_seed = self._loader.takes_seed and 0 <= state["seed"] < 1 << 63
        lines = [
            f"{k}: {state[k]} -> {now[k]}"
            for k in ("version", *self._loader.described, "seed")
            if state[k] != now[k] and not (k == "seed" and takes_seed)
        ]
        if lines:
            raise StateError.of_other_data(lines)
        seed = draw_seed = None
        if state["seed"] != self._loader.seed:
            draw_seed = state["seed"]
            seed = shard_seed(draw_seed, self._loader.shard)
        restored = Restored("", state["graph"], seed, draw_seed, state["random"])
        self._engine.check(restored)
        if state["random"] not in (-1, 0, 1) or state["shards"] < 1:
            raise StateError(
                f"the state is damaged: random is {state['random']}, shards {state['shards']}"
            )
        if not 0 <= state["step"] <= self._loader.num_steps:
            raise StateError(
                f"the state is at step {state['step']}, which is none of the loader's "
                f"{self._loader.num_steps}: it was changed after get_state()"
            )
        moved = state["shards"] != now["shards"] and not self._loader.other_randomness
        if moved and state["random"] == 1:
            raise StateError(
                f"the state is of {state['shards']} shards, here are {now['shards']}, and the "
                "graph's random operators draw other numbers for them: draw them for each "
                "record (by draw.uniform() and its like, or RandomInputs), or pass "
                "other_randomness=True to go on all the same"
            )
        self._engine.restore(RecordPosition(state["step"], restored=restored))
        self._reader.stop()  # the next read starts it at the new position

    def seek_step(self, step: int) -> None:
        """Moves to a global step in constant time, for loops that save only their step.

        Args:
            step: The number of batches before it, from 0.

        Raises:
            ValueError: If the loader has fewer batches, or with ``on_error="skip"``, since the
                number of batches that were skipped is not known.
        """
        step = whole_number("step", step, "a whole number of batches, 0 or more", 0)
        if step > self._loader.num_steps:
            raise ValueError(
                f"seek_step({step}): the loader has only {self._loader.num_steps} batches"
            )
        if step and self._loader.skips:
            raise ValueError(
                f"seek_step({step}) with on_error='skip': a step counts delivered batches, and the "
                "number of batches that were skipped before it is not known. Restore a state by "
                "set_state(), or use on_error='mask', which delivers every batch"
            )
        self.set_state(self.get_state() | {"step": step})

    _set_next_index = seek_step

    def close(self) -> None:
        """Frees the pipelines and the readers; ``next()`` then raises ValueError."""
        super().close()
        self._reader.stop()

    def __str__(self) -> str:
        return "DALIDataLoaderIterator()"
