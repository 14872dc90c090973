"""dalijax over a DALI reader, as its pages on getting started and states recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dalijax import data_iterator
from loaders import dali_plugin, dalijax_source
from loaders.dalijax_source import sharding_of
from loaders.protocol import Config


class Adapter(dalijax_source.Adapter):
    """An iterator over `fn.readers.file`."""

    title = "dalijax, DALI reader"
    augmentation = "`fn.random`"
    not_offered: ClassVar[Mapping[str, str]] = {}

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
