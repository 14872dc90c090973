"""The interface of the packers.

It needs only NumPy, since each packer runs in its own environment.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Row = list[tuple[int, int]]  # the images of a row, and how many of their tokens it contains


@dataclasses.dataclass(frozen=True)
class Job:
    """The input of a process.

    Attributes:
        lengths: File of the number of tokens of each image, int32 [images].
        sizes: File of the size of each image in pixels, int32 [images, 2].
        images: Number of images of the files to use.
        row: Tokens of a row.
        tokens: The largest number of tokens of an image.
        batch: Rows of a global batch.
        seed: Seed of the order.
        processes: Number of processes; each process delivers ``batch / processes`` rows.
        process: Index of this process.
        port: A free port for processes that connect with each other.
    """

    lengths: str
    sizes: str
    images: int
    row: int
    tokens: int
    batch: int = 8
    seed: int = 1
    processes: int = 1
    process: int = 0
    port: int = 0

    @property
    def rows(self) -> int:
        """Rows of a batch in this process."""
        return self.batch // self.processes


@dataclasses.dataclass(frozen=True)
class Packing:
    """The parts of images in rows.

    Attributes:
        images: Number of the image of each part, int [parts].
        rows: Row of each part, int [parts].
        tokens: Number of tokens of each part, int [parts].
        widths: Tokens of each row with padding, int [rows].
        complete: Number of tokens of each whole image, int [images].
    """

    images: Ints
    rows: Ints
    tokens: Ints
    widths: Ints
    complete: Ints


class Packer(abc.ABC):
    """Packs the images of an epoch, in a process of its own.

    Attributes:
        stateful: Whether the packer has a state.
        packages: Distributions whose versions are reported.
        reads: Number of images that were read until now.
        options: Settings of a variant of the packer.
    """

    stateful: ClassVar[bool] = True
    packages: ClassVar[Sequence[str]] = ()

    def __init__(self, job: Job, **options: Any) -> None:
        self.job, self.options, self.reads = job, options, 0
        self.lengths = np.load(job.lengths)[: job.images]

    @abc.abstractmethod
    def work(self) -> Any:
        """Packs the epoch; the CPU time of this method is measured."""

    def without(self) -> None:
        """Does the part of `work` that is not packing. Its CPU time is subtracted."""
        return

    @abc.abstractmethod
    def packing(self, result: Any) -> Packing:
        """Returns the packing of the epoch from the result of `work`."""

    @abc.abstractmethod
    def batches(self) -> Iterator[list[Row]]:
        """Yields the rows of this process, by batches."""

    def state(self) -> str:
        """Returns the position after the last batch."""
        raise NotImplementedError

    def load(self, states: Sequence[str]) -> None:
        """Restores the states of all processes of the interrupted run before the first batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the packer."""
        return


def packing_of(rows: Sequence[NDArray[Any]], lengths: Ints) -> Packing:
    """Returns the packing of rows whose tokens contain the number of their image + 1, or 0."""
    widths = np.array([len(row) for row in rows])
    tokens = np.concatenate(rows).astype(np.int64)
    numbers = np.repeat(np.arange(len(rows)), widths)
    keys = (numbers * (len(lengths) + 1) + tokens)[tokens > 0]
    parts, counts = np.unique(keys, return_counts=True)
    row, image = np.divmod(parts, len(lengths) + 1)
    return Packing(image - 1, row, counts, widths, lengths)


def parts_of(row: NDArray[Any]) -> Row:
    """Returns the images of a row of tokens, in their order."""
    values = row[row > 0].astype(np.int64) - 1
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    counts = np.diff(np.append(starts, len(values)))
    return list(zip(values[starts].tolist(), counts.tolist()))
