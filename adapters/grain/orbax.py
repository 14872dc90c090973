"""Orbax for the iterators of a `DALIDataLoader`: they go on on another number of processes.

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

from ...core.extras import extra

with extra("grain,examples", "dalijax.adapters.grain.orbax"):  # Orbax is one of the examples'
    import grain
    import orbax.checkpoint as ocp
    from etils import epath

from .data_loader import DALIDataLoaderIterator

__all__ = ["ElasticHandler", "ElasticRestore", "ElasticSave"]


class ElasticHandler(grain.checkpoint.CheckpointHandler):
    """Grain's handler, which also reads what another number of processes saved."""

    def restore(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        """The iterator at the saved step, by an `ElasticRestore`; its errors are there."""
        iterator = args.item if item is None else item
        iterator.set_state(_saved(directory))
        iterator.start_prefetch()
        return iterator


@dataclasses.dataclass
class _Elastic(ocp.args.CheckpointArgs):
    item: DALIDataLoaderIterator

    def __post_init__(self) -> None:
        if not isinstance(self.item, DALIDataLoaderIterator):
            raise TypeError(
                f"{self.item} is no iterator of a DALIDataLoader: its state is of one process "
                "alone. Use CheckpointSave and CheckpointRestore of grain.checkpoint"
            )


@ocp.args.register_with_handler(ElasticHandler, for_save=True)
class ElasticSave(_Elastic):
    """Saves an iterator of a `DALIDataLoader`, in the files of ``grain.checkpoint``.

    Args:
        item: The iterator.

    Raises:
        TypeError: If it is another one.
    """


@ocp.args.register_with_handler(ElasticHandler, for_restore=True)
class ElasticRestore(_Elastic):
    """Restores an iterator of a `DALIDataLoader`, whatever number of processes saved it.

    It reads this process's file, or, where another number of processes saved, all files, which
    hold the same global step. Orbax v1 saves iterators as they are and takes this to load them:
    ``load_checkpointables(path, {"data": ElasticRestore(iterator)})``.

    Args:
        item: The iterator.

    Raises:
        TypeError: If it is another one.
        ValueError: When it is restored: there is no state, the processes' states differ, or the
            iterator refuses it; the iterator is as it was.
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
    own = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    files = [own] if own.exists() else sorted(directory.glob("process_*-of-*.json"))
    states = {file.name: json.loads(file.read_text()) for file in files}
    if not states:
        raise ValueError(f"{directory} has no process_I-of-N.json: no iterator was saved there")
    if any(state != states[files[0].name] for state in states.values()):
        raise ValueError(f"the processes' states in {directory} are not of one step: {states}")
    return states[files[0].name]
