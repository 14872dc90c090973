"""Finds the bad records of a failed batch by running its records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import BatchError, EpochError, GraphError, RecordError
from ..printable import printable
from ..state.position import FailedBatch
from ..workers import WorkersEnded
from .failure import Failure, failure_of
from .runner import Runner, SourceEnded, SourceError, discard

# The graph is at fault if an operator fails for this many batches in a row, and has succeeded for
# none before.
MOST_UNEXPLAINED = 8
# The number of batches in a row that a stream skips before it gives up, if an epoch has fewer.
MOST_SKIPPED = 64
_MOST_NAMED = 5


def failure_alone(runner: Runner) -> Failure | None:
    """Runs and drops one batch, and closes the runner; returns its failure, if it failed.

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
    """Runs and drops one batch, and closes the runner; returns whether that succeeded."""
    return failure_alone(runner) is None


def find_bad(
    count: int,
    run: Callable[[Sequence[int]], Failure | None],
    failure: Failure,
    at_once: int | None = None,
) -> list[int]:
    """Finds the records that made a batch fail.

    These are the records that fail alone in the same way. If there are none, these are the records
    that fail alone in another way, unless all do: then the runs prove nothing, as for a graph's
    own ``external_source`` that returns batches of another size.

    Args:
        count: The number of records.
        run: Runs the records of some row numbers, and returns their failure.
        failure: The failure of the batch.
        at_once: The largest number of records that can run together.

    Returns:
        The row numbers of the bad records.
    """
    failures: dict[int, Failure] = {}

    def succeed(rows: Sequence[int]) -> bool:
        own_failure = run(rows)
        if own_failure is not None and len(rows) == 1:
            failures[rows[0]] = own_failure
        return own_failure is None

    bad = failing(count, succeed, at_once)
    alike = [row for row in bad if failures[row].is_like(failure)]
    return alike or (bad if len(bad) < count else [])


def failing(
    count: int,
    succeed: Callable[[Sequence[int]], bool],
    at_once: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Finds the records that fail alone, by halving the batch.

    Args:
        count: The number of records.
        succeed: Returns whether the records of some row numbers run together.
        at_once: The largest number of records that can run together.
        most: The number of failing records after which the search stops.

    Returns:
        The row numbers of the failing records, in order.
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


def listed(names: Sequence[str]) -> str:
    """Joins the first names by commas, and adds "and more" if there are more."""
    return ", ".join(map(printable, names[:_MOST_NAMED])) + " and more" * (len(names) > _MOST_NAMED)


def with_printable(text: str, names: Iterable[str]) -> str:
    """Returns DALI's message with the names in it escaped, which may contain line breaks."""
    for name in names:
        if not name.isprintable():
            text = text.replace(name, printable(name))
    return text


def describe(failure: Failure, names: Sequence[str], every: bool, verb: str = "decoded") -> str:
    """Returns the message for a failed run: the operator or the records, and DALI's own error.

    Args:
        failure: The failure.
        names: The names of the records that fail alone.
        every: Whether every record that was tried fails.
        verb: What DALI could not do with a bad file, as a participle.
    """
    shown, message = listed(names), with_printable(failure.message, names)
    if failure.reads_file:
        return f"{shown} can't be {verb}: {message}" if names else message
    if every:
        records_text = " for every record"
    elif names:
        records_text = f" for {shown}"
    else:
        records_text = ""
    return f"{failure.subject} failed{records_text}: {message}"


def can_skip(error: Exception | None) -> bool:
    """Returns whether ``on_error="skip"`` skips a batch with this error."""
    return isinstance(error, (BatchError, RecordError)) and not isinstance(error, GraphError)


def graph_error(error: BatchError | RecordError, batches: int) -> GraphError:
    """Returns the error of a graph that failed for each of its first batches."""
    failure = failure_of(error.__cause__ or error)
    text = describe(failure, (), every=True)
    described = GraphError(f"{text}\nThe first {batches} batches failed. The last one: {error}")
    described.files = getattr(error, "files", ())
    described.__cause__ = error.__cause__
    return described


def every_batch_failed(skipped: Sequence[FailedBatch]) -> EpochError:
    """Returns the error of an epoch in which ``on_error="skip"`` skipped every batch."""
    last = skipped[-1]
    return EpochError(
        f"every batch of epoch {last.epoch} failed, and on_error='skip' left all of them out. "
        f"The last one: {last.message}"
    )
