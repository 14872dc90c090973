"""`Announcer`: requests the bytes of upcoming batches from a remote source, up to a budget."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..order.samples import SamplePosition
from ..order.shuffle import Indices
from ..sources.source import Source, announce, range_bytes, read_ahead_of
from ..threads.workers import Workers

_MOST_RUNS = 256  # the most runs that are announced ahead; reached if records are small


class Announcer:
    """Announces the records of upcoming runs to a source, which requests their bytes.

    A run of the pipelines makes one batch. Runs are announced in blocks, because requests for the
    same file share a call if they are announced together. The first run after a restart is a block
    of its own, so that its bytes do not wait for the bytes of other runs. The next block is
    announced after the first run was read. Each further block takes half of the budget (in bytes):
    one block is read while the next block is received.

    `restart` and `was_read` return at once. The announcer's own thread does the work, in the order
    of the calls.

    Args:
        source: The record source.
        names: The fields that are read.
        records_of: Returns the indices of the records of the run at a position, int64 [rows].
        after: Returns the position of the run after the run at a position.

    Attributes:
        generation: The number of calls of `restart`.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        records_of: Callable[[SamplePosition], Indices],
        after: Callable[[SamplePosition], SamplePosition],
    ):
        self._source, self._names = source, names
        self._records_of, self._after = records_of, after
        self._budget = read_ahead_of(source)
        self.generation = 0  # changed in the threads of the callers
        self._current = 0  # the generation to which the values below belong
        self._failure: tuple[int, BaseException] | None = None  # the generation, and its error
        self._workers = Workers(1, "dalijax-announce")
        self._done = 0  # the run after the last run that was read
        self._next = 0  # the first run that is not announced
        self._position = SamplePosition()  # the position of run `_next`
        self._first_run = 0  # the first run after the last restart
        self._num_announced = 1  # runs of the last announcement
        self._fetches: dict[int, set[Any]] = {}  # requests, kept alive until their run was read
        self._ahead: dict[int, int] = {}  # bytes of each announced run, including bytes on a disk
        self._held = 0  # bytes of the requests that were made, and not freed
        self._freed = collections.deque[int]()  # bytes of the freed requests

    @property
    def error(self) -> BaseException | None:
        """Returns the error that has ended the announcements since the last restart, or None."""
        failure = self._failure
        return failure[1] if failure is not None and failure[0] == self.generation else None

    def restart(self, run: int, position: SamplePosition) -> None:
        """Drops all announcements, and announces runs again from a given run on.

        Args:
            run: The number of the first run.
            position: The position at which the first run begins.
        """
        self.generation += 1
        self._submit(self._restart, self.generation, run, position)

    def was_read(self, generation: int, run: int) -> None:
        """Drops the bytes of a run that was read, and announces further runs.

        Args:
            generation: The value of ``generation`` when the reading began. After a restart, runs
                with the same number have other records.
            run: The number of the run.
        """
        self._submit(self._was_read, generation, run)

    def close(self) -> None:
        """Drops the announcements and ends the thread."""
        self._workers.end()
        self._fetches.clear()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._workers.dropped:
            self._workers.submit(self._run, function, *arguments)

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self._failure = (self._current, error)

    def _restart(self, generation: int, run: int, position: SamplePosition) -> None:
        self._fetches.clear()
        self._ahead.clear()
        self._current, self._done = generation, run
        self._next = self._first_run = run
        self._position = position
        self._fill()

    def _was_read(self, generation: int, run: int) -> None:
        if generation != self._current or self.error is not None:
            return
        self._fetches.pop(run, None)
        self._ahead.pop(run, None)
        self._done = max(self._done, run + 1)
        while self._next <= run:  # the run was read before its announcement
            self._position = self._after(self._position)
            self._next += 1
        self._fill()

    def _fill(self) -> None:
        """Announces the first run alone, and later runs while half of the budget is free."""
        while not self._workers.dropped:
            while self._freed:
                self._held -= self._freed.popleft()
            if self._next == self._first_run:
                self._announce(0)
                return
            is_full = max(self._held, sum(self._ahead.values())) > self._budget / 2
            if self._done == self._first_run or is_full or self._next - self._done >= _MOST_RUNS:
                return
            self._announce(self._budget // 2)

    def _announce(self, num_bytes: int) -> None:
        """Announces the next run, and as many following runs as fit into a number of bytes."""
        runs: list[Indices] = []
        positions = [self._position]
        # Bytes are counted for many runs at once, because each call takes as long as counting a
        # hundred records. The first number of runs is that of the last announcement.
        count, total = self._num_announced if num_bytes else 1, 0
        while not runs or (total < num_bytes and len(runs) < _MOST_RUNS):
            for _ in range(min(count, _MOST_RUNS - len(runs))):
                runs.append(self._records_of(positions[-1]))
                positions.append(self._after(positions[-1]))
            total = self._num_bytes(runs)
            missing = (num_bytes - total) * len(runs) / max(1, total)
            count = max(1, min(_MOST_RUNS, math.ceil(missing)))
        while len(runs) > 1 and total > num_bytes:
            del runs[max(1, min(len(runs) - 1, int(len(runs) * num_bytes / total))) :]
            total = self._num_bytes(runs)
        self._num_announced = len(runs)
        sizes = [total // len(runs)] * len(runs)
        self._ahead.update(zip(range(self._next, self._next + len(runs)), sizes))
        turns = self._next + np.repeat(np.arange(len(runs)), [*map(len, runs)])
        self._position, self._next = positions[len(runs)], self._next + len(runs)
        if self._workers.dropped:
            return
        leases = announce(self._source, np.concatenate(runs), self._names, turns, self._freed)
        for lease, row_turns in leases:
            self._held += lease.num_bytes
            for run, fetches in lease.parts(row_turns).items():
                self._fetches.setdefault(run, set()).update(fetches)
        if self._workers.dropped:  # the announcer was closed meanwhile
            self._fetches.clear()

    def _num_bytes(self, runs: Sequence[Indices]) -> int:
        return range_bytes(self._source, np.concatenate(runs), self._names)
