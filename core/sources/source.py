"""`Source`: the protocol of sources with random access, and the order of their epochs.

The package's own sources may also have these members, which are called by functions of this module
and which `core.sources.wrapper.Wrapper` passes on:

- ``order(seed, shuffle)`` replaces the order of the epochs, as in a mixture; see `order_of`.
- ``_groups`` are groups of records that are read as a whole, or None; see `epoch_order`.
- ``_read_ahead`` is the number of bytes to request ahead of their use. ``_range_bytes`` counts
  these bytes, and ``_announce`` requests them; see `read_ahead_of`, `range_bytes` and `announce`.
- ``_record_names`` returns the names of several records; see `names_of`.
- ``_check_names`` raises an error if fields must not be read together; see `check_names`.
- ``_record_count`` is the number of records, if it differs from the length of an epoch; see
  `record_count`.
- ``classes`` are the names of the labels; see `core.sources.labels.classes_of`.
- ``_gives_new_arrays`` is True if `Source.read` never reuses memory, and gives equal values each
  time; see `core.sources.reuse` and `core.sources.identity`.
- ``_read_keyed(indices, names, keys)`` is `Source.read` with a key of each record for random maps,
  and with the errors of single records; see `read_records`.
- ``_heads(indices, name, num_bytes)`` returns the first bytes of a field of encoded images or other
  bytes, or None if it can only be read whole; see `sizes_in_heads`.
- ``_version`` is a text that changes whenever a file of the source changes, or None; see
  `version_of`.
- ``_mixture`` is the `Mixture` that determines the order of the records; see `mixture_of`.
- ``_maps`` are the functions of the source's maps, and ``_mapped_fields`` the fields that these
  functions return; see `maps_of` and `mapped_fields`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arguments import call_fault
from ..environment.passing_errors import chain_of, is_environment
from ..formats.field import Field
from ..formats.image_size import HEAD, image_size, look_at_head, path_size
from ..messages import replacements
from ..order.shuffle import Indices, shuffled
from ..order.windows import Groups
from ..random.hashing import Bits
from ..remote.range_cache import Lease
from ..remote.retries import RemoteError
from ..threads.workers import WorkersEnded
from .values import UnfitValueError, check_unmasked

# Maps positions in the stream of all epochs' samples, int64 [samples], to the record of each
# sample, and to the epoch on which its random numbers depend.
Order = Callable[[Indices], tuple[Indices, Indices]]
# A field of some records: a value for each record, or one array [records, ...].
Values = Sequence[Any] | NDArray[Any]

# The class of maps. `core.sources.map` adds it, because imports must not form a cycle.
map_classes: list[Callable[..., Any]] = []


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

    def map(
        self,
        function: Callable[[dict[str, Any]], Mapping[str, Any]],
        *,
        inputs: Sequence[str] | None = None,
        fields: Mapping[str, Field] | None = None,
        stateful: bool | None = None,
    ) -> Source:
        """Returns a source whose records are changed by a Python function.

        The reading threads call the function for each record, before the graph::

            def with_mask(record):                                # class numbers of a palette PNG
                mask = PIL.Image.open(io.BytesIO(record["mask"]))
                return {"mask": np.asarray(mask)[..., np.newaxis]}

            source = sources.Tar("train.tar", {"data": "jpg", "mask": "png"})
            source = source.map(with_mask, inputs=["mask"])

        States contain the name of the function, not its code, and the same identity as without the
        map. Image sizes and headers of the returned fields are read in each epoch.

        Args:
            function: Takes a dict of the fields ``inputs``, and returns a dict of fields, the same
                for every record. Arrays in the dict are read-only; do not change lists and dicts in
                it either. Encoded bytes and the contents of files are uint8 arrays, so that text in
                them needs ``bytes(value)``. Fields of kind ``Field(None)`` are Python objects, such
                as str. Results may be arrays, numbers, lists, bytes (as uint8 arrays) and text
                (which bypasses the graph). If the function raises an error, the record is a bad
                record.
            inputs: The fields that the function takes, and that its result replaces; None: all. The
                other fields remain. A batch that needs no result does not call the function.
            fields: Kinds of the returned fields, to which values are converted. None: the function
                is called with the first record, twice, and with up to seven further records if the
                first has empty lists or is bad.
            stateful: True if the function keeps state, so that iterators can't resume. False if no
                result depends on state that the function keeps, such as a cache. None: dalijax
                checks whether values that the function reaches have changed.

        Raises:
            TypeError: If ``function`` can't be called, or ``fields`` has other values than `Field`.
            ValueError: If the function does not return a dict, or returns other values in the
                second call, or a field of the source that is not in ``inputs``; if ``inputs`` has
                an unknown name, or none of the first records is good. In a batch, whatever
                ``on_error`` is: if it returns None or other fields.
        """
        mapped: Source = map_classes[0](
            self, function, inputs=inputs, fields=fields, stateful=stateful
        )
        return mapped

    def random_map(
        self,
        function: Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]],
        *,
        inputs: Sequence[str] | None = None,
        fields: Mapping[str, Field] | None = None,
        stateful: bool | None = None,
    ) -> Source:
        """Returns a source whose records are changed by a function that takes random numbers.

        As `map`, but the function is called with a generator, too::

            def one_caption(record, rng):
                return {"caption": record["caption"][rng.integers(5)]}

            source = source.random_map(one_caption, inputs=["caption"])

        The generator is ``np.random.Generator(np.random.Philox(...))``. Its numbers depend only on
        the seed, the epoch, the record and the number of random maps before this one. A state
        contains NumPy's version (major and minor), because other versions may draw other numbers.
        `read` of the returned source raises a ValueError, since only iterators know the epoch.

        Args:
            function: Takes a dict, and a generator that is valid during the call.
            inputs: See `map`.
            fields: See `map`.
            stateful: See `map`.

        Raises:
            TypeError, ValueError: See `map`.
        """
        mapped: Source = map_classes[0](
            self, function, inputs=inputs, fields=fields, stateful=stateful, is_random=True
        )
        return mapped

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in ("classes", "order"):  # optional members
                raise AttributeError(name)
            owner = f"{type(self).__name__!r} object"
            raise replacements.no_attribute(owner, name, dir(type(self)), replacements.SOURCE)


class MapFunction(Protocol):
    """The function of a map, as iterators see it; see `core.sources.record_function`.

    Attributes:
        label: The kind and the name of the function, for messages.
        is_random: Whether the function takes random numbers.
        depth: The number of maps between the data and this map.
        place: The number of random maps between the data and this map.
    """

    label: str
    is_random: bool
    depth: int
    place: int

    def line(self, part: str) -> str:
        """Returns the line of the function in a state, given the part of its mixture."""
        ...

    def kept_state(self) -> str:
        """Returns a description of the state that the function keeps between calls; or ""."""
        ...


class SourceFault(ValueError):
    """A fault of a source, or of the function of a map, and not of a record."""


def is_of_record(error: Exception) -> bool:
    """Returns whether an error of ``read`` is the fault of a record, not of a machine or a server.

    An error of a remote file that is missing, changed or denied is not the fault of a record, since
    it concerns all records of the file. Replacing the records would train on other data.
    """
    faults = (RemoteError, SourceFault, WorkersEnded)
    if any(isinstance(cause, faults) for cause in chain_of(error)):
        return False
    return not is_environment(error)


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


def checked_columns(
    source: Source, count: int, names: Sequence[str], columns: Any
) -> dict[str, Values]:
    """Checks the result of a source's ``read``; returns its columns of the requested fields.

    Raises:
        TypeError, ValueError: If the source has a bug; these are not errors of a record.
    """

    def call() -> str:
        return f"{type(source).__name__}.read() of {count} records and the fields {list(names)}"

    if not isinstance(columns, Mapping):
        raise TypeError(f"{call()} must return a dict of them, not {type(columns).__name__}")
    if missing := [name for name in names if name not in columns]:
        raise ValueError(f"{call()} returned {sorted(map(str, columns))}, without {missing}")
    for name in names:
        has = len(columns[name]) if hasattr(columns[name], "__len__") else columns[name]
        if not isinstance(has, int) or has != count:
            raise ValueError(
                f"{call()} returned {has} values of {name!r}: return one for each record"
            )
    lists = {name: _as_list(columns[name]) for name in names}
    for name, column in lists.items():
        try:
            check_unmasked([column] if isinstance(column, np.ndarray) else column)
        except UnfitValueError as error:
            raise ValueError(f"{call()} returned {name!r}, but {error}") from None
    return lists


def _as_list(values: Values) -> Values:
    """Converts an array of objects to a list; returns other values unchanged."""
    is_of_objects = isinstance(values, np.ndarray) and values.dtype == object
    return list(values) if is_of_objects else values


def read_records(
    source: Source, indices: Indices, names: Sequence[str], keys: Bits | None
) -> tuple[Any, dict[int, Exception]]:
    """Reads records with the numbers that random maps need.

    Args:
        source: The source.
        indices: Indices of records.
        names: Names of the fields.
        keys: The hash of the seed, the epoch and the number of each record, uint64 [records]; None
            if the source has no random maps.

    Returns:
        The result of `Source.read`, and the errors of records that functions of maps can't process,
        by row. The values of these records are None.
    """
    read = getattr(source, "_read_keyed", None)
    if read is None:
        return source.read(indices, names), {}
    columns, errors = read(indices, names, keys)
    return columns, errors


def maps_of(source: Any) -> Sequence[tuple[str, MapFunction]]:
    """Returns the functions of a source's maps, with the part of the mixture that contains each."""
    maps: Sequence[tuple[str, MapFunction]] = getattr(source, "_maps", ())
    return maps


def mapped_fields(source: Any) -> frozenset[str]:
    """Returns the fields that the functions of a source's maps return.

    Their values may differ between two reads of a record, so that nothing about them is cached.
    """
    fields: frozenset[str] = getattr(source, "_mapped_fields", frozenset())
    return fields


def image_sizes(data: Values, are_paths: bool) -> NDArray[np.int32]:
    """Returns heights and widths of encoded images, or of image files; see `Source.sizes`."""
    size_of = path_size if are_paths else image_size
    sizes = [size_of(value) or (-1, -1) for value in data]
    return np.array(sizes, np.int32).reshape(-1, 2)


def version_of(source: Any) -> str | None:
    """Returns a text that changes whenever a file of a source changes.

    Returns None if the source may not notice a change, e.g. because it reads objects in memory.
    `Source.identity` may remain equal if a file changes, since it depends on few records.
    """
    version: str | None = getattr(source, "_version", None)
    return version


def heads_of(source: Any, indices: Indices, name: str, num_bytes: int) -> Sequence[Any] | None:
    """Returns the first bytes of a field of some records; None if the source reads values whole.

    Args:
        source: The source.
        indices: Indices of records.
        name: The name of the field.
        num_bytes: The number of bytes of each value to read; smaller values are read whole.

    Returns:
        Objects with the buffer protocol, one for each record.

    Raises:
        OSError, ValueError: As `Source.read`.
    """
    read = getattr(source, "_heads", None)
    if read is None or name in mapped_fields(source):
        return None
    heads: Sequence[Any] | None = read(indices, name, num_bytes)
    return heads


def sizes_in_heads(source: Any, indices: Indices, name: str) -> NDArray[np.int32]:
    """Returns heights and widths of encoded images, read from their first bytes.

    Args:
        source: The source.
        indices: Indices of records.
        name: The name of the field.

    Returns:
        int32 [records, 2], as `Source.sizes`; 0 for images that must be read whole.

    Raises:
        OSError, ValueError: As `Source.read`.
    """
    sizes = np.zeros((len(indices), 2), np.int32)
    heads = heads_of(source, indices, name, HEAD)
    for row, head in enumerate(() if heads is None else heads):
        if (look := look_at_head(head)) is not None:
            sizes[row] = look.size or (-1, -1)
    return sizes


def epoch_order(count: int, seed: int, shuffle: bool, groups: Groups | None = None) -> Order:
    """Returns the order of a source's successive epochs, as a function; see `Order`.

    Args:
        count: The number of records.
        seed: The seed.
        shuffle: Whether each epoch has its own order; otherwise all are sequential.
        groups: Groups of records, which are shuffled in windows; None: all records are shuffled.
    """
    in_windows = None if groups is None else groups.order(seed)

    def order(samples: Indices) -> tuple[Indices, Indices]:
        epochs, positions = np.divmod(samples, count)
        if not shuffle:
            return positions, epochs
        records = np.empty_like(positions)
        for epoch in np.unique(epochs):  # a batch spans one epoch or a few
            chosen = epochs == epoch
            if in_windows is None:
                records[chosen] = shuffled(positions[chosen], count, seed, int(epoch))
            else:
                records[chosen] = in_windows(positions[chosen], int(epoch))
        return records, epochs

    return order


def order_of(source: Any, seed: int, shuffle: bool) -> Order:
    """Returns ``source.order(seed, shuffle)`` if the source has this method, else `epoch_order`."""
    make_order = getattr(source, "order", None)
    if make_order is None:
        return epoch_order(len(source), seed, shuffle, groups_of(source))
    order: Order = make_order(seed, shuffle)
    return order


def groups_of(source: Any) -> Groups | None:
    """Returns the groups of records that a source reads as a whole; None without groups."""
    groups: Groups | None = getattr(source, "_groups", None)
    return groups


def record_count(source: Any) -> int:
    """Returns the number of records; in a mixture, ``len`` is the length of an epoch instead."""
    return int(getattr(source, "_record_count", len(source)))


def mixture_of(source: Any) -> Any:
    """Returns the `Mixture` that a source is or wraps, or None."""
    return getattr(source, "_mixture", None)


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
