"""Records in, batches out: pipelines that are fed, one for each data shard of this process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn

from . import randomness
from .arrays import dali_type, narrowed
from .batches import Batch, BatchMaker, choose_layout
from .config import IteratorConfig
from .fingerprint import StateError
from .pipelines import FunctionSource, check_outputs, check_resumable, function_parameters
from .placement import GlobalLayout
from .position import FailedBatch
from .prober import Prober, runs
from .records import Schema, described, learn, stacked, values_of
from .runner import Outputs, Runner, SourceEnded, SourceError, drop
from .stats import InputStats
from .tape import Place, Pulled, RecordError, Tape, check_fed, no_more

_log = logging.getLogger("dalijax")


class Decoder:
    """Feeds batches of records to pipelines and gives what they make of them.

    Args:
        pipeline_fn: The function of the graph; see `dalijax.core.records.learn`.
        config: The iterator's arguments; ``mask`` adds the rows that are valid.
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        each: What differs between the pipelines (device_id, seed).
        rows: Rows of each pipeline's batch.
        pull: Gives the records of the next batch, in the rows of all pipelines together;
            raises StopIteration at the end.
        on_error: What becomes of records that DALI can't decode: "raise", "skip" (the whole
            batch) or "mask" (a neighbour stands for them, masked out).
        spec: What a record looks like, where the first one doesn't say it.
        by_step: Whether the random state follows from the step alone, for whole batches.

    Attributes:
        place: Where the consumer stands; replaced as a whole, so that any thread may read it.
        errors: The batches that were skipped, and those with masked records.
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        config: IteratorConfig,
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        rows: int,
        pull: Callable[[], Pulled],
        on_error: str = "raise",
        spec: Any = None,
        by_step: bool = False,
    ):
        check_fed(pipeline_fn, config, on_error)
        self.place = Place()
        self.errors: list[FailedBatch] = []
        self.stats: InputStats | None = None
        self._fn = pipeline_fn
        self._config = config
        own = function_parameters(pipeline_fn)
        self._given = {k: v for k, v in call.items() if k in own}
        self._options = {k: v for k, v in call.items() if k not in own}
        self._each = [dict(one) for one in each]
        self._rows = rows
        self._on_error = on_error
        self._spec = spec
        self._by_step = by_step
        self._layout = choose_layout(config)
        self._make = BatchMaker(config, self._layout)
        self._schema: Schema | None = None
        self._tape = Tape(pull, len(self._each))
        self._source = self._source_over(self._tape, self._each)
        one = functools.partial(self._source_over, each=self._each[:1], prefetch_queue_depth=1)
        self._prober = Prober(one, rows)
        self._runner: Runner | None = None
        self._first: tuple[bytes, ...] = ()
        self._begin: tuple[bytes, ...] = ()  # where the pipelines stood when they were built
        self._wanted = ""  # the random state to start from, as text

    # The pipelines

    def _source_over(
        self, tape: Tape, each: Sequence[Mapping[str, Any]], **options: Any
    ) -> FunctionSource:
        """Pipelines that read along a tape."""
        graph = functools.partial(_graph, self, tape)
        made = [{**one, "lane": lane} for lane, one in enumerate(each)]
        return FunctionSource(graph, (), {**self._options, **options}, made)

    def start(self) -> Runner:
        """The running pipelines, built to stand at the place where there are none.

        Raises:
            StopIteration: If there is no batch: the first one says the records' dtypes.
            StateError: If the place is of other pipelines.
        """
        if self._runner is None:
            if self._schema is None:
                first = self._tape.first().records[0]
                self._schema = learn(first, self._fn, self._given, self._spec)
            try:
                runner = self._stand(None)
                check_outputs(runner.pipelines[0], self._config.output_map)
                self._first = runner.checkpoints() or ()
                marks = self.place.marks or self._start_marks()
                if marks and marks != self._first:
                    runner = self._stand(marks)
            except BaseException:  # refused, and so is the next call
                self._stop()
                raise
            self._begin = marks
            return runner
        return self._runner

    @property
    def _here(self) -> tuple[bytes, ...] | None:
        """Where the pipelines must stand for the batch that is delivered next."""
        return self.place.marks or self._begin or None

    def _stand(self, marks: Sequence[bytes] | None) -> Runner:
        """New pipelines that stand where checkpoints say, before the first batch of the tape."""
        if self._runner is not None:
            self._runner.close()
        self._tape.rewind()
        self._runner = Runner(self._source.build(marks))
        return self._runner

    def _start_marks(self) -> tuple[bytes, ...]:
        """The checkpoints that the pipelines start from."""
        if self._first and self._wanted:
            return tuple(randomness.applied(self._wanted, self._first))
        if self._by_step and self.place.step and self.stateful():
            return self._marks_at(self.place.step)
        return self._first

    def _marks_at(self, step: int) -> tuple[bytes, ...]:
        """The checkpoints after so many whole batches, told by those of the first two."""
        lanes = len(self._each)
        first = self._tape.first().padded(self._rows * lanes)
        sample = self._prober.repaired(self._tape, first, self._prober.undecodable(first))
        if sample is None:
            raise StateError(f"no record behind step {step} can be decoded: nothing goes on there")
        runner = Runner(self._source_over(Tape(no_more, lanes, [sample] * 2), self._each).build())
        try:
            told = [runner.checkpoints() or ()]
            for _ in range(2):
                runner.take(drop)
                told.append(runner.checkpoints() or ())
        finally:
            runner.close()
        return tuple(randomness.after(step, *own) for own in zip(*told, strict=True))

    def _inputs(self, tape: Tape, lane: int) -> list[list[np.ndarray]]:
        """What DALI is given next for one pipeline."""
        schema, records = self._schema, tape.read(lane).records
        if len(self._each) > 1 and len(records) > self._rows:
            records = records[lane * self._rows : (lane + 1) * self._rows]
        return schema.inputs(records) if schema else []

    # Batches

    def next(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: At the end.
            RecordError: If DALI can't decode a record; the next call gives the next batch.
            Exception: What ``pull`` raised.
        """
        if self.stats is not None:
            with self.stats.waiting():
                return self._next()
        return self._next()

    def _next(self) -> Batch:
        while True:
            runner = self.start()
            try:
                batch = runner.take(self._convert)
            except SourceEnded:
                raise StopIteration from None
            except SourceError as error:
                self._stand(self._here)
                raise error.__cause__ or error from None
            except RuntimeError as error:
                self._failed(error)
                continue
            except Exception:  # no array can be made of it: it is behind us
                self._delivered()
                raise
            except BaseException:  # Ctrl-C, say: it is still the next one
                self._stand(self._here)
                raise
            self._delivered()
            return batch

    def _delivered(self) -> None:
        """The first batch of the tape is behind the consumer."""
        pulled = self._tape.batches[0]
        if self.stats is not None:
            rows = len(pulled.records)
            valid = rows if pulled.valid is None else int(pulled.valid.sum())
            self.stats.delivered(0, self.place.step, valid, rows, len(self.errors))
        self._tape.forget_first()
        marks = self._runner.checkpoints() if self._runner else None
        self.place = Place(self.place.step + 1, pulled.after, marks)

    def _convert(self, outputs: Sequence[Outputs]) -> Batch:
        if self._tape.unread:
            raise ValueError(
                "the graph uses none of the records' arrays, so that nothing feeds it: have its "
                "outputs depend on one of its inputs"
            )
        pulled, runner = self._tape.batches[0], self._runner
        lengths = [len(own[0]) for own in outputs]
        valid = np.ones(sum(lengths), bool) if pulled.valid is None else pulled.valid
        masks = np.split(valid, np.cumsum(lengths)[:-1])
        batch = self._make(outputs, masks, not (runner and runner.dynamic))
        for name in self._schema.passed if self._schema else ():
            if name in batch:
                raise ValueError(
                    f"the record's key {name!r} passes the graph by, and an output or the mask "
                    "has that name, too: name the output otherwise"
                )
            values = stacked(values_of(pulled.records, name), name)
            batch[name] = self._placed(name, values, lengths)
        return batch

    def _placed(self, name: str, values: Any, lengths: Sequence[int]) -> Any:
        """What passed the graph by, beside its outputs; text and dicts stay on the host."""
        numeric = isinstance(values, np.ndarray) and values.dtype.kind in "biufc"
        if not numeric or not isinstance(self._layout, GlobalLayout):
            return values
        values = narrowed(values, name)
        return self._layout.place_mask(name, np.split(values, np.cumsum(lengths)[:-1]))

    # Records that DALI can't decode

    def _failed(self, error: RuntimeError) -> None:
        """Goes on behind a batch that failed, or, masked, before what was made of it.

        Raises:
            RecordError: With ``on_error="raise"``.
        """
        pulled = self._tape.batches[0]
        bad = self._prober.undecodable(pulled)
        what = "; ".join(f"{pulled.name(i)} ({described(pulled.records[i])})" for i in bad[:5])
        text = f"DALI can't decode {what}" if bad else f"batch {self.place.step} failed"
        text += f"{' and more' if len(bad) > 5 else ''}. DALI says: {error}"
        masks = self._on_error == "mask"
        repaired = self._prober.repaired(self._tape, pulled, bad) if bad else None
        if repaired is not None:
            self._tape.batches[0] = repaired
            runner = self._stand(self._here)
        if repaired is None or not (masks or runs(runner)):
            # Nothing can stand for it, so that the random state does not move on.
            self._tape.forget_first()
            marks = None if self._by_step else self._here
            self.place = Place(self.place.step + 1, pulled.after, marks)
            self._stop()
        elif not masks:  # it ran without them: the random state moved on as by any other batch
            self._delivered()
        if self._on_error == "raise":
            raise RecordError(text) from error
        self.errors.append(FailedBatch(0, self.place.step - (not (masks and repaired)), text))
        _log.warning("%s: %s", "masked" if masks and repaired else "skipped", text)

    # State and lifecycle

    def random_state(self) -> str:
        """The random state at the place as a short text; "" before the pipelines were built.

        Raises:
            StateError: If the graph can't be resumed: the message says why.
        """
        check_resumable(self._source)
        marks = self.place.marks
        return self._wanted if not marks else randomness.difference(marks, self._first)

    @property
    def pulled_ahead(self) -> int:
        """Number of batches that were pulled and are not behind the consumer."""
        return len(self._tape.batches)

    @property
    def operators(self) -> dict[str, bool]:
        """Whether each operator has a state, by its name; empty until there are pipelines."""
        return randomness.operators(self._first[0]) if self._first else {}

    def stateful(self) -> list[str]:
        """Names of the operators that have a state, once the pipelines were built."""
        return [name for name, has in self.operators.items() if has]

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; until it is called nothing is counted."""
        self.stats = self.stats or InputStats()
        return self.stats

    def check(self, random_state: str) -> None:
        """Raises StateError where a random state is known to be of other pipelines."""
        if random_state and self._first:
            randomness.applied(random_state, self._first)

    def restore(self, step: int, after: Any, random_state: str = "") -> None:
        """Goes on behind a batch; the pipelines are built when they are next used."""
        self._stop()
        self._tape.batches.clear()
        self._wanted = random_state
        self.place = Place(step, after)

    def again(self) -> None:
        """Goes on after ``pull`` had no batch, where it may have one now."""
        if self._runner is not None:
            self._runner.restart()

    def _stop(self) -> None:
        """Frees the pipelines; the next use builds them again, at the place."""
        self._tape.rewind()
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def close(self) -> None:
        """Frees the pipelines and what was pulled."""
        self._stop()
        self._tape.batches.clear()


def _graph(decoder: Decoder, tape: Tape, lane: int = 0) -> Any:
    """The graph of one pipeline: the caller's function over what its tape feeds."""
    schema = decoder._schema
    columns = schema.columns if schema else ()
    nodes: Any = fn.external_source(
        source=lambda index: decoder._inputs(tape, lane),
        num_outputs=len(columns),
        dtype=[dali_type(column.dtype) for column in columns],
        ndim=[column.ndim for column in columns],
        batch=True,
    )
    args, kwargs = schema.arguments(nodes) if schema else ([], {})
    return decoder._fn(*args, **kwargs, **decoder._given)
