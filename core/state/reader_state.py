"""Encodes and validates states of iterators over DALI's readers.

A state contains the position, DALI's checkpoints and the fingerprint of the iterator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import nvidia.dali

from . import envelope
from .fingerprint import Fingerprint, unknown
from .position import Checkpoints, ReaderPosition

_MOST_TO_DROP = 1 << 16  # batches
_TO_DROP = range(_MOST_TO_DROP + 1)
FORM = envelope.Form(
    kind="reader",
    owner="an iterator over one of DALI's readers",
    shown={"epoch": int, "step": int, "errors": int, "unchecked": str},
    packed={
        "dali": str,
        "checkpoints": [str],
        # Negative if DALI's iterator saved the checkpoints under DROP: it has already read the
        # batches that it drops.
        "to_drop": range(-_MOST_TO_DROP, _MOST_TO_DROP + 1),
        "epoch_checkpoints": [str],
        "epoch_to_drop": _TO_DROP,
        "fingerprint": {
            name: {int: envelope.INTEGER, str: str, list: [str]}[type(blank)]
            for name, blank in unknown().items()
            if name != "unchecked"
        },
    },
)


@dataclasses.dataclass(frozen=True)
class ReaderState:
    """The decoded content of a state.

    Attributes:
        position: The position after the last delivered batch.
        fingerprint: The fingerprint of the iterator; see `dalijax.core.state.fingerprint`.
    """

    position: ReaderPosition
    fingerprint: Fingerprint


def encode(position: ReaderPosition, fingerprint: Fingerprint) -> dict[str, Any]:
    """Returns the state of an iterator with a position and a fingerprint."""
    current, start = position.checkpoints or Checkpoints(), position.epoch_start or Checkpoints()
    return FORM.encode(
        epoch=position.epoch,
        step=position.step,
        errors=position.errors,
        # A text instead of a list, so that all states have the same tree: the list would be empty
        # in a first state.
        unchecked="\n".join(fingerprint["unchecked"]),
        dali=nvidia.dali.__version__,
        checkpoints=_to_texts(current),
        to_drop=current.to_drop,
        epoch_checkpoints=_to_texts(start),
        epoch_to_drop=start.to_drop,
        fingerprint={k: v for k, v in fingerprint.items() if k != "unchecked"},
    )


def decode(saved: Mapping[str, Any] | str | bytes) -> ReaderState:
    """Returns the content of a state, or of the JSON text or bytes of a state.

    Raises:
        StateError: If ``saved`` is not a state of an iterator over a reader, or is damaged.
    """
    state = FORM.decode(saved)
    fingerprint = {
        **state["fingerprint"],
        "unchecked": [*filter(None, state["unchecked"].split("\n"))],
    }
    current = _checkpoints(state["checkpoints"], state["to_drop"])
    start = _checkpoints(state["epoch_checkpoints"], state["epoch_to_drop"])
    position = ReaderPosition(state["epoch"], state["step"], current, start, state["errors"])
    if current.data is None:  # the pipelines were not built yet
        first = ReaderPosition(checkpoints=Checkpoints(), epoch_start=Checkpoints())
        if position != first or fingerprint != unknown() | {"outputs": fingerprint["outputs"]}:
            raise envelope.damaged("it has no checkpoint of DALI, but is not a first state")
        position = ReaderPosition()
    return ReaderState(position, fingerprint)


def _to_texts(checkpoints: Checkpoints) -> list[str]:
    """Returns DALI's checkpoints, which are mostly ASCII, as texts with one character per byte."""
    return [piece.decode("latin-1") for piece in checkpoints.data or ()]


def _checkpoints(texts: Sequence[str], to_drop: int) -> Checkpoints:
    try:
        return Checkpoints(tuple(text.encode("latin-1") for text in texts) or None, to_drop)
    except ValueError as error:
        raise envelope.damaged(str(error)) from None
