"""CLU: iterators over DALI pipelines with the interface of CLU's DatasetIterator.

    from dalijax.adapters.clu import DALIDatasetIterator, ReportInput

`DALIGenericPeekableIterator` and `peekable_data_iterator` replace the class and the function of the
same names in DALI's plugin.
`DALIDatasetIterator` does not need TensorFlow. `ReportInput` is imported on first use, because
clu's periodic actions import TensorFlow.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..core.api import IteratorFunction, data_iterator, iterator_function
from ..core.arguments import knows_its_names, refuse_positional
from ..core.environment.extras import extra
from ..core.errors import StateError
from ..core.iterator.batch_stream import BatchStream
from ..core.iterator.iterator import DALIGenericIterator
from ..core.messages import replacements
from ..core.threads.workers import Workers
from .process_files import write_text_atomically
from .stream_adapter import StreamAdapter

with extra("clu", "dalijax.adapters.clu"):
    from clu.data import dataset_iterator
    from etils import epath

if TYPE_CHECKING:
    from .clu_report import ReportInput as ReportInput

__all__ = [
    "DALIDatasetIterator",
    "DALIGenericPeekableIterator",
    "ReportInput",
    "peekable_data_iterator",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        if name == "ReportInput":
            from .clu_report import ReportInput

            return ReportInput
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Methods that replace methods of other libraries.
_REPLACEMENTS = {
    **replacements.ITERATOR,
    **dict.fromkeys(("statedict", "savestate", "checkpoint"), "save(file)"),
    **dict.fromkeys(("loadstatedict", "loadstate"), "restore(file)"),
    "repeat": "nothing: without num_epochs=, the iterator has no end",
}


def _specs(arrays: Mapping[str, Any]) -> dict[str, dataset_iterator.ArraySpec]:
    return {
        name: dataset_iterator.ArraySpec(dtype=array.dtype, shape=tuple(array.shape))
        for name, array in arrays.items()
    }


def _path_of(filename: epath.PathLike) -> epath.Path:
    """Returns the path of a file; rejects the objects that ``orbax.checkpoint.v1`` passes."""
    try:
        return epath.Path(filename)
    except TypeError:
        raise TypeError(
            f"save() and restore() require the path of a file, not {type(filename).__name__}. With "
            "orbax.checkpoint.v1, save get_state(), and pass what it loads to set_state()"
        ) from None


class DALIDatasetIterator(StreamAdapter, dataset_iterator.DatasetIterator):
    """Iterates over the batches of an iterator function, in CLU's training loops.

    `save` writes the position after the last batch that ``next()`` returned; peeked batches don't
    count. Don't wrap the iterator in CLU's PeekableDatasetIterator, which would lose the peeked
    batch on restore. ``len()`` works only with ``num_epochs``.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`.
        num_epochs: Number of epochs; None: no end.
        element: "numpy" for NumPy arrays (outputs of GPU pipelines are copied to the host), "jax"
            for jax.Arrays on the pipelines' devices or over the sharding.
        checkpoint: Whether `save` and `restore` have an effect, as in clu's TfDatasetIterator.
        **call: Arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`: batch_size, mask, sharding, ...

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
    """

    _stream: BatchStream

    def __new__(cls, *args: Any, **kwargs: Any) -> DALIDatasetIterator:
        """Returns a new instance; with ``num_epochs``, of a subclass that has a length."""
        finite = cls is DALIDatasetIterator and kwargs.get("num_epochs") is not None
        iterator: DALIDatasetIterator = super().__new__(_FiniteDatasetIterator if finite else cls)
        return iterator

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        *args: NoReturn,
        num_epochs: int | None = None,
        element: str = "numpy",
        checkpoint: bool = True,
        **call: Any,
    ):
        refuse_positional("DALIDatasetIterator", args)
        if element not in ("numpy", "jax"):
            raise ValueError(f"element must be 'numpy' or 'jax', not {element!r}")
        self._numpy = element == "numpy"
        iterator_fn = iterator_function(iterator_fn)
        iterator_fn._check_names(DALIDatasetIterator, call)
        if num_epochs is not None:  # without an end, auto_reset changes nothing
            iterator_fn = iterator_fn._adapted("DALIDatasetIterator", auto_reset=False)
        if self._numpy:
            iterator_fn = iterator_fn._for_host(call)
        self._stream = iterator_fn.stream(num_epochs, **call)
        if self._numpy and self._stream._config.over_processes:
            raise ValueError(
                "element='numpy' with a sharding over several processes: a process can't copy the "
                "rows of the others. Pass element='jax'"
            )
        self._checkpoint = checkpoint
        self._future: concurrent.futures.Future[Any] | None = None
        self._workers: Workers | None = None
        self._future_lock = threading.Lock()

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            owner = f"{type(self).__name__!r} object"
            raise replacements.no_attribute(owner, name, dir(type(self)), _REPLACEMENTS)

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> dict[str, Any]:
        """Returns the next batch.

        Raises:
            StopIteration: After the last epoch, at each call until `reset`.
            Exception: Any error of ``next()`` of `dalijax.DALIGenericIterator`.
        """
        self._forget_future()
        return self._delivered(next(self._stream))

    def get_next(self) -> dict[str, Any]:
        """Returns the next batch; deprecated by CLU."""
        return next(self)

    def peek(self) -> dict[str, Any]:
        """Returns the batch that the following ``next()`` will return."""
        return self._delivered(self._stream.peek())

    def peek_async(self) -> concurrent.futures.Future[Any]:
        """Calls `peek` in a thread, and returns a future of the batch.

        Further calls return the same future until the position changes.
        """
        with self._future_lock:
            if self._workers is None:
                self._workers = Workers(1, "dalijax-peek")
            if self._future is None:
                self._future = self._workers.future(self.peek)
            return self._future

    def _forget_future(self) -> None:
        with self._future_lock:
            self._future = None

    def _delivered(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self._numpy:
            return batch
        return {name: np.asarray(array) for name, array in batch.items()}

    def reset(self) -> None:
        """Moves back to the start of the first epoch."""
        with self._moving():
            self._stream.reset()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        self._forget_future()  # before moving, in case the call is interrupted
        yield
        self._forget_future()

    @property
    def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
        """CLU's ArraySpec (dtype and shape) of each array of a full batch, by name.

        Produces at most one batch, which the following ``next()`` delivers.
        """
        return _specs(self._stream.element_spec)

    def save(self, filename: epath.PathLike) -> None:
        """Writes the position of this process's iterator to a file, atomically.

        Args:
            filename: A local or remote path, used as is. An existing file is replaced; a link is
                not followed.

        Raises:
            TypeError: If ``filename`` is not a path, as in calls of ``orbax.checkpoint.v1``.
            ValueError: If the state of the pipelines can't be saved.
        """
        path = _path_of(filename)
        if not path.name or path.is_dir():
            raise ValueError(f"{str(filename)!r} is a directory. Pass the path of a file in it")
        if not self._checkpoint:
            return
        write_text_atomically(path, json.dumps(self._stream.get_state()))

    def restore(self, filename: epath.PathLike) -> None:
        """Restores the position from a file.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file does not contain a state, or a state of different data; the
                position is unchanged.
        """
        if not self._checkpoint:
            return
        text = _path_of(filename).read_bytes()
        try:
            self.set_state(text)
        except StateError as error:
            raise StateError(f"{filename}: {error}") from None

    def load(self, filename: epath.PathLike) -> None:
        """Restores the position from a file; deprecated by CLU."""
        self.restore(filename)

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        super().close()
        if self._workers is not None:
            self._workers.end(drop=False)  # a pending peek then reports that the iterator is closed

    def __repr__(self) -> str:
        return f"DALIDatasetIterator(num_epochs={self._stream._num_epochs})"


class _FiniteDatasetIterator(DALIDatasetIterator):
    """A `DALIDatasetIterator` over a finite number of epochs, which has a length."""

    def __len__(self) -> int:
        """Returns the number of batches of all epochs."""
        return len(self._stream)


class DALIGenericPeekableIterator(DALIGenericIterator):
    """Replaces DALI's iterator of this name; arguments as for `dalijax.DALIGenericIterator`.

    States and checkpoints describe the position after the last batch that ``next()`` returned;
    peeked batches don't count. ``element_spec`` contains CLU's ArraySpecs.

    Raises:
        ValueError: From ``next()`` and `peek`, if a batch differs in shapes or dtypes from the
            first batch. If ``next()`` raises, the batch counts as delivered.
    """

    _workers: Workers | None = None
    _first_specs: dict[str, dataset_iterator.ArraySpec] | None = None

    def __next__(self) -> dict[str, Any]:
        return self._checked(super().__next__())

    next = __next__

    def peek(self) -> dict[str, Any]:
        """Returns the batch that the following ``next()`` will return."""
        return self._checked(super().peek())

    def peek_async(self) -> concurrent.futures.Future[Any]:
        """Calls `peek` in a thread, and returns a future of the batch."""
        with self._engine.lock:
            if self._workers is None:
                self._workers = Workers(1, "dalijax-peek")
            return self._workers.future(self.peek)

    @property
    def element_spec(self) -> Any:
        """CLU's ArraySpec (dtype and shape) of each array of a batch, by name.

        Produces at most one batch, which the following ``next()`` delivers.
        """
        return _specs(super().element_spec)

    def _checked(self, batch: dict[str, Any]) -> dict[str, Any]:
        specs = _specs(batch)
        self._first_specs = first = self._first_specs or specs
        for name, spec in specs.items():
            if spec != first[name]:
                raise ValueError(
                    f"output {name!r} is {spec}, but was {first[name]} in the first batch. A "
                    "peekable iterator needs constant shapes and dtypes. Resize or pad the output "
                    "in the graph, or use dalijax.data_iterator"
                )
        return batch

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        super().close()
        if self._workers is not None:
            self._workers.end(drop=False)  # a pending peek then reports that the iterator is closed


class _PeekableFunction(IteratorFunction):
    _iterator = DALIGenericPeekableIterator


def _with_its_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function after setting its signature to that of `dalijax.data_iterator`."""
    vars(function)["__signature__"] = inspect.signature(data_iterator)
    return function


@knows_its_names
@_with_its_arguments
def peekable_data_iterator(
    pipeline_fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Returns iterator functions for peekable iterators; see `dalijax.data_iterator`.

    Works as a decorator with arguments and as a plain call.

    Args:
        pipeline_fn: The graph function.
        *args: Further arguments of `dalijax.data_iterator`.
        **kwargs: Keyword arguments of `dalijax.data_iterator`.

    Returns:
        A function that returns a `DALIGenericPeekableIterator`; if ``pipeline_fn`` is None, a
        decorator that returns such a function.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
    """
    if pipeline_fn is None:
        return lambda function: peekable_data_iterator(function, *args, **kwargs)
    plain = data_iterator(pipeline_fn, *args, **kwargs)
    return _PeekableFunction(plain.pipeline_fn, plain._config)
