"""Compares the batches of an interrupted run with those of an uninterrupted run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch: the epoch, the numbers of its records, and their random numbers."""

    epoch: int
    ids: tuple[int, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Differences of an interrupted run.

    Attributes:
        repeated: Deliveries of records beyond those of the same epoch of the uninterrupted run.
        lost: Deliveries of that epoch which are missing.
        moved: Records that came in another batch of the epoch, or at another position if the
            sizes of the batches differ.
        augmented: Records with another random number.
    """

    repeated: int
    lost: int
    moved: int
    augmented: int

    @property
    def equal(self) -> bool:
        """Whether the interruption changed nothing."""
        return not (self.repeated or self.lost or self.moved or self.augmented)


def merge(processes: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Concatenates the rows of each step in the order of the processes.

    If a process has fewer batches, the last global batches have fewer rows.
    """
    steps = max(map(len, processes), default=0)
    merged = []
    for step in range(steps):
        parts = [batches[step] for batches in processes if step < len(batches)]
        ids = tuple(number for part in parts for number in part.ids)
        values = tuple(value for part in parts for value in part.values)
        merged.append(Batch(parts[0].epoch, ids, values))
    return merged


def counts(batches: Iterable[Batch], records: Collection[int]) -> tuple[int, int]:
    """Returns the numbers of repeated and of lost records in the first epoch."""
    deliveries = _deliveries(batches, {0})
    repeated = sum(number - 1 for number in deliveries.values())
    return repeated, sum((0, record) not in deliveries for record in records)


def compare(expected: Sequence[Batch], delivered: Sequence[Batch]) -> Verdict:
    """Compares a run with an uninterrupted run, over the epochs of the latter.

    Rows of a batch may be in another order. If an epoch delivers a record twice, the first delivery
    decides whether the record is moved or augmented.
    """
    by_batch = {len(batch.ids) for batch in expected} == {len(batch.ids) for batch in delivered}
    old, new = _places(expected, by_batch), _places(delivered, by_batch)
    common = old.keys() & new.keys()
    epochs = {batch.epoch for batch in expected}
    before, after = _deliveries(expected, epochs), _deliveries(delivered, epochs)
    return Verdict(
        (after - before).total(),
        (before - after).total(),
        sum(old[key][0] != new[key][0] for key in common),
        sum(old[key][1] != new[key][1] for key in common),
    )


def _deliveries(
    batches: Iterable[Batch], epochs: Collection[int]
) -> collections.Counter[tuple[int, int]]:
    """Returns the number of deliveries of each epoch and record."""
    return collections.Counter(
        (batch.epoch, number) for batch in batches if batch.epoch in epochs for number in batch.ids
    )


def _places(batches: Iterable[Batch], by_batch: bool) -> dict[tuple[int, int], tuple[int, float]]:
    """Returns the place within its epoch and the random number of each epoch and record."""
    places: dict[tuple[int, int], tuple[int, float]] = {}
    lengths: collections.Counter[int] = collections.Counter()
    for batch in batches:
        for row, (number, value) in enumerate(zip(batch.ids, batch.values)):
            place = lengths[batch.epoch] + (0 if by_batch else row)
            places.setdefault((batch.epoch, number), (place, value))
        lengths[batch.epoch] += 1 if by_batch else len(batch.ids)
    return places
