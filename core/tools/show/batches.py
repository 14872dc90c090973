"""Takes batches from iterators, datasets and sources; iterators keep their positions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...api import IteratorFunction
from ...iterator.iterator import DALIGenericIterator
from ...messages.printable import printable_lines, printable_repr, printable_text
from ...messages.replacements import source_call
from ...random.hashing import fold
from ...sources.source import Source, read_records

_MOST_NAMED = 10


@dataclasses.dataclass
class Taken:
    """Batches to show, and failures.

    Attributes:
        batches: Pairs of a title and a batch.
        failures: Descriptions of failures.
        mask: Name of the output that is the mask; None if unknown.
        device_axis: Whether arrays have pmap's layout, [devices, batch, ...].
    """

    batches: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    mask: str | None = None
    device_axis: bool = False

    def take(self, iterator: Any, count: int, take: Callable[[], Any]) -> None:
        """Adds batches up to the end of the epoch to `batches`, and errors to `failures`.

        Args:
            iterator: The iterator, for the titles of the batches; None without an iterator.
            count: Maximum number of batches.
            take: Returns the next batch.
        """
        for number in range(count):
            title = f"Batch {number}"
            if isinstance(iterator, DALIGenericIterator):
                title = f"Epoch {iterator.epoch}, batch {iterator.step}"
            try:
                self.batches.append((title, take()))
            except StopIteration:
                if not number:
                    self.failures.append(
                        "the iterator is at the end of its epoch. Call reset() or iter()"
                    )
                return
            except Exception as error:  # any error of a graph, a function or a file system
                self.failures.append(f"{title}: {described(error)}")

    def inspect(self, iterator: Any) -> None:
        """Sets `mask` and `device_axis` from an iterator; adds its last errors to `failures`."""
        for failed in tuple(getattr(iterator, "errors", ()))[-_MOST_NAMED:]:
            text = str(getattr(failed, "message", failed))
            if hasattr(failed, "step"):
                text = f"epoch {failed.epoch}, batch {failed.step}: {text}"
            self.failures.append(text + _files(failed))
        if isinstance(iterator, DALIGenericIterator):
            config = iterator._config
            self.mask = config.mask
            placed = config.sharding is not None or config.devices is not None
            by_default = config.devices is not None or (not placed and len(iterator._shards) > 1)
            axis = config.pmap_compatible
            self.device_axis = config.sharding is None and (by_default if axis is None else axis)


def described(error: Exception) -> str:
    """Returns the text of an error, with the error's files that the text does not name."""
    return printable_lines(f"{type(error).__name__}: {error}") + _files(error)


def _files(error: Any) -> str:
    unnamed = [
        file for file in getattr(error, "files", ()) if printable_text(str(file)) not in str(error)
    ]
    return "".join(f"\n{printable_text(str(file))}" for file in unnamed)


def take(data: Any, count: int, call: Mapping[str, Any], samples: int) -> Taken:
    """Returns batches to show, and failures. An iterator keeps its position.

    Args:
        data: An iterator function, an iterator, a dataset, a source or a batch.
        count: Maximum number of batches.
        call: Arguments of an iterator function.
        samples: Maximum number of records of a source.

    Raises:
        TypeError: If ``data`` has another type, or an iterator can't return to its position.
        Exception: Any error of calling an iterator function.
    """
    result = Taken()
    if isinstance(data, (str, bytes, os.PathLike)):
        raise TypeError(
            f"{printable_repr(data)} is a path. Show its records by "
            f"show(dalijax.{source_call(data)}), or the batches of a graph by an iterator function "
            "and its arguments"
        )
    if isinstance(data, IteratorFunction):
        with data(**call) as iterator:
            result.take(iterator, count, lambda: next(iterator))
            result.inspect(iterator)
    elif Source in type(data).__mro__:
        indices = np.arange(min(samples, len(data)))
        result.take(None, 1, lambda: _records(data, indices))
        result.batches = [("Records", batch) for _, batch in result.batches]
    elif hasattr(data, "__next__"):
        _from_iterator(result, data, count)
    elif isinstance(data, (Mapping, tuple)) or hasattr(data, "shape"):
        result.batches.append(("Batch", data))
    elif hasattr(data, "__iter__"):
        iterator = iter(data)
        result.take(iterator, count, lambda: next(iterator))
        result.inspect(iterator)
        getattr(iterator, "close", lambda: None)()
    else:
        cure = ". Decorate it with dalijax.data_iterator" if callable(data) else ""
        raise TypeError(
            f"{printable_repr(data)} is not an iterator function, iterator, dataset, source or "
            f"batch{cure}"
        )
    return result


def _from_iterator(result: Taken, iterator: Any, count: int) -> None:
    """Adds batches of an iterator to a result, and returns the iterator to its position."""
    if count == 1 and hasattr(iterator, "peek"):
        result.take(iterator, 1, iterator.peek)
    elif hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        with _uncounted(iterator):
            state = iterator.get_state()
            try:
                result.take(iterator, count, lambda: next(iterator))
            finally:
                iterator.set_state(state)
    else:
        raise TypeError(
            f"showing batches of {printable_repr(iterator)} would move it, because it can't "
            "return to its "
            "position. Pass one of its batches, by show(next(iterator)), or the object that "
            "created it"
        )
    result.inspect(iterator)


@contextlib.contextmanager
def _uncounted(iterator: Any) -> Iterator[None]:
    """Context manager that disables the counters of an iterator during its block."""
    if not isinstance(iterator, DALIGenericIterator):
        yield
        return
    stats, iterator._stats = iterator._stats, None
    try:
        yield
    finally:
        iterator._stats = stats


def _records(source: Source, indices: Any) -> dict[str, Any]:
    """Returns records of a source as a batch, with the contents of files instead of paths."""
    indices = np.asarray(indices, np.int64)
    columns, errors = read_records(source, indices, list(source.fields), fold(0, 0, indices))
    for error in errors.values():
        raise error
    batch: dict[str, Any] = {}
    for name, values in columns.items():
        is_path = source.fields[name].is_path
        batch[name] = [_content(value) for value in values] if is_path else values
        if not isinstance(batch[name], np.ndarray):
            batch[name] = list(batch[name])
    return batch


def _content(path: Any) -> bytes:
    name = path.tobytes().decode() if isinstance(path, np.ndarray) else path
    return Path(name).read_bytes()
