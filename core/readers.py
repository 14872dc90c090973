"""What the readers of built pipelines say of their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvidia.dali import Pipeline

from .config import IteratorConfig
from .epochs import EpochPlan
from .placement import DataShard


def reader_names(pipeline: Pipeline) -> list[str]:
    """Names of the readers of a built pipeline that know their epoch's size."""
    return sorted(pipeline.reader_meta())


def reader_meta(pipelines: Sequence[Pipeline], name: str) -> list[dict[str, Any]]:
    """DALI's metadata of one reader in each of the pipelines.

    Raises:
        ValueError: If a pipeline has no such reader (the message lists those that it has),
            or the readers disagree on what must be alike.
    """
    metas = []
    for pipeline in pipelines:
        known = reader_names(pipeline)
        if name not in known:
            raise ValueError(
                f"reader_name={name!r} is not in the pipeline: its readers are {known}. "
                "Give the reader operator that name, e.g. fn.readers.file(..., name="
                f"{name!r})"
            )
        metas.append(pipeline.reader_meta(name))
    for key in ("epoch_size", "number_of_shards", "pad_last_batch", "stick_to_shard"):
        values = [meta[key] for meta in metas]
        if len(set(values)) > 1:
            raise ValueError(f"reader {name!r} has another {key} in each pipeline: {values}")
    return metas


def epochs_of(
    built: Sequence[Pipeline], config: IteratorConfig, data_shards: Sequence[DataShard]
) -> tuple[EpochPlan | None, tuple[int, ...]]:
    """The epochs of an iterator's pipelines, and the shard of each in epoch 0.

    Args:
        built: Built pipelines.
        config: The iterator's arguments.
        data_shards: The data shard of each pipeline, where batches are placed by shards.

    Returns:
        The epochs, None where only the source knows their end; and the shards.

    Raises:
        ValueError: If the arguments do not fit the pipelines, or the reader.
    """
    samples, shards, padded, stick = config.size, len(built), config.last_batch_padded, False
    streams = tuple(range(shards))
    if data_shards:
        if len(data_shards) != shards:
            raise ValueError(
                f"the sharding has {len(data_shards)} data shards on this process, and "
                f"there is {shards} pipeline{'s' * (shards > 1)}: pass one for each"
            )
        shards = data_shards[0].num_shards
        streams = tuple(shard.shard_id for shard in data_shards)
    if config.reader_name is not None:
        metas = reader_meta(built, config.reader_name)
        samples, shards = metas[0]["epoch_size"], metas[0]["number_of_shards"]
        padded, stick = bool(metas[0]["pad_last_batch"]), bool(metas[0]["stick_to_shard"])
        streams = tuple(meta["shard_id"] for meta in metas)
        if config.last_batch_padded and not padded:
            raise ValueError(
                f"last_batch_padded=True, but reader {config.reader_name!r} has "
                "pad_last_batch=False: leave last_batch_padded out, the reader says it"
            )
    elif samples < 0 and shards > 1:
        raise ValueError(
            f"{shards} pipelines without reader_name or size: only a single pipeline can "
            "end its epoch by StopIteration"
        )
    separate, plan = config.separate, None
    alone = separate is not None and separate.alone and not data_shards
    if samples > 0:
        policy, rows = config.last_batch_policy, built[0].max_batch_size
        plan = EpochPlan(samples, shards, rows, policy, padded, stick, alone)
    if separate is not None:
        separate.check(config.reader_name or "", plan)
    return plan, streams
