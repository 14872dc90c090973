"""Converts a `DALIDataset` to a tf.data.Dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ...core.config import IteratorConfig
from ...core.environment.extras import extra
from ...core.messages.printable import printable_repr
from ...core.order.epochs import EpochPlan
from ...core.pipeline.calls import calls
from ...core.pipeline.output_notes import notes_of
from ...core.pipeline.pipeline_factory import GraphPipelineFactory
from ...core.threads.workers import busy
from .steps import UNKNOWN, Repeat, Skip, Step, Take
from .stream_factory import StreamFactory

with extra("tf", "DALIDataset.to_tf_dataset()"):
    import tensorflow as tf

__all__: list[str] = []


# The dtypes that DALI's TensorFlow plugin supports.
_TYPES = (tf.float16, tf.float32, tf.uint8, tf.int16, tf.int32, tf.int64)


def by_generator(
    generate: Callable[[], Iterator[Any]], element_spec: Any, count: int
) -> tf.data.Dataset:
    """Returns a tf.data.Dataset that calls Python for each element (``from_generator``).

    Args:
        generate: Function that returns an iterator over the elements.
        element_spec: The structure of an element, with a tf.TensorSpec for each array.
        count: Number of elements, or INFINITE or UNKNOWN.
    """

    def encoded() -> Iterator[Any]:
        for element in generate():
            yield jax.tree_util.tree_map_with_path(_text_as_bytes, element)

    # TensorFlow keeps references to the arrays, which keep DALI's buffers alive.
    generated = tf.data.Dataset.from_generator(
        lambda: _until_exit(encoded()), output_signature=element_spec
    )
    return _counted(generated, count)


def _text_as_bytes(path: Sequence[Any], array: Any) -> Any:
    """Returns an array of text as an array of UTF-8 bytes; returns other arrays unchanged.

    Surrogate escapes, which TensorFlow can't encode, become the original bytes of file names that
    are not UTF-8.

    Args:
        path: The path of the array in its element, for errors.
        array: The array.

    Raises:
        TypeError: If an array of objects has a value that is neither text nor bytes.
    """
    if array.dtype != object:
        return array
    encoded = np.empty_like(array)
    for index, value in enumerate(array.flat):
        if not isinstance(value, (str, bytes)):
            raise TypeError(
                f"to_tf_dataset() only supports text, but {path[-1].key!r} has "
                f"{printable_repr(value, 60)}. Convert it to text in the source, e.g. by "
                "json.dumps(value), or omit the field"
            )
        if isinstance(value, str):
            value = value.encode(errors="surrogateescape")
        encoded.flat[index] = value
    return encoded


def _until_exit(elements: Iterator[Any]) -> Iterator[Any]:
    """Yields elements until Python exits.

    TensorFlow's threads outlive Python's exit handlers. If the threads still requested elements,
    they would print an error, or need the interpreter while the main thread waits for them.
    """
    while True:
        try:
            with busy():
                element = next(elements)
        except StopIteration:
            return
        except BaseException:
            if calls.ended or not threading.main_thread().is_alive():
                return
            raise
        yield element


def by_plugin(
    streams: StreamFactory, epochs: int | None, chain: Sequence[Step]
) -> tf.data.Dataset | None:
    """Returns a tf.data.Dataset of DALI's TensorFlow plugin.

    Returns None if the plugin is not installed, or can't deliver the same elements.

    Args:
        streams: Creates the streams of the batches.
        epochs: Number of epochs; None if there is no end.
        chain: The steps that are applied to the batches.
    """
    try:
        from nvidia.dali.plugin import tf as plugin
    except ImportError:
        return None
    config, stream = streams.config, streams.current(epochs)
    plan = stream._plan
    if plan is None or not _is_regular(plan, config) or config.on_error == "skip":
        return None
    if config.batch_map is not None:
        return None
    pipeline = _pipeline(streams, plugin)
    if pipeline is None:
        return None
    spec = streams.spec(epochs, ())
    names = notes_of(pipeline).names or tuple(config.output_map)
    dtypes = tuple(spec[name].dtype for name in names)
    if not set(dtypes) <= set(_TYPES):
        return None
    shapes = [[plan.batch_size, *spec[name].shape[1:]] for name in names]
    with tf.device("/cpu:0"):
        raw = plugin.DALIDataset(
            pipeline=pipeline,
            batch_size=plan.batch_size,
            output_dtypes=dtypes,
            output_shapes=tuple(tf.TensorShape(shape) for shape in shapes),
            num_threads=pipeline.num_threads,
            device_id=None,
        )
    count = streams.cardinality(epochs, ())
    batches = _counted(_delivered(raw, plan, stream._shards[0], config, names).take(count), count)
    for step in chain:
        batches = _applied(batches, step)
    return batches


def _counted(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    if count == UNKNOWN:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def _is_regular(plan: EpochPlan, config: IteratorConfig) -> bool:
    """Returns whether epochs have equal numbers of batches, or all batches are delivered as is."""
    stays = plan.stick or plan.num_shards == 1
    runs_on = plan.policy is LastBatchPolicy.FILL and config.mask is None
    return (plan.padded and stays) or runs_on


def _pipeline(streams: StreamFactory, plugin: Any) -> Pipeline | None:
    """Returns the pipeline of a stream; None unless it is on the CPU and does not call Python."""
    pipelines = streams.prepared()[0]
    if not isinstance(pipelines, GraphPipelineFactory):  # Python feeds the pipeline
        return None
    pipeline = pipelines.define()
    if pipeline.device_id is not None or plugin._has_external_source(pipeline):
        return None
    try:
        pipeline.serialize()
    except RuntimeError:  # Python functions
        return None
    return pipeline


def _delivered(
    raw: tf.data.Dataset,
    plan: EpochPlan,
    shard: int,
    config: IteratorConfig,
    names: Sequence[str],
) -> tf.data.Dataset:
    """Returns a dataset of dicts, with the last batch of each epoch cut, dropped or masked.

    Args:
        raw: The dataset of DALI's plugin, whose elements are tuples of arrays.
        plan: The epochs.
        shard: The shard that the pipeline reads.
        config: Arguments of the iterator.
        names: Names of the arrays.
    """
    mask = config.mask
    if not plan.padded:
        return raw.map(lambda *arrays: dict(zip(names, arrays)))
    consumed, delivered = plan.consumed(0), plan.delivered(0, shard)
    counts = tf.constant([plan.valid(0, k, shard) for k in range(delivered)], tf.int64)
    cuts = plan.policy is LastBatchPolicy.PARTIAL

    def is_delivered(number: Any, arrays: Any) -> Any:
        del arrays
        return number % consumed < delivered

    def batch(number: Any, arrays: Any) -> Any:
        count = counts[number % consumed]
        cut = {k: a[:count] if cuts else a for k, a in zip(names, arrays)}
        if mask is not None:
            rows = count if cuts else plan.batch_size
            cut[mask] = tf.range(rows, dtype=tf.int64) < count
        return cut

    return raw.map(lambda *arrays: arrays).enumerate().filter(is_delivered).map(batch)


def _applied(dataset: tf.data.Dataset, step: Step) -> tf.data.Dataset:
    if isinstance(step, Take):
        return dataset.take(step.count)
    if isinstance(step, Skip):
        return dataset.skip(step.count)
    if isinstance(step, Repeat):
        return dataset.repeat(step.count)
    return dataset.enumerate(step.start)
