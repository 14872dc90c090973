"""dalijax over a DALI reader, as its pages on getting started and states recommend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import jax

from dalijax import data_iterator
from loaders import dali_plugin
from loaders.dalijax_source import rows, sharding_of
from loaders.protocol import Batch, Config, Loader, own


class Adapter(Loader):
    """An iterator over `fn.readers.file`."""

    title = "dalijax, DALI reader"
    packages = ("dalijax", "nvidia-dali-cuda120", "jax")
    augmentation = "`fn.random`"

    write = staticmethod(dali_plugin.write_files)

    def __init__(self, config: Config) -> None:
        self._config = config
        sharding = sharding_of(config)
        self._iterator = data_iterator(
            dali_plugin.graph, ["label", "random"], reader_name="reader", mask="mask"
        )(
            **dali_plugin.arguments(config),
            batch_size=config.batch,
            sharding=sharding,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        for _, batches in self._iterator.epochs(epoch + 1):
            yield from map(rows, batches)

    def state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator.set_state(json.loads(own(states, self._config)))

    def close(self) -> None:
        self._iterator.close()
        if self._config.processes > 1:
            jax.distributed.shutdown()
