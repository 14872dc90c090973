"""The conformance check over the matrix of readers, policies and settings."""

import functools
import os
import random

import numpy as np
import pytest

from cells import Cell, matrix, pairs, pairwise
from conformance import TALLY, check
from full import FULL
from oracle import Case

DRAWN = 0 if os.environ.get("CI") else random.SystemRandom().randrange(2**31)
SEED = int(os.environ.get("DALIJAX_SEED", DRAWN))
BLOCKS = 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_matrix(jpegs_many, block):
    cells = list(matrix()) if FULL else pairwise(SEED)
    before = TALLY.restores
    for cell in cells[block::BLOCKS]:
        try:
            check(functools.partial(cell.make, jpegs_many), cell.expected())
        except BaseException:
            print(f"cell {cell} of seed {SEED} (DALIJAX_SEED={SEED} runs it again)")  # noqa: T201
            raise
    assert TALLY.restores > before


@pytest.mark.parametrize("shards", (1, 2, 3, 4))
@pytest.mark.parametrize("shuffle", ("none", "random_shuffle", "shuffle_after_epoch"))
def test_each_sample_counts_once_over_the_shards(jpegs_many, shards, shuffle):
    for n in (4, 7, 10, 13):
        case = Case(n, shards, 3, "FILL", True, False)
        iterators = [Cell(case, s, shuffle).make(jpegs_many) for s in range(shards)]
        for _ in range(2 * shards):
            counted = [x for it in iterators for b in it for x in b["x"][b["mask"]].ravel()]
            assert sorted(counted) == list(range(n))
            for iterator in iterators:
                iterator.reset()


def test_the_matrix_contains_every_value():
    cells = list(matrix())
    assert len(cells) == len(set(cells)) == 15 * (12 * 3 - 6) * 24
    assert {c.shuffle for c in cells} == {"none", "random_shuffle", "shuffle_after_epoch"}
    assert np.mean([c.auto_reset for c in cells]) == 0.5


def test_pairwise_cells_contain_every_pair_of_values():
    every = set().union(*map(pairs, matrix()))
    for seed in range(3) if FULL else (SEED,):
        cells = pairwise(seed)
        assert set().union(*map(pairs, cells)) == every and len(cells) < 32
