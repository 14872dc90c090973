"""T5X: values for ``get_dataset_fn`` and ``train_eval_get_dataset_fn`` of ``train/utils``.

    from dalijax.adapters.t5x import eval_get_dataset_fn, get_dataset_fn

In your own module, `my_data.py`::

    def train_data(folder, partitioner=None):
        return get_dataset_fn(iterator_fn, partitioner=partitioner, folder=folder)

    def eval_data(folder):
        return eval_get_dataset_fn(iterator_fn, folder=folder)

and after the lines of T5X's ``runs/pretrain.gin``, which configure everything else
(``verify_matching_vocabs_fn`` must be None, because there are no vocabularies)::

    from __gin__ import dynamic_registration
    import __main__ as train_script
    import my_data
    from t5x import partitioning
    from t5x import utils

    train_script.train:
      get_dataset_fn = @my_data.train_data()
      train_eval_get_dataset_fn = @my_data.eval_data()
      verify_matching_vocabs_fn = None
    my_data.train_data:
      folder = "/data/train"
      partitioner = @partitioning.PjitPartitioner()
    my_data.eval_data:
      folder = "/data/validation"
    utils.SaveCheckpointConfig:
      save_dataset = True

With airio (imported by T5X since October 2023), the train iterator is an AirIODatasetIterator. T5X
uses it directly, and its saved states are exact, including checkpoint_0. Without airio (an older
T5X), T5X wraps it in clu's PeekableDatasetIterator, which loses the peeked batch if the run stops
before the first step that saves.

T5X names a dataset's files after the number of hosts (``train_ds-000-of-002``). Over a source of
`dalijax.sources`, a host without its own file restores from the file of any host, so that a run can
resume on any number of hosts.
"""

from __future__ import annotations

import importlib
import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..core.api import IteratorFunction, iterator_function
from ..core.arguments import refuse_positional
from ..core.config import EpochRules
from ..core.environment.extras import extra
from ..core.random.seeds import ShardSeed
from .clu import DALIDatasetIterator
from .process_files import file_of_any_process

with extra("clu", "dalijax.adapters.t5x"):
    from etils import epath

_PART = r"\d+-of-\d+$"  # end of the names of T5X's files

__all__ = ["eval_get_dataset_fn", "get_dataset_fn"]


def __dir__() -> list[str]:
    return sorted(__all__)


def _checked(iterator_fn: object, call: Mapping[str, Any]) -> IteratorFunction:
    """Returns ``iterator_fn`` after checking that the call omits the arguments that T5X sets.

    Raises:
        TypeError: If ``iterator_fn`` is not an iterator function.
        ValueError: If the call, or the iterator function, sets an argument that T5X sets.
    """
    function = iterator_function(iterator_fn)
    reserved = sorted({"batch_size", "seed", "shard_id", "num_shards"} & set(call))
    if reserved:
        raise ValueError(
            f"{reserved} of {function.__name__}(): T5X sets them, by batch_size and seed of the "
            "DatasetConfig and the shard of this host. Omit them"
        )
    if function._is_placed(call):
        raise ValueError(
            "sharding, devices and pmap_compatible are determined by T5X's partitioner. Omit "
            "them, and pass get_dataset_fn(iterator_fn, partitioner=...)"
        )
    return function


def _seed(cfg: Any) -> int:
    """Returns the seed of a DatasetConfig; if it is None, a drawn seed, equal in all processes.

    A restored state replaces a drawn seed, so that a resumed run keeps its seed.
    """
    seed: int | None = getattr(cfg, "seed", None)
    if seed is not None:
        return seed
    drawn = np.int32(secrets.randbits(31))
    if jax.process_count() > 1:
        drawn = multihost_utils.broadcast_one_to_all(drawn)
    return ShardSeed(int(drawn), 0, is_default=True)


def _host_arguments(
    iterator_fn: IteratorFunction,
    cfg: Any,
    shard_id: int,
    num_shards: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the arguments of the iterator function for one host's share of the global batch.

    Raises:
        ValueError: If the shards of the hosts do not divide the batch.
    """
    if cfg.batch_size % num_shards:
        raise ValueError(
            f"batch_size={cfg.batch_size} of the DatasetConfig is not divisible by the "
            f"{num_shards} hosts' shards. Choose a multiple of {num_shards}"
        )
    call = iterator_fn._shard_arguments(shard_id, num_shards, _seed(cfg), arguments)
    return call | {"batch_size": cfg.batch_size // num_shards}


def get_dataset_fn(
    iterator_fn: IteratorFunction, *args: NoReturn, partitioner: Any = None, **call: Any
) -> Callable[..., Any]:
    """Returns a function to pass as T5X's ``get_dataset_fn``, for training.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`. With several hosts, or a
            partitioner, its graph function must take ``shard_id`` and ``num_shards``.
        partitioner: A T5X partitioner, configured as for training. Batches are then global arrays
            over its mesh and data_partition_spec, with a pipeline for each data shard of this
            process. Required with several processes. None: batches are NumPy arrays of this host's
            rows, which T5X accepts from a single process.
        **call: Further arguments of the iterator function. Batch size and seed come from T5X's
            DatasetConfig. If its seed is None, each run draws a seed, and a resumed run keeps the
            seed of its state.

    Returns:
        A function of (cfg, shard_id, num_shards, feature_converter_cls, num_epochs=None,
        continue_from_last_checkpoint=False) that returns an endless `DALIDatasetIterator`, with
        batches of cfg.batch_size over all hosts. It raises ValueError if num_epochs is set, if the
        hosts or the mesh do not divide the batch, and for several processes without a partitioner.

    Raises:
        TypeError: If iterator_fn is not an iterator function, or another argument is positional.
        ValueError: If an argument is set by T5X.
    """
    refuse_positional("get_dataset_fn", args)
    iterator_fn = _checked(iterator_fn, call)

    def get_dataset(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        feature_converter_cls: Any = None,
        num_epochs: int | None = None,
        continue_from_last_checkpoint: bool = False,
    ) -> Any:
        # The position is restored from the iterator's own state.
        del feature_converter_cls, continue_from_last_checkpoint
        if num_epochs is not None:
            raise ValueError(
                f"num_epochs={num_epochs} for training: T5X would stop with StopIteration at the "
                "end of the data. Omit it and set train.total_steps; use eval_get_dataset_fn for "
                "evaluation"
            )
        base_class = _SourceIterator if iterator_fn._has_source(call) else DALIDatasetIterator
        train_class = _train_class(base_class)
        # T5X places the batches of other iterators itself.
        is_airio = train_class is not base_class
        if partitioner is not None and is_airio:
            sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
            placed = {"sharding": sharding, "batch_size": cfg.batch_size, "seed": _seed(cfg)}
            return train_class(iterator_fn, element="jax", **call, **placed)
        if is_airio and jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes without a partitioner: T5X's train step requires "
                "global arrays over its mesh. Pass get_dataset_fn(iterator_fn, partitioner=...), "
                "in gin @partitioning.PjitPartitioner()"
            )
        host = _host_arguments(iterator_fn, cfg, shard_id, num_shards, call)
        return train_class(iterator_fn, **call, **host)

    return get_dataset


class _SourceIterator(DALIDatasetIterator):
    """A `DALIDatasetIterator` over a source, with the same position in all processes."""

    def restore(self, filename: epath.PathLike) -> None:
        """Restores the position from a file; if it is missing, from one by another number of hosts.

        T5X's files are named ``train_ds-000-of-002``; with several processes, each file is in a
        directory ``process_0-of-2``.
        """
        file = epath.Path(filename)
        folder = file.parent
        if re.fullmatch(r"process_\d+-of-\d+", folder.name):
            folder = folder.parent
        name = re.escape(re.sub(_PART, "", file.name)) + _PART
        candidates = [*folder.glob("*-of-*"), *folder.glob("process_*-of-*/*-of-*")]
        alternatives = (file for file in candidates if re.fullmatch(name, file.name))
        super().restore(file_of_any_process(file, alternatives))


def _train_class(base_class: type[DALIDatasetIterator]) -> type[DALIDatasetIterator]:
    """Returns a subclass of ``base_class`` and of AirIO's iterator class.

    T5X does not wrap iterators of AirIO's class. If AirIO is not installed, ``base_class`` itself
    is returned.
    """
    for name in ("airio.core", "airio", "airio.dataset_iterators"):  # depending on the version
        try:
            airio_class = getattr(importlib.import_module(name), "AirIODatasetIterator", None)
        except ImportError:
            continue
        if airio_class is not None:
            return type("AirIODALIDatasetIterator", (base_class, airio_class), {})
    return base_class


def eval_get_dataset_fn(
    iterator_fn: IteratorFunction,
    *args: NoReturn,
    name: str | None = None,
    weights: str = "weights",
    masked: Sequence[str] = ("decoder_loss_weights",),
    **call: Any,
) -> Callable[..., Any]:
    """Returns a function to pass as T5X's ``train_eval_get_dataset_fn``.

    The last batch is padded. T5X's losses and metrics have token weights instead of sample weights,
    so the padded rows of the outputs in ``masked`` are set to 0. A loss weight of 0 excludes a
    token from the loss, the accuracy, and everything that is divided by the number of weighted
    tokens. Metrics that T5X computes from shapes (``timing/seqs``, ``loss_per_all_target_tokens``)
    include padding.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`, over a reader with
            pad_last_batch=True, or over a source.
        name: Name of the evaluation; None for the name of the iterator function.
        weights: Name of an additional output, float32 [batch], 1 for a sample and 0 for padding.
            Its sum over all hosts' batches is the number of samples.
        masked: Names of outputs [batch, ...] whose padded rows are set to 0; by default T5X's
            decoder_loss_weights. Pass ("decoder_target_tokens",) if loss_normalizing_factor is a
            SpecialLossNormalizingFactor of T5X, which counts targets > 0 without loss weights, and
            () if the model's own loss multiplies by ``weights``.
        **call: Further arguments of the iterator function. Batch size and seed come from T5X's
            DatasetConfig. If its seed is None, each run draws a seed.

    Returns:
        A function of (cfg, shard_id, num_shards, eval_steps=None, feature_converter_cls=None, ...)
        that returns {name: `EvalDataset`}, with at most eval_steps batches of this host's share of
        cfg.batch_size.

    Raises:
        TypeError: If iterator_fn is not an iterator function, another argument is positional, or
            ``masked`` is a string.
        ValueError: If an argument is set by T5X, or a name in ``masked`` is not an output.
    """
    refuse_positional("eval_get_dataset_fn", args)
    iterator_fn = _checked(iterator_fn, call)
    outputs = call.get("output_map", iterator_fn._config.output_map)
    if isinstance(masked, str):
        raise TypeError(
            f"masked={masked!r} must be a list of names, not a string. Pass masked=[{masked!r}]"
        )
    unknown = sorted(set(masked) - set(outputs)) if outputs else []  # of a dict: at its batches
    adds_arrays = call.get("batch_map", iterator_fn._config.batch_map) is not None
    if unknown and not adds_arrays:
        raise ValueError(
            f"masked={masked!r}, but the outputs of {iterator_fn.__name__}() are {list(outputs)}. "
            "T5X's losses exclude padding only by decoder_loss_weights [batch, length]. Add that "
            "output, with 1 for each token that counts, or name the outputs that your loss reads. "
            f"Pass masked=() if your loss multiplies by {weights!r}"
        )

    def get_datasets(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        eval_steps: int | None = None,
        feature_converter_cls: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> dict[str, EvalDataset]:
        del feature_converter_cls, _args, _kwargs
        iterator_fn._check_in_step(call, num_shards)
        fitted = iterator_fn._adapted(
            "eval_get_dataset_fn",
            auto_reset=False,
            last_batch_policy=LastBatchPolicy.FILL,
            mask=weights,
            epoch_rules=EpochRules(num_epochs=1),
        )
        arguments = {**call, **_host_arguments(iterator_fn, cfg, shard_id, num_shards, call)}
        if iterator_fn._has_source(call):
            arguments["last_batch_padded"] = True
        dataset = EvalDataset(fitted, arguments, weights, masked, eval_steps)
        return {name or iterator_fn.__name__: dataset}

    return get_datasets


class EvalDataset:
    """A dataset whose ``iter()`` starts the same epoch again, and whose padding has weight 0.

    Args:
        iterator_fn: The iterator function, with a mask named like the weights.
        call: Arguments of the iterator function.
        weights: Name of the array of weights.
        masked: Names of the outputs whose padded rows are set to 0.
        eval_steps: Maximum number of batches; None for all batches of the epoch.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        call: dict[str, Any],
        weights: str,
        masked: Sequence[str],
        eval_steps: int | None,
    ):
        self._iterator = DALIDatasetIterator(iterator_fn, num_epochs=1, **call)
        self._weights = weights
        self._masked = tuple(masked)
        self._steps = eval_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iterator.reset()
        return (
            self._with_weights(batch) for batch in itertools.islice(self._iterator, self._steps)
        )

    as_numpy_iterator = __iter__

    def _with_weights(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch with weights; the padded rows of the masked outputs are set to 0."""
        if missing := sorted(set(self._masked) - set(batch)):
            raise ValueError(
                f"masked={self._masked!r}, but a batch has no {missing}, only {sorted(batch)}. "
                "Name the outputs that your loss reads, or pass masked=() if it multiplies by "
                f"{self._weights!r}"
            )
        valid = batch[self._weights]
        weighed = batch | {self._weights: valid.astype(np.float32)}
        if not valid.all():
            for name in self._masked:
                weighed[name] = batch[name].copy()  # the array may view DALI's memory
                weighed[name][_padding(batch, name, valid)] = 0
        return weighed

    def __len__(self) -> int:
        """Returns the number of batches, the same on all hosts."""
        total = len(self._iterator)
        return total if self._steps is None else min(total, self._steps)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A jax.ShapeDtypeStruct (shape and dtype) of each array of this host's batch, by name."""
        specs = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for name, spec in self._iterator.element_spec.items()
        }
        specs[self._weights] = jax.ShapeDtypeStruct(specs[self._weights].shape, np.float32)
        return specs


def _padding(batch: Mapping[str, Any], name: str, valid: Any) -> Any:
    """Returns which values of an output are padding: rows, or tokens and images of packed rows."""
    segments = batch.get("segment_ids")
    if valid.ndim == 2 and segments is not None and batch[name].shape[:2] == segments.shape:
        padding = segments == 0
    else:
        padding = ~valid
    return padding
