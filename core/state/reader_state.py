"""Encodes and validates states of iterators over DALI's readers.

A state contains the position, DALI's checkpoints and the fingerprint of the iterator.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import nvidia.dali

from ..formats import protobuf
from . import envelope
from .fingerprint import Fingerprint, split_line, unknown
from .position import Checkpoints, Position
from .reader_files import READERS, reader_of

_MOST_TO_DROP = 1 << 16  # batches; a restore also checks the number against the epochs
_MOST_PASSES = 1 << 31
_MOST_SAMPLES = 1 << 31  # bound for the samples in a pass of a reader whose number is unknown
# Readers whose states are checked here. DALI checks the states of video readers, which need a GPU.
_KNOWN_STATES = READERS - {"video", "video_resize"}
_PHILOX = re.compile(rb"Philox_[0-9A-F]+_[0-9A-F]+:[0-9A-F]+_[0-9A-F]+")  # a generator's state
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

    position: Position
    fingerprint: Fingerprint


def encode(position: Position, fingerprint: Fingerprint) -> dict[str, Any]:
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
    position = Position(state["epoch"], state["step"], current, start, state["errors"])
    if current.data is None:  # the pipelines were not built yet
        first = Position(checkpoints=Checkpoints(), epoch_start=Checkpoints())
        if position != first or fingerprint != unknown() | {"outputs": fingerprint["outputs"]}:
            raise envelope.damaged("it has no checkpoint of DALI, but is not a first state")
        position = Position()
    return ReaderState(position, fingerprint)


def _to_texts(checkpoints: Checkpoints) -> list[str]:
    """Returns DALI's checkpoints, which are mostly ASCII, as texts with one character per byte."""
    return [piece.decode("latin-1") for piece in checkpoints.data or ()]


def _checkpoints(texts: Sequence[str], to_drop: int) -> Checkpoints:
    try:
        return Checkpoints(tuple(text.encode("latin-1") for text in texts) or None, to_drop)
    except ValueError as error:
        raise envelope.damaged(str(error)) from None


def check_checkpoints(saved: ReaderState, reader: str | None) -> None:
    """Raises StateError if saved checkpoints do not have the form of DALI's.

    Args:
        saved: The content of the state.
        reader: Name of the reader whose epochs the fingerprint describes; None without a reader.
    """
    data, position = saved.fingerprint, saved.position
    operators = [split_line(line) for line in data["operators"]]
    names = {name for kind, name, _ in operators if reader_of(kind) in _KNOWN_STATES}
    readers = dict.fromkeys(names, _MOST_SAMPLES)
    if reader in readers and min(data["epoch_size"], data["num_shards"], data["batch_size"]) > 0:
        # At most the samples of a pass over the reader's shard, padded to full batches.
        readers[reader] = data["epoch_size"] // data["num_shards"] + 1 + data["batch_size"]
    pieces = [
        checkpoints.data or ()
        for checkpoints in (position.checkpoints, position.epoch_start)
        if checkpoints
    ]
    forms = [[_check_form(piece, readers) for piece in group] for group in pieces]
    if len(forms) < 2 or not forms[1]:
        return
    # DALI reads the checkpoint of the epoch's start only when the iterator is reset, which is too
    # late for an error.
    differ = len(forms[0]) != len(forms[1])
    for current, start in zip(*forms):
        states = [(current[name], start[name]) for name in current.keys() & start.keys()]
        differ = differ or current.keys() != start.keys()
        differ = differ or any(a != b and None not in (a, b) for a, b in states)
    if differ:
        raise envelope.damaged(
            "DALI's checkpoints of the position and of the epoch's start belong to different graphs"
        )


def _check_form(checkpoint: bytes, readers: Mapping[str, int]) -> dict[str, bool | None]:
    """Checks a checkpoint for values that would make DALI fail or hang.

    Args:
        checkpoint: The checkpoint of a pipeline.
        readers: The largest possible number of samples in a pass of each reader, by name.

    Returns:
        A dict with a value for each operator, by name: True if its state is that of a random
        generator, False if it has another state, None if it has no state.

    Raises:
        StateError: If ``checkpoint`` is not a checkpoint, or has values that no pipeline saves.
    """
    random: dict[str, bool | None] = {}
    counted = False
    try:
        for number, content in protobuf.fields(checkpoint):
            fields = dict(protobuf.fields(content))
            if number == 2:
                counts, counted = json.loads(fields[1]), True
                counters = [counts[name] for name in ("iter", "epoch_idx")]
                if any(type(count) is not int or count < 0 for count in counters):
                    raise ValueError(f"its counts are {counters}")
            elif number == 1:
                name, state = fields[1].decode(), fields[2]
                random[name] = state.startswith(b"Philox") if state else None
                if {*fields} != {1, 2}:
                    raise ValueError(f"{name} has {sorted(fields)}")
                if random[name] and not _PHILOX.fullmatch(state):
                    raise ValueError(f"{name} has an invalid random state")
                if name in readers:
                    _check_reader(name, state, readers[name])
        if not counted:
            raise ValueError("it has no count of runs")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise envelope.damaged(f"in DALI's part, {error}") from None
    return random


def _check_reader(name: str, state: bytes, most: int) -> None:
    """Raises ValueError if no reader can have a state.

    Args:
        name: The name of the reader.
        state: The serialized state of the reader.
        most: The largest possible number of samples in a pass.
    """
    outer = dict(protobuf.fields(state))
    snapshot = dict(protobuf.fields(outer[1]))
    if {*outer} != {1} or {*snapshot} != {1, 2, 3}:
        raise ValueError(f"the state of {name} is not that of a reader")
    generator, passes, samples = snapshot[1], snapshot[2], snapshot[3]
    # A linear congruential generator would stay at 0 forever.
    if not re.fullmatch(rb"0*[1-9][0-9 ]*", generator):
        raise ValueError(f"the generator of {name} is at {generator!r}")
    if samples > most or passes > _MOST_PASSES:
        raise ValueError(f"{name} is at sample {samples} of pass {passes}")
