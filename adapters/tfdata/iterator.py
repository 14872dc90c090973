"""`DatasetIterator`: iterates over a `DALIDataset`; `Array`: the arrays of its elements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ..stream_adapter import StreamAdapter
from .stepped_stream import ChainedStream

try:
    import tensorflow as tf
except ImportError:
    tf = None

__all__ = ["Array", "DatasetIterator", "plain", "scalar", "tf"]  # only for this package


class Array(np.ndarray):
    """A NumPy array with the methods of tf.Tensor that loops over tf.data call.

    Indexing returns an array without dimensions instead of a NumPy scalar.
    """

    def numpy(self) -> Any:
        """Returns a numpy.ndarray that views the same data; a NumPy scalar if there are no axes."""
        return self.view(np.ndarray)[()]

    _numpy = numpy

    def __getitem__(self, key: Any) -> Any:
        item = super().__getitem__(key)
        return np.asarray(item).view(Array) if isinstance(item, np.generic) else item

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[number] for number in range(len(self)))


def scalar(number: int) -> Array:
    """Returns a number as an int64 `Array` without dimensions."""
    return np.array(number, np.int64).view(Array)


def plain(element: Any) -> Any:
    """Returns an element whose arrays are converted from `Array` to plain NumPy arrays."""
    return jax.tree_util.tree_map(lambda leaf: leaf.numpy(), element)


_Base: Any = object if tf is None else tf.train.experimental.PythonState


class DatasetIterator(StreamAdapter, _Base):
    """Iterates over a `DALIDataset`; ``tf.train.Checkpoint(data=iterator)`` can save it.

    States and steps count the elements of the dataset.

    Args:
        stream: The stream of elements, at its start. The iterator owns the stream.
        element_spec: Function that returns the specs of an element.
    """

    _stream: ChainedStream

    def __init__(self, stream: ChainedStream, element_spec: Callable[[], Any]):
        self._stream = stream
        self._element_spec = element_spec

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """Returns the next element.

        Raises:
            StopIteration: After the last element, at each call.
            Exception: Any error of ``next()`` of `dalijax.DALIGenericIterator`.
        """
        batch, numbers = next(self._stream)
        element: Any = {name: np.asarray(array).view(Array) for name, array in batch.items()}
        for number in reversed(numbers):
            element = (scalar(number), element)
        return element

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            tf.errors.OutOfRangeError: After the last element; StopIteration without TensorFlow.
        """
        try:
            return next(self)
        except StopIteration:
            if tf is None:
                raise
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    @property
    def element_spec(self) -> Any:
        """The structure of an element; see `DALIDataset.element_spec`."""
        return self._element_spec()

    def serialize(self) -> bytes:
        """Returns the state as JSON in bytes, for ``tf.train.Checkpoint``."""
        return json.dumps(self.get_state()).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Restores a state that ``tf.train.Checkpoint`` has read; see `serialize`."""
        self.set_state(string_value)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Copies the state to a `_Snapshot` in ``object_map``, for an asynchronous checkpoint.

        TensorFlow writes the checkpoint later, in another thread. From the second checkpoint on,
        TensorFlow traces this function, which requires a py_function.
        """
        if self not in object_map:
            object_map[self] = _Snapshot()
        snapshot = object_map[self]

        def take() -> None:
            snapshot.text = self.serialize()

        if tf.executing_eagerly():
            take()
        else:
            tf.py_function(take, [], [])


class _Snapshot(_Base):
    """The state of an iterator when an asynchronous checkpoint was requested."""

    text = b""

    def serialize(self) -> bytes:
        return self.text

    def deserialize(self, string_value: bytes) -> None:
        self.text = string_value
