"""`Steps`: the records of each global batch; `LoaderConfig`: arguments of a `DALIDataLoader`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from ...core.feeding.stream_part import StreamPart
from ...core.state.agreement import Values
from ...core.state.fingerprint import Fingerprint
from .packing import pack_records

__all__: list[str] = []

Row = dict[str, Any]  # "record", its "index" in the sampler, and its "key" in the data source


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """The arguments of a `DALIDataLoader`, without the arguments that only its transform needs.

    Worker processes receive copies.

    Attributes:
        data_source, sampler, operations, batch_size, drop_remainder, read_options,
            other_randomness: As for `DALIDataLoader`.
        shard_options: The share of each global batch that this process reads.
        pad: Whether the last batch is padded; see `dalijax.core.order`.
        workers: Number and buffers of the worker processes that read records.
        skips: Whether batches that fail are skipped.
        seed: The seed of the loader.
        takes_seed: Whether the seed of a restored state is used, because the user gave no seed.
        described: The values in states that describe the data, by name.
    """

    data_source: Any
    sampler: Any
    operations: Sequence[Any]
    _: dataclasses.KW_ONLY
    batch_size: int
    shard_options: grain.sharding.ShardOptions
    drop_remainder: bool
    pad: bool
    workers: grain.MultiprocessingOptions
    read_options: grain.ReadOptions
    skips: bool
    seed: int
    takes_seed: bool
    other_randomness: bool
    described: Fingerprint


class Steps(grain.MapDataset):
    """A dataset of the records that this process reads for each global batch.

    The element at index ``step`` is a pair. The first item is a list of `Row`. The second item is a
    list with a bool for each row of this process, which is False for padding or a missing record.

    Args:
        config: The arguments of the loader.
        rows: The indices in a global batch of the rows of this process, int64 [rows].

    Attributes:
        records: Number of records of the sampler; sys.maxsize if the sampler has no length.
    """

    def __init__(self, config: LoaderConfig, rows: NDArray[np.int64]):
        super().__init__()
        self.config = config
        self.rows = rows
        sampler = config.sampler
        self.records = len(sampler) if hasattr(sampler, "__len__") else sys.maxsize
        full_batches, remainder = divmod(self.records, config.batch_size)
        self._length = full_batches + (remainder > 0 and not config.drop_remainder)

    def part(self) -> StreamPart:
        """Returns the description of the part of each global batch that this process reads.

        The processes compare their descriptions before the first batch.
        """
        values: Values = {
            "loader": "DALIDataLoader",
            "sampler": self.config.described["sampler"],
            "number of records": self.records,
            "batches": len(self),
            "global batch": self.config.batch_size,
            "pad": self.config.pad,
        }
        return StreamPart(values, len(self), agreed=True)

    def read_from(self, step: int) -> grain.DatasetIterator:
        """Returns an iterator over the elements from a step, with packed rows if workers read."""
        steps = self[step:] if step else self
        workers = self.config.workers
        ds: Any = steps.map(pack_rows) if workers.num_workers else steps
        ds = ds.to_iter_dataset(self.config.read_options)
        if workers.num_workers:
            ds = ds.mp_prefetch(workers)
        iterator: grain.DatasetIterator = ds.__iter__()
        return iterator

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        if index >= self._length:
            raise IndexError(f"step {index} of {self._length}")
        config = self.config
        start = index * config.batch_size
        # Padding repeats the last record of the global batch, also in other processes.
        last = min(start + config.batch_size, self.records) - 1
        numbers = (start + self.rows).tolist()
        valid = [number <= last for number in numbers]
        if not config.pad:
            numbers = [number for number in numbers if number <= last]
        metadata = [config.sampler[min(number, last)] for number in numbers]
        keys = [entry.record_key for entry in metadata]
        records = self._records(keys)
        rows: list[Row] = []
        for entry, record in zip(metadata, records, strict=True):
            for operation in config.operations:
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
        source = self.config.data_source
        try:
            if hasattr(source, "__getitems__"):
                return list(source.__getitems__(keys))
            return [source[key] for key in keys]
        except IndexError as error:
            count = len(source) if hasattr(source, "__len__") else sys.maxsize
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
