"""The matrix of small file readers and iterators, and the batches that they must deliver."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, types

from conformance import Expected
from dalijax import LastBatchPolicy, data_iterator
from numbered import read_case
from oracle import Case

EPOCHS = 3


@dataclasses.dataclass(frozen=True)
class Cell:
    """A configuration of a file reader and of an iterator over one of its shards."""

    case: Case
    stream: int = 0
    shuffle: str = "none"  # or "random_shuffle" or "shuffle_after_epoch"
    depth: int = 2
    auto_reset: bool = False
    prepare: bool = True
    random: bool = True

    def make(self, files: list[str]):
        """Returns a new iterator."""
        iterator_fn = data_iterator(
            graph,
            ["x", "u"] if self.random else ["x"],
            reader_name="reader",
            auto_reset=self.auto_reset,
            prepare_first_batch=self.prepare,
            last_batch_policy=LastBatchPolicy[self.case.policy],
            mask="mask",
            as_numpy=True,
        )
        return iterator_fn(
            files, self, batch_size=self.case.batch, num_threads=1, prefetch_queue_depth=self.depth
        )

    def expected(self) -> Expected:
        """Returns the simulated epochs; shuffled epochs are multisets, if known."""
        epochs = []
        # With shuffle_after_epoch, DALI's readers stick to their shard without the option.
        stick = self.case.stick or self.shuffle == "shuffle_after_epoch"
        for number, streams in dataclasses.replace(self.case, stick=stick).epochs(EPOCHS):
            epochs.append([])
            for own in streams[self.stream]:
                batch = {"mask": np.array(self.case.mask(own, number))}
                if self.shuffle == "none" or self._known():
                    batch["x"] = np.array([[s[0]] for s in own], np.int32)
                epochs[-1].append(batch)
        return Expected(epochs, self.auto_reset, ordered=self.shuffle == "none")

    def _known(self) -> bool:
        """Whether the samples of each shuffled epoch are known: DALI shuffles across shards."""
        return self.case.padded and self.case.policy != "DROP" and self.case.shards == 1


def graph(files: list[str], cell: Cell):
    """Defines the pipeline of a cell; the label is the number of the file."""
    case = cell.case
    label = read_case(
        files,
        case,
        cell.stream,
        case.shards,
        random_shuffle=cell.shuffle == "random_shuffle",
        shuffle_after_epoch=cell.shuffle == "shuffle_after_epoch",
        initial_fill=4,
    )[1]
    if not cell.random:
        return label
    noise = fn.random.uniform(range=(0.0, 1.0))
    flip = fn.cast(fn.random.coin_flip(), dtype=types.FLOAT)
    return label, noise + flip + fn.random.normal(stddev=0.1)


def sizes() -> Iterator[tuple[int, int, int]]:
    """Returns (samples, batch size, shards) around multiples of the batch size."""
    for batch, shards in itertools.product((2, 3), (1, 2, 4)):
        for rest in sorted({0, 1, batch - 1}):
            yield 2 * batch * shards + rest, batch, shards


def matrix() -> Iterator[Cell]:
    """Yields every cell of the matrix."""
    readers = itertools.product(sizes(), ("FILL", "DROP", "PARTIAL"), (False, True), (False, True))
    for (n, batch, shards), policy, padded, stick in readers:
        case = Case(n, shards, batch, policy, padded, stick)
        for shuffle in ("none", "random_shuffle", "shuffle_after_epoch"):
            if shuffle == "shuffle_after_epoch" and stick:
                continue  # DALI rejects this combination
            for depth, auto, prepare, drawn in itertools.product(
                (1, 2, 3), (False, True), (False, True), (False, True)
            ):
                yield Cell(case, shards - 1, shuffle, depth, auto, prepare, drawn)


def pairs(cell: Cell) -> set[tuple[Any, Any]]:
    """Returns the pairs of values of two fields; a field is the rest after whole batches."""
    case = cell.case
    size = (case.n - 2 * case.batch * case.shards, case.batch, case.shards)
    values = (*size, case.policy, case.padded, case.stick, *dataclasses.astuple(cell)[2:])
    return set(itertools.combinations(enumerate(values), 2))


@functools.cache
def pairwise(seed: int) -> list[Cell]:
    """Returns random cells that together contain every pair of values of two fields."""
    cells = list(matrix())
    random.Random(seed).shuffle(cells)
    of_cell = {cell: pairs(cell) for cell in cells}
    missing = set().union(*of_cell.values())
    chosen = []
    while missing:
        pair = min(missing, key=repr)
        candidates = itertools.islice((c for c in cells if pair in of_cell[c]), 100)
        chosen.append(max(candidates, key=lambda c: len(of_cell[c] & missing)))
        missing -= of_cell[chosen[-1]]
    return chosen
