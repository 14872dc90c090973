"""Which records of a batch DALI can't decode, found by running them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .runner import Runner, SourceError, discard


def runs(runner: Runner) -> bool:
    """Whether the next batch of a runner runs; it is then used up."""
    try:
        runner.take(discard)
    except (RuntimeError, SourceError):
        return False
    return True


def runs_alone(runner: Runner) -> bool:
    """As `runs`; the runner is closed afterwards."""
    try:
        return runs(runner)
    finally:
        runner.close()


def failing(
    count: int,
    succeed: Callable[[Sequence[int]], bool],
    at_once: int | None = None,
    most: int | None = None,
) -> list[int]:
    """The records that fail by themselves, found by halving, in order.

    Args:
        count: Number of records.
        succeed: Whether some of them, by their numbers, run together.
        at_once: The most that run together.
        most: The number of failing records that is enough.
    """
    size = at_once or max(count, 1)
    todo = [range(at, min(at + size, count)) for at in range(0, count, size)][::-1]
    bad: list[int] = []
    while todo and (most is None or len(bad) < most):
        rows = todo.pop()
        if succeed(rows):
            continue
        if len(rows) == 1:
            bad += rows
        else:
            todo += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
    return bad
