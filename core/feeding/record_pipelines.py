"""Pipelines fed with records: built to stand at checkpoints, one for each data shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.pipeline import do_not_convert

from ..config import IteratorConfig, function_parameters, is_pipeline_def
from ..dtypes import dali_type
from ..pipeline.bad_record import failing, failure_alone, find_bad
from ..pipeline.dali_pipeline import check_outputs, graph_lines
from ..pipeline.failure import Failure
from ..pipeline.picture_size import Size, look_at_input
from ..pipeline.pipeline_source import FunctionSource, check_resumable
from ..pipeline.runner import Runner, discard
from ..pipeline.schema import Column, Schema, learn
from ..random.draw import DRAW, Draw, DrawRows
from ..random.hashing import fold
from ..replacements import for_name
from ..state import random_state
from ..state.operators import Operator, Picture, operators_of, picture_inputs
from .record_queue import Numbers, PipelineRows, RecordBatch, RecordQueue, no_more

ON_ERROR = ("raise", "skip", "mask")


def check_record_graph(
    pipeline_fn: Callable[..., Any], config: IteratorConfig, on_error: str
) -> None:
    """Raises TypeError or ValueError where a graph or its arguments can't be fed with records."""
    if is_pipeline_def(pipeline_fn):
        raise TypeError(
            f"{pipeline_fn!r} is decorated with pipeline_def, which makes whole pipelines: "
            "pass the plain function, whose parameters are fed"
        )
    if isinstance(getattr(pipeline_fn, "_config", None), IteratorConfig):
        raise TypeError(
            f"{pipeline_fn!r} is an iterator function of dalijax.data_iterator, which reads by "
            "itself: pass the plain function, undecorated, whose parameters are the records' keys"
        )
    if not callable(pipeline_fn):
        raise TypeError(f"pipeline_fn must be a function of a DALI graph, not {pipeline_fn!r}")
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {ON_ERROR}, not {on_error!r}")
    if on_error == "mask" and config.mask is None:
        raise ValueError("on_error='mask' needs a mask to say which records are bad: pad='mask'")
    if on_error == "skip" and config.over_processes:
        raise ValueError(
            "on_error='skip' over several processes, one of which would then be a batch ahead of "
            "the others: use 'mask'"
        )


class RecordPipelines:
    """The pipelines of one `RecordEngine`.

    Args:
        pipeline_fn: The function of the graph; see `dalijax.core.pipeline.schema.learn`.
        config: The iterator's arguments.
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        each: Arguments that differ between the pipelines (device_id, seed).
        rows: Rows of each pipeline's batch.
        queue: The records that they read.
        numbers: Gives the numbers of the rows of a step; None where they are unknown.
        draw_seed: The seed of ``draw``, the same for all pipelines of all processes.
        spec: The structure of a record, where the first one doesn't show it.

    Attributes:
        runner: The running pipelines, where there are any.
        first: DALI's checkpoint of each pipeline before its first run, once they were built.
        operators: A line for each operator of the graph, once pipelines were built.
        passed: The records' keys that pass the graph by, once a record was seen.
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        config: IteratorConfig,
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        rows: int,
        queue: RecordQueue,
        numbers: Numbers | None,
        draw_seed: int,
        spec: Any,
    ):
        parameters = function_parameters(pipeline_fn)
        self.runner: Runner | None = None
        self.operators: tuple[str, ...] = ()
        self.passed: tuple[str, ...] = ()
        self._fn = pipeline_fn
        arguments = {k: v for k, v in call.items() if k in parameters}
        self._draw_seed = draw_seed
        self._record_graph = _RecordGraph(pipeline_fn, arguments, draw_seed)
        self._numbers = numbers
        self._options = {k: v for k, v in call.items() if k not in parameters}
        self._output_map = config.output_map
        self._batch_map = () if config.batch_map is None else config.batch_map.names
        self._each = [{**one, "pipeline": number} for number, one in enumerate(each)]
        self._rows = rows
        self._queue = queue
        self._spec = spec
        self._seed: int | None = None
        self._first: dict[int | None, tuple[bytes, ...]] = {}
        self._source = self._over(queue, self._each)

    @property
    def stateful(self) -> list[str]:
        """Names of the operators that have a state; empty until there are pipelines."""
        first = next(iter(self._first.values()), ())
        operators = random_state.operators(first[0]) if first else {}
        return [name for name, has_state in operators.items() if has_state]

    @property
    def first(self) -> tuple[bytes, ...]:
        """The checkpoints of the start, once pipelines with the present seed were built."""
        return self.first_of(self._seed)

    def first_of(self, seed: int | None) -> tuple[bytes, ...]:
        """The checkpoints of the start with a seed, once pipelines with it were built."""
        return self._first.get(seed, ())

    def set_seed(self, seed: int | None, draw_seed: int | None) -> None:
        """Sets the seeds of the next pipelines; see `Restored`."""
        drawn = seed if draw_seed is None else draw_seed
        self._record_graph.seed = self._draw_seed if drawn is None else drawn
        self._source.set_seed(seed)
        self._seed = seed

    def check_resumable(self) -> None:
        """Raises StateError where the graph has no state to resume from."""
        check_resumable(self._source)

    def build(self) -> Runner:
        """New pipelines at their start; the first record says what they take.

        Raises:
            StopIteration: If there is no record.
        """
        if self._record_graph.schema is None:
            first = self._queue.at(0)
            if not first.records:
                raise ValueError("a batch of no record was read: leave out empty lists")
            self.passed = self._record_graph.learn(first.records[0], self._spec).passed
            if self._record_graph.draws and self._numbers is None:
                raise ValueError(
                    "draw has numbers of records whose place in the stream is known, and no "
                    "operation of grain.DataLoader knows it: use DALITransform or DALIDataLoader, "
                    "or draw the numbers by RandomInputs"
                )
        runner = self.stand(None)
        check_outputs(runner.pipelines[0], self._output_map)
        self._first[self._seed] = runner.checkpoints() or ()
        if not self.operators:
            self._record_graph.find_inputs(operators_of(runner.pipelines[0]))
            self.operators = tuple(graph_lines(runner.pipelines, self._batch_map))
        return runner

    def stand(self, checkpoints: Sequence[bytes] | None) -> Runner:
        """New pipelines at checkpoints, which read from the start of the queue."""
        self.stop()
        self.runner = Runner(self._source.build(checkpoints), gradual=True)
        return self.runner

    def stop(self) -> None:
        """Frees the pipelines; the next ones read from the start of the queue."""
        runner, self.runner = self.runner, None
        self._queue.rewind()
        if runner is not None:
            runner.close()

    def _over(
        self, queue: RecordQueue, each: Sequence[Mapping[str, Any]], **more: Any
    ) -> FunctionSource:
        """The source of pipelines that read a queue."""
        graph: Any = functools.partial(self._record_graph, queue)
        graph.__name__ = getattr(self._fn, "__name__", repr(self._fn))  # for errors
        source = FunctionSource(graph, (), {**self._options, **more}, each, function=self._fn)
        source.set_seed(self._seed)
        return source

    def after(
        self, runs: int, sample: RecordBatch, start: Sequence[bytes] | None = None
    ) -> tuple[bytes, ...]:
        """The checkpoints some runs behind others.

        Args:
            runs: Number of runs.
            sample: A batch like those that are run, which tells how far each run moves on.
            start: Where the runs begin; at the start of the pipelines by default.

        Raises:
            StateError: If the operators' states are not known to move on evenly.
            RuntimeError: If the sample doesn't run.
        """
        queue = RecordQueue(no_more, len(self._each), self._rows, self._numbers, [sample] * 2)
        runner = Runner(self._over(queue, self._each).build())
        try:
            three = [runner.checkpoints() or ()]
            for _ in range(2):
                runner.take(discard)
                three.append(runner.checkpoints() or ())
        finally:
            runner.close()
        return tuple(
            random_state.after_runs(runs, zero, one, two, base)
            for (zero, one, two), base in zip(zip(*three), start or three[0], strict=True)
        )

    # Records that DALI can't take

    def undecodable(
        self, batch: RecordBatch, step: int, failure: Failure | None = None
    ) -> list[int]:
        """Returns the rows of the batch of a step that fail by themselves.

        Args:
            batch: The batch.
            step: Its step.
            failure: The failure of the batch; None for the rows that fail in any way.
        """
        numbers = self._numbers and self._numbers(step)

        def run(rows: Sequence[int]) -> Failure | None:
            alone = RecordBatch([batch.records[row] for row in rows], None, str)
            some = None if numbers is None else numbers[list(rows)]
            of_step = None if some is None else lambda _: some
            queue = RecordQueue(no_more, 1, self._rows, of_step, [alone])
            one = self._over(queue, self._each[:1], prefetch_queue_depth=1)
            return failure_alone(Runner(one.build()))

        count = len(batch.records)
        if failure is None:
            return failing(count, lambda rows: run(rows) is None, self._rows)
        return find_bad(count, run, failure, self._rows)

    def unfit(self, batch: RecordBatch) -> list[int]:
        """The rows of a batch of which no inputs of the graph can be made."""
        return self._record_graph.unfit(batch.records)


class _RecordGraph:
    """The graph of one pipeline: the caller's function over the columns of its records.

    It refers to no pipeline, so that pipelines are freed with the last reference to them.

    Args:
        pipeline_fn: The function.
        arguments: Its arguments that are no columns.
        seed: The seed of ``draw``.

    Attributes:
        schema: The columns, once a record was seen.
        draws: Whether the function takes ``draw``; a key of the records has the name before it.
        seed: The seed of ``draw``.
    """

    def __init__(self, pipeline_fn: Callable[..., Any], arguments: Mapping[str, Any], seed: int):
        self.schema: Schema | None = None
        self.draws = False
        self.seed = seed
        self._fn = pipeline_fn
        self._arguments = arguments
        self._used: set[int] = set()  # columns that pipelines ask for
        self._nodes: dict[str, int] = {}  # the column of each input of the graph
        self._pictures: dict[int, Picture] = {}  # by column

    def learn(self, record: Any, spec: Any) -> Schema:
        """Finds the columns by the first record, or by ``spec`` where there is one."""
        like = record if spec is None else spec
        open_ = function_parameters(self._fn) - {*self._arguments}
        self.draws = DRAW in open_ and not (isinstance(like, Mapping) and DRAW in like)
        arguments = {**self._arguments, DRAW: None} if self.draws else self._arguments
        self.schema = learn(record, self._fn, arguments, spec)
        return self.schema

    def __call__(self, queue: RecordQueue, pipeline: int = 0) -> Any:
        """Defines the graph.

        Args:
            queue: The records that the pipeline reads.
            pipeline: Its number.
        """
        schema = self._known()
        feed = _Feed(self, queue, pipeline)
        nodes = _sources(schema, feed)
        args, kwargs = do_not_convert(schema.arguments)(nodes)
        self._nodes = {node.name: k for k, node in enumerate(nodes)}
        sized: dict[str, bool] = {}
        if self.draws:
            columns = {name: str(k) for name, k in self._nodes.items()}
            kwargs[DRAW] = Draw(feed.draw_rows, columns, sized)
        try:
            outputs = self._fn(*args, **kwargs, **self._arguments)
            several = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            if any(isinstance(output, dict) for output in several):
                raise TypeError("an output of the graph's function is a dict")
            for column, is_path in sized.items():
                self._pictures.setdefault(int(column), Picture(is_path))
            return outputs
        except StopIteration as error:
            raise RuntimeError(f"the graph's function raised StopIteration: {error}") from error
        except KeyError as error:
            if not schema.nested:
                raise
            keys = ["/".join(column.path) for column in schema.columns]
            raise KeyError(f"{error} in the graph's function: the records have {keys}") from error
        except (AttributeError, TypeError) as error:
            if not (args and isinstance(args[0], dict)):
                raise
            names = sorted(function_parameters(self._fn) - set(self._arguments) - {DRAW})
            close = " or ".join(filter(None, (for_name(name, args[0], {}) for name in names)))
            raise TypeError(
                f"{error}\nThe parameter {names} of the graph's function is not a key of the "
                f"records, {sorted(args[0])}, and so gets the whole record, a dict: rename it to "
                f"the key that it takes, or index the dict{f' ({close})' if close else ''}"
            ) from error

    def find_inputs(self, operators: Sequence[Operator]) -> None:
        """Finds the columns that are taken, and pictures, by the pipeline that was built last."""
        nodes, names = picture_inputs(operators), {name for _, name, _ in operators}
        self._pictures |= {k: nodes[name] for name, k in self._nodes.items() if name in nodes}
        self._used.update(k for name, k in self._nodes.items() if name in names)

    def column(self, number: int, records: Sequence[Any]) -> tuple[Any, list[Size | None]]:
        """A column of records, as DALI takes it, and the sizes where it has pictures.

        Raises:
            ValueError, TypeError: If a record has no such column, or no picture there.
        """
        self._used.add(number)
        try:
            values = self._known().column(number, records)
        except StopIteration as error:  # which DALI would take for the end
            raise RuntimeError(f"a record raised StopIteration: {error}") from error
        if number not in self._pictures:
            return values, []
        sizes = []
        for place, value in enumerate(values):
            size, said = look_at_input(np.ascontiguousarray(value), self._pictures[number])
            if said:
                where = "/".join(self._known().columns[number].path) or "the record"
                raise ValueError(f"{where} in record {place} of the batch: {said}")
            sizes.append(size)
        return values, sizes

    def _known(self) -> Schema:
        if self.schema is None:
            raise ValueError("no record was seen that would say what the graph takes")
        return self.schema

    def unfit(self, records: Sequence[Any]) -> list[int]:
        """The rows of which a column that was asked for can't be made."""
        rows: list[int] = []
        for row, record in enumerate(records):
            try:
                for column in sorted(self._used):
                    self.column(column, [record])
            except (ValueError, TypeError):
                rows.append(row)
        return rows


class _Feed:
    """Feeds one pipeline: each run asks once for each column that the graph uses, and draw."""

    def __init__(self, graph: _RecordGraph, queue: RecordQueue, pipeline: int):
        self._graph = graph
        self._queue = queue
        self._pipeline = pipeline
        self._asked: set[int | str] = set()  # columns and draws that this run has
        self._rows: PipelineRows | None = None
        self._made: dict[int, tuple[Any, list[Size | None]]] = {}  # columns of this run

    def columns(self, *columns: int) -> list[Any]:
        """Some columns of the next run."""
        rows = self._rows_for(columns)
        return [self._column(column, rows)[0] for column in columns]

    def _column(self, number: int, rows: PipelineRows) -> tuple[Any, list[Size | None]]:
        if number not in self._made:
            self._made[number] = self._graph.column(number, rows.records)
        return self._made[number]

    def source_of(self, column: int) -> Callable[[int], Any]:
        """A source of ``fn.external_source``: one column."""
        return lambda index: self.columns(column)[0]

    def draw_rows(self, run: int, name: str) -> DrawRows:
        """The rows of the next run, for one draw."""
        rows = self._rows_for((name,))
        hashes = fold(self._graph.seed, 0, rows.numbers)
        return DrawRows(hashes, functools.partial(self._sizes_of, rows), rows.refuse)

    def _rows_for(self, names: Sequence[int | str]) -> PipelineRows:
        """The rows of the run that asks: a name that comes again is asked for by the next run."""
        if self._rows is None or self._asked.intersection(names):
            self._asked.clear()
            self._made.clear()
            self._rows = None  # where the stream has ended the next run asks anew
            self._rows = self._queue.read(self._pipeline)
        self._asked.update(names)
        return self._rows

    def _sizes_of(self, rows: PipelineRows, column: str) -> NDArray[np.int32]:
        """Heights and widths of the pictures of a column in this run, int32 [rows, 2].

        A record whose picture's header can't be read is refused; 1 x 1 stands there.
        """
        _, sizes = self._column(int(column), rows)
        unknown = ValueError("the size of the picture can't be read from its header")
        for row, size in enumerate(sizes):
            if size is None:
                rows.refuse(row, unknown)
        return np.array([size or (1, 1) for size in sizes], np.int32)


def _sources(schema: Schema, feed: _Feed) -> Any:
    """A node for each column."""
    if schema.nested:  # DALI drops those that the graph doesn't use, and never asks for them
        return [
            fn.external_source(source=feed.source_of(k), batch=True, **_type(one))
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
    """The dtype and number of dimensions of a column, as DALI names them."""
    if column.dtype is None:
        return {}
    return {"dtype": dali_type(column.dtype), "ndim": column.ndim}
