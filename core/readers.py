"""What the readers of built pipelines say of their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvidia.dali import Pipeline


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
