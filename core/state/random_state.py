"""Compresses, converts and advances the states of random operators in DALI's checkpoints.

DALI's random operators count samples (a Philox generator has a key, a sequence number and an
offset), and checkpoints contain these counts as hexadecimal text. A checkpoint therefore differs
little from the first checkpoint of its pipeline. If each run adds the same number to a count, the
checkpoint after any number of runs follows from the first three. A reader counts the samples of its
pass over the data.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import StateError
from ..formats import protobuf
from .envelope import deflate, inflate

_NUMBER = re.compile(rb"(?<![0-9A-Za-z])[0-9A-F]{16}(?![0-9A-Za-z])")  # of a Philox state
_ITER = re.compile(rb'("iter": )(\d+)')  # the pipeline's count of runs
# Names of the operators that DALI adds to copy to and from devices.
_COPY = re.compile("__(MakeContiguous|Copy)_(Cpu|Gpu)To(Cpu|Gpu)_")
_COPIES = re.compile(f"^({_COPY.pattern})+")


def stateful(checkpoint: bytes = b"") -> list[str]:
    """Returns the names of the operators that have a state in a pipeline's checkpoint, if any."""
    return [name for name, fields in _contents(checkpoint).items() if fields.get(2)]


def _contents(checkpoint: bytes) -> dict[str, dict[int, Any]]:
    """Returns the fields of each operator in a checkpoint, by its name: {1: name, 2: state}."""
    contents = (content for number, content in protobuf.fields(checkpoint) if number == 1)
    return {fields[1].decode(): fields for fields in map(dict, map(protobuf.fields, contents))}


def for_operators(checkpoint: bytes, start: bytes, names: Mapping[str, str] | None = None) -> bytes:
    """Converts the checkpoint of a pipeline for a pipeline with other operators.

    Args:
        checkpoint: The checkpoint.
        start: The first checkpoint of the other pipeline, which contains the states of new
            operators.
        names: Names of operators in the checkpoint, by their names in the other pipeline; the same
            names by default.

    Raises:
        StateError: If an operator has a state only in the other pipeline, or if ``checkpoint`` is
            not a checkpoint.
    """
    had, has, other_fields = _both_contents(checkpoint, start)
    fields: list[tuple[int, Any]] = []
    for name, present in has.items():
        saved_fields = had.get(name if names is None else names.get(name, ""))
        if saved_fields is not None and present.get(2) and not saved_fields.get(2):
            raise StateError(f"{name} has a state, but had none when the state was saved")
        fields.append(
            (1, protobuf.message(((saved_fields or present) | {1: name.encode()}).items()))
        )
    return protobuf.message([*fields, *other_fields])


def to_other_device(checkpoint: bytes, start: bytes) -> bytes:
    """Converts a checkpoint for a pipeline of the same graph on other devices.

    DALI adds operators that copy between devices. They have no state, but their names contain the
    devices, and DALI restores nothing from a checkpoint with other names.

    Raises:
        StateError: If another operator exists in only one of the pipelines, or has a state only in
            the other pipeline; if their outputs differ; if it is not a checkpoint.
    """
    had, has, _ = _both_contents(checkpoint, start)
    # An operator may have no state yet at the start; in the opposite case DALI starts again.
    alone = {*had} ^ {*has}
    alone |= {name for name in {*had} & {*has} if has[name].get(2) and not had[name].get(2)}
    alone = {name for name in alone if not _COPY.match(name)}
    if alone:
        names = ", ".join(sorted(alone))
        raise StateError(f"{names}: exists, or has a state, in only one of the two graphs")
    lost, gained = _outputs(had) - _copied(has), _outputs(has) - _copied(had)
    if lost and gained:
        raise StateError(f"its outputs were {sorted(lost)}, and are now {sorted(gained)}")
    return for_operators(checkpoint, start)


def _both_contents(
    checkpoint: bytes, start: bytes
) -> tuple[dict[str, dict[int, Any]], dict[str, dict[int, Any]], list[tuple[int, Any]]]:
    """Returns the operators' fields in two checkpoints, and the other fields of the first."""
    try:
        other_fields = [field for field in protobuf.fields(checkpoint) if field[0] != 1]
        return _contents(checkpoint), _contents(start), other_fields
    except (ValueError, TypeError, LookupError) as error:
        raise StateError(
            f"DALI's checkpoint has an unknown format: {error}. Restore it with the version of "
            "DALI that saved it"
        ) from None


def without_counts(checkpoint: bytes, start: bytes) -> bytes:
    """Returns a checkpoint with the counts of runs of the pipeline's first checkpoint."""
    operators = [field for field in protobuf.fields(checkpoint) if field[0] == 1]
    counts = [field for field in protobuf.fields(start) if field[0] != 1]
    return protobuf.message([*operators, *counts])


def _copied(names: Iterable[str]) -> set[str]:
    """Returns the tensors that DALI's copying operators copy, from the names of operators."""
    return {_COPIES.sub("", name) for name in names if _COPY.match(name)}


def _outputs(names: Iterable[str]) -> set[str]:
    """Returns the graph's outputs: the tensors of DALI's ``__MakeContiguous_`` operators."""
    return _copied(name for name in names if name.startswith("__MakeContiguous_"))


def compress(checkpoints: Sequence[bytes], first: Sequence[bytes]) -> str:
    """Encodes checkpoints as a short text, which `expand` decodes.

    Args:
        checkpoints: The checkpoint of each pipeline.
        first: The first checkpoint of each pipeline, used as a dictionary for the compression.
    """
    data = b"".join(len(checkpoint).to_bytes(4, "big") + checkpoint for checkpoint in checkpoints)
    return base64.b85encode(deflate(data, b"".join(first), 9)).decode()


def expand(text: str, first: Sequence[bytes]) -> list[bytes]:
    """Returns the checkpoints in a text of `compress`.

    Raises:
        StateError: If the text is of other pipelines.
    """
    try:
        data = inflate(base64.b85decode(text), b"".join(first))
    except ValueError as error:
        raise StateError(
            "the state was saved with another graph, seed or number of shards, so its random "
            f"numbers can't be continued ({error}). Create the transform with its original "
            "arguments"
        ) from None
    checkpoints, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        checkpoints.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if len(checkpoints) != len(first):
        raise StateError(
            f"the state has {len(checkpoints)} pipelines, not {len(first)}. Create the transform "
            "for as many devices as before"
        )
    return checkpoints


def after_runs(
    runs: int, start: bytes, first: bytes, second: bytes, base: bytes | None = None
) -> bytes:
    """Returns the checkpoint of a pipeline after a number of runs of whole batches.

    Args:
        runs: Number of runs after ``base``.
        start, first, second: The checkpoints at the start, and after one and two runs.
        base: The checkpoint to count from; ``start`` by default.

    Raises:
        StateError: If the operators' states do not advance evenly.
    """
    parts = [_NUMBER.split(checkpoint) for checkpoint in (start, first, second)]
    constant_parts = [[_ITER.sub(rb"\1", part) for part in checkpoint] for checkpoint in parts]
    numbers = [
        [int(n, 16) for n in _NUMBER.findall(checkpoint)] for checkpoint in (start, first, second)
    ]
    steps = [b - a for a, b in zip(numbers[0], numbers[1])]
    if (
        not constant_parts[0] == constant_parts[1] == constant_parts[2]
        or steps != [b - a for a, b in zip(numbers[1], numbers[2])]
        or any(step < 0 for step in steps)
    ):
        raise StateError(
            "the state of a random operator after this number of batches is unknown, so the loader "
            "can't resume there. Draw the numbers for each record, by draw.uniform() and similar "
            "functions, or by RandomInputs"
        )
    # The count of runs is not changed, because a pipeline with fed inputs does not depend on it.
    base = start if base is None else base
    begun = [int(n, 16) for n in _NUMBER.findall(base)]
    texts = [b"%016X" % (n + runs * step) for n, step in zip(begun, steps, strict=True)]
    pieces = zip(_NUMBER.split(base), [*texts, b""], strict=True)
    return b"".join(piece for pair in pieces for piece in pair)
