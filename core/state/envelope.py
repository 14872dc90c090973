"""Encodes states, and validates the fields of states, for every engine and adapter.

A state is a flat dict of JSON values with the same keys and types over its whole lifetime::

    {"format": "dalijax", "version": 3, "kind": "reader",
     "epoch": 0, "step": 2, "errors": 0, "unchecked": "",     # the fields that this kind shows
     "data": "eJyr...", "digest": "5f0c9e6a41b2d783"}

``data`` holds the other fields of the kind as JSON, deflated (RFC 1950) and in base64. ``digest``
covers all fields. Nothing is ever unpickled, because a state may come from an untrusted place.

The kinds are the `Form`s of `core.state.reader_state`, `core.sources.state`,
`adapters.grain.transform`, `adapters.grain.data_loader` and `adapters.tfdata.stepped_stream`. These
modules also check whether the values are consistent; the engines check whether the position exists.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import reprlib
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import StateError

VERSION = 3
COUNT = range(1 << 53)  # JSON readers that store numbers as float64 keep these exactly
INTEGER = range(-(1 << 63), 1 << 64)
_FORMAT = "dalijax"
_HEAD: Mapping[str, Any] = {"format": str, "version": int, "kind": str, "data": str, "digest": str}
_MOST_BYTES = 1 << 24  # of inflated data


def digest(*pieces: bytes, length: int = 12) -> str:
    """Returns the first ``length`` hexadecimal digits of the SHA-256 hash of pieces of data.

    The hash includes the length of each piece.
    """
    state = hashlib.sha256()
    for piece in pieces:
        state.update(b"%d " % len(piece))
        state.update(piece)
    return state.hexdigest()[:length]


@dataclasses.dataclass(frozen=True)
class Form:
    """The fields of one kind of state.

    A field is declared as ``str``; as ``int``, a count below 2**53; as a ``range`` of whole
    numbers; as ``[str]``, a list of texts; as a dict of further fields; or as ``object``, the state
    of an inner iterator, which validates it.

    Attributes:
        kind: The name of the kind.
        owner: A description of the iterators that have states of this kind, for errors.
        shown: The fields that are keys of the state.
        packed: The fields that are compressed in the state's ``data``.
        optional: Packed fields, lists of texts, that states omit if they are empty.
    """

    kind: str
    owner: str
    shown: Mapping[str, Any]
    packed: Mapping[str, Any]
    optional: frozenset[str] = frozenset()

    def encode(self, **values: Any) -> dict[str, Any]:
        """Returns a state with the values of all fields."""
        packed = {name: values.pop(name) for name in self.packed}
        packed = {k: value for k, value in packed.items() if value or k not in self.optional}
        text = json.dumps(packed, separators=(",", ":")).encode()
        state = {
            "format": _FORMAT,
            "version": VERSION,
            "kind": self.kind,
            **{name: values.pop(name) for name in self.shown},
            "data": base64.b64encode(deflate(text)).decode(),
        }
        if values:
            raise TypeError(f"states of kind {self.kind!r} have no field {', '.join(values)}")
        return {**state, "digest": _digest(state)}

    def decode(self, saved: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
        """Validates a state, and returns the values of all its fields by name.

        Args:
            saved: The result of `encode`, or its JSON text or bytes, which are not changed. The
                values of ``object`` fields are returned without a copy.

        Raises:
            StateError: If ``saved`` is not a state, has another kind or version, or is damaged.
        """
        state = self._recognized(parsed(saved))
        _check(state, {**_HEAD, **self.shown})
        try:
            if state["digest"] != _digest(state):
                raise ValueError("its digest does not match")
            packed = json.loads(inflate(base64.b64decode(state["data"], validate=True)))
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged(str(error)) from None
        if type(packed) is dict:
            packed = {**{name: [] for name in self.optional}, **packed}
        _check(packed, self.packed, "data")
        return {**{name: state[name] for name in self.shown}, **packed}

    def _recognized(self, state: Any) -> dict[str, Any]:
        """Returns a state of this kind and version as a dict.

        Raises:
            StateError: If ``state`` is not a state of this kind and version.
        """
        # The type is checked first, because comparing an array with a text returns an array.
        known = isinstance(state, Mapping) and type(state.get("format")) is str
        if not known or state["format"] != _FORMAT:
            raise StateError(
                f"not a state of dalijax: {brief(state)}. Pass the result of get_state() of "
                f"{self.owner}"
            )
        version, kind = state.get("version"), state.get("kind")
        if type(version) is not int or version != VERSION:
            age = "newer" if isinstance(version, int) and version > VERSION else "older"
            raise StateError(
                f"version: {brief(version)} -> {VERSION} (saved -> this dalijax). Restore the "
                f"state with the {age} dalijax that saved it"
            )
        if type(kind) is not str or kind != self.kind:
            raise StateError(
                f"kind: {brief(kind)} -> {self.kind!r} (saved -> now). Restore the state in an "
                f"iterator of the kind that saved it; this is {self.owner}"
            )
        return dict(state)


def damaged(reason: str) -> StateError:
    """Returns the error for a state that no iterator saves."""
    return StateError(
        f"the state is damaged: {reason}. It was cut short or changed after get_state(): restore "
        "an undamaged copy"
    )


def parsed(saved: Any) -> Any:
    """Returns the value of JSON text or bytes; returns values of other types unchanged.

    Raises:
        StateError: If the text or bytes are not JSON, or if ``saved`` is a path.
    """
    if isinstance(saved, os.PathLike):
        saved = os.fspath(saved)
    elif not isinstance(saved, (str, bytes)):
        return saved
    try:
        return json.loads(saved)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"not a state of dalijax, since it is not JSON ({error}): {str(saved)[:80]!r}. For a "
            "path, pass the content of the file: set_state(json.load(open(path)))"
        ) from None


def brief(value: Any) -> str:
    """Returns the repr of a value, cut to about 80 characters, for messages."""
    return repr(value[:80]) if isinstance(value, (str, bytes)) else reprlib.repr(value)[:80]


def deflate(data: bytes, dictionary: bytes = b"", level: int = -1) -> bytes:
    """Returns bytes deflated (RFC 1950) with a preset dictionary of similar bytes."""
    compressor = zlib.compressobj(level, zdict=dictionary)
    return compressor.compress(data) + compressor.flush()


def inflate(data: bytes, dictionary: bytes = b"") -> bytes:
    """Returns the bytes that `deflate` compressed.

    Raises:
        ValueError: If ``data`` is not deflated data, was deflated with another dictionary, or has
            more than 16 MiB when inflated.
    """
    decompressor = zlib.decompressobj(zdict=dictionary)
    try:
        plain = decompressor.decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not deflated data: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("not deflated data: it is cut off, longer than its content, or too large")
    return plain


def _digest(state: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in state.items() if name != "digest"}
    # States of Grain's iterators may contain values that are not JSON; only their type counts.
    text = json.dumps(fields, sort_keys=True, default=lambda value: type(value).__name__)
    return digest(text.encode(), length=16)


def _check(value: Any, form: Any, path: str = "") -> None:
    """Raises StateError if a value does not have a form; the error names the first wrong field.

    Args:
        value: The value.
        form: The declaration of the value, as for the fields of `Form`.
        path: The name of the value in the state; empty for the whole state.
    """
    if isinstance(form, Mapping):
        if type(value) is not dict:
            raise damaged(f"{path} is {brief(value)}, not a dict")
        missing, unknown = sorted(form.keys() - value.keys()), sorted(map(str, value.keys() - form))
        if missing or unknown:
            place = f"in {path} " if path else ""
            raise damaged(f"{place}{missing} are missing, and {brief(unknown)} are unknown")
        for name, part in form.items():
            _check(value[name], part, f"{path}.{name}" if path else name)
        return
    if isinstance(form, list):
        fits = type(value) is list and all(type(item) is str for item in value)
        expected = "a list of texts"
    elif form is object:
        return
    elif form is str:
        fits, expected = type(value) is str, "text"
    else:
        numbers = COUNT if form is int else form
        fits = type(value) is int and value in numbers
        expected = f"a whole number from {numbers[0]} to {numbers[-1]}"
    if not fits:
        raise damaged(f"{path} is {brief(value)}, not {expected}")
