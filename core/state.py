"""States: an iterator's position as a plain JSON value, and back.

Nothing is ever unpickled: a state from elsewhere can at worst be refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import nvidia.dali

from .fingerprint import Fingerprint, StateError, differences
from .position import Mark, Position

VERSION = 1
_FORMAT = "dalijax"
_TYPES: Mapping[str, type] = {
    "format": str,
    "version": int,
    "dali": str,
    "epoch": int,
    "step": int,
    "errors": int,
    "lag": int,
    "checkpoints": list,
    "epoch_lag": int,
    "epoch_checkpoints": list,
    "outputs": list,
    "fingerprint": dict,
    "digest": str,
}


def encode(position: Position, outputs: Sequence[str], fingerprint: Fingerprint) -> dict[str, Any]:
    """A position as a dict of str, int, list and dict that JSON keeps.

    Args:
        position: The consumer's position.
        outputs: Names of the outputs.
        fingerprint: What the pipelines read; see `dalijax.core.fingerprint`.
    """
    mark, start = position.mark or Mark(), position.epoch_mark or Mark()
    state = {
        "format": _FORMAT,
        "version": VERSION,
        "dali": nvidia.dali.__version__,
        "epoch": position.epoch,
        "step": position.step,
        "errors": position.errors,
        "lag": mark.lag,
        "checkpoints": _to_text(mark.checkpoints),
        "epoch_lag": start.lag,
        "epoch_checkpoints": _to_text(start.checkpoints),
        "outputs": list(outputs),
        "fingerprint": json.loads(json.dumps(fingerprint)),
    }
    return state | {"digest": _digest(state)}


def decode(state: Mapping[str, Any], outputs: Sequence[str], fingerprint: Fingerprint) -> Position:
    """The position that a state describes, once it is known to fit.

    Args:
        state: What `encode` gave; it is neither kept nor changed.
        outputs: Names of the outputs now.
        fingerprint: That of the pipelines now; unknown fields are not compared.

    Raises:
        StateError: If it is no state, of another version, damaged, or of other data; the
            message has each field that differs as saved -> now.
    """
    _check_shape(state)
    lines = differences(state["fingerprint"], fingerprint)
    if state["outputs"] != list(outputs):
        lines.insert(0, f"outputs: {state['outputs']} -> {list(outputs)}")
    if lines:
        raise StateError.of_other_data(lines)
    marks = [
        Mark(_from_text(state[prefix + "checkpoints"]), state[prefix + "lag"])
        for prefix in ("", "epoch_")
    ]
    built = marks[0].checkpoints is not None
    return Position(
        epoch=state["epoch"],
        step=state["step"],
        mark=marks[0] if built else None,
        epoch_mark=marks[1] if built else None,
        errors=state["errors"],
    )


def _check_shape(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise StateError(
            f"no state of dalijax: {str(state)[:80]!r}. Pass what get_state() of an iterator gave"
        )
    version = state.get("version")
    if version != VERSION:
        raise StateError(
            f"the state has format version {version}, this dalijax reads version {VERSION}: use "
            f"the {'newer' if isinstance(version, int) and version > VERSION else 'older'} "
            "dalijax that saved it"
        )
    wrong = [k for k, t in _TYPES.items() if type(state.get(k)) is not t]
    if wrong or state["digest"] != _digest({k: v for k, v in state.items() if k != "digest"}):
        raise StateError(
            f"the state is damaged ({wrong or 'its digest does not match'}): it was cut short "
            "or changed after get_state()"
        )


def _digest(state: Mapping[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_text(checkpoints: Sequence[bytes] | None) -> list[str]:
    return [base64.b64encode(one).decode() for one in checkpoints or ()]


def _from_text(texts: Sequence[str]) -> tuple[bytes, ...] | None:
    try:
        return tuple(base64.b64decode(one, validate=True) for one in texts) or None
    except (binascii.Error, TypeError, ValueError) as error:
        raise StateError(f"the state's checkpoints are no base64: {error}") from None
