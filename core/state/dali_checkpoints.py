"""Checkpoints as bytes, one for each pipeline: this package's, and those of DALI's plugin.

Both are DALI's own protobuf (``Checkpoint``: the operators' states, and an external context
of two texts, the pipeline's and the iterator's). This package puts its state where DALI's
plugin puts its counters, so that a checkpoint serves ``checkpoints=`` here and the
``checkpoint=`` of a pipeline made by hand alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..epochs import EpochPlan
from ..errors import StateError
from . import protobuf
from .codec import brief, decode, pack, parsed, unpack
from .fingerprint import Fingerprint
from .position import Checkpoints, Position

_CONTEXT, _ITERATOR_DATA = 2, 2


def _context(text: bytes) -> bytes:
    """A checkpoint's field that has an iterator's text."""
    return protobuf.message([(_CONTEXT, protobuf.message([(_ITERATOR_DATA, text)]))])


def to_bytes(state: Mapping[str, Any]) -> list[bytes]:
    """A state as one checkpoint for each pipeline."""
    shared = json.dumps({k: v for k, v in state.items() if k != "checkpoints"})
    pieces = []
    for part, text in enumerate(state["checkpoints"]):
        own = json.dumps({"part": part, "parts": len(state["checkpoints"]), "state": shared})
        # A field that comes again is merged with the first: the pipeline's text stays.
        context = _context(own.encode())
        pieces.append(unpack(text) + context)
    return pieces


def iterator_data(piece: bytes) -> dict[str, Any]:
    """What an iterator put into a checkpoint: this package's envelope or DALI's counters.

    Raises:
        StateError: If the bytes are no checkpoint, or an iterator put nothing into it.
    """
    text = b""
    try:
        for number, content in protobuf.fields(piece):
            if number == _CONTEXT:
                text = dict(protobuf.fields(content)).get(_ITERATOR_DATA, text)
        data = json.loads(text)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise StateError(
            f"no checkpoint of an iterator: {brief(piece)}. Pass what checkpoints() of an "
            "iterator gave, one for each pipeline"
        ) from None
    if not isinstance(data, dict):
        raise StateError(f"no checkpoint of an iterator: it holds {brief(data)}")
    return data


def from_bytes(pieces: Sequence[bytes]) -> dict[str, Any] | None:
    """The state that `to_bytes` cut, from its pieces in any order; None if they are DALI's.

    Raises:
        StateError: If they are no checkpoints, or not all of one state.
    """
    if isinstance(pieces, (str, bytes)):
        raise StateError("checkpoints is one text: pass a list of bytes, one for each pipeline")
    read = [iterator_data(piece) for piece in pieces]
    if not read:
        raise StateError("checkpoints is empty: pass one for each pipeline")
    ours = ["parts" in one for one in read]
    if not any(ours):
        return None
    wanted = {"part": int, "parts": int, "state": str}
    if not all(type(one.get(k)) is t for one in read for k, t in wanted.items()):
        raise StateError("the checkpoints are damaged, or not all of one iterator")
    numbers = sorted(one["part"] for one in read)
    if {one["parts"] for one in read} != {len(read)} or numbers != list(range(len(read))):
        raise StateError(
            f"checkpoints() gave {read[0]['parts']} pieces, but those of numbers {numbers} "
            "were passed: pass all of them"
        )
    if any(one["state"] != read[0]["state"] for one in read):
        raise StateError("the checkpoints are of different states: pass those of one call")
    ordered = sorted(zip(read, pieces), key=lambda pair: pair[0]["part"])
    state = parsed(read[0]["state"])
    if not isinstance(state, dict):
        raise StateError(f"no checkpoint of an iterator: its state is {brief(state)}")
    state["checkpoints"] = [pack(piece[: len(piece) - _added(one)]) for one, piece in ordered]
    return state


def _added(own: Mapping[str, Any]) -> int:
    return len(_context(json.dumps(own).encode()))


def of_dali(pieces: Sequence[bytes], plan: EpochPlan | None, streams: Sequence[int]) -> Position:
    """The position that checkpoints of DALI's own JAX iterator describe.

    DALI saves counters of samples: those read ahead when the epoch started, and those of the
    epoch so far; the shard of each pipeline says where the rotation over shards stands. The
    start of the epoch is not among them, so that ``reset()`` can't go back in this epoch.

    Args:
        pieces: One for each pipeline.
        plan: The epochs now.
        streams: The shard of each pipeline in epoch 0.

    Raises:
        StateError: If they don't say enough, or are of another reader.
    """
    counters = iterator_data(pieces[0])
    lists = ("_counter_per_gpu", "_shard_sizes_per_gpu", "_shards_id")
    known = [_are_counts(counters.get(key)) for key in lists]
    if plan is None or not all([*known, _are_counts([counters.get("_counter")])]):
        raise StateError(
            "the checkpoints of DALI's iterator don't say where it stood: only those of an "
            "iterator with reader_name do. Finish the epoch with DALI's plugin and start the next "
            "one here"
        )
    sizes = sorted(int(size) for size in counters["_shard_sizes_per_gpu"])
    now = sorted(plan.shard_size(i) for i in range(plan.num_shards))
    if sizes != now or len(pieces) != len(streams):
        raise StateError(
            "the checkpoints of DALI's iterator are of other data (saved -> now): shard sizes "
            f"{sizes} -> {now}, pipelines {len(pieces)} -> {len(streams)}"
        )
    ahead = [int(n) for n in counters["_counter_per_gpu"]]
    epoch = _epoch_of(plan, streams, [int(i) for i in counters["_shards_id"]], ahead)
    step, rest = divmod(int(counters["_counter"]) - min(ahead), plan.batch_size)
    if epoch is None or rest or step < 0:
        raise StateError(
            f"the counters of DALI's checkpoint {counters} fit no batch of batch_size "
            f"{plan.batch_size} over {plan.num_samples} samples: pass the batch size and the "
            "last_batch_policy that they were saved with"
        )
    delivered = plan.delivered(epoch, streams[0])
    # DALI's DROP has read the batch that it drops when it stops; we drop it afterwards.
    checkpoints = Checkpoints(tuple(bytes(piece) for piece in pieces), min(0, delivered - step))
    step = min(step, delivered)
    return Position(epoch, step, checkpoints, checkpoints if step == 0 else Checkpoints())


def _are_counts(value: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on, as DALI writes them: some as 3.0."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            type(one) in (int, float) and 0 <= one < 1 << 53 and one == int(one) for one in value
        )
    )


def _epoch_of(
    plan: EpochPlan, streams: Sequence[int], shards: Sequence[int], ahead: Sequence[int]
) -> int | None:
    """The first epoch that starts as DALI's counters say: everything later repeats from it."""
    runs_on = any(ahead)
    epoch = 0
    for _ in range(2 * plan.num_shards * plan.batch_size + 1):
        turned = [plan.shard_of(stream, epoch) for stream in streams]
        read = [0] * plan.num_shards
        if runs_on and epoch:
            start = plan.first_batch(epoch) * plan.batch_size
            read = [start - plan.samples_until(s, epoch - 1) for s in range(plan.num_shards)]
        # DALI orders them by neither stream nor shard; epochs of one turn differ evenly in all.
        if turned == list(shards) and sorted(read) == sorted(ahead):
            return epoch
        epoch = plan.next_epoch(epoch)
    return None


def position(
    pieces: Sequence[bytes],
    outputs: Sequence[str],
    fingerprint: Fingerprint,
    plan: EpochPlan | None,
    streams: Sequence[int],
) -> Position:
    """The position that checkpoints describe, this package's or those of DALI's plugin.

    Args:
        pieces: One for each pipeline.
        outputs: Names of the outputs.
        fingerprint: That of the pipelines now.
        plan: Their epochs.
        streams: The shard of each pipeline in epoch 0.

    Raises:
        StateError: If they don't fit.
    """
    state = from_bytes(pieces)
    if state is None:
        return of_dali(pieces, plan, streams)
    return decode(state, outputs, fingerprint)[0]
