"""NVIDIA DALI pipelines as JAX iterators, with exact epochs, masks and resuming.

Functions and classes:

- `data_iterator`: converts a function of a DALI graph to an `IteratorFunction`, which creates
  iterators.
- `DALIGenericIterator`: an iterator over DALI pipelines.
- `BatchStream`: an iterator over the batches of several epochs, for loops that count steps.
- `LastBatchPolicy`: DALI's enum FILL, DROP and PARTIAL.
- `Draw`: the type of ``draw``, which draws random numbers in a graph.
- `Bucket`: the type of ``bucket``, which crops images to the sizes of buckets in a graph.
- `Pack`: the type of ``pack``, which packs images into rows in a graph.
- `FailedBatch`: an entry of an iterator's ``errors``.
- `InputStats`: the counters of an iterator.

Modules:

- `sources`: random access to records: files, tars, TFRecords, robot episodes, arrays, mixtures.
- `augment`: random augmentation that depends only on the record, the epoch and the seed.
- `fn`: operators for graphs, in addition to ``nvidia.dali.fn``.
- `errors`: exceptions to catch.
- `show`: draws batches; ``from dalijax.show import show``, and a command.
- `tune`: measures settings; ``from dalijax.tune import tune``, and a command.
- `profile`: reports whether a loop waits for its input; ``from dalijax.profile import profile``.
"""

import importlib as _importlib
import typing as _typing

# This must come first: the imports below may start CUDA, which reads the number of queues once.
from .core.environment import cuda_queues as _cuda_queues
from .core.environment import extras as _extras

_cuda_queues.set_at_import()
_extras.check_dali()

# isort: split
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as LastBatchPolicy

from . import errors as errors
from . import fn as fn
from .core.api import IteratorFunction as IteratorFunction
from .core.api import data_iterator as data_iterator
from .core.iterator.batch_stream import BatchStream as BatchStream
from .core.iterator.iterator import DALIGenericIterator as DALIGenericIterator
from .core.messages import replacements as _replacements
from .core.random.draw import Draw as Draw
from .core.state.position import FailedBatch as FailedBatch
from .core.stats import InputStats as InputStats

if _typing.TYPE_CHECKING:
    from . import augment as augment
    from . import profile as profile
    from . import show as show
    from . import sources as sources
    from . import tune as tune
    from .core.augment.bucket import Bucket as Bucket
    from .core.augment.pack import Pack as Pack

__all__ = [
    "BatchStream",
    "Bucket",
    "DALIGenericIterator",
    "Draw",
    "FailedBatch",
    "InputStats",
    "IteratorFunction",
    "LastBatchPolicy",
    "Pack",
    "augment",
    "data_iterator",
    "errors",
    "fn",
    "profile",
    "show",
    "sources",
    "tune",
]
__version__ = "0.1.0"

_CLASSES = {"Bucket": "core.augment.bucket", "Pack": "core.augment.pack"}
_MODULES = ("errors", "sources", "augment", "fn", "profile", "show", "tune")

if not _typing.TYPE_CHECKING:  # type checkers report names that do not exist

    def __getattr__(name: str) -> _typing.Any:
        if name in _MODULES:  # imported when first used
            return _importlib.import_module(f"{__name__}.{name}")
        if name in _CLASSES:
            return getattr(_importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
        for module in _MODULES if not name.startswith("_") else ():
            if name in _importlib.import_module(f"{__name__}.{module}").__all__:
                raise AttributeError(
                    f"{__name__} has no attribute {name!r}: use {__name__}.{module}.{name}"
                )
        raise _replacements.no_attribute(__name__, name, __all__, _replacements.PACKAGE)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
