"""From a `DALIDataset` to a real tf.data.Dataset."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.environment.extras import extra
from ...core.epochs import EpochPlan
from ...core.pipeline.pipeline_source import FunctionSource
from .dataset import DALIDataset
from .steps import UNKNOWN, Repeat, Skip, Step, Take

with extra("tf", "DALIDataset.to_tf_dataset()"):
    import tensorflow as tf

__all__ = ["to_tf_dataset"]


# What the plugin's operator has types for.
_TYPES = (tf.float16, tf.float32, tf.uint8, tf.int16, tf.int32, tf.int64)


def to_tf_dataset(dataset: DALIDataset, element_spec: Any = None) -> tf.data.Dataset:
    """See `DALIDataset.to_tf_dataset`."""
    bridged = by_plugin(dataset) if element_spec is None else None
    return by_generator(dataset, element_spec) if bridged is None else bridged


def by_generator(dataset: DALIDataset, element_spec: Any = None) -> tf.data.Dataset:
    """Through from_generator."""
    # TensorFlow refers to the arrays that it is handed, and so keeps DALI's buffers alive.
    spec = dataset.element_spec if element_spec is None else element_spec
    generated = tf.data.Dataset.from_generator(dataset.as_numpy_iterator, output_signature=spec)
    leaves_out = dataset._source.config.on_error == "skip"
    return _counted(generated, UNKNOWN if leaves_out else int(dataset.cardinality()))


def by_plugin(dataset: DALIDataset) -> tf.data.Dataset | None:
    """Through DALI's plugin; None where that can't deliver what the dataset does."""
    with contextlib.suppress(ImportError):
        from nvidia.dali.plugin import tf as plugin

        return _Bridge(dataset).dataset(plugin)
    return None


def _counted(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    if count == UNKNOWN:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


class _Bridge:
    """What the plugin's endless dataset of raw batches needs to become the dataset."""

    def __init__(self, dataset: DALIDataset):
        self._source = dataset._source
        self._epochs = dataset._epochs
        self._chain = dataset._chain
        self._config = dataset._source.config

    def dataset(self, plugin: Any) -> tf.data.Dataset | None:
        """The dataset, or None."""
        source, epochs = self._source, self._epochs
        iterator = source.known(epochs).iterator
        pipelines, plan = source.prepared()[0], iterator.plan
        if plan is None or not self._regular(plan) or self._config.on_error == "skip":
            return None
        if not isinstance(pipelines, FunctionSource):  # Python feeds them
            return None
        pipeline = pipelines.define()
        if pipeline.device_id is not None or plugin._has_external_source(pipeline):
            return None
        try:
            pipeline.serialize()
        except RuntimeError:  # Python functions
            return None
        names = self._config.output_map
        dtypes = tuple(tf.as_dtype(np.dtype(iterator.element_spec[name].dtype)) for name in names)
        if not set(dtypes) <= set(_TYPES):
            return None
        spec = source.spec(epochs, ())
        with tf.device("/cpu:0"):
            raw = plugin.DALIDataset(
                pipeline=pipeline,
                batch_size=plan.batch_size,
                output_dtypes=dtypes,
                output_shapes=tuple(
                    tf.TensorShape([plan.batch_size, *spec[name].shape[1:]]) for name in names
                ),
                num_threads=pipeline.num_threads,
                device_id=None,
            )
        batches = self._delivered(raw, plan, iterator.shards[0])
        count = source.cardinality(epochs, ())
        batches = _counted(batches.take(count), count)
        for step in self._chain:
            batches = _applied(batches, step)
        return batches

    def _regular(self, plan: EpochPlan) -> bool:
        """Whether all epochs are alike, or each of the pipeline's batches is delivered whole."""
        stays = plan.stick or plan.num_shards == 1
        runs_on = plan.policy is LastBatchPolicy.FILL and self._config.mask is None
        return (plan.padded and stays) or runs_on

    def _delivered(self, raw: tf.data.Dataset, plan: EpochPlan, shard: int) -> tf.data.Dataset:
        """The delivered batches as dicts, the last ones of the epochs cut, dropped or masked."""
        mask, names = self._config.mask, self._config.output_map
        if not plan.padded:
            return raw.map(lambda *arrays: dict(zip(names, arrays)))
        consumed, delivered = plan.consumed(0), plan.delivered(0, shard)
        counts = tf.constant([plan.valid(0, k, shard) for k in range(delivered)], tf.int64)
        cuts = plan.policy is LastBatchPolicy.PARTIAL

        def kept(number: Any, arrays: Any) -> Any:
            del arrays
            return number % consumed < delivered

        def batch(number: Any, arrays: Any) -> Any:
            count = counts[number % consumed]
            cut = {k: a[:count] if cuts else a for k, a in zip(names, arrays)}
            if mask is not None:
                rows = count if cuts else plan.batch_size
                cut[mask] = tf.range(rows, dtype=tf.int64) < count
            return cut

        return raw.map(lambda *arrays: arrays).enumerate().filter(kept).map(batch)


def _applied(dataset: tf.data.Dataset, step: Step) -> tf.data.Dataset:
    if isinstance(step, Take):
        return dataset.take(step.count)
    if isinstance(step, Skip):
        return dataset.skip(step.count)
    if isinstance(step, Repeat):
        return dataset.repeat(step.count)
    return dataset.enumerate(step.start)
