"""`Source`: the protocol of sources with random access, and the order of their epochs.

The package's own sources may also have these members, which are called by functions of this module
and which `core.sources.wrapper.Wrapper` passes on:

- ``order(seed, shuffle)`` replaces the order of the epochs, as in a mixture; see `order_of`.
- ``_read_ahead`` is the number of bytes to request ahead of their use. ``_range_bytes`` counts
  these bytes, and ``_announce`` requests them; see `read_ahead_of`, `range_bytes` and `announce`.
- ``_record_names`` returns the names of several records; see `names_of`.
- ``_check_names`` raises an error if fields must not be read together; see `check_names`.
- ``classes`` are the names of the labels; see `core.sources.labels.classes_of`.
- ``_gives_new_arrays`` is True if `Source.read` never reuses memory, and gives equal values each
  time; see `core.feeding.reuse` and `core.sources.identity`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arguments import call_fault
from ..formats.field import Field
from ..formats.image_size import image_size, path_size
from ..messages import replacements
from ..order.shuffle import Indices, shuffled
from ..remote.range_cache import Lease

# Maps positions in the stream of all epochs' samples, int64 [samples], to the record of each
# sample, and to the epoch on which its random numbers depend.
Order = Callable[[Indices], tuple[Indices, Indices]]
# A field of some records: a value for each record, or one array [records, ...].
Values = Sequence[Any] | NDArray[Any]


class Source(Protocol):
    """Records by index, from 0 to ``len(source) - 1``; the base class of your own sources.

    Methods may be called from several threads concurrently. A source must be picklable, and should
    open files at first use.

    Attributes:
        fields: The names of the fields of a record, with their kinds: dtype and number of
            dimensions.
        read_threads: Number of reading threads of an iterator, for all its pipelines. One or two
            threads read whole batches, and share only the first batch. More threads share each
            batch, which helps only if reads wait, e.g. for a network. Otherwise the threads contend
            for the GIL and become slower.
    """

    fields: Mapping[str, Field]
    read_threads: int = 2

    def __len__(self) -> int:
        """Returns the number of records, at least 1."""
        ...

    def read(self, indices: Indices, names: Sequence[str]) -> Mapping[str, Values]:
        """Returns fields of some records, in the order of ``indices``.

        The values of a record must be the same at each call, or no state can restore its batches.
        The returned memory must not be written to again, because DALI may read it later without a
        copy. A source that reuses memory for other records is rejected.

        Args:
            indices: Indices of records, possibly repeated, int64 [records].
            names: Names of the fields to read.

        Returns:
            For each field, a list with a value of each record, or one array [records, ...].

        Raises:
            OSError, ValueError: If a record can't be read; the message names the record.
        """
        ...

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images as decoded by DALI, with EXIF orientation applied.

        Args:
            indices: Indices of records.
            name: A field of encoded images.
            data: The values of the field, returned by `read`.

        Returns:
            int32 [records, 2]; -1 if the header does not contain the size.
        """
        return image_sizes(data, self.fields[name].is_path)

    def name(self, index: int) -> str:
        """Returns the name of a record for errors, such as its path; by default, its index."""
        return f"record {index} of {type(self).__name__}"

    def identity(self) -> str:
        """Returns a text, such as a digest, that depends on the records and not on their place."""
        ...

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in ("classes", "order"):  # optional members
                raise AttributeError(name)
            owner = f"{type(self).__name__!r} object"
            raise replacements.no_attribute(owner, name, dir(type(self)), replacements.SOURCE)


# The methods that a source must define, and how.
_METHODS = {
    "__len__": "__len__(self), the number of records",
    "read": "read(self, indices, names), which returns a dict of a list or array for each name",
    "identity": "identity(self), a text that changes if the records change",
}


def check_source(source: Source) -> None:
    """Checks that a source has records and implements the protocol.

    Raises:
        TypeError: If the source lacks a part of the protocol.
        ValueError: If the source has no records.
    """
    name, fields = type(source).__name__, getattr(source, "fields", None)
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields of {name} must be a dict like {{'x': Field(np.float32, 1)}}, not {fields!r}"
        )
    for key, field in fields.items():
        if not isinstance(field, Field):
            dtype = field if isinstance(field, str) else "uint8"
            raise TypeError(
                f"fields of {name} must be of type dalijax.sources.Field, not {key!r}: {field!r}. "
                f"Write Field(np.{dtype}, ndim), with ndim=0 for a number and 1 for a vector"
            )
    for method, call in _METHODS.items():
        if getattr(type(source), method, None) in (None, getattr(Source, method)):
            raise TypeError(f"{name} has no method {method}. Define {call}")
    if fault := call_fault(source.read, np.zeros(1, np.int64), list(fields)):
        raise TypeError(f"read of {name}: {fault}. Define {_METHODS['read']}")
    if not len(source):
        raise ValueError(f"{name} has no records: its len() is 0. Check the data that it reads")


def image_sizes(data: Values, are_paths: bool) -> NDArray[np.int32]:
    """Returns heights and widths of encoded images, or of image files; see `Source.sizes`."""
    size_of = path_size if are_paths else image_size
    sizes = [size_of(value) or (-1, -1) for value in data]
    return np.array(sizes, np.int32).reshape(-1, 2)


def epoch_order(count: int, seed: int, shuffle: bool) -> Order:
    """Returns the order of a source's successive epochs, as a function; see `Order`.

    Args:
        count: The number of records.
        seed: The seed.
        shuffle: Whether each epoch has its own order; otherwise all are sequential.
    """

    def order(samples: Indices) -> tuple[Indices, Indices]:
        epochs, positions = np.divmod(samples, count)
        if not shuffle:
            return positions, epochs
        records = np.empty_like(positions)
        for epoch in np.unique(epochs):  # a batch spans one epoch or a few
            chosen = epochs == epoch
            records[chosen] = shuffled(positions[chosen], count, seed, int(epoch))
        return records, epochs

    return order


def order_of(source: Any, seed: int, shuffle: bool) -> Order:
    """Returns ``source.order(seed, shuffle)`` if the source has this method, else `epoch_order`."""
    make_order = getattr(source, "order", None)
    if make_order is None:
        return epoch_order(len(source), seed, shuffle)
    order: Order = make_order(seed, shuffle)
    return order


def read_ahead_of(source: Any) -> int:
    """Returns how many bytes a source requests ahead of their use; 0 if it does not read ahead."""
    return int(getattr(source, "_read_ahead", 0))


def range_bytes(source: Any, indices: Indices, names: Sequence[str]) -> int:
    """Returns the number of bytes that `announce` requests for some records."""
    return int(source._range_bytes(indices, names)) if read_ahead_of(source) else 0


def announce(
    source: Any,
    indices: Indices,
    names: Sequence[str],
    turns: Indices,
    freed: collections.deque[int],
) -> list[tuple[Lease, Indices]]:
    """Requests the bytes of records that will be read soon, if the source reads ahead.

    Args:
        source: The source.
        indices: Indices of records.
        names: Names of the fields.
        turns: A number for each record; records with smaller numbers are needed earlier.
        freed: Receives the number of bytes of each request whose memory is freed.

    Returns:
        Pairs of a `Lease`, which keeps the bytes in memory while it exists, and the turn of each of
        its ranges.
    """
    if not read_ahead_of(source):
        return []
    leases: list[tuple[Lease, Indices]] = source._announce(indices, names, turns, freed)
    return leases


def check_names(source: Any, names: Sequence[str]) -> None:
    """Checks that a source can supply some fields to one graph.

    Args:
        source: The source.
        names: Names of the fields.

    Raises:
        ValueError: If the source is a mixture, and a label has several meanings in its sources.
    """
    check = getattr(source, "_check_names", None)
    if check is not None:
        check(names)


def names_of(source: Any, indices: Indices) -> list[str]:
    """Returns the names of several records, by one call if the source supports it."""
    together = getattr(source, "_record_names", None)
    if together is None:
        return [source.name(index) for index in indices.tolist()]
    names: list[str] = together(indices)
    return names
