"""Exceptions to catch, in addition to Python's own: ``from dalijax import errors``.

Wrong arguments raise ValueError or TypeError. Each class describes its messages:

- `StateError`: a state is rejected.
- `BatchError`: a batch can't be read or decoded.
- `RecordError`: records of Grain can't be decoded.
- `UnfitRecordError`: records of Grain differ in form from the first record.
- `GraphError`: the graph fails for every record.
- `RaggedError`: the samples of an output differ in shape.
- `BatchMapError`: a function of ``batch_map`` failed.
- `EpochError`: every batch of an epoch was skipped.
- `ProcessError`: the processes of a run differ.
"""

import typing as _typing

from .core.errors import BatchError as BatchError
from .core.errors import BatchMapError as BatchMapError
from .core.errors import EpochError as EpochError
from .core.errors import GraphError as GraphError
from .core.errors import ProcessError as ProcessError
from .core.errors import RaggedError as RaggedError
from .core.errors import RecordError as RecordError
from .core.errors import StateError as StateError
from .core.errors import UnfitRecordError as UnfitRecordError
from .core.messages import replacements as _replacements

__all__ = [
    "BatchError",
    "BatchMapError",
    "EpochError",
    "GraphError",
    "ProcessError",
    "RaggedError",
    "RecordError",
    "StateError",
    "UnfitRecordError",
]

if not _typing.TYPE_CHECKING:  # type checkers would accept misspelled names

    def __getattr__(name: str) -> _typing.Any:
        raise _replacements.no_attribute(__name__, name, __all__, {})
