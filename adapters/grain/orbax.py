"""Orbax for iterators that can be restored on another number of processes.

These are iterators of a `DALIDataLoader`, and of a `DALIIterDataset` over one of `dalijax.sources`.
Files have the names of Grain's own handler, ``process_0-of-2.json``, which can read those of an
unchanged number of processes::

    manager.save(step, args=ocp.args.Composite(data=ElasticSave(iterator), ...))
    manager.restore(step, args=ocp.args.Composite(data=ElasticRestore(iterator), ...))
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable
from typing import Any

import jax

from ...core.environment.extras import extra

with extra("grain,examples", "dalijax.adapters.grain.orbax"):  # Orbax is one of the examples'
    import grain
    import orbax.checkpoint as ocp
    from etils import epath

from ..process_files import file_of_any_process
from .data_loader import DALIDataLoaderIterator
from .iter_dataset import DALIDatasetIterator

__all__ = ["ElasticHandler", "ElasticRestore", "ElasticSave"]


def __dir__() -> list[str]:
    return sorted(__all__)


class ElasticHandler(grain.checkpoint.CheckpointHandler):
    """Grain's handler, which also restores from another number of processes."""

    def restore(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        """Restores an iterator, and returns it; for errors see `ElasticRestore`."""
        iterator = args.item if item is None else item
        iterator.set_state(_saved(directory))
        iterator.start_prefetch()
        return iterator


@dataclasses.dataclass
class _Elastic(ocp.args.CheckpointArgs):
    item: DALIDataLoaderIterator | DALIDatasetIterator

    def __post_init__(self) -> None:
        item = self.item
        over_source = isinstance(item, DALIDatasetIterator) and item.over_source
        if not (over_source or isinstance(item, DALIDataLoaderIterator)):
            raise TypeError(
                f"{item} is no iterator of a DALIDataLoader, or of a DALIIterDataset over a "
                "source: its state is of one process alone. Use CheckpointSave and "
                "CheckpointRestore of grain.checkpoint"
            )


@ocp.args.register_with_handler(ElasticHandler, for_save=True)
class ElasticSave(_Elastic):
    """Saves an iterator in the files of ``grain.checkpoint``.

    Args:
        item: The iterator of a `DALIDataLoader`, or of a `DALIIterDataset` over a source.

    Raises:
        TypeError: If it is another one.
    """


@ocp.args.register_with_handler(ElasticHandler, for_restore=True)
class ElasticRestore(_Elastic):
    """Restores an iterator that any number of processes saved.

    It reads this process's file, or, if another number of processes saved, all files, which hold
    the same global position. Orbax v1 saves iterators as they are, and loads them by this:
    ``load_checkpointables(path, {"data": ElasticRestore(iterator)})``.

    Args:
        item: The iterator of a `DALIDataLoader`, or of a `DALIIterDataset` over a source.

    Raises:
        TypeError: If it is another one.
        FileNotFoundError: When it is restored: there is no state; the iterator is unchanged.
        ValueError: When it is restored: the processes' states differ, or the iterator refuses
            them; it is unchanged.
    """

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the iterator in Orbax v1."""
        return await self.item.save(directory)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Restores the iterator in Orbax v1."""

        async def loaded() -> None:
            self.item.set_state(await asyncio.to_thread(_saved, directory))

        return loaded()


def _saved(directory: epath.Path) -> Any:
    """The state for this process among the files of Grain's handler, one for each process."""
    expected = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    file = file_of_any_process(expected, directory.glob("process_*-of-*.json"))
    return json.loads(file.read_text())
