"""Device, seed and batch size of each data shard's pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..placement import DataShard
from ..random.seeds import ShardSeed


def shard_pipelines(
    shards: Sequence[DataShard], batch_size: int, call: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the arguments in which the pipelines of this process differ, a dict for each.

    Args:
        shards: Data shards of this process; empty without a sharding, for one pipeline.
        batch_size: Global batch size with a sharding, otherwise that of this process.
        call: Arguments of ``nvidia.dali.pipeline_def``.

    Raises:
        ValueError: If the shards do not divide the batch, or device_id is a number.
    """
    if not shards:
        return [{"batch_size": batch_size}]
    if isinstance(call.get("device_id"), int):
        raise ValueError(
            f"device_id={call['device_id']} together with sharding or devices, which determine it. "
            "Omit device_id, or pass None for pipelines on the CPU"
        )
    on_cpu = "device_id" in call
    return [
        {
            "batch_size": shard.batch_size(batch_size),
            "device_id": None if on_cpu else shard.device_id,
            # With a common seed, all shards would have the same random augmentations.
            "seed": ShardSeed.of(call.get("seed"), shard.shard_id),
        }
        for shard in shards
    ]
