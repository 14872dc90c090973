"""Restores a position of DALI's readers: builds pipelines at checkpoints, and compares the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..errors import StateError
from ..pipeline import advice
from ..pipeline.runner import Runner
from ..state.differences import check, renamed
from ..state.fingerprint import Fingerprint
from ..state.position import Checkpoints, ReaderPosition
from ..state.random_state import for_operators
from ..state.reader_state import ReaderState


def restored(
    saved: ReaderState,
    build: Callable[[Checkpoints], Runner],
    fingerprint: Callable[[], Fingerprint],
    allow: Sequence[str],
    named: Sequence[str],
) -> ReaderPosition:
    """Builds pipelines at a saved position; returns the position with matching checkpoints.

    If operators were added, removed or renamed since the position was saved, each operator receives
    its own saved state; added operators begin at their start.

    Args:
        saved: The saved position and the fingerprint of its data.
        build: Replaces the pipelines by pipelines at checkpoints.
        fingerprint: Returns the fingerprint of the pipelines' data.
        allow: Names of differences to ignore.
        named: Further names of ignored differences; each must exist in a fingerprint.

    Raises:
        StateError: If the saved position belongs to different data, or DALI rejects its
            checkpoints.
        Exception: If no pipelines can be built.
    """
    position = saved.position
    refusal = _refused(position, build)
    if refusal is not None:
        build(Checkpoints())  # to report the differences instead of DALI's error
    own = fingerprint()
    check(saved.fingerprint, own, allow, named)
    names = None if saved.fingerprint == own else renamed(saved.fingerprint, own)
    if names is not None:
        position = with_names(position, names, build(Checkpoints()).checkpoints() or ())
        refusal = _refused(position, build)
    if refusal is not None:  # no difference of the data explains the refusal
        raise refusal
    return position


def _refused(position: ReaderPosition, build: Callable[[Checkpoints], Runner]) -> Exception | None:
    """Builds pipelines at a position; returns the error if DALI rejects its checkpoints, or None.

    Errors about the checkpoints are returned as a StateError, other errors unchanged.
    """
    try:
        build(position.checkpoints or Checkpoints())
    except (RuntimeError, StateError) as error:
        if isinstance(error, StateError) or not advice.is_raised_by_dali(error):
            return error
        refusal = StateError(f"DALI rejects its part of the state: {error}")
        refusal.__cause__ = error
        return refusal
    except (ValueError, LookupError, TypeError) as error:  # DALI parses some parts in Python
        refusal = StateError(f"DALI can't read its part of the state: {error!r}")
        refusal.__cause__ = error
        return refusal
    return None


def with_names(
    position: ReaderPosition, names: Mapping[str, str], start: Sequence[bytes]
) -> ReaderPosition:
    """Returns a position with checkpoints for pipelines that have other operators.

    Args:
        position: The saved position.
        names: Maps the operators' current names to their names in the saved position.
        start: DALI's checkpoint of each pipeline at its start, for added operators.
    """

    def moved(checkpoints: Checkpoints | None) -> Checkpoints | None:
        if checkpoints is None or checkpoints.data is None:
            return checkpoints
        pairs = zip(checkpoints.data, start, strict=True)
        data = tuple(for_operators(*pair, names) for pair in pairs)
        return dataclasses.replace(checkpoints, data=data)

    return dataclasses.replace(
        position,
        checkpoints=moved(position.checkpoints),
        epoch_start=moved(position.epoch_start),
    )
