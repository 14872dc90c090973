"""Where iterators have their pipelines from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nvidia.dali import Pipeline

from ..errors import StateError

Define = Callable[[bytes | None], Pipeline]


class PipelineSource(Protocol):
    """Where an iterator has its pipelines from.

    Attributes:
        name: What to call it.
        rebuildable: Whether `build` may be called again.
        serialized: What DALI serialises of each pipeline, where they were given so.
        restored: The checkpoints that the first pipelines built stand at by themselves.
        owned: Whether the pipelines built last belong to nobody else.
    """

    name: str
    rebuildable: bool
    serialized: list[bytes]
    restored: list[bytes]
    owned: bool

    @property
    def unresumable(self) -> str:
        """Why a checkpoint can't tell where the pipelines stand, or "" where it can."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed that those of the shards follow from; None where it is the pipeline's own."""
        ...

    def takes_seed(self) -> bool:
        """Whether nobody gave a seed, so that a state's may stand for the default."""
        ...

    def set_seed(self, seed: int | None) -> int | None:
        """Has what is built from now on have the seed of a state, or None: the default.

        Returns:
            What was set before.
        """
        ...

    def shards(self) -> list[tuple[int, int] | None]:
        """Shard and number of shards that each pipeline was made for, as far as it is known."""
        ...

    def of_another_shard(self) -> Pipeline | None:
        """The first pipeline as it would be of another shard, not built, where that is known."""
        ...

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Built pipelines, at their start or where DALI's ``checkpoints`` say (one for each)."""
        ...

    def definitions(self) -> list[Define]:
        """Of each pipeline, what defines another one like it, at a checkpoint, and builds nothing.

        It prepares one batch ahead. There are none where pipelines can't be had unbuilt.
        """
        ...

    def unmap(self) -> bool:
        """Has the readers of what is built next read files, not map them; False if it can't."""
        ...


def check_resumable(source: PipelineSource) -> None:
    """Raises StateError where a source has no state to resume from, with the way out."""
    if source.unresumable:
        raise StateError(f"the pipelines have no state to resume from: {source.unresumable}")
