"""Errors about batches of DALI's readers: what happens to the batch, and DALI's message."""

from __future__ import annotations

from typing import TypeVar

from ..errors import BatchError
from ..pipeline import advice
from ..pipeline.dali_pipeline import is_unmappable
from ..pipeline.failure import EnvironmentFailure, failure_of
from ..pipeline.failure_errors import describe, with_dali

_Error = TypeVar("_Error", bound=RuntimeError)


def counted_failure(error: RuntimeError, label: str) -> BatchError:
    """Returns the error of a failed batch that counts as delivered.

    Args:
        error: DALI's error.
        label: The name of the batch: "batch 3 of epoch 0".
    """
    problem = "failed, and counts as delivered; the following call returns the next batch"
    described = _described(error, label, problem, BatchError)
    described.unexplained = not failure_of(error).reads_file
    return described


def stopped(error: RuntimeError, label: str) -> RuntimeError:
    """Returns the error of a batch if the pipelines run no batch after a failed batch.

    Args:
        error, label: As for `counted_failure`.
    """
    problem = (
        "can't be produced: with exec_dynamic=False no batch runs after this batch, or a "
        "prefetched later batch, has failed. Omit exec_dynamic=False, so that the following call "
        "continues after the failed batch"
    )
    return _described(error, label, problem, RuntimeError)


def unread(error: RuntimeError, label: str, skips: bool, pointer: str = "") -> RuntimeError:
    """Returns the error of a batch whose reader failed.

    Args:
        error, label: As for `counted_failure`.
        skips: Whether ``on_error`` is "skip".
        pointer: The fix if a file is a git-lfs pointer, or "".
    """
    problem = "can't be read" + (f". {pointer}" if pointer else "")
    if is_unmappable(error):
        problem += ". Pass dont_use_mmap=True to its reader, so that an empty file fails alone"
    problem += "; the following call tries it again"
    if skips and not failure_of(error).environment:
        problem += (
            ". on_error='skip' can't skip it, because DALI's reader rejects the file and stops. "
            "Repair or remove the file, or use a source of dalijax.sources, which skips single "
            "records"
        )
    return _described(error, label, problem, RuntimeError)


def exhausted_retries(failed: EnvironmentFailure, label: str, skips: bool) -> RuntimeError:
    """Returns the error of a batch for which all retries failed.

    Args:
        failed: The last failure, raised from DALI's error.
        label, skips: As for `unread`.
    """
    error = failed.__cause__
    if not isinstance(error, RuntimeError):
        return RuntimeError(str(failed))
    if failure_of(error).stops_reader:
        return unread(error, label, skips)
    problem = "can't be produced, but not because of its files; the following call tries it again"
    return _described(error, label, problem, RuntimeError)


def _described(error: RuntimeError, label: str, problem: str, kind: type[_Error]) -> _Error:
    """Returns an error with the name of a batch, what happens to it, and DALI's message.

    Args:
        error, label: As for `counted_failure`.
        problem: What happens to the batch: "can't be read; the following call tries it again".
        kind: The class of the returned error.
    """
    reason = with_dali(describe(failure_of(error), (), every=False), advice.run_message(error))
    described = kind(f"{label} {problem}: {reason}")
    described.__cause__ = error
    return described
