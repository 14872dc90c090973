"""The state of pipelines: kept short, and known at any step without running to it.

DALI's random operators count the samples that they drew for (a Philox generator: a key, a
sequence number, an offset), and its checkpoints hold these counts as hexadecimal text. So a
checkpoint differs little from the first one of its pipeline; and where each run counts on by
the same number, the checkpoint after any number of runs follows from the first three. A
reader counts the samples of its pass over the data.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import StateError
from . import protobuf
from .codec import deflate, inflate

_NUMBER = re.compile(rb"(?<![0-9A-Za-z])[0-9A-F]{16}(?![0-9A-Za-z])")
_COPY = re.compile("__(MakeContiguous|Copy)_(Cpu|Gpu)To(Cpu|Gpu)_")
_COPIES = re.compile(f"^({_COPY.pattern})+")
_MOST_PASSES = 1 << 31
_PHILOX = re.compile(rb"Philox_[0-9A-F]+_[0-9A-F]+:[0-9A-F]+_[0-9A-F]+")
_ITER = re.compile(rb'("iter": )(\d+)')


def operators(checkpoint: bytes) -> dict[str, bool]:
    """Whether each operator has a state, by its name, in the checkpoint of a pipeline."""
    return {name: bool(fields.get(2)) for name, fields in _contents(checkpoint).items()}


def _contents(checkpoint: bytes) -> dict[str, dict[int, Any]]:
    """What a checkpoint has of each operator, by its name: {1: name, 2: state}."""
    contents = (content for number, content in protobuf.fields(checkpoint) if number == 1)
    return {fields[1].decode(): fields for fields in map(dict, map(protobuf.fields, contents))}


def check_form(checkpoint: bytes, readers: Mapping[str, int]) -> list[str]:
    """Checks what DALI does not check of a checkpoint, and would go wrong or wait for ever by.

    Args:
        checkpoint: The checkpoint of a pipeline.
        readers: Of each of its readers, by name, the most samples that a pass has.

    Returns:
        The names of its operators, sorted.

    Raises:
        StateError: If it is no checkpoint, or one that no pipeline gives.
    """
    names: list[str] = []
    try:
        for number, content in protobuf.fields(checkpoint):
            fields = dict(protobuf.fields(content))
            if number == 2:
                counts = json.loads(fields[1]) if fields.get(1) else {}
                known = [counts[name] for name in ("iter", "epoch_idx") if name in counts]
                if any(type(count) is not int or count < 0 for count in known):
                    raise ValueError(f"its counts are {known}")
            elif number == 1:
                name, state = fields[1].decode(), fields[2]
                names.append(name)
                if {*fields} != {1, 2}:
                    raise ValueError(f"{name} has {sorted(fields)}")
                if state.startswith(b"Philox") and not _PHILOX.fullmatch(state):
                    raise ValueError(f"the random state of {name} is none")
                if name in readers:
                    _check_reader(name, state, readers[name])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StateError(f"DALI's part of the state is damaged: {error}") from None
    return sorted(names)


def _check_reader(name: str, state: bytes, most: int) -> None:
    """Raises ValueError where a reader's state has counts that it never reaches."""
    outer = dict(protobuf.fields(state))
    snapshot = dict(protobuf.fields(outer[1]))
    if {*outer} != {1} or {*snapshot} != {1, 2, 3}:
        raise ValueError(f"{name} has no state of a reader")
    generator, passes, samples = snapshot[1], snapshot[2], snapshot[3]
    # It is a linear congruential generator, which gives the same number for ever from 0 on.
    if not re.fullmatch(rb"0*[1-9][0-9 ]*", generator):
        raise ValueError(f"the generator of {name} is at {generator!r}")
    if samples > most or passes > _MOST_PASSES:
        raise ValueError(f"{name} is at sample {samples} of pass {passes}")


def for_operators(checkpoint: bytes, start: bytes, names: Mapping[str, str] | None = None) -> bytes:
    """The checkpoint of a pipeline, for one with other operators.

    Args:
        checkpoint: The checkpoint.
        start: The other pipeline's, at its start: operators that are new keep this state.
        names: The names of operators in the checkpoint, by those that they have now; the same
            names by default.

    Raises:
        StateError: If an operator has a state now and had none; if it is no checkpoint.
    """
    had, has, rest = _both(checkpoint, start)
    fields: list[tuple[int, Any]] = []
    for name, present in has.items():
        kept = had.get(name if names is None else names.get(name, ""))
        if kept is not None and present.get(2) and not kept.get(2):
            raise StateError(f"{name} has a state now, and had none when the state was saved")
        fields.append((1, protobuf.message(((kept or present) | {1: name.encode()}).items())))
    return protobuf.message([*fields, *rest])


def with_random_state(checkpoint: bytes, other: bytes) -> bytes:
    """The checkpoint of a pipeline, whose random operators stand where another one has them.

    Args:
        checkpoint: The checkpoint.
        other: Another one of the same pipeline.

    Raises:
        StateError: If one of them is no checkpoint.
    """
    had, has, _ = _both(other, checkpoint)
    same = {name: name for name in has if not had[name].get(2, b"").startswith(b"Philox")}
    return for_operators(checkpoint, other, same)


def to_other_device(checkpoint: bytes, start: bytes) -> bytes:
    """The checkpoint of a pipeline, for one of the same graph on other devices.

    DALI copies to and from devices by operators of its own, named after them, which have no
    state; of a checkpoint with other names it takes nothing.

    Args:
        checkpoint: The checkpoint.
        start: The other pipeline's, at its start.

    Raises:
        StateError: If another operator than those is in one of them alone, or has a state in the
            other pipeline alone; if they are of other outputs; if it is no checkpoint.
    """
    had, has, _ = _both(checkpoint, start)
    # At its start an operator may have no state yet; the other way round DALI would begin anew.
    alone = {*had} ^ {*has}
    alone |= {name for name in {*had} & {*has} if has[name].get(2) and not had[name].get(2)}
    alone = {name for name in alone if not _COPY.match(name)}
    if alone:
        names = ", ".join(sorted(alone))
        raise StateError(f"{names} is, or has a state, in one of the two graphs alone")
    lost, gained = _outputs(had) - _copied(has), _outputs(has) - _copied(had)
    if lost and gained:
        raise StateError(f"its outputs were {sorted(lost)} where they are {sorted(gained)} now")
    return for_operators(checkpoint, start)


def _both(
    checkpoint: bytes, start: bytes
) -> tuple[dict[str, dict[int, Any]], dict[str, dict[int, Any]], list[tuple[int, Any]]]:
    """What two checkpoints have of each operator, and what the first has besides."""
    try:
        rest = [field for field in protobuf.fields(checkpoint) if field[0] != 1]
        return _contents(checkpoint), _contents(start), rest
    except (ValueError, TypeError, LookupError) as error:
        raise StateError(f"DALI's checkpoint is not of the form that is known: {error}") from None


def without_counts(checkpoint: bytes, start: bytes) -> bytes:
    """A checkpoint whose pipeline counts its runs from 0, with the states of its operators.

    Args:
        checkpoint: The checkpoint.
        start: The pipeline's at its start.
    """
    operators = [field for field in protobuf.fields(checkpoint) if field[0] == 1]
    return protobuf.message(
        [*operators, *(field for field in protobuf.fields(start) if field[0] != 1)]
    )


def _copied(names: Iterable[str]) -> set[str]:
    """What DALI's own operators copy, of the names of all operators."""
    return {_COPIES.sub("", name) for name in names if _COPY.match(name)}


def _outputs(names: Iterable[str]) -> set[str]:
    """What is copied for the consumer, of the names of all operators."""
    return _copied(name for name in names if name.startswith("__MakeContiguous_"))


def compress(checkpoints: Sequence[bytes], first: Sequence[bytes]) -> str:
    """Checkpoints of pipelines as a short text, given those of their start."""
    data = b"".join(len(one).to_bytes(4, "big") + one for one in checkpoints)
    return base64.b85encode(deflate(data, b"".join(first), 9)).decode()


def expand(text: str, first: Sequence[bytes]) -> list[bytes]:
    """The checkpoints that `compress` made a text of.

    Raises:
        StateError: If it was made of other pipelines.
    """
    try:
        data = inflate(base64.b85decode(text), b"".join(first))
    except ValueError as error:
        raise StateError(
            "the state was saved by another graph, seed or number of shards, so that its random "
            f"numbers can't go on ({error}). Make the transform as it was"
        ) from None
    checkpoints, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        checkpoints.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if len(checkpoints) != len(first):
        raise StateError(f"the state has {len(checkpoints)} pipelines, not {len(first)}")
    return checkpoints


def after_runs(runs: int, zero: bytes, one: bytes, two: bytes, base: bytes | None = None) -> bytes:
    """The checkpoint of a pipeline after so many runs of whole batches.

    Args:
        runs: Number of runs from the start.
        zero, one, two: Its checkpoints at the start, and after one and two runs.
        base: The checkpoint to count from; its start by default.

    Raises:
        StateError: If the operators' states are not known to advance evenly.
    """
    parts = [_NUMBER.split(checkpoint) for checkpoint in (zero, one, two)]
    rest = [[_ITER.sub(rb"\1", part) for part in checkpoint] for checkpoint in parts]
    numbers = [[int(n, 16) for n in _NUMBER.findall(checkpoint)] for checkpoint in (zero, one, two)]
    steps = [b - a for a, b in zip(numbers[0], numbers[1])]
    if (
        not rest[0] == rest[1] == rest[2]
        or steps != [b - a for a, b in zip(numbers[1], numbers[2])]
        or any(step < 0 for step in steps)
    ):
        raise StateError(
            "a random operator's state after so many batches can't be told, so that the loader "
            "can't go on there. Draw its numbers for each record, by draw.uniform() and its "
            "like, or by RandomInputs"
        )
    # The count of runs stays at 0: nothing of a pipeline that is fed depends on it.
    base = zero if base is None else base
    begun = [int(n, 16) for n in _NUMBER.findall(base)]
    texts = [b"%016X" % (n + runs * step) for n, step in zip(begun, steps, strict=True)]
    pieces = zip(_NUMBER.split(base), [*texts, b""], strict=True)
    return b"".join(piece for pair in pieces for piece in pair)
