"""Grain: DALI as a dataset, as a transform of records, as a batch operation, or as a data loader.

    from dalijax.adapters.grain import DALIIterDataset, DALITransform, DALIBatch, DALIDataLoader

- `DALIIterDataset`: a DALI reader as a ``grain.IterDataset``.
- `DALITransform`: ``ds.pipe(DALITransform(...))``: Grain reads, shards, shuffles and checkpoints
  records; DALI decodes and augments them. The default choice, unless a DALI reader reads the data.
- `DALIBatch`: the same inside an unchanged ``grain.DataLoader(operations=[...])``.
- `DALIDataLoader`: Grain's sampler and data source with DALI as the last stage; elastic states.
- `RandomInputs`: random numbers for each record that depend only on its index and the seed.
- `pack_records`: ``.batch(B, batch_fn=pack_records)``: worker processes return the records of a
  batch in shared memory.
"""

from ...core.environment.extras import extra

with extra("grain", "dalijax.adapters.grain"):  # before the modules that need it
    import grain as _grain  # noqa: F401

from .batch_operation import DALIBatch as DALIBatch
from .batch_operation import RandomInputs as RandomInputs
from .data_loader import DALIDataLoader as DALIDataLoader
from .iter_dataset import DALIIterDataset as DALIIterDataset
from .packing import PackedRecords as PackedRecords
from .packing import pack_records as pack_records
from .transform import DALITransform as DALITransform

__all__ = [
    "DALIBatch",
    "DALIDataLoader",
    "DALIIterDataset",
    "DALITransform",
    "PackedRecords",
    "RandomInputs",
    "pack_records",
]


def __dir__() -> list[str]:
    return sorted(__all__)
