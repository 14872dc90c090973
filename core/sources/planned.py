"""`PlannedSource`: the base class of sources that decide which records form a batch."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..order.samples import SamplePlan
from ..order.shuffle import Indices
from ..state.envelope import digest
from .mixture_state import MixtureState
from .source import mixture_of, order_of
from .wrapper import Wrapper


class PlannedSource(Wrapper):
    """The records of another source, in batches that depend on all records, such as on their sizes.

    Other sources can't wrap it, because its batches are planned for its own records.

    Attributes:
        num_shapes: The number of shapes that the images of batches have.
    """

    num_shapes: int = 1
    _is_planned = True

    @abc.abstractmethod
    def plan(
        self, seed: int, shuffle: bool, batch_size: int, policy: LastBatchPolicy, padded: bool
    ) -> SamplePlan:
        """Returns the plan of the batches.

        Args:
            seed, shuffle: They determine the order of the records.
            batch_size: The size of a global batch.
            policy: The policy for incomplete batches.
            padded: Whether incomplete batches may repeat samples; see `SamplePlan`.

        Raises:
            ValueError: If no epoch has a batch, or the source does not support the policy.
        """

    def _records_of_epoch(self, seed: int, shuffle: bool, epoch: int) -> Indices:
        """Returns the record at each position of an epoch."""
        count = len(self._source)
        samples = epoch * count + np.arange(count, dtype=np.int64)
        records, _ = order_of(self._source, seed, shuffle)(samples)
        return records

    def _digest_of(self, *arrays: NDArray[Any]) -> str:
        """Returns a digest of values of all records, or of those in the identity of a mixture.

        Args:
            *arrays: Values of each record, on which the plan depends.
        """
        mixture = mixture_of(self._source)
        count = None if mixture is None else mixture._num_identified
        if mixture is not None:
            bounds = mixture._starts[1:-1]
            self._of_sources = [
                digest(*(part.tobytes() for part in parts))
                for parts in zip(*(np.split(array, bounds) for array in arrays))
            ]
        return digest(*(array[:count].tobytes() for array in arrays))

    def mixture_state(self, state: MixtureState) -> MixtureState:
        """Returns the state of the mixture, with the values that the plan of each source needs.

        Args:
            state: The state of the mixture that this source wraps.
        """
        pairs = zip(state.sources, self._of_sources, strict=True)
        sources = [(size, digest(old.encode(), of.encode())) for (size, old), of in pairs]
        return dataclasses.replace(state, sources=tuple(sources))
