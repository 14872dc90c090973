"""NVIDIA DALI's pipelines as JAX iterators, with exact epochs, masks and resume.

The public names:

- `data_iterator`: from a function of a DALI graph to one that makes iterators.
- `DALIGenericIterator`: an iterator over pipelines made by hand.
- `LastBatchPolicy`: DALI's own enum, FILL, DROP or PARTIAL.
- `fn`: operators for graphs, beside ``nvidia.dali.fn``.
- `sources`, `augment`, and `profile`, a block that says whether a loop waits for its input and for
  which part: imported when first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# First: what is imported below may start CUDA, which then knows its queues.
from .core.environment import cuda_queues, extras

cuda_queues.set_at_import()
extras.check_dali()

# isort: split
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as LastBatchPolicy

from . import fn as fn
from .core import replacements as _replacements
from .core.api import data_iterator as data_iterator
from .core.iterator.iterator import DALIGenericIterator as DALIGenericIterator

if _TYPE_CHECKING:
    from .core.tools.profile.profile import profile as profile

__all__ = ["DALIGenericIterator", "LastBatchPolicy", "data_iterator", "fn", "profile"]
__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:  # importing the package costs nothing for these
    if name in ("augment", "show", "sources", "tune"):
        return _importlib.import_module(f"{__name__}.{name}")
    if name == "profile":
        return _importlib.import_module(f"{__name__}.core.tools.profile.profile").profile
    for module in ("sources", "augment", "fn"):
        if name in (names := _importlib.import_module(f"{__name__}.{module}").__all__):
            table = {
                other.replace("_", "").lower(): f"{__name__}.{module}.{other}" for other in names
            }
            raise _replacements.no_attribute(__name__, name, (), table)
    raise _replacements.no_attribute(__name__, name, __all__, _replacements.PACKAGE)


def __dir__() -> list[str]:
    return sorted({*globals(), "augment", "profile", "sources"})
