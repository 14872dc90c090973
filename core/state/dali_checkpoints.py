"""Writes states as checkpoints in DALI's format, and reads such checkpoints.

There is one checkpoint per pipeline. It is DALI's protobuf message ``Checkpoint``, which contains
the operators' states and two texts: one of the pipeline and one of the iterator. The text of the
iterator is a state if this package wrote the checkpoint, and a dict of counters if DALI's JAX
plugin did. Checkpoints of both can be passed to this package as ``checkpoints=``, and to a pipeline
that the user creates as ``checkpoint=``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StateError
from ..formats import protobuf
from ..order.epochs import EpochPlan
from . import reader_state
from .envelope import brief
from .position import Checkpoints, ReaderPosition

_CONTEXT, _ITERATOR_DATA = 2, 2  # field numbers in a checkpoint, and in its external context


def to_bytes(state: Mapping[str, Any]) -> list[bytes]:
    """Returns DALI's checkpoint of each pipeline, with the state as the text of the iterator."""
    # Protobuf merges the appended context with the first, so that the pipeline's text is kept.
    text = json.dumps(state).encode()
    context = protobuf.message([(_CONTEXT, protobuf.message([(_ITERATOR_DATA, text)]))])
    checkpoints = reader_state.decode(state).position.checkpoints or Checkpoints()
    return [piece + context for piece in checkpoints.data or ()]


def read(pieces: Sequence[bytes]) -> reader_state.ReaderState | None:
    """Returns the state in checkpoints from `to_bytes`; None if DALI's plugin wrote them.

    Args:
        pieces: The checkpoints, in any order.

    Raises:
        StateError: If ``pieces`` are not checkpoints, or not all checkpoints of one state.
    """
    if isinstance(pieces, (str, bytes)):
        raise StateError(
            "checkpoints is a single text: pass a list of bytes with a checkpoint of each pipeline"
        )
    if not pieces:
        raise StateError("checkpoints is empty: pass a checkpoint of each pipeline")
    states = [_iterator_data(piece) for piece in pieces]
    if not any("format" in state for state in states):
        return None
    saved = reader_state.decode(states[0])
    state_bytes = to_bytes(states[0])
    if sorted(pieces) != sorted(state_bytes):
        raise StateError(
            f"the {len(pieces)} checkpoints are not the {len(state_bytes)} checkpoints that a call "
            "of checkpoints() returned: pass all of them, unchanged"
        )
    return saved


def _iterator_data(piece: bytes) -> dict[str, Any]:
    """Returns the iterator's dict in a checkpoint: a state of this package, or DALI's counters.

    Raises:
        StateError: If the bytes are not a checkpoint, or a checkpoint without this dict.
    """
    text = b""
    try:
        for number, content in protobuf.fields(piece):
            if number == _CONTEXT:
                text = dict(protobuf.fields(content)).get(_ITERATOR_DATA, text)
        data = json.loads(text)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise StateError(
            f"not a checkpoint of an iterator: {brief(piece)}. Pass the result of checkpoints() of "
            "an iterator, a list with a checkpoint of each pipeline"
        ) from None
    if not isinstance(data, dict):
        raise StateError(f"not a checkpoint of an iterator: it contains {brief(data)}")
    return data


def plugin_position(
    pieces: Sequence[bytes], plan: EpochPlan | None, streams: Sequence[int]
) -> ReaderPosition:
    """Returns the position that checkpoints of DALI's own JAX iterator describe.

    DALI saves how many samples had been read ahead when the epoch started, how many have been read
    in the epoch so far, and the current shard of each pipeline. DALI does not save the start of the
    epoch, so that ``reset()`` can't move back to it.

    Args:
        pieces: The checkpoint of each pipeline.
        plan: The epochs of the iterator to restore; None if the epochs are unknown.
        streams: The shard of each pipeline in epoch 0.

    Raises:
        StateError: If the counters are incomplete, or do not match a position in the epochs.
    """
    counters = _iterator_data(pieces[0])
    lists = ("_counter_per_gpu", "_shard_sizes_per_gpu", "_shards_id")
    are_counts = [_are_counts(counters.get(key)) for key in lists]
    are_counts.append(_are_counts([counters.get("_counter")]))
    if plan is None or not all(are_counts):
        raise StateError(
            "the checkpoints of DALI's iterator do not contain its position, because it had no "
            "reader_name. Finish the epoch with DALI's plugin, and start the next epoch here"
        )
    sizes = sorted(int(size) for size in counters["_shard_sizes_per_gpu"])
    current_sizes = sorted(plan.shard_size(i) for i in range(plan.num_shards))
    if sizes != current_sizes or len(pieces) != len(streams):
        raise StateError(
            "the checkpoints of DALI's iterator belong to different data (saved -> now): "
            f"shard sizes {sizes} -> {current_sizes}, pipelines {len(pieces)} -> {len(streams)}"
        )
    ahead = [int(n) for n in counters["_counter_per_gpu"]]
    epoch = _epoch_of(plan, streams, [int(i) for i in counters["_shards_id"]], ahead)
    step, remainder = divmod(int(counters["_counter"]) - min(ahead), plan.batch_size)
    if epoch is None or remainder or step < 0:
        raise StateError(
            f"the counters of DALI's checkpoint {counters} do not match a batch of batch_size "
            f"{plan.batch_size} over {plan.num_samples} samples: pass the batch size and the "
            "last_batch_policy of the iterator that saved it"
        )
    delivered = plan.delivered(epoch, streams[0])
    # With DROP, DALI's iterator has already read the batch that it drops; this package has not.
    checkpoints = Checkpoints(tuple(bytes(piece) for piece in pieces), min(0, delivered - step))
    step = min(step, delivered)
    return ReaderPosition(epoch, step, checkpoints, checkpoints if step == 0 else Checkpoints())


def _are_counts(value: Any) -> bool:
    """Returns whether a value is a non-empty list of whole numbers from 0, such as 3 or 3.0."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            type(count) in (int, float) and 0 <= count < 1 << 53 and count == int(count)
            for count in value
        )
    )


def _epoch_of(
    plan: EpochPlan, streams: Sequence[int], shards: Sequence[int], ahead: Sequence[int]
) -> int | None:
    """Returns the first epoch whose start matches DALI's counters; None if no epoch does.

    Args:
        plan: The epochs of the iterator.
        streams: The shard of each pipeline in epoch 0.
        shards: The current shard of each pipeline.
        ahead: Number of samples that DALI had read ahead in each shard when the epoch started.
    """
    runs_on = any(ahead)
    epoch = 0
    for _ in range(2 * plan.num_shards * plan.batch_size + 1):
        turned = [plan.shard_of(stream, epoch) for stream in streams]
        read = [0] * plan.num_shards
        if runs_on and epoch:
            start = plan.first_batch(epoch) * plan.batch_size
            read = [start - plan.samples_until(s, epoch - 1) for s in range(plan.num_shards)]
        # Sorted, since DALI's counters are ordered neither by stream nor by shard. Epochs with the
        # same rotation differ by the same number in all shards.
        if turned == list(shards) and sorted(read) == sorted(ahead):
            return epoch
        epoch = plan.next_epoch(epoch)
    return None
