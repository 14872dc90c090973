"""Compresses, converts and advances the states of random operators in DALI's checkpoints.

DALI's random operators count samples (a Philox generator has a key, a sequence number and an
offset), and checkpoints contain these counts as hexadecimal text. A checkpoint therefore differs
little from the first checkpoint of its pipeline, which compresses it well. If each run adds the
same number to a count, the checkpoint after any number of runs can be computed from the first three
checkpoints.
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
# Prefix of the names of the operators that DALI adds to copy data within and between devices.
_COPY = re.compile("__(MakeContiguous|Copy)_(Cpu|Gpu)To(Cpu|Gpu)_")
_COPIES = re.compile(f"^({_COPY.pattern})+")


def stateful(checkpoint: bytes = b"") -> list[str]:
    """Returns the names of the operators that have a state in a pipeline's checkpoint.

    Args:
        checkpoint: The checkpoint; empty for a pipeline without checkpoints.
    """
    return [name for name, fields in _contents(checkpoint).items() if fields.get(2)]


def _contents(checkpoint: bytes) -> dict[str, dict[int, Any]]:
    """Returns the protobuf fields {1: name, 2: state} of each operator in a checkpoint, by name."""
    contents = (content for number, content in protobuf.fields(checkpoint) if number == 1)
    return {fields[1].decode(): fields for fields in map(dict, map(protobuf.fields, contents))}


def for_operators(checkpoint: bytes, start: bytes, names: Mapping[str, str] | None = None) -> bytes:
    """Returns a pipeline's checkpoint, converted for a new pipeline with other operators.

    Args:
        checkpoint: The checkpoint to convert.
        start: The first checkpoint of the new pipeline. Operators that exist only in the new
            pipeline get their states from it.
        names: Names of operators in ``checkpoint``, by their names in the new pipeline; by default,
            the names are the same.

    Raises:
        StateError: If an operator of both pipelines has a state in ``start`` but not in
            ``checkpoint``, or if one of the two is not a checkpoint.
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
    """Returns a checkpoint, converted for a new pipeline of the same graph on other devices.

    DALI adds operators that copy between devices. These operators have no state, but their names
    contain the devices, and DALI restores nothing from a checkpoint with other names.

    Args:
        checkpoint: The checkpoint to convert.
        start: The first checkpoint of the new pipeline.

    Raises:
        StateError: If an operator that does not copy exists in only one of the checkpoints, or has
            a state in ``start`` but not in ``checkpoint``; if the outputs of the graphs differ; if
            one of the two is not a checkpoint.
    """
    had, has, _ = _both_contents(checkpoint, start)
    # An operator may have no state yet in the first checkpoint. An operator without a state in the
    # saved checkpoint, however, would be restarted by DALI.
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
    """Returns the fields of the operators in both checkpoints, and the other fields of the first.

    Raises:
        StateError: If one of the two is not a checkpoint.
    """
    try:
        other_fields = [field for field in protobuf.fields(checkpoint) if field[0] != 1]
        return _contents(checkpoint), _contents(start), other_fields
    except (ValueError, TypeError, LookupError) as error:
        raise StateError(
            f"DALI's checkpoint has an unknown format: {error}. Restore it with the version of "
            "DALI that saved it"
        ) from None


def without_counts(checkpoint: bytes, start: bytes) -> bytes:
    """Returns a checkpoint whose count of runs is replaced by the count in ``start``.

    Args:
        checkpoint: The checkpoint of a pipeline.
        start: The first checkpoint of the pipeline.
    """
    operators = [field for field in protobuf.fields(checkpoint) if field[0] == 1]
    counts = [field for field in protobuf.fields(start) if field[0] != 1]
    return protobuf.message([*operators, *counts])


def _copied(names: Iterable[str]) -> set[str]:
    """Returns the names of the tensors that DALI's copying operators copy.

    Args:
        names: The names of all operators, among them those of the copying operators.
    """
    return {_COPIES.sub("", name) for name in names if _COPY.match(name)}


def _outputs(names: Iterable[str]) -> set[str]:
    """Returns the names of a graph's outputs, which DALI's ``__MakeContiguous_`` operators copy.

    Args:
        names: The names of all operators.
    """
    return _copied(name for name in names if name.startswith("__MakeContiguous_"))


def compress(checkpoints: Sequence[bytes], first: Sequence[bytes]) -> str:
    """Returns checkpoints as a short text, which `expand` decodes.

    Args:
        checkpoints: The checkpoint of each pipeline.
        first: The first checkpoint of each pipeline, used as a dictionary for the compression.
    """
    data = b"".join(len(checkpoint).to_bytes(4, "big") + checkpoint for checkpoint in checkpoints)
    return base64.b85encode(deflate(data, b"".join(first), 9)).decode()


def expand(text: str, first: Sequence[bytes]) -> list[bytes]:
    """Returns the checkpoints that `compress` encoded as a text.

    Args:
        text: The text.
        first: The first checkpoint of each pipeline, as for `compress`.

    Raises:
        StateError: If the text contains checkpoints of other pipelines.
    """
    try:
        data = inflate(base64.b85decode(text), b"".join(first))
    except ValueError:
        raise StateError(
            "the state was saved with another graph, seed or number of devices, so its random "
            "numbers can't be continued. Create the transform with its original arguments"
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
    """Computes the checkpoint of a pipeline after a number of runs of full batches.

    Args:
        runs: Number of runs between ``base`` and the returned checkpoint.
        start, first, second: The checkpoints of a new pipeline before its first run, after one run
            and after two runs.
        base: The checkpoint from which the runs are counted; ``start`` by default.

    Raises:
        StateError: If the first two runs change the states of the operators by different amounts.
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
    # The count of runs stays as in ``base``: a pipeline with fed inputs does not depend on it.
    base = start if base is None else base
    begun = [int(n, 16) for n in _NUMBER.findall(base)]
    texts = [b"%016X" % (n + runs * step) for n, step in zip(begun, steps, strict=True)]
    pieces = zip(_NUMBER.split(base), [*texts, b""], strict=True)
    return b"".join(piece for pair in pieces for piece in pair)
