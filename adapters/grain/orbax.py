"""Orbax for iterators that can be restored on a different number of processes.

These are iterators over a `DALIDataLoader`, or over a `DALIIterDataset` of one of
`dalijax.sources`. Files have the names of Grain's own handler, ``process_0-of-2.json``, which can
read them if the number of processes is unchanged::

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

with extra("grain,examples", "dalijax.adapters.grain.orbax"):  # "examples" includes Orbax
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
    """Grain's handler, which also reads the files of a different number of processes."""

    def restore(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        """Restores an iterator and returns it; for errors see `ElasticRestore`."""
        iterator = args.item if item is None else item
        iterator.set_state(_saved(directory))
        iterator.start_prefetch()
        return iterator


@dataclasses.dataclass
class _Elastic(ocp.args.CheckpointArgs):
    """Orbax's arguments for an iterator; raises TypeError if its states depend on the process."""

    item: DALIDataLoaderIterator | DALIDatasetIterator

    def __post_init__(self) -> None:
        item = self.item
        over_source = isinstance(item, DALIDatasetIterator) and item.over_source
        if not (over_source or isinstance(item, DALIDataLoaderIterator)):
            raise TypeError(
                f"{item} is not an iterator of a DALIDataLoader, or of a DALIIterDataset over a "
                "source: its state belongs to a single process. Use CheckpointSave and "
                "CheckpointRestore of grain.checkpoint"
            )


@ocp.args.register_with_handler(ElasticHandler, for_save=True)
class ElasticSave(_Elastic):
    """Saves an iterator in the files of ``grain.checkpoint``.

    Args:
        item: The iterator of a `DALIDataLoader`, or of a `DALIIterDataset` over a source.

    Raises:
        TypeError: If ``item`` is another iterator.
    """


@ocp.args.register_with_handler(ElasticHandler, for_restore=True)
class ElasticRestore(_Elastic):
    """Restores an iterator that was saved by any number of processes.

    Reads this process's file. If a different number of processes saved, reads all files, which
    contain the same global position. With Orbax v1, save the iterator itself, and load it by
    ``load_checkpointables(path, {"data": ElasticRestore(iterator)})``.

    Args:
        item: The iterator of a `DALIDataLoader`, or of a `DALIIterDataset` over a source.

    Raises:
        TypeError: If ``item`` is another iterator.
        FileNotFoundError: When restoring, if there is no state; the iterator is unchanged.
        ValueError: When restoring, if the processes' states differ, or the iterator rejects them;
            the iterator is unchanged.
    """

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the iterator with Orbax v1."""
        return await self.item.save(directory)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Restores the iterator with Orbax v1."""

        async def loaded() -> None:
            self.item.set_state(await asyncio.to_thread(_saved, directory))

        return loaded()


def _saved(directory: epath.Path) -> Any:
    """Returns the state for this process, from the files that Grain's handler wrote."""
    expected = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    file = file_of_any_process(expected, directory.glob("process_*-of-*.json"))
    return json.loads(file.read_text())
