"""Replaces bad records by good records, and remembers the records that DALI could not process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..formats.field import Field
from ..pipeline.failure import Failure

_MOST = 1 << 16  # the number of samples, and of records, to remember
# The numbers of samples after a batch, and across its epoch, that may replace bad records.
_FOLLOWING, _SPREAD = 16, 64
_STRIDE = 37  # coprime to _SPREAD

C = TypeVar("C")
K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


class UnusableRecord(ValueError):
    """The error of a record that DALI could not process; stored for the record's row.

    Attributes:
        failure: The operator and the message of DALI's error.
        text: The complete error of DALI, for the message; "" without an error.
    """

    def __init__(self, failure: Failure, text: str = ""):
        super().__init__(failure.message)
        self.failure, self.text = failure, text


class NoStandIn(Exception):
    """Raised if no record can replace the bad records of a batch.

    Attributes:
        errors: The name and the error of each bad record.
    """

    def __init__(self, errors: Sequence[tuple[str, Exception]]):
        super().__init__(f"no record can replace {len(errors)} bad records")
        self.errors = errors


def choose(
    bad: Iterable[int],
    candidates: Callable[[int], Iterable[C]],
    load: Callable[[C], T | None],
) -> dict[int, tuple[C, T]] | None:
    """Chooses the first good candidate for each bad row.

    Args:
        bad: The bad rows.
        candidates: Returns the candidates for a row, the best first.
        load: Returns the record of a candidate; None if the candidate is bad, too.

    Returns:
        The candidate and its record, by row. None if a row has no good candidate.
    """
    chosen: dict[int, tuple[C, T]] = {}
    for row in bad:
        loaded = ((candidate, load(candidate)) for candidate in candidates(row))
        first_good = next(((c, record) for c, record in loaded if record is not None), None)
        if first_good is None:
            return None
        chosen[row] = first_good
    return chosen


def nearest(row: int, count: int) -> Iterator[int]:
    """Yields the other rows of a batch, the nearest first."""
    for distance in range(1, max(row, count - 1 - row) + 1):
        if row >= distance:
            yield row - distance
        if row + distance < count:
            yield row + distance


class _Latest(dict[K, V]):
    """A dict of the latest 65,536 items: a further item displaces the oldest."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST:
            self.pop(next(iter(self)), None)


@dataclasses.dataclass
class BadSamples:
    """Remembers the samples and records that DALI could not process.

    A sample of the stream may fail because of the numbers that are drawn for it. A record that
    can't be decoded fails in every epoch. Such a record is remembered with a digest of its values,
    so that it is decoded again if it has changed.

    Attributes:
        samples: The error of each sample, by a key of the sample.
        records: The digest and the error of each record, by a key of the record.
    """

    samples: dict[Hashable, UnusableRecord] = dataclasses.field(default_factory=_Latest)
    records: dict[Hashable, tuple[bytes, UnusableRecord]] = dataclasses.field(
        default_factory=_Latest
    )

    def record_error(self, record: Hashable, digest: Callable[[], bytes]) -> UnusableRecord | None:
        """Returns the error of a record that failed before and has not changed, or None.

        Args:
            record: The record's key.
            digest: Returns the digest of the record's present values.
        """
        digest_then, error = self.records.get(record, (b"", None))
        return error if error is not None and digest_then == digest() else None


def digest_of(fields: Mapping[str, Field], columns: Mapping[str, Any], index: int) -> bytes:
    """Returns a digest of a record's values; of a path, also of the size and time of the file."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(columns):
        field = fields[name]
        if field.dtype is None:
            continue
        data = np.asarray(columns[name][index], order="C").tobytes()
        digest.update(data)
        if field.is_path:
            try:
                stat = os.stat(data.partition(b"\0")[0])
                digest.update(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode())
            except OSError as error:
                digest.update(str(error.errno).encode())
    return digest.digest()


def stand_ins(batch: Sequence[int], row: int, num_samples: int) -> Iterator[int]:
    """Yields the samples that may stand in for a row of a batch, the best first.

    The order is: the nearest rows, some samples after the batch, some samples across its epoch. It
    depends only on the global batch, so that every process chooses the same sample.

    Args:
        batch: The sample of each row of the global batch.
        row: The row in the global batch.
        num_samples: The number of samples of an epoch.
    """
    yield from (batch[row_nearby] for row_nearby in nearest(row, len(batch)))
    end = batch[-1] + 1
    yield from range(end, end + _FOLLOWING)
    yield from across_epoch(batch[-1] // num_samples, num_samples)


def across_epoch(epoch: int, num_samples: int) -> Iterator[int]:
    """Yields evenly spaced samples of an epoch, in an order that soon reaches all its parts."""
    for k in range(_SPREAD):
        yield epoch * num_samples + (k * _STRIDE % _SPREAD) * num_samples // _SPREAD
