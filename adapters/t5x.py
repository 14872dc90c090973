"""T5X: functions for its ``train/utils.get_dataset_fn`` and ``train_eval_get_dataset_fn``.

    from dalijax.adapters.t5x import eval_get_dataset_fn, get_dataset_fn

In a module of yours, `my_data.py`::

    def train_data(folder, partitioner=None):
        return get_dataset_fn(iterator_fn, partitioner=partitioner, folder=folder)

    def eval_data(folder):
        return eval_get_dataset_fn(iterator_fn, folder=folder)

and after the lines of T5X's ``runs/pretrain.gin``, which configure the rest
(``verify_matching_vocabs_fn`` must be None, since there are no vocabularies)::

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

With airio (T5X imports it since October 2023) the train iterator is an AirIODatasetIterator: T5X
takes it as it is, and its saved states are exact, checkpoint_0 included. Without (an older T5X),
T5X wraps it into clu's PeekableDatasetIterator, which loses the peeked batch if the run stops
before the first step that saves.

T5X names a dataset's files after the number of hosts (``train_ds-000-of-002``). Over a source of
`dalijax.sources` a host without a file of its own restores one of another number of hosts, so that
a run continues on any number of hosts.
"""

from __future__ import annotations

import importlib
import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..core.api import IteratorFunction, iterator_function
from ..core.config import EpochRules
from ..core.environment.extras import extra
from ..core.random.seeds import ShardSeed
from .clu import DALIDatasetIterator
from .process_files import file_of_any_process

with extra("clu", "dalijax.adapters.t5x"):
    from etils import epath

_PART = r"\d+-of-\d+$"  # at the end of the names of T5X's files

__all__ = ["eval_get_dataset_fn", "get_dataset_fn"]


def __dir__() -> list[str]:
    return sorted(__all__)


def _checked(iterator_fn: object, call: Mapping[str, Any]) -> IteratorFunction:
    """The iterator function, after a check that the call leaves out T5X's own arguments."""
    function = iterator_function(iterator_fn)
    set_here = sorted({"batch_size", "seed", "shard_id", "num_shards"} & set(call))
    if set_here:
        raise ValueError(
            f"{set_here} of {function.__name__}(): T5X says them, by batch_size and seed of the "
            "DatasetConfig and the shard of this host. Leave them out here"
        )
    if function._is_placed(call):
        raise ValueError(
            "sharding, devices and pmap_compatible are T5X's to say, by its partitioner: leave "
            "them out, and pass get_dataset_fn(iterator_fn, partitioner=...)"
        )
    return function


def _seed(cfg: Any) -> int:
    """The seed of a DatasetConfig; if it is None, one that all processes draw together.

    A drawn seed gives way to a restored state's, so that a run that resumes keeps its seed.
    """
    seed: int | None = getattr(cfg, "seed", None)
    if seed is not None:
        return seed
    drawn = np.int32(secrets.randbits(31))
    if jax.process_count() > 1:
        drawn = multihost_utils.broadcast_one_to_all(drawn)
    return ShardSeed(int(drawn), 0, is_default=True)


def _of_host(
    iterator_fn: IteratorFunction,
    cfg: Any,
    shard_id: int,
    num_shards: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of the iterator function for one host's share of the batch."""
    if cfg.batch_size % num_shards:
        raise ValueError(
            f"batch_size={cfg.batch_size} of the DatasetConfig is not divisible by the "
            f"{num_shards} hosts' shards: choose one that is"
        )
    call = iterator_fn._of_shard(shard_id, num_shards, _seed(cfg), arguments)
    return call | {"batch_size": cfg.batch_size // num_shards}


def get_dataset_fn(
    iterator_fn: IteratorFunction, *, partitioner: Any = None, **call: Any
) -> Callable[..., Any]:
    """A function with the signature of T5X's ``get_dataset_fn``, for training.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`; with several hosts, or a
            partitioner, its function takes ``shard_id`` and ``num_shards``.
        partitioner: A partitioner of T5X, configured like the training's: batches are then global
            arrays over its mesh and data_partition_spec, with a pipeline for each part of the data
            that this process holds. Required with several processes. None: NumPy arrays of this
            host's rows, which T5X takes from a single process.
        **call: Further arguments of the iterator function. Batch size and seed come from T5X's
            DatasetConfig; if its seed is None each run draws one, and a run that resumes keeps the
            seed of its state.

    Returns:
        A function of (cfg, shard_id, num_shards, feature_converter_cls, num_epochs=None,
        continue_from_last_checkpoint=False) that makes an endless `DALIDatasetIterator` of
        batches of cfg.batch_size over all hosts. It raises ValueError for num_epochs, if the hosts
        or the mesh do not divide the batch, and for several processes without a partitioner.

    Raises:
        TypeError: If iterator_fn is no iterator function.
        ValueError: For arguments that T5X sets.
    """
    iterator_fn = _checked(iterator_fn, call)

    def get_dataset(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        feature_converter_cls: Any = None,
        num_epochs: int | None = None,
        continue_from_last_checkpoint: bool = False,
    ) -> Any:
        # The position comes from the iterator's own state.
        del feature_converter_cls, continue_from_last_checkpoint
        if num_epochs is not None:
            raise ValueError(
                f"num_epochs={num_epochs} for training: T5X ends by StopIteration where its data "
                "ends. Leave it out and set train.total_steps; use eval_get_dataset_fn for "
                "evaluation"
            )
        own_class = _SourceIterator if iterator_fn._has_source(call) else DALIDatasetIterator
        train_class = _train_class(own_class)
        # T5X places the batches of other iterators itself.
        as_it_is = train_class is not own_class
        if partitioner is not None and as_it_is:
            sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
            placed = {"sharding": sharding, "batch_size": cfg.batch_size, "seed": _seed(cfg)}
            return train_class(iterator_fn, element="jax", **call, **placed)
        if as_it_is and jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes and no partitioner: T5X's step wants global "
                "arrays, over its mesh. Pass get_dataset_fn(iterator_fn, partitioner=...), in gin "
                "@partitioning.PjitPartitioner()"
            )
        host = _of_host(iterator_fn, cfg, shard_id, num_shards, call)
        return train_class(iterator_fn, **call, **host)

    return get_dataset


class _SourceIterator(DALIDatasetIterator):
    """An iterator over a source; its position is the same in all processes."""

    def restore(self, filename: epath.PathLike) -> None:
        """Continues at the position in a file, or in the files of another number of hosts.

        T5X's files are ``train_ds-000-of-002``; with several processes each is in a folder
        ``process_0-of-2``.
        """
        file = epath.Path(filename)
        folder = file.parent
        if re.fullmatch(r"process_\d+-of-\d+", folder.name):
            folder = folder.parent
        name = re.escape(re.sub(_PART, "", file.name)) + _PART
        every = [*folder.glob("*-of-*"), *folder.glob("process_*-of-*/*-of-*")]
        others = (file for file in every if re.fullmatch(name, file.name))
        super().restore(file_of_any_process(file, others))


def _train_class(own_class: type[DALIDatasetIterator]) -> type[DALIDatasetIterator]:
    """The iterator's class, also derived from AirIO's, if airio is there: T5X takes it as it is."""
    for name in ("airio.core", "airio", "airio.dataset_iterators"):  # depending on the version
        try:
            airios = getattr(importlib.import_module(name), "AirIODatasetIterator", None)
        except ImportError:
            continue
        if airios is not None:
            return type("AirIODALIDatasetIterator", (own_class, airios), {})
    return own_class


def eval_get_dataset_fn(
    iterator_fn: IteratorFunction,
    *,
    name: str | None = None,
    weights: str = "weights",
    masked: Sequence[str] = ("decoder_loss_weights",),
    **call: Any,
) -> Callable[..., Any]:
    """A function with the signature of T5X's ``train_eval_get_dataset_fn``.

    The last batch is padded. T5X's own losses and metrics have weights of tokens, not of samples:
    so the padded rows of the outputs in ``masked`` are set to 0. A loss weight of 0 for each of
    their tokens leaves them out of loss, accuracy and all that is divided by the number of weighted
    tokens. Metrics that T5X counts by shapes (``timing/seqs``, ``loss_per_all_target_tokens``)
    include them.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`, over a reader with
            pad_last_batch=True.
        name: Name of the evaluation; the iterator function's by default.
        weights: Name of an array of float32 of shape [batch], 1 for a sample and 0 for padding:
            its sum over all hosts' batches is the number of samples.
        masked: Names of outputs of shape [batch, ...] whose padded rows become 0. By default T5X's
            decoder_loss_weights. ("decoder_target_tokens",) if loss_normalizing_factor is one of
            T5X's SpecialLossNormalizingFactor, which takes targets > 0 without loss weights; () if
            the model's own loss multiplies by ``weights``.
        **call: Further arguments of the iterator function. Batch size and seed come from T5X's
            DatasetConfig; if its seed is None each run draws one.

    Returns:
        A function of (cfg, shard_id, num_shards, eval_steps=None, feature_converter_cls=None, ...)
        that returns {name: `EvalDataset`} with at most eval_steps batches of this host's share of
        cfg.batch_size.

    Raises:
        TypeError: If iterator_fn is no iterator function, or ``masked`` is one name.
        ValueError: For arguments that T5X sets, and names in ``masked`` that no output has.
    """
    iterator_fn = _checked(iterator_fn, call)
    outputs = call.get("output_map", iterator_fn._config.output_map)
    if isinstance(masked, str):
        raise TypeError(
            f"masked={masked!r} must be a list of names, not one name: pass masked=[{masked!r}]"
        )
    unknown = sorted(set(masked) - set(outputs))
    if unknown:
        raise ValueError(
            f"masked={masked!r}: the outputs of {iterator_fn.__name__}() are {list(outputs)}. "
            "T5X's losses leave padding out by decoder_loss_weights [batch, length] alone: add "
            "that output, 1 for each token that counts, or name the outputs that your loss reads; "
            f"masked=() if it multiplies by {weights!r}"
        )

    def get_datasets(
        cfg: Any,
        shard_id: int,
        num_shards: int,
        eval_steps: int | None = None,
        feature_converter_cls: Any = None,
        *rest: Any,
        **more: Any,
    ) -> dict[str, EvalDataset]:
        del feature_converter_cls, rest, more
        iterator_fn._check_in_step(call, num_shards)
        fitted = iterator_fn._adapted(
            "eval_get_dataset_fn",
            auto_reset=False,
            last_batch_policy=LastBatchPolicy.FILL,
            mask=weights,
            epoch_rules=EpochRules(num_epochs=1),
        )
        arguments = {**call, **_of_host(iterator_fn, cfg, shard_id, num_shards, call)}
        if iterator_fn._has_source(call):
            arguments["last_batch_padded"] = True
        dataset = EvalDataset(fitted, arguments, weights, masked, eval_steps)
        return {name or iterator_fn.__name__: dataset}

    return get_datasets


class EvalDataset:
    """One epoch of batches for each ``iter()``, with weights of 0 for the padding.

    Args:
        iterator_fn: The iterator function, with a mask that has the name of the weights.
        call: Its arguments.
        weights: Name of the weights.
        masked: Names of the outputs whose padded rows are 0.
        eval_steps: The largest number of batches; None for all.
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
        return (self._weighed(batch) for batch in itertools.islice(self._iterator, self._steps))

    as_numpy_iterator = __iter__

    def _weighed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with weights, and zeros in the padded rows of the masked outputs."""
        valid = batch[self._weights]
        weighed = batch | {self._weights: valid.astype(np.float32)}
        if not valid.all():
            for name in self._masked:
                weighed[name] = batch[name].copy()  # it may be DALI's own memory
                weighed[name][~valid] = 0
        return weighed

    def __len__(self) -> int:
        """Number of batches, the same on all hosts."""
        total = len(self._iterator)
        return total if self._steps is None else min(total, self._steps)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of this host's batch."""
        specs = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for name, spec in self._iterator.element_spec.items()
        }
        specs[self._weights] = jax.ShapeDtypeStruct(specs[self._weights].shape, np.float32)
        return specs
