"""Finds the rows of a failed batch that fail alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..threads.workers import WorkersEnded
from .failure import Failure, failure_of
from .runner import Runner, SourceEnded, SourceError, discard


def failure_alone(runner: Runner) -> Failure | None:
    """Runs one batch, drops it and closes the runner; returns the batch's failure, if it failed.

    Raises:
        WorkersEnded: If the reading threads were ended, which isn't a failure of the batch.
    """
    try:
        runner.take(discard)
    except (RuntimeError, SourceError) as error:
        if isinstance(error.__cause__, WorkersEnded):
            raise error.__cause__ from None
        return failure_of(error)
    except SourceEnded:  # the graph's own source has no batch for this run
        return None
    finally:
        runner.close()
    return None


def runs_alone(runner: Runner) -> bool:
    """Runs one batch, drops it and closes the runner; returns whether the batch succeeded."""
    return failure_alone(runner) is None


def find_bad(
    count: int,
    run: Callable[[Sequence[int]], Failure | None],
    failure: Failure,
) -> list[int]:
    """Returns the row numbers of the records that made a batch fail.

    A bad record fails alone in the same way as the batch. If no record does, the records that fail
    alone in another way are bad, unless all records do: the cause is then elsewhere, e.g. in an
    ``external_source`` of the graph that returns batches of another size.

    Args:
        count: The number of records of the batch.
        run: A function that runs some rows of the batch, and returns the failure, or None if the
            rows succeed.
        failure: The failure of the batch.
    """
    failures: dict[int, Failure] = {}
    named_row: int | None = None

    def succeed(rows: Sequence[int]) -> bool:
        nonlocal named_row
        row_failure = run(rows)
        if row_failure is None:
            return True
        named_row = row_failure.row
        if len(rows) == 1:
            failures[rows[0]] = row_failure
        return False

    bad = failing_rows(count, succeed, suspect=lambda: named_row)
    similar = [row for row in bad if failures[row].is_like(failure)]
    return similar or (bad if len(bad) < count else [])


def failing_rows(
    count: int,
    succeed: Callable[[Sequence[int]], bool],
    most: int | None = None,
    suspect: Callable[[], int | None] = lambda: None,
) -> list[int]:
    """Returns the row numbers of the records that fail alone, in order.

    The batch is halved until its parts succeed. If the error names a record, that record is run
    alone first, so that a part with one bad record isn't halved further.

    Args:
        count: The number of records of the batch.
        succeed: A function that runs some rows together, and returns whether they succeed.
        most: The number of failing records after which the search stops; None: no limit.
        suspect: A function that returns which row the last error names, as an index into the rows
            that failed with this error; None if the error names no row.
    """
    todo = [list(range(count))] if count else []
    bad: list[int] = []
    trusted = True  # until a named record succeeds alone
    while todo and (most is None or len(bad) < most):
        rows = todo.pop()
        if succeed(rows):
            continue
        if len(rows) == 1:
            bad += rows
            continue
        row = suspect() if trusted else None
        if row is not None and row < len(rows):
            trusted = not succeed([rows[row]])
            if trusted:
                bad.append(rows.pop(row))
        halves = rows[len(rows) // 2 :], rows[: len(rows) // 2]
        todo += [half for half in halves if half]
    return sorted(bad)
