"""Saves iterators with Orbax, and restores them on a different number of processes.

Supports iterators over a `DALIDataLoader`, or over a `DALIIterDataset` that reads one of
`dalijax.sources`. The files are named as by Grain's own handler (``process_0-of-2.json``), which
can read these files if the number of processes is unchanged::

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
    """Extends Grain's handler to restore from the files of a different number of processes."""

    def restore(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        """Restores an iterator, starts its prefetching, and returns it.

        Raises:
            Exception: As for `ElasticRestore`.
        """
        iterator = args.item if item is None else item
        iterator.set_state(_saved(directory))
        iterator.start_prefetch()
        return iterator


@dataclasses.dataclass
class _Elastic(ocp.args.CheckpointArgs):
    """Orbax's arguments for an iterator.

    Raises:
        TypeError: If the states of the iterator differ between processes.
    """

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

    Reads the file of this process. If a different number of processes has saved the iterator, reads
    all files, which contain the same global position. With Orbax v1, save the iterator itself, and
    load it by ``load_checkpointables(path, {"data": ElasticRestore(iterator)})``.

    Args:
        item: The iterator of a `DALIDataLoader`, or of a `DALIIterDataset` over a source.

    Raises:
        TypeError: If ``item`` is another iterator.
        FileNotFoundError: When restoring, if there is no state; the iterator is unchanged.
        ValueError: When restoring, if the processes' states differ, or the iterator rejects them;
            the iterator is unchanged.
    """

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the iterator with Orbax v1; returns an awaitable that writes the file."""
        return await self.item.save(directory)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Returns an awaitable that restores the iterator with Orbax v1."""

        async def loaded() -> None:
            self.item.set_state(await asyncio.to_thread(_saved, directory))

        return loaded()


def _saved(directory: epath.Path) -> Any:
    """Returns the state to restore in this process, from the files that Grain's handler wrote.

    Raises:
        FileNotFoundError: If there is no file.
        StateError: If the files of a different number of processes differ.
    """
    expected = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    file = file_of_any_process(expected, directory.glob("process_*-of-*.json"))
    return json.loads(file.read_text())
