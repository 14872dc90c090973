"""NVIDIA DALI's pipelines as JAX iterators, with exact epochs, masks and resume.

The public names:

- `data_iterator`: from a function of a DALI graph to one that makes iterators.
- `DALIGenericIterator`: an iterator over pipelines made by hand.
- `LastBatchPolicy`: DALI's own enum, FILL, DROP or PARTIAL.
- `fn`: operators for graphs, beside ``nvidia.dali.fn``.
"""

# First: what is imported below may start CUDA, which then knows its queues.
from .core import cuda_queues

cuda_queues.set_at_import()

# isort: split
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as LastBatchPolicy

from . import fn as fn
from .core.iterator.data_iterator import data_iterator as data_iterator
from .core.iterator.iterator import DALIGenericIterator as DALIGenericIterator

__all__ = ["DALIGenericIterator", "LastBatchPolicy", "data_iterator", "fn"]
__version__ = "0.1.0"
