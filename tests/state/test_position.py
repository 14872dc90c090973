"""Positions: checkpoints of later batches, and states that contain every value of a position."""

import itertools
import json

import pytest

from dalijax.core.state import reader_state
from dalijax.core.state.fingerprint import unknown
from dalijax.core.state.position import Checkpoints, ReaderPosition

DATA = (b"a checkpoint", bytes(range(256)))


@pytest.mark.parametrize("to_drop", (-2, 0, 3))
def test_checkpoints_of_later_batches(to_drop):
    checkpoints = Checkpoints(DATA, to_drop)
    for first, second in itertools.product((0, 1, 5), repeat=2):
        later = checkpoints.later(first).later(second)
        assert later == Checkpoints(DATA, to_drop + first + second)
    assert checkpoints == Checkpoints(DATA, to_drop)


@pytest.mark.parametrize("to_drop", (-2, 0, 3))
@pytest.mark.parametrize("epoch_to_drop", (0, 2))
def test_a_state_contains_each_value_of_a_position(to_drop, epoch_to_drop):
    start = Checkpoints(DATA[::-1], epoch_to_drop)
    position = ReaderPosition(4, 7, Checkpoints(DATA, to_drop), start, errors=11)
    fingerprint = unknown() | {"seed": 5, "shard_ids": "0 1", "unchecked": ["a", "b"]}
    state = reader_state.encode(position, fingerprint)
    assert (state["epoch"], state["step"], state["errors"]) == (4, 7, 11)
    for saved in (state, json.dumps(state), json.dumps(state).encode()):
        assert reader_state.decode(saved) == reader_state.ReaderState(position, fingerprint)
