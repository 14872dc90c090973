"""tf.data without a checkpoint: a new dataset skips the records that the run has taken.

`tf.data.Dataset.skip` is the usual form if the trainer saves only its step. The seed makes the
order repeatable: https://www.tensorflow.org/api_docs/python/tf/data/Dataset#shuffle. The records
are skipped before ``map``, so that they are read and shuffled, but not augmented.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loaders.protocol import Batch, Config, Loader, own
from loaders.tfdata_checkpoint import dataset, rows, write_tfrecords


class Adapter(Loader):
    """A dataset with ``skip``; the state is the number of records that all processes have taken."""

    title = "tf.data, skip"
    packages = ("tensorflow-cpu",)
    stream = True
    augmentation = "`stateless_uniform` of a counter"

    write = staticmethod(write_tfrecords)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._taken = 0

    def batches(self, epoch: int) -> Iterator[Batch]:
        for batch in dataset(self._config, self._taken):
            self._taken += self._config.batch
            yield rows(batch)

    def state(self) -> bytes:
        return str(self._taken).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._taken = int(own(states, self._config))
