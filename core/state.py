"""States: an iterator's position as a plain JSON value, and back.

Nothing is ever unpickled: a state from elsewhere can at worst be refused. DALI's checkpoints,
and long lists of operators, are deflated (RFC 1950) in base64, so that a graph of dozens of
operators stays within the 4 KiB that a state may have for each pipeline.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import nvidia.dali

from .fingerprint import Fingerprint, StateError, differences
from .position import Mark, Position

T = TypeVar("T")
VERSION = 1
_MOST = 1 << 24  # bytes of anything deflated: a state may come from elsewhere
_READABLE = 1024  # characters of a list of operators that stays as it is
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
    # The digest is of what is deflated: another zlib may deflate it otherwise.
    digest = _digest(state)
    now, before = mark.checkpoints or (), start.checkpoints or ()
    state["checkpoints"] = [pack(one) for one in now]
    state["epoch_checkpoints"] = [pack(one, like) for one, like in _beside(before, now)]
    operators = json.dumps(fingerprint["operators"])
    if len(operators) > _READABLE:
        state["fingerprint"]["operators"] = [pack(operators.encode())]
    return state | {"digest": digest}


def _beside(before: Sequence[T], now: Sequence[bytes]) -> list[tuple[T, bytes]]:
    """Each checkpoint of the epoch's start, and the one of now, which is much like it."""
    return list(zip(before, now if len(now) == len(before) else (b"",) * len(before)))


def pack(data: bytes, like: bytes = b"") -> str:
    """Bytes as text, short where they repeat themselves or those of ``like``."""
    deflate = zlib.compressobj(zdict=like)
    return base64.b64encode(deflate.compress(data) + deflate.flush()).decode()


def unpack(text: str, like: bytes = b"") -> bytes:
    """What `pack` made a text of.

    Raises:
        ValueError: If it is no such text.
    """
    inflate = zlib.decompressobj(zdict=like)
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), _MOST)
    except (zlib.error, binascii.Error, TypeError) as error:
        raise ValueError(f"no deflated text: {error}") from None
    if not inflate.eof:
        raise ValueError("no deflated text: it ends too soon, or never")
    return data


def decode(
    state: Mapping[str, Any], outputs: Sequence[str], fingerprint: Fingerprint
) -> tuple[Position, Fingerprint]:
    """The position that a state describes, and its fingerprint, once it is known to fit.

    Args:
        state: What `encode` gave; it is neither kept nor changed.
        outputs: Names of the outputs now.
        fingerprint: That of the pipelines now; unknown fields are not compared.

    Raises:
        StateError: If it is no state, of another version, damaged, or of other data; the
            message has each field that differs as saved -> now.
    """
    _check_shape(state)
    plain, marks = _unpacked(state)
    lines = differences(plain["fingerprint"], fingerprint)
    if state["outputs"] != list(outputs):
        lines.insert(0, f"outputs: {state['outputs']} -> {list(outputs)}")
    if lines:
        raise StateError.of_other_data(lines)
    built = marks[0].checkpoints is not None
    position = Position(
        epoch=state["epoch"],
        step=state["step"],
        mark=marks[0] if built else None,
        epoch_mark=marks[1] if built else None,
        errors=state["errors"],
    )
    return position, plain["fingerprint"]


def _unpacked(state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Mark, Mark]]:
    """The state with nothing deflated, whose digest is right, and its marks."""
    own = dict(state["fingerprint"])
    plain = {k: v for k, v in state.items() if k != "digest"} | {"fingerprint": own}
    try:
        now = tuple(unpack(text) for text in state["checkpoints"])
        texts = _beside(state["epoch_checkpoints"], now)
        before = tuple(unpack(text, like) for text, like in texts)
        if len(own["operators"]) == 1 and " " not in own["operators"][0]:
            own["operators"] = json.loads(unpack(own["operators"][0]))
    except (ValueError, TypeError, LookupError) as error:
        raise _damaged(str(error)) from None
    plain["checkpoints"], plain["epoch_checkpoints"] = _to_text(now), _to_text(before)
    if state["digest"] != _digest(plain):
        raise _damaged("its digest does not match")
    return plain, (Mark(now or None, state["lag"]), Mark(before or None, state["epoch_lag"]))


def _damaged(why: str) -> StateError:
    return StateError(
        f"the state is damaged ({why}): it was cut short or changed after get_state()"
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
    if wrong:
        raise _damaged(f"{wrong} missing, or of another type")


def _digest(state: Mapping[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_text(checkpoints: Sequence[bytes] | None) -> list[str]:
    return [base64.b64encode(one).decode() for one in checkpoints or ()]
