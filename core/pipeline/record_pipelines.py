"""Pipelines that are fed from a tape: built to stand at a checkpoint, and told apart."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvidia.dali import fn

from ..arguments import function_parameters
from ..state import random_state as randomness
from ..state.fingerprint import digest, fingerprint
from .arrays import dali_type
from .bad_record import Prober
from .dali_pipeline import check_outputs
from .function_source import FunctionSource
from .pipeline_source import check_resumable
from .record_queue import Pulled, Tape, no_more
from .runner import Runner, discard
from .schema import Column, Schema, learn

Marks = tuple[bytes, ...]


class FedPipelines:
    """The pipelines of one decoder, one for each data shard of this process.

    Args:
        pipeline_fn: The function of the graph; see `dalijax.core.pipeline.schema.learn`.
        output_map: Names of its outputs.
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        each: What differs between the pipelines (device_id, seed).
        rows: Rows of each pipeline's batch.
        tape: What they are fed with.
        spec: What a record looks like, where the first one doesn't say it.

    Attributes:
        runner: The running pipelines, where there are any.
        schema: How records become inputs, once one was seen.
        first: DALI's checkpoint of each pipeline before its first run, once they were built.
        prober: Finds the records that they can't decode.
        graph: A digest of the operators and their arguments, once they were built; else "".
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        output_map: Sequence[str],
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        rows: int,
        tape: Tape,
        spec: Any,
    ):
        own = function_parameters(pipeline_fn)
        self.fn = pipeline_fn
        self.given = {k: v for k, v in call.items() if k in own}
        self.runner: Runner | None = None
        self.schema: Schema | None = None
        self.first: Marks = ()
        self.graph = ""
        self._output_map = output_map
        self._options = {k: v for k, v in call.items() if k not in own}
        self._each = [dict(one) for one in each]
        self._rows = rows
        self._spec = spec
        self._tape = tape
        self._used: set[int] = set()  # columns that the graph was fed with
        self._saved_seed: int | None = None
        self._firsts: dict[int | None, Marks] = {}  # by seed
        self._source = self._source_over(tape, self._each)
        # Weak, as all that the pipelines refer to: they are freed with the last reference.
        self.prober = Prober(weakref.WeakMethod(self._one_over), rows)

    def _source_over(self, tape: Tape, each: Sequence[Mapping[str, Any]], **more: Any) -> Any:
        """Pipelines that read along a tape."""
        graph: Any = functools.partial(_graph, weakref.ref(self), tape)
        graph.__name__ = getattr(self.fn, "__name__", repr(self.fn))  # for errors
        made = [{**one, "lane": lane} for lane, one in enumerate(each)]
        source = FunctionSource(graph, (), {**self._options, **more}, made)
        source.set_seed(self._saved_seed)
        return source

    def _one_over(self, tape: Tape) -> Any:
        return self._source_over(tape, self._each[:1], prefetch_queue_depth=1)

    def set_seed(self, seed: int | None) -> int | None:
        """Has pipelines have the seed of a state; see `PipelineSource`."""
        self.stop()
        before, self._saved_seed = self._saved_seed, seed
        self._source = self._source_over(self._tape, self._each)
        self._firsts[before] = self.first
        self.first = self._firsts.get(seed, ())
        return before

    def check_resumable(self) -> None:
        """Raises StateError where the graph has no state to resume from."""
        check_resumable(self._source)

    def build(self) -> Runner:
        """New pipelines at their start; the first record says what they take.

        Raises:
            StopIteration: If there is no record.
        """
        if self.schema is None:
            first = self._tape.first()
            if not first.records:
                raise ValueError("a batch of no record was pulled: leave out empty lists")
            self.schema = learn(first.records[0], self.fn, self.given, self._spec)
        runner = self.stand(None)
        check_outputs(runner.pipelines[0], self._output_map)
        self.first = runner.checkpoints() or ()
        if not self.graph:
            told = fingerprint(runner.pipelines, None, (), deferred=runner.deferred)["operators"]
            text = json.dumps([list(self._output_map), told])
            self.graph = digest(text.encode(), length=8)
        return runner

    def stand(self, marks: Marks | None) -> Runner:
        """New pipelines that stand where checkpoints say, before the first batch of the tape."""
        self.stop()
        self.runner = Runner(self._source.build(marks), gradual=True)
        return self.runner

    def stop(self) -> None:
        """Frees the pipelines."""
        self._tape.rewind()
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()

    def after(self, runs: int, sample: Pulled, here: Marks | None = None) -> Marks:
        """The checkpoints some runs after others, or after the start.

        Args:
            runs: Number of runs.
            sample: A batch like those that are run, which tells how far each run moves on.
            here: Where the runs begin.

        Raises:
            StateError: If the operators' states are not known to move on evenly.
            RuntimeError: If the sample doesn't run.
        """
        lanes = len(self._each)
        runner = Runner(self._source_over(Tape(no_more, lanes, [sample] * 2), self._each).build())
        try:
            told = [runner.checkpoints() or ()]
            for _ in range(2):
                runner.take(discard)
                told.append(runner.checkpoints() or ())
        finally:
            runner.close()
        from_ = here or told[0]
        return tuple(
            randomness.after(runs, zero, one, two, base)
            for (zero, one, two), base in zip(zip(*told), from_, strict=True)
        )

    @property
    def operators(self) -> dict[str, bool]:
        """Whether each operator has a state, by its name; empty until there are pipelines."""
        return randomness.operators(self.first[0]) if self.first else {}

    def unfit(self, batches: Sequence[Pulled]) -> list[int]:
        """The rows of the first batch that the graph can't be given, if any."""
        rows: list[int] = []
        for row, record in enumerate(batches[0].records if batches else ()):
            try:
                self.inputs(sorted(self._used), [record])
            except (ValueError, TypeError):
                rows.append(row)
        return rows

    def records(self, tape: Tape, lane: int) -> Sequence[Any]:
        """The records that one pipeline is fed next."""
        records = tape.read(lane).records
        if len(self._each) > 1 and len(records) > self._rows:
            records = records[lane * self._rows : (lane + 1) * self._rows]
        return records

    def inputs(self, columns: Sequence[int], records: Sequence[Any]) -> list[Any]:
        """What DALI is given of some columns of records."""
        self._used.update(columns)
        try:
            return [self.schema.column(k, records) for k in columns] if self.schema else []
        except StopIteration as error:  # which DALI would take for the end
            raise RuntimeError(f"a record raised StopIteration: {error}") from error


class _Feed:
    """What feeds one pipeline: each run asks once for each column that the graph uses."""

    def __init__(self, fed: weakref.ref[FedPipelines], tape: Tape, lane: int):
        self._fed = fed
        self._tape = tape
        self._lane = lane
        self._asked: set[int] = set()  # columns that this run was fed with
        self._records: Sequence[Any] = ()

    def columns(self, *columns: int) -> list[Any]:
        """Some columns of the next run."""
        now = self._fed()
        if now is None:
            raise ValueError("the iterator is closed: make a new one")
        if not self._asked or self._asked.intersection(columns):
            self._asked.clear()
            self._records = now.records(self._tape, self._lane)
        self._asked.update(columns)
        return now.inputs(columns, self._records)

    def of(self, column: int) -> Callable[[int], Any]:
        """A source of ``fn.external_source``: one column."""
        return lambda index: self.columns(column)[0]


def _sources(schema: Schema, feed: _Feed) -> Any:
    """A node for each column."""
    if schema.nested:  # DALI drops those that the graph doesn't use, and asks for none of theirs
        return [
            fn.external_source(source=feed.of(k), batch=True, **_type(one))
            for k, one in enumerate(schema.columns)
        ]
    every = range(len(schema.columns))
    return fn.external_source(
        source=lambda index: feed.columns(*every),
        num_outputs=len(schema.columns),
        dtype=[_type(one)["dtype"] for one in schema.columns],
        ndim=[one.ndim for one in schema.columns],
        batch=True,
    )


def _type(column: Column) -> dict[str, Any]:
    """What DALI is told of a column."""
    if column.dtype is None:
        return {}
    return {"dtype": dali_type(column.dtype), "ndim": column.ndim}


def _graph(fed: weakref.ref[FedPipelines], tape: Tape, lane: int = 0) -> Any:
    """The graph of one pipeline: the caller's function over what its tape feeds."""
    own = fed()
    schema = own.schema if own else None
    if own is None or schema is None:
        raise ValueError("the iterator is closed: make a new one")

    nodes = _sources(schema, _Feed(fed, tape, lane))
    args, kwargs = schema.arguments(nodes)
    try:
        return own.fn(*args, **kwargs, **own.given)
    except StopIteration as error:
        raise RuntimeError(f"the graph's function raised StopIteration: {error}") from error
    except KeyError as error:
        if not schema.nested:
            raise
        keys = ["/".join(column.path) for column in schema.columns]
        raise KeyError(f"{error} in the graph's function: the records have {keys}") from error
    except TypeError as error:
        if not (args and isinstance(args[0], dict)):
            raise
        names = sorted(function_parameters(own.fn) - set(own.given))
        raise TypeError(
            f"{error}\nThe whole record, a dict of {sorted(args[0])}, is its only argument, since "
            f"none of its parameters, {names}, is one of these keys: name its parameters like the "
            "keys that it takes, or index the dict"
        ) from error
