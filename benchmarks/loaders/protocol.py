"""The interface of the loaders' adapters.

It needs only the standard library, since each loader runs in its own environment.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

Batch = tuple[Iterable[int], Iterable[float]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The input of a process.

    Attributes:
        data: Folder that `Loader.write` filled.
        records: Number of records in the folder.
        batch: Size of the global batch.
        processes: Number of processes; each process delivers ``batch / processes`` rows.
        process: Index of this process.
        port: A free port for processes that connect with each other.
        prefetch: Number of batches to prepare ahead, or the loader's setting that is closest.
        shuffle: "full" for the best shuffle of the loader, "buffer" for a buffer or window of
            ``window`` records, "none" for the order of the files.
        window: Size of the buffer.
        seed: Seed of the order and of the augmentation.
        scale: Factor of the random number of each record, which represents the transform.
        evaluation: Whether the pass must contain every record, with padding if necessary.
    """

    data: str
    records: int
    batch: int = 40
    processes: int = 1
    process: int = 0
    port: int = 0
    prefetch: int = 2
    shuffle: str = "full"
    window: int = 100
    seed: int = 1
    scale: float = 1.0
    evaluation: bool = False

    @property
    def rows(self) -> int:
        """Rows of a batch in this process."""
        return self.batch // self.processes


class Loader(abc.ABC):
    """A loader of numbered records with a random number each, in a process of its own.

    Attributes:
        title: Name of the loader in tables.
        packages: Distributions whose versions are reported.
        stream: Whether `batches` continues with the next epoch.
        augmentation: Origin of the random numbers.
        not_offered: Reason and source by case, for cases that the loader does not offer.
    """

    title: ClassVar[str]
    packages: ClassVar[Sequence[str]]
    stream: ClassVar[bool] = False
    augmentation: ClassVar[str]
    not_offered: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    @abc.abstractmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        """Writes the records of each shard in the loader's format, in the given order."""

    @abc.abstractmethod
    def __init__(self, config: Config) -> None:
        """Prepares the loader as at the start of a run."""

    @abc.abstractmethod
    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yields the numbers of the records and their random numbers, without padded rows.

        Args:
            epoch: The epoch, counted by the trainer; its remaining batches follow.
        """

    @abc.abstractmethod
    def state(self) -> bytes:
        """Returns the position after the last delivered batch."""

    @abc.abstractmethod
    def load(self, states: Sequence[bytes]) -> None:
        """Restores a position before the first batch.

        Args:
            states: The states of all processes of the interrupted run.
        """

    def close(self) -> Any:
        """Ends threads and processes."""
        return None


def own(states: Sequence[Any], config: Config) -> Any:
    """Returns the state of the process with the same index, or another if there is none."""
    return states[config.process % len(states)]
