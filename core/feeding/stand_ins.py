"""Remembers the records that DALI could not process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..pipeline.failure import Failure
from ..sources.source import Source

_MOST = 1 << 16  # entries of each kind
# Samples after a batch, and across its epoch, that may stand in for bad records.
_FOLLOWING, _SPREAD = 16, 64
_STRIDE = 37  # no divisor of _SPREAD


class UnusableRecord(ValueError):
    """DALI could not process a record.

    Attributes:
        failure: The failure.
    """

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


class NoStandIn(Exception):
    """No record can stand in for those of a batch, which were read and can't be processed.

    Attributes:
        records: The number of the record of each row.
        errors: The error of each row that has one.
    """

    def __init__(self, records: Sequence[int], errors: Mapping[int, Exception]):
        super().__init__(f"no record can stand in for {len(errors)} bad ones")
        self.records, self.errors = records, errors


class BadSamples:
    """The samples and records that DALI could not process.

    A sample of the stream may fail for the numbers that are drawn for it. A record that can't be
    decoded fails in every epoch: it is remembered with a digest of its values, so that it is
    decoded again if it has changed.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], UnusableRecord] = {}  # by seed and sample
        self._records: dict[int, tuple[bytes, UnusableRecord]] = {}

    def knows_samples(self) -> bool:
        """Returns whether any sample is remembered."""
        return bool(self._samples)

    def add_sample(self, seed: int, sample: int, error: UnusableRecord) -> None:
        """Remembers a sample of the stream of a seed."""
        _add(self._samples, (seed, sample), error)

    def add_record(self, record: int, digest: bytes, error: UnusableRecord) -> None:
        """Remembers a record that fails in every epoch."""
        _add(self._records, record, (digest, error))

    def sample_error(self, seed: int, sample: int) -> UnusableRecord | None:
        """Returns the error of a sample, if it failed before."""
        return self._samples.get((seed, sample))

    def record_error(
        self, record: int, source: Source, columns: Mapping[str, Any], place: int
    ) -> UnusableRecord | None:
        """Returns the error of a record that failed before, and has not changed since.

        Args:
            record: Its number.
            source: The source.
            columns: The values that were read of some records, by field.
            place: The place of the record among them.
        """
        digest, error = self._records.get(record, (b"", None))
        if error is None or digest == digest_of(source, columns, place):
            return error
        self._records.pop(record, None)
        return None

    def knows_records(self) -> bool:
        """Returns whether any record is remembered."""
        return bool(self._records)


def _add(table: dict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > _MOST:
        table.pop(next(iter(table)), None)


def digest_of(source: Source, columns: Mapping[str, Any], place: int) -> bytes:
    """Returns a digest of a record's values, and of the files that they name."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(columns):
        field = source.fields[name]
        if field.dtype is None:
            continue
        data = np.asarray(columns[name][place], order="C").tobytes()
        digest.update(data)
        if field.is_path:
            try:
                stat = os.stat(data.partition(b"\0")[0])
                digest.update(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode())
            except OSError as error:
                digest.update(str(error.errno).encode())
    return digest.digest()


def stand_ins(batch: Sequence[int], row: int, num_samples: int) -> Iterator[int]:
    """Yields the samples that may stand in for a row of a batch, the best one first.

    They are those of the nearest rows, then some after the batch, then some across its epoch. So
    they follow from the global batch alone, and every process chooses the same sample.

    Args:
        batch: The sample of each row of the global batch.
        row: The row.
        num_samples: Number of samples of an epoch.
    """
    count = len(batch)
    for distance in range(1, max(row, count - 1 - row) + 1):
        if row >= distance:
            yield batch[row - distance]
        if row + distance < count:
            yield batch[row + distance]
    end = batch[-1] + 1
    yield from range(end, end + _FOLLOWING)
    yield from across_epoch(batch[-1] // num_samples, num_samples)


def across_epoch(epoch: int, num_samples: int) -> Iterator[int]:
    """Yields some samples of an epoch, evenly spaced, in an order that soon reaches all parts."""
    for k in range(_SPREAD):
        yield epoch * num_samples + (k * _STRIDE % _SPREAD) * num_samples // _SPREAD
