"""CLU: a DALI pipeline as a ``clu.data.dataset_iterator.DatasetIterator``.

    from dalijax.adapters.clu import DALIDatasetIterator, ReportInput

`DALIGenericPeekableIterator` and `peekable_data_iterator` are for code that was written for DALI's
iterators of these names. `DALIDatasetIterator` needs no TensorFlow. `ReportInput` is loaded when
it is first asked for, since clu's periodic actions import TensorFlow.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..core.arguments import knows_its_names
from ..core.environment.extras import extra
from ..core.errors import StateError
from ..core.iterator.data_iterator import IteratorFunction, data_iterator, iterator_function
from ..core.iterator.epoch_stream import BatchStream
from ..core.iterator.iterator import DALIGenericIterator
from ..core.stats import InputStats

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


def __getattr__(name: str) -> Any:
    if name == "ReportInput":
        from .clu_report import ReportInput

        return ReportInput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DALIDatasetIterator(dataset_iterator.DatasetIterator):
    """The batches of an iterator function, for loops that are written for CLU.

    A save is the position of the last batch that ``next()`` delivered, whatever was peeked; so
    it needs no PeekableDatasetIterator, which loses the peeked batch. With ``num_epochs`` it has
    a length; without, it has none.

    Args:
        iterator_fn: What `dalijax.data_iterator` returned.
        num_epochs: Number of epochs; None for no end.
        element: "numpy": batches are NumPy arrays, of GPU pipelines copied to the host; "jax":
            jax.Arrays where the pipelines, or a sharding, put them.
        checkpoint: False: `save` and `restore` do nothing, as in clu's TfDatasetIterator.
        **call: Arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`: batch_size, mask, sharding, ...

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> DALIDatasetIterator:
        """A finite one is of a class with a length."""
        finite = cls is DALIDatasetIterator and kwargs.get("num_epochs") is not None
        iterator: DALIDatasetIterator = super().__new__(_FiniteDatasetIterator if finite else cls)
        return iterator

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        *,
        num_epochs: int | None = None,
        element: str = "numpy",
        checkpoint: bool = True,
        **call: Any,
    ):
        if element not in ("numpy", "jax"):
            raise ValueError(f"element must be 'numpy' or 'jax', not {element!r}")
        self._stream = _stream(iterator_function(iterator_fn), num_epochs, element == "numpy", call)
        self._numpy = element == "numpy"
        self._checkpoint = checkpoint
        self._future: concurrent.futures.Future[Any] | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._future_lock = threading.Lock()

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> dict[str, Any]:
        """The next batch.

        Raises:
            StopIteration: After the last epoch, on each call until `reset`.
            Exception: What the core's ``next()`` raises.
        """
        self._forget_future()
        return self._delivered(next(self._stream))

    def get_next(self) -> dict[str, Any]:
        """The next batch; deprecated by CLU."""
        return next(self)

    def peek(self) -> dict[str, Any]:
        """The batch that ``next()`` will deliver, which stays the next one."""
        return self._delivered(self._stream.peek())

    def peek_async(self) -> concurrent.futures.Future[Any]:
        """`peek` in a thread; the same future until a batch is taken, or the position changes."""
        with self._future_lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(1, "dalijax-peek")
            if self._future is None:
                self._future = self._pool.submit(self.peek)
            return self._future

    def _forget_future(self) -> None:
        with self._future_lock:
            self._future = None

    def _delivered(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self._numpy:
            return batch
        return {name: np.asarray(array) for name, array in batch.items()}

    def reset(self) -> None:
        """Goes back to the start of the first epoch, at any time."""
        self._forget_future()
        self._stream.reset()

    @property
    def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
        """Dtype and shape of each array of a whole batch; nothing is taken by it."""
        return {
            name: dataset_iterator.ArraySpec(dtype=spec.dtype, shape=tuple(spec.shape))
            for name, spec in self._stream.element_spec.items()
        }

    def save(self, filename: epath.PathLike) -> None:
        """Writes the position of this process's iterator to exactly this file, or not at all.

        Args:
            filename: A local or remote path; a file that is there is replaced.

        Raises:
            ValueError: If the pipelines can't be resumed: the message says why.
        """
        if not self._checkpoint:
            return
        text = json.dumps(self._stream.get_state())
        path = epath.Path(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + f".{jax.process_index()}.new")
        new.write_text(text)
        new.replace(path)

    def restore(self, filename: epath.PathLike) -> None:
        """Goes on where a file says.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no state, or one of other data; nothing has changed.
        """
        if not self._checkpoint:
            return
        text = epath.Path(filename).read_bytes()
        try:
            self.set_state(text)
        except StateError as error:
            raise StateError(f"{filename}: {error}") from None

    def load(self, filename: epath.PathLike) -> None:
        """`restore`; deprecated by CLU."""
        self.restore(filename)

    def get_state(self) -> dict[str, Any]:
        """Where the consumer stands, as a JSON value."""
        return self._stream.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Goes on where a state says.

        Raises:
            ValueError: If it is no state, or one of other data; nothing has changed.
        """
        self._stream.set_state(state)
        self._forget_future()

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; see `ReportInput`."""
        return self._stream.watch()

    @property
    def core(self) -> DALIGenericIterator:
        """The core's iterator that the batches come from, as `dalijax.profile` wants it."""
        return self._stream.iterator

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs; waits for none."""
        self._stream.start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        if self._pool is not None:
            self._pool.shutdown()
        self._stream.close()

    def __repr__(self) -> str:
        epochs = self._stream.num_epochs
        return f"DALIDatasetIterator(num_epochs={epochs})"


class _FiniteDatasetIterator(DALIDatasetIterator):
    """One that ends, and so has a length."""

    def __len__(self) -> int:
        """Number of batches of all epochs."""
        return len(self._stream)


class DALIGenericPeekableIterator(DALIGenericIterator):
    """`dalijax.DALIGenericIterator` as DALI's iterator of this name, with its arguments.

    `peek` changes nothing that is saved: states and checkpoints are of the last batch that
    ``next()`` delivered. ``element_spec`` is of CLU's ArraySpec.

    Raises:
        ValueError: From ``next()`` and `peek`, where a batch has other shapes or dtypes than the
            first one; to ``next()`` it counts as delivered.
    """

    _pool: concurrent.futures.ThreadPoolExecutor | None = None
    _first: dict[str, dataset_iterator.ArraySpec] | None = None

    def __next__(self) -> dict[str, Any]:
        return self._alike(super().__next__())

    next = __next__

    def peek(self) -> dict[str, Any]:
        """The batch that ``next()`` will deliver, which stays the next one."""
        return self._alike(super().peek())

    def peek_async(self) -> concurrent.futures.Future[Any]:
        """`peek` in a thread."""
        with self._engine.lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(1, "dalijax-peek")
            return self._pool.submit(self.peek)

    @property
    def element_spec(self) -> Any:
        """Dtype and shape of each array of a batch; nothing is taken by it."""
        return {
            name: dataset_iterator.ArraySpec(dtype=spec.dtype, shape=tuple(spec.shape))
            for name, spec in super().element_spec.items()
        }

    def _alike(self, batch: dict[str, Any]) -> dict[str, Any]:
        specs = {
            name: dataset_iterator.ArraySpec(dtype=array.dtype, shape=tuple(array.shape))
            for name, array in batch.items()
        }
        self._first = first = self._first or specs
        for name, spec in specs.items():
            if spec != first[name]:
                raise ValueError(
                    f"output {name!r} is {spec}, and was {first[name]} in the first batch: a "
                    "peekable iterator has one shape and dtype for each. Resize or pad it in the "
                    "graph, or use dalijax.data_iterator"
                )
        return batch

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)  # who peeks finds the iterator closed
        super().close()


class _PeekableFunction(IteratorFunction):
    _iterator = DALIGenericPeekableIterator


def _with_its_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function that passes all on to `dalijax.data_iterator` its signature."""
    vars(function)["__signature__"] = inspect.signature(data_iterator)
    return function


@knows_its_names
@_with_its_arguments
def peekable_data_iterator(
    pipeline_fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """`dalijax.data_iterator` under DALI's other name: it makes peekable iterators.

    Works as a decorator, with arguments, and as a plain call.

    Args:
        pipeline_fn: The function of the graph.
        *args: The further arguments of `dalijax.data_iterator`.
        **kwargs: The same by keyword.

    Returns:
        A function that makes a `DALIGenericPeekableIterator`, or a decorator that makes one where
        ``pipeline_fn`` is None.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
    """
    if pipeline_fn is None:
        return lambda function: peekable_data_iterator(function, *args, **kwargs)
    plain = data_iterator(pipeline_fn, *args, **kwargs)
    return _PeekableFunction(plain.pipeline_fn, plain.config)


def _stream(
    iterator_fn: IteratorFunction, num_epochs: int | None, numpy: bool, call: dict[str, Any]
) -> BatchStream:
    """The batches; an iterator function may say auto_reset where there is no end anyway."""
    if num_epochs is not None:
        iterator_fn = iterator_fn.adapted("DALIDatasetIterator", auto_reset=False)
    return (iterator_fn.for_host(call) if numpy else iterator_fn).stream(num_epochs, **call)
