"""States: an iterator's position as a plain JSON value, and back.

A state shows its epoch and step, the number of failed batches, and what could not be compared; the
rest is JSON, deflated (RFC 1950) in base64 behind a digest of all. Nothing is ever unpickled: a
state from elsewhere can at worst be refused.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import nvidia.dali

from ..errors import Difference, StateError
from .fingerprint import Fingerprint, differences, unknown
from .position import Checkpoints, Position

VERSION = 2
_FORMAT = "dalijax"
_MOST_COUNT = 1 << 53  # epochs, or batches: every JSON reader keeps whole numbers up to here
_MOST_TO_DROP = 1 << 16  # batches; restoring checks it against the epochs
_MOST_BYTES = 1 << 24  # of inflated data: a state may come from elsewhere
_DIGEST_BYTES = 8

# Fields with a value of their type; lists are of str.
_STATE: Mapping[str, Any] = {
    "format": "",
    "version": 0,
    "epoch": 0,
    "step": 0,
    "errors": 0,
    "unchecked": "",
    "data": "",
}
_DATA: Mapping[str, Any] = {
    "dali": "",
    "checkpoints": [],
    "to_drop": 0,
    "epoch_checkpoints": [],
    "epoch_to_drop": 0,
    "outputs": [],
    "fingerprint": {name: blank for name, blank in unknown().items() if name != "unchecked"},
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """The content of a state.

    Attributes:
        position: The consumer's position.
        outputs: Names of the outputs.
        fingerprint: Its data; see `dalijax.core.state.fingerprint`.
    """

    position: Position
    outputs: list[str]
    fingerprint: Fingerprint

    def differences(self, outputs: Sequence[str], now: Fingerprint) -> list[Difference]:
        """The differences from an iterator's outputs and fingerprint."""
        different = differences(self.fingerprint, now)
        if self.outputs != list(outputs):
            different.insert(0, Difference("outputs", str(self.outputs), str(list(outputs))))
        return different


def encode(position: Position, outputs: Sequence[str], fingerprint: Fingerprint) -> dict[str, Any]:
    """Encodes a position as a JSON value, a dict of str and int; see `Saved`."""
    now, start = position.checkpoints or Checkpoints(), position.epoch_start or Checkpoints()
    head = {
        "format": _FORMAT,
        "version": VERSION,
        "epoch": position.epoch,
        "step": position.step,
        "errors": position.errors,
        # Text, not a list: a fresh state has no such lines, and all states have the same tree.
        "unchecked": "\n".join(fingerprint["unchecked"]),
    }
    data = {
        "dali": nvidia.dali.__version__,
        "checkpoints": _to_texts(now),
        "to_drop": now.to_drop,
        "epoch_checkpoints": _to_texts(start),
        "epoch_to_drop": start.to_drop,
        "outputs": list(outputs),
        "fingerprint": {k: v for k, v in fingerprint.items() if k != "unchecked"},
    }
    return _sealed(head, data)


def read(saved: Mapping[str, Any] | str | bytes) -> Saved:
    """Checks a state and returns its content.

    Args:
        saved: The result of `encode`, or its JSON text or bytes; it is neither kept nor changed.

    Raises:
        StateError: If it is no state, of another version, or damaged.
    """
    state = _checked(saved)
    data = _opened(state)
    fingerprint = {
        **data["fingerprint"],
        "unchecked": [*filter(None, state["unchecked"].split("\n"))],
    }
    now = _checkpoints(data["checkpoints"], data["to_drop"])
    start = _checkpoints(data["epoch_checkpoints"], data["epoch_to_drop"])
    position = Position(state["epoch"], state["step"], now, start, state["errors"])
    if now.data is None:  # not built yet
        first = Position(checkpoints=Checkpoints(), epoch_start=Checkpoints())
        if position != first or fingerprint != unknown():
            raise _damaged("it has no checkpoint of DALI's, and is not a first one")
        position = Position()
    return Saved(position, data["outputs"], fingerprint)


def parsed(saved: Mapping[str, Any] | str | bytes) -> Any:
    """Parses JSON text or bytes; returns any other value as it is.

    Raises:
        StateError: If the text is no JSON.
    """
    if isinstance(saved, os.PathLike):
        saved = os.fspath(saved)
    elif not isinstance(saved, (str, bytes)):
        return saved
    try:
        return json.loads(saved)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"no state of dalijax, since it is not JSON ({error}): {str(saved)[:80]!r}. For a "
            "path, pass the content of the file: set_state(json.load(open(path)))"
        ) from None


def brief(value: Any) -> str:
    """A value in about 80 characters at most, for messages."""
    return repr(value[:80]) if isinstance(value, (str, bytes)) else reprlib.repr(value)[:80]


def deflate(data: bytes, dictionary: bytes = b"", level: int = -1) -> bytes:
    """Deflates bytes (RFC 1950) with a preset dictionary of similar bytes."""
    compressor = zlib.compressobj(level, zdict=dictionary)
    return compressor.compress(data) + compressor.flush()


def inflate(data: bytes, dictionary: bytes = b"") -> bytes:
    """Inflates the result of `deflate`, up to 16 MiB.

    Raises:
        ValueError: If it is no deflated data, or was made with another dictionary.
    """
    decompressor = zlib.decompressobj(zdict=dictionary)
    try:
        plain = decompressor.decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"no deflated data: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("no deflated data: it ends too soon, or too late, or never")
    return plain


def _to_texts(checkpoints: Checkpoints) -> list[str]:
    """DALI's checkpoints as texts, a character for each byte: they are mostly text."""
    return [piece.decode("latin-1") for piece in checkpoints.data or ()]


def _checkpoints(texts: Sequence[str], to_drop: int) -> Checkpoints:
    try:
        return Checkpoints(tuple(text.encode("latin-1") for text in texts) or None, to_drop)
    except ValueError as error:
        raise _damaged(str(error)) from None


def _sealed(head: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A state: the fields of its head, and its packed data."""
    text = json.dumps(data, separators=(",", ":")).encode()
    packed = base64.b64encode(deflate(_digest(head, text) + text))
    return {**head, "data": packed.decode()}


def _opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The unpacked data of a state, of the right types and in range."""
    head = {key: value for key, value in state.items() if key != "data"}
    try:
        plain = inflate(base64.b64decode(state["data"], validate=True))
        digest, text = plain[:_DIGEST_BYTES], plain[_DIGEST_BYTES:]
        matches = digest == _digest(head, text)
        data: dict[str, Any] = json.loads(text) if matches else {}
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from None
    if not matches:
        raise _damaged("its digest does not match")
    _check_fields(data, _DATA)
    # Less than 0 after DALI's own DROP, which has read the batch that it drops.
    _check_range(data, "to_drop", -_MOST_TO_DROP, _MOST_TO_DROP)
    _check_range(data, "epoch_to_drop", 0, _MOST_TO_DROP)
    return data


def _digest(head: Mapping[str, Any], text: bytes) -> bytes:
    shown = json.dumps(head, sort_keys=True).encode()
    return hashlib.sha256(shown + text).digest()[:_DIGEST_BYTES]


def _checked(saved: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    """A state whose fields are of the right types and in range."""
    state = parsed(saved)
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise StateError(
            f"no state of dalijax: {brief(saved)}. Pass what get_state() of an iterator gave"
        )
    version = state.get("version")
    if version != VERSION or type(version) is not int:
        raise StateError(
            f"the state has format version {brief(version)}, this dalijax reads version {VERSION}: "
            f"use the {'newer' if isinstance(version, int) and version > VERSION else 'older'} "
            "dalijax that saved it"
        )
    state = dict(state)
    _check_fields(state, _STATE)
    for name in ("epoch", "step", "errors"):
        _check_range(state, name, 0, _MOST_COUNT)
    return state


def _check_fields(value: Any, form: Mapping[str, Any]) -> None:
    """Raises StateError if a field is missing, unknown, or of another type than the form's."""
    if wrong := _misfits(value, form, "data"):
        raise _damaged(f"{wrong} missing, unknown, or of another type")


def _misfits(value: Any, form: Any, name: str) -> list[str]:
    if type(value) is not type(form):
        return [name]
    if isinstance(form, list):
        return [] if all(type(item) is str for item in value) else [name]
    if not isinstance(form, dict):
        return []
    both = [key for key in form if key in value]
    misfits = [misfit for key in both for misfit in _misfits(value[key], form[key], key)]
    return sorted(map(str, value.keys() ^ form.keys())) + misfits


def _check_range(values: Mapping[str, Any], name: str, least: int, most: int) -> None:
    if not least <= values[name] <= most:
        raise _damaged(f"{name} is {values[name]}, and not from {least} to {most}")


def _damaged(why: str) -> StateError:
    return StateError(
        f"the state is damaged ({why}): it was cut short or changed after get_state()"
    )
