"""`StreamFactory`: the iterator function and pipelines that derived datasets share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.api import IteratorFunction
from ...core.config import EpochRules, IteratorConfig
from ...core.pipeline.engine import MakeEngine
from ...core.pipeline.pipeline_factory import GraphPipelineFactory
from .iterator import tf
from .passes import PassCounter, PassStream
from .stepped_stream import stream_length
from .steps import Enumerate, Step, length

__all__: list[str] = []


class StreamFactory:
    """Creates the streams of an iterator function's batches, and tells their length and specs.

    If the length or the specs require pipelines, the next iterator uses the same pipelines.

    Args:
        iterator_fn: The iterator function.
        call: Arguments of the iterator function.
        reshuffles: Whether each pass starts with the next epoch, or repeats the first epoch.

    Attributes:
        config: Arguments of the underlying iterators.
    """

    def __init__(
        self, iterator_fn: IteratorFunction, call: Mapping[str, Any], reshuffles: bool = True
    ):
        self.iterator_fn = iterator_fn
        self.call = dict(call)
        self.config = self.prepared()[1]
        self.reshuffles = reshuffles
        self._passes = PassCounter(reshuffles)
        self._spare: dict[int | None, PassStream] = {}
        # Weak references, because iterators own their streams.
        self._lent: weakref.WeakValueDictionary[int | None, PassStream] = (
            weakref.WeakValueDictionary()
        )
        self._spec: dict[str, jax.ShapeDtypeStruct] | None = None

    def __reduce__(self) -> Any:
        return StreamFactory, (
            self.iterator_fn,
            self.call,
            self.reshuffles,
        )  # pipelines aren't pickled

    def prepared(self) -> tuple[GraphPipelineFactory | MakeEngine, IteratorConfig]:
        """Returns the factory of the pipelines, and the iterator's arguments."""
        return self.iterator_fn._prepared((), dict(self.call))

    def stream(self, epochs: int | None) -> PassStream:
        """Returns a stream at the start of the next pass; the caller owns the stream.

        Args:
            epochs: Number of epochs of the pass; None for an endless pass.
        """
        stream = self._spare.pop(epochs, None) or self._new_stream(epochs)
        stream.begin_next()
        self._lent[epochs] = stream
        return stream

    def _new_stream(self, epochs: int | None) -> PassStream:
        iterator_fn = self.iterator_fn
        if self.config.last_batch_policy is not LastBatchPolicy.FILL:
            epoch_rules = EpochRules(epochs, per_shard=True)
            iterator_fn = iterator_fn._adapted("DALIDataset", epoch_rules=epoch_rules)
        return PassStream(iterator_fn._for_host(self.call), self.call, epochs, self._passes)

    def current(self, epochs: int | None) -> PassStream:
        """Returns a stream to ask for its length and specs, at any position.

        This is the stream of the last iterator with this number of epochs, if it is still open, or
        else a stream for the next iterator.
        """
        lent = self._lent.get(epochs)
        if lent is not None and not lent.closed:
            return lent
        if epochs not in self._spare:
            self._spare[epochs] = self._new_stream(epochs)
        return self._spare[epochs]

    def cardinality(self, epochs: int | None, chain: Sequence[Step]) -> int:
        """Returns the number of elements after a chain of steps, or INFINITE or UNKNOWN."""
        return length(chain, stream_length(self.current(epochs)))

    def spec(self, epochs: int | None, chain: Sequence[Step]) -> Any:
        """Returns the structure of an element after a chain of steps, with a spec for each array.

        Dimension 0 of the specs is None if batches may be smaller than ``batch_size``.
        """
        if self._spec is None:
            self._spec = self.current(epochs).element_spec
        partial = self.config.last_batch_policy is LastBatchPolicy.PARTIAL
        varies = partial or self.current(epochs)._plan is None
        spec: Any = {name: _spec(array, varies) for name, array in self._spec.items()}
        for step in chain:
            if isinstance(step, Enumerate):
                spec = (_spec(jax.ShapeDtypeStruct((), np.int64), False), spec)
        return spec


def _spec(array: jax.ShapeDtypeStruct, varies: bool) -> Any:
    shape = (None, *array.shape[1:]) if varies else array.shape
    if tf is None:
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return tf.TensorSpec(shape, tf.as_dtype(np.dtype(array.dtype)))
