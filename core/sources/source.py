"""What a source is: records by number, and the order in which an epoch takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices, shuffled
from ..pipeline.picture_size import path_size, picture_size

# Of samples of the stream: the record of each, and the epoch whose random numbers it draws.
Order = Callable[[Indices], tuple[Indices, Indices]]

# A field of some records: an array for each (what passes the graph by, as it is), or one array of
# shape [records, ...].
Values = Sequence[Any] | NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Field:
    """What the records of a source have under one name.

    Attributes:
        dtype: Of the array of one record; None for text, dicts and the like, which pass the graph
            by.
        ndim: Number of its dimensions: 1 for encoded bytes, 0 for a label.
        is_path: Whether it is the path of a file whose bytes DALI reads in the graph.
    """

    dtype: np.dtype[Any] | None
    ndim: int = 0
    is_path: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:  # users write np.int32, which is none yet
            object.__setattr__(self, "dtype", np.dtype(self.dtype))


class Source(Protocol):
    """Records by number, from 0 to ``len(source) - 1``; the base class of sources of your own.

    Its methods may be called from several threads at once. It pickles: what it opens, it opens when
    it is first used.

    Attributes:
        fields: The names and the kinds of what a record has.
        read_threads: Threads of an iterator that read at once, for all its pipelines. More than
            two are for reads that wait, as for a network: those that work take turns with Python's
            lock, and are slower the more they are.
    """

    fields: Mapping[str, Field]
    read_threads: int = 2

    def __len__(self) -> int:
        """Number of records, at least 1."""
        ...

    def read(self, indices: Indices, names: Sequence[str]) -> Mapping[str, Values]:
        """Fields of some records, in their order.

        What it gives is not written to again: DALI may read it later, without a copy. A source
        that gives the same memory for other records is refused.

        Args:
            indices: Numbers of records; one may come twice.
            names: The fields that are wanted.

        Raises:
            OSError, ValueError: If a record can't be read; the message names it.
        """
        ...

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Heights and widths of pictures as DALI's decoder gives them, EXIF's turning included.

        Args:
            indices: Numbers of records.
            name: A field of encoded pictures.
            data: What `read` gave of the field.

        Returns:
            int32 of shape [records, 2]; -1 where the header doesn't say it.
        """
        return picture_sizes(data, self.fields[name].is_path)

    def name(self, index: int) -> str:
        """What to call a record in errors: its path, or archive and member, or its number."""
        return f"record {index} of {type(self).__name__}"

    def identity(self) -> str:
        """A digest that is alike where the records are alike, wherever they lie."""
        ...


def picture_sizes(data: Values, are_paths: bool) -> NDArray[np.int32]:
    """`Source.sizes` of encoded pictures, or of those in the files that are named by paths."""
    size_of = path_size if are_paths else picture_size
    sizes = [size_of(value) or (-1, -1) for value in data]
    return np.array(sizes, np.int32).reshape(-1, 2)


def epoch_order(count: int, seed: int, shuffle: bool) -> Order:
    """The order of a source's epochs, one after another.

    Args:
        count: Number of records.
        seed: The seed.
        shuffle: Whether each epoch has an order of its own; else all are sequential.
    """

    def order(samples: Indices) -> tuple[Indices, Indices]:
        epochs, positions = np.divmod(samples, count)
        if not shuffle:
            return positions, epochs
        records = np.empty_like(positions)
        for epoch in np.unique(epochs):  # a batch is of one epoch, or of few
            chosen = epochs == epoch
            records[chosen] = shuffled(positions[chosen], count, seed, int(epoch))
        return records, epochs

    return order


def order_of(source: Any, seed: int, shuffle: bool) -> Order:
    """The order of a source: its own, which a mixture has, or that of its epochs."""
    make_order = getattr(source, "order", None)
    if make_order is None:
        return epoch_order(len(source), seed, shuffle)
    order: Order = make_order(seed, shuffle)
    return order


def names_of(source: Any, indices: Indices) -> list[str]:
    """Returns the names of several records, together if the source has a method for it."""
    together = getattr(source, "record_names", None)
    if together is None:
        return [source.name(index) for index in indices.tolist()]
    names: list[str] = together(indices)
    return names
