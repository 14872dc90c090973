"""`Steps`: the records that a `DALIDataLoader` reads for each global batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grain

from .packing import pack_records

__all__: list[str] = []

Row = dict[str, Any]  # "record", its "index" in the sampler, and its "key" in the data source


class Steps(grain.MapDataset):
    """A dataset of the records that this process reads for each global batch.

    The element at index ``step`` is a pair. The first item is a list of `Row`. The second item is a
    list with a bool for each row of this process, which is False for padding or a missing record.

    Attributes:
        records: Number of records of the sampler; sys.maxsize if the sampler has no length.
        pad: Whether the last batch is padded; see `dalijax.core.order`.
    """

    def __init__(
        self,
        data_source: Any,
        sampler: Any,
        operations: Sequence[Any],
        batch_size: int,
        rows: Sequence[int],
        drop_remainder: bool,
        pad: bool,
    ):
        super().__init__()
        self._source = data_source
        self._sampler = sampler
        self._operations = operations
        self._batch_size = batch_size
        self._rows = rows
        self.pad = pad
        self.records = len(sampler) if hasattr(sampler, "__len__") else sys.maxsize
        full_batches, remainder = divmod(self.records, batch_size)
        self._length = full_batches + (remainder > 0 and not drop_remainder)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        if index >= self._length:
            raise IndexError(f"step {index} of {self._length}")
        start = index * self._batch_size
        # Padding repeats the last record of the global batch, also in other processes.
        last = min(start + self._batch_size, self.records) - 1
        numbers = [start + row for row in self._rows]
        valid = [number <= last for number in numbers]
        if not self.pad:
            numbers = [number for number in numbers if number <= last]
        metadata = [self._sampler[min(number, last)] for number in numbers]
        keys = [entry.record_key for entry in metadata]
        records = self._records(keys)
        rows: list[Row] = []
        for entry, record in zip(metadata, records, strict=True):
            for operation in self._operations:
                if isinstance(operation, grain.transforms.Map):
                    record = operation.map(record)
                elif entry.rng is None:
                    raise ValueError(
                        f"{operation!r} draws random numbers, but the sampler has no seed. Pass "
                        "seed= to the sampler"
                    )
                else:
                    record = operation.random_map(record, entry.rng)
            rows.append({"index": entry.index, "key": entry.record_key, "record": record})
        return rows, valid

    def _records(self, keys: Sequence[Any]) -> list[Any]:
        """Returns records of the data source.

        Raises:
            IndexError: If a key exceeds the number of records.
        """
        try:
            if hasattr(self._source, "__getitems__"):
                return list(self._source.__getitems__(keys))
            return [self._source[key] for key in keys]
        except IndexError as error:
            count = len(self._source) if hasattr(self._source, "__len__") else sys.maxsize
            beyond = [key for key in keys if isinstance(key, int) and key >= count]
            if not beyond:
                raise
            raise IndexError(
                f"the sampler requests record {beyond[0]} of {count} records. Pass "
                "num_records=len(data_source) to the sampler"
            ) from error


def pack_rows(element: Any) -> Any:
    """Returns an element of `Steps` with packed rows, for the transfer from a worker process."""
    rows, valid = element
    return pack_records(rows), valid


def row_name(row: Row) -> str:
    """Returns the name of a row's record for errors, such as "record 3 (key 7)"."""
    key = row["key"]
    return f"record {row['index']} (key {bytes(key) if isinstance(key, memoryview) else key!r})"
