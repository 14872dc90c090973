"""Finds the records that make a batch fail, by running them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import BatchError, EpochError, GraphError, RecordError
from ..printable import printable
from ..state.position import FailedBatch
from ..workers import WorkersEnded
from .failure import Failure, failure_of
from .runner import Runner, SourceEnded, SourceError, discard

# Batches in a row that an operator fails for, and none before that it does not, until the graph
# is at fault.
MOST_UNEXPLAINED = 8
# Batches that a stream leaves out in a row before it gives up, if an epoch has fewer.
MOST_SKIPPED = 64
_MOST_NAMED = 5


def failure_alone(runner: Runner) -> Failure | None:
    """Runs and drops one batch, and closes the runner; returns its failure, if it failed.

    Raises:
        WorkersEnded: If the threads that read were ended, which is no failure of the batch.
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
    """Finds the records of a batch that made it fail.

    These are the records that fail alone in the same way; if there are none, those that fail alone
    in another way, unless all do: then the runs prove nothing. A graph's own ``external_source``,
    for example, gives batches that single records do not fit.

    Args:
        count: Number of records.
        run: Runs some records, given by their numbers; returns their failure.
        failure: The failure of the batch.
        at_once: The largest number of records that run together.
    """
    failures: dict[int, Failure] = {}

    def succeed(rows: Sequence[int]) -> bool:
        found = run(rows)
        if found is not None and len(rows) == 1:
            failures[rows[0]] = found
        return found is None

    bad = failing(count, succeed, at_once)
    alike = [row for row in bad if failures[row].is_like(failure)]
    return alike or (bad if len(bad) < count else [])


def failing(
    count: int,
    succeed: Callable[[Sequence[int]], bool],
    at_once: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Finds the records that fail by themselves, by halving, in order.

    Args:
        count: Number of records.
        succeed: Returns whether some records, given by their numbers, run together.
        at_once: The largest number of records that run together.
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


def listed(names: Sequence[str]) -> str:
    """Lists the first names, and says if there are more."""
    return ", ".join(map(printable, names[:_MOST_NAMED])) + " and more" * (len(names) > _MOST_NAMED)


def with_printable(text: str, names: Iterable[str]) -> str:
    """DALI's text with the names in it escaped: they may have line breaks."""
    for name in names:
        if not name.isprintable():
            text = text.replace(name, printable(name))
    return text


def describe(failure: Failure, names: Sequence[str], every: bool, verb: str = "decoded") -> str:
    """Describes a failed run: the operator or the records, and DALI's own error.

    Args:
        failure: The failure.
        names: Names of the records that fail alone.
        every: Whether every record that was tried fails.
        verb: What could not be done with a bad file.
    """
    shown, message = listed(names), with_printable(failure.message, names)
    if failure.reads_file:
        return f"{shown} can't be {verb}: {message}" if names else message
    if every:
        where = " for every record"
    elif names:
        where = f" for {shown}"
    else:
        where = ""
    return f"{failure.subject} failed{where}: {message}"


def can_skip(error: Exception | None) -> bool:
    """Returns whether ``on_error="skip"`` leaves out a batch with this error."""
    return isinstance(error, (BatchError, RecordError)) and not isinstance(error, GraphError)


def graph_error(error: BatchError | RecordError, batches: int) -> GraphError:
    """Returns the error of a graph that failed for each of its first batches, by the last one."""
    failure = failure_of(error.__cause__ or error)
    text = describe(failure, (), every=True)
    described = GraphError(f"{text}\nThe first {batches} batches failed. The last one: {error}")
    described.files = getattr(error, "files", ())
    described.__cause__ = error.__cause__
    return described


def every_batch_failed(skipped: Sequence[FailedBatch]) -> EpochError:
    """Returns the error of an epoch that ``on_error="skip"`` left out as a whole."""
    last = skipped[-1]
    return EpochError(
        f"every batch of epoch {last.epoch} failed, and on_error='skip' left all of them out. "
        f"The last one: {last.message}"
    )
