"""T5X: functions for its ``train/utils.get_dataset_fn`` and ``train_eval_get_dataset_fn``.

    from dalijax.adapters.t5x import eval_get_dataset_fn, get_dataset_fn

In a module of yours, and in gin (``verify_matching_vocabs_fn`` must be None, since there are no
vocabularies)::

    @gin.configurable
    def train_data(folder):
        return get_dataset_fn(iterator_fn, folder=folder)

    train.get_dataset_fn = @my_module.train_data()
    train.train_eval_get_dataset_fn = @my_module.eval_data()
    train.verify_matching_vocabs_fn = None
    my_module.train_data.folder = "/data/train"

Where ``airio`` can be imported, the train iterator is an AirIODatasetIterator, too: T5X then takes
it as it is and saves exact states, its checkpoint_0 included. Without airio T5X puts it into
clu's PeekableDatasetIterator, which loses the batch it has peeked if the run stops before
the first step that saves.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..core.config import Separate
from ..core.decorator import IteratorFunction
from .clu import DALIDatasetIterator

__all__ = ["eval_get_dataset_fn", "get_dataset_fn"]


def _arguments(
    iterator_fn: IteratorFunction, cfg: Any, shard_id: int, num_shards: int
) -> dict[str, Any]:
    """Arguments of the iterator function for one host, by T5X's DatasetConfig."""
    if cfg.batch_size % num_shards:
        raise ValueError(
            f"batch_size={cfg.batch_size} of the DatasetConfig is not divisible by the "
            f"{num_shards} hosts' shards: choose one that is"
        )
    call = iterator_fn.of_shard(shard_id, num_shards, getattr(cfg, "seed", None))
    return call | {"batch_size": cfg.batch_size // num_shards}


def get_dataset_fn(iterator_fn: IteratorFunction, **call: Any) -> Callable[..., Any]:
    """A function with the signature of T5X's ``get_dataset_fn``, for training.

    Args:
        iterator_fn: What `dalijax.data_iterator` returned; its function takes ``shard_id`` and
            ``num_shards`` where there are several hosts.
        **call: Its further arguments.

    Returns:
        A function of (cfg, shard_id, num_shards, feature_converter_cls, num_epochs=None,
        continue_from_last_checkpoint=False) that makes an endless `DALIDatasetIterator` of this
        host's share of cfg.batch_size. It raises ValueError for num_epochs, and where
        the hosts do not divide the batch.
    """

    def get_dataset(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        feature_converter_cls: Any = None,
        num_epochs: int | None = None,
        continue_from_last_checkpoint: bool = False,
    ) -> Any:
        # Its own state says where to go on.
        del feature_converter_cls, continue_from_last_checkpoint
        if num_epochs is not None:
            raise ValueError(
                f"num_epochs={num_epochs} for training: T5X ends by StopIteration where its data "
                "ends. Leave it out and set train.total_steps; use eval_get_dataset_fn for "
                "evaluation"
            )
        made = {**call, **_arguments(iterator_fn, cfg, shard_id, num_shards)}
        return _train_class()(iterator_fn, **made)

    return get_dataset


def _train_class() -> type[DALIDatasetIterator]:
    """The iterator's class, which T5X takes as it is where it is AirIO's, too."""
    for name in ("airio.core", "airio", "airio.dataset_iterators"):  # as its versions have it
        try:
            airios = getattr(importlib.import_module(name), "AirIODatasetIterator", None)
        except ImportError:
            continue
        if airios is not None:
            return type("AirIODALIDatasetIterator", (DALIDatasetIterator, airios), {})
    return DALIDatasetIterator


def eval_get_dataset_fn(
    iterator_fn: IteratorFunction, *, name: str | None = None, weights: str = "weights", **call: Any
) -> Callable[..., Any]:
    """A function with the signature of T5X's ``train_eval_get_dataset_fn``.

    Args:
        iterator_fn: What `dalijax.data_iterator` returned, over a reader with
            pad_last_batch=True.
        name: Name of the evaluation; the iterator function's by default.
        weights: Name of an array of float32 of shape [batch], 1 for a sample and 0 for padding:
            its sum over all hosts' batches is the number of samples.
        **call: Its further arguments.

    Returns:
        A function of (cfg, shard_id, num_shards, eval_steps, feature_converter_cls, ...) that gives
        {name: `EvalDataset`}, of at most eval_steps batches.
    """

    def get_datasets(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        eval_steps: int | None,
        feature_converter_cls: Any = None,
        *rest: Any,
        **more: Any,
    ) -> dict[str, EvalDataset]:
        del feature_converter_cls, rest, more
        iterator_fn.check_in_step(call, num_shards)
        separate = Separate(num_epochs=1)
        fitted = iterator_fn.adapted(
            "eval_get_dataset_fn",
            auto_reset=False,
            last_batch_policy=LastBatchPolicy.FILL,
            mask=weights,
            separate=separate,
        )
        made = {**call, **_arguments(iterator_fn, cfg, shard_id, num_shards)}
        return {name or iterator_fn.__name__: EvalDataset(fitted, made, weights, eval_steps)}

    return get_datasets


class EvalDataset:
    """One epoch of batches, again for each ``iter()``; with weights for the padding.

    Args:
        iterator_fn: The iterator function, with a mask named like the weights.
        call: Its arguments.
        weights: Name of the weights.
        eval_steps: The most batches that are given; None for all.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        call: dict[str, Any],
        weights: str,
        eval_steps: int | None,
    ):
        self._iterator = DALIDatasetIterator(iterator_fn, num_epochs=1, **call)
        self._weights = weights
        self._steps = eval_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iterator.reset()
        return (self._weighed(batch) for batch in itertools.islice(self._iterator, self._steps))

    as_numpy_iterator = __iter__

    def _weighed(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {self._weights: batch[self._weights].astype(np.float32)}

    def __len__(self) -> int:
        """Number of batches, the same on all hosts."""
        total = len(self._iterator)
        return total if self._steps is None else min(total, self._steps)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> dict[str, Any]:
        """Shape and dtype of each array, as TensorFlow's TensorSpec where it is installed."""
        specs = {k: (s.shape, np.dtype(s.dtype)) for k, s in self._iterator.element_spec.items()}
        specs[self._weights] = (specs[self._weights][0], np.dtype(np.float32))
        try:
            import tensorflow as tf
        except ImportError:
            return {k: jax.ShapeDtypeStruct(shape, dtype) for k, (shape, dtype) in specs.items()}
        return {k: tf.TensorSpec(shape, tf.as_dtype(dtype)) for k, (shape, dtype) in specs.items()}
