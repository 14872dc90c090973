"""Which records DALI can't decode, found by decoding them alone; and what stands for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .function_source import FunctionSource
from .record_queue import Pulled, ReadError, Tape, no_more
from .runner import Runner, SourceError, discard

_LOOK_AHEAD = 8  # batches that are searched for a record that can be decoded


def runs(runner: Runner) -> bool:
    """Whether the next batch of a runner runs; it is then used up."""
    try:
        runner.take(discard)
    except (RuntimeError, SourceError):
        return False
    return True


SourceOver = Callable[[Tape], FunctionSource]


class Prober:
    """Runs records in pipelines of their own.

    Args:
        source_over: A weak reference to what makes the source of one pipeline that reads
            along a tape.
        rows: The most records that it takes at once.
    """

    def __init__(self, source_over: Callable[[], SourceOver | None], rows: int):
        self._source_over = source_over
        self._rows = rows

    def undecodable(self, pulled: Pulled) -> list[int]:
        """The rows of a batch that fail by themselves, found by halving."""
        rows = range(len(pulled.records))
        todo = [list(rows[i : i + self._rows]) for i in range(0, len(rows), self._rows)]
        bad: list[int] = []
        while todo:
            own = todo.pop(0)
            if self._decodes([pulled.records[i] for i in own]):
                continue
            if len(own) == 1:
                bad += own
            else:
                todo += [own[: len(own) // 2], own[len(own) // 2 :]]
        return sorted(bad)

    def _decodes(self, records: Sequence[Any]) -> bool:
        """Whether a fresh pipeline runs these records."""
        tape = Tape(no_more, 1, [Pulled(records, None, str)])
        source_over = self._source_over()
        if source_over is None:
            return False
        runner = Runner(source_over(tape).build())
        try:
            return runs(runner)
        finally:
            runner.close()

    def repaired(self, tape: Tape, pulled: Pulled, bad: Sequence[int]) -> Pulled | None:
        """A batch with good records for the bad ones, its own or else of the batches behind it.

        Not of those before it, which a run that goes on from here never saw.

        Args:
            tape: What comes, the batch first.
            pulled: The batch.
            bad: Its rows that can't be decoded.
        """
        if len(bad) < len(pulled.records):
            return pulled.without(bad, None)
        for at in range(1, _LOOK_AHEAD + 1):
            try:
                later = tape.at(at)
            except (StopIteration, ReadError):
                break
            good = sorted(set(range(len(later.records))) - set(self.undecodable(later)))
            if good:
                return pulled.without(bad, later.records[good[0]])
        return None
