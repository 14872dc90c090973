"""Creates the errors of failed batches, and decides which errors ``on_error="skip"`` skips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import BatchError, EpochError, GraphError, RecordError
from ..messages.printable import printable_text
from ..state.position import FailedBatch
from .advice import run_cure
from .failure import Failure, failure_of

# The graph is at fault if operators fail for this many batches before any batch succeeds.
MOST_UNEXPLAINED = 8
# The number of skipped batches in a row after which a stream of failing epochs gives up. Searches
# for a batch that does not fail have the same limit.
MOST_SKIPPED = 64
_MOST_NAMED = 5


def first_names(names: Sequence[str]) -> str:
    """Returns the first five names, joined by commas, and "and more" if there are more."""
    return ", ".join(map(printable_text, names[:_MOST_NAMED])) + " and more" * (
        len(names) > _MOST_NAMED
    )


def with_dali(text: str, dali_text: str, names: Iterable[str] = ()) -> str:
    """Returns a message, followed by DALI's complete message, if there is one.

    Args:
        text: The message of this package.
        dali_text: DALI's message.
        names: Names of records that DALI's message may contain; unprintable characters are escaped.
    """
    return f"{text}\nDALI says: {_with_printable(dali_text, names)}" if dali_text else text


def _with_printable(text: str, names: Iterable[str]) -> str:
    """Returns DALI's message with escapes in names that contain e.g. line breaks."""
    for name in names:
        if not name.isprintable():
            text = text.replace(name, printable_text(name))
    return text


def describe(failure: Failure, names: Sequence[str], every: bool) -> str:
    """Returns the message for a failed run: the operator or the records, and DALI's own error.

    Args:
        failure: The failure.
        names: The names of the records that fail alone.
        every: Whether every record fails that was tried alone.
    """
    shown, message = first_names(names), _with_printable(failure.message, names)
    if failure.reads_file:
        return f"{shown} can't be decoded: {message}" if names else message
    if every:
        records_text = " for every record"
    elif names:
        records_text = f" for {shown}"
    else:
        records_text = ""
    if cure := run_cure(failure.message):
        message += f"\n{cure}"
    return f"{failure.subject} failed{records_text}: {message}"


def can_skip(error: Exception | None) -> bool:
    """Returns whether ``on_error="skip"`` skips a batch with this error."""
    return isinstance(error, (BatchError, RecordError)) and not isinstance(error, GraphError)


def graph_error(error: BatchError | RecordError, batches: int) -> GraphError:
    """Returns the error that blames a graph, if it failed for each of its first batches."""
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
        f"every batch of epoch {last.epoch} failed, and on_error='skip' skipped all of them. "
        f"The last one: {last.message}"
    )


def too_many_skipped(skipped: Sequence[FailedBatch]) -> EpochError:
    """Returns the error of a stream, if ``on_error="skip"`` skipped too many batches in a row."""
    return EpochError(
        f"{len(skipped)} batches in a row failed, and on_error='skip' skipped all of them. "
        f"The last one: {skipped[-1].message}"
    )
