"""Sources of pipelines: the base of `FunctionSource` and `HandmadeSource`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from nvidia.dali import Pipeline

from ..errors import StateError
from .function_notes import FunctionsOfPipelines

Define = Callable[[bytes | None], Pipeline]


class PipelineSource(abc.ABC):
    """A source of an iterator's pipelines.

    Args:
        name: What to call it in messages.

    Attributes:
        rebuildable: Whether `build` may be called again.
        serialized: What DALI serialises of each pipeline, where they are built of it.
        restored: The checkpoints that the first pipelines built stand at by themselves.
        owned: Whether the pipelines built last belong to nobody else.
    """

    def __init__(self, name: str):
        self.name = name
        self.rebuildable = True
        self.serialized: list[bytes] = []
        self.restored: list[bytes] = []
        self.owned = True
        self._unresumable = ""
        self._functions = FunctionsOfPipelines()

    @property
    def unresumable(self) -> str:
        """Why a checkpoint can't tell where the pipelines stand, or "" where it can."""
        self._unresumable = self._unresumable or self._functions.kept_state()
        return self._unresumable

    @abc.abstractmethod
    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Built pipelines, at their start or where DALI's ``checkpoints`` say (one for each)."""

    # What only those who define the pipelines know

    @property
    def seed(self) -> int | None:
        """The seed that the seeds of the shards follow from; None where each has its own."""
        return None

    def takes_seed(self) -> bool:
        """Whether nobody chose a seed, so that a state's may stand for the default."""
        return False

    def set_seed(self, seed: int | None) -> int | None:
        """Sets the seed of the next pipelines to that of a state; None: the default.

        Returns:
            The seed that was set before.
        """
        return None

    def shards(self) -> list[tuple[int, int] | None]:
        """Shard and number of shards that each pipeline is for, as far as it is known."""
        return []

    def of_another_shard(self) -> Pipeline | None:
        """The first pipeline as it would be of another shard, not built, where that is known."""
        return None

    def definitions(self) -> list[Define]:
        """Of each pipeline, what defines another one like it, at a checkpoint, and builds nothing.

        There are none where pipelines can't be had unbuilt.
        """
        return []

    def unmap(self) -> bool:
        """Has the next pipelines read files instead of mapping them; False if it can't."""
        return False


def check_resumable(source: PipelineSource) -> None:
    """Raises StateError where a source has no state to resume from, with the way out."""
    if source.unresumable:
        raise StateError(f"the pipelines have no state to resume from: {source.unresumable}")
