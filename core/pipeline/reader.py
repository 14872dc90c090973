"""Checks the epochs, shards, orders and videos of built pipelines, from their readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..arrays.placement import DataShard
from ..config import IteratorConfig
from ..formats.media import rotation_of
from ..formats.spread import spread
from ..messages.printable import printable
from ..messages.user_warnings import warn_user, warn_user_once
from ..order.epochs import EpochPlan
from ..state import reader_files
from ..state.fingerprint import labels_of
from ..state.operators import Operator, operators_of, serialized_operators
from .dali_pipeline import operator_name
from .pipeline_factory import PipelineFactory

# Readers that shuffle only while they read. Other readers also shuffle the list of their files.
_RECORD_READERS = frozenset({"caffe", "caffe2", "mxnet", "tfrecord", "webdataset"})
_INITIAL_FILL = 1024  # DALI's default
_DERIVED = "derived"  # the seed of a reader without seed=, which DALI derives for each reader
_VIDEO_READERS = ("readers__Video", "experimental__readers__Video")  # begin names of schemas
_MOST_VIDEOS = 64  # whose headers are read, evenly spread over all videos of a reader


def reader_meta(pipelines: Sequence[Pipeline], name: str) -> list[dict[str, Any]]:
    """Returns DALI's metadata of a reader, a dict for each of the pipelines.

    Raises:
        ValueError: If a pipeline has no such reader (the message lists its readers), or the
            readers differ in values that must be equal.
    """
    metas = []
    for pipeline in pipelines:
        names = sorted(pipeline.reader_meta())
        if name not in names:
            raise ValueError(
                f"reader_name={name!r} is not in the pipeline, whose readers are {names}. Pass "
                f"this name to the reader operator, e.g. fn.readers.file(..., name={name!r})"
            )
        metas.append(pipeline.reader_meta(name))
    for key in ("epoch_size", "number_of_shards", "pad_last_batch", "stick_to_shard"):
        values = [meta[key] for meta in metas]
        if len(set(values)) > 1:
            raise ValueError(f"reader {name!r} has a different {key} in each pipeline: {values}")
    return metas


def epochs_of(
    built: Sequence[Pipeline], config: IteratorConfig, data_shards: Sequence[DataShard]
) -> tuple[EpochPlan | None, tuple[int, ...]]:
    """Returns the epochs of an iterator's pipelines, and each pipeline's shard in epoch 0.

    The reader determines whether the last batch is padded; see `dalijax.core.order`.

    Args:
        built: Built pipelines.
        config: Arguments of the iterator.
        data_shards: The data shard of each pipeline, if batches are placed by shards.

    Returns:
        The epochs, or None if their end is unknown, and the index of each pipeline's shard.

    Raises:
        ValueError: If the arguments do not match the pipelines or the reader.
    """
    samples, shards, padded, stick = config.size, len(built), bool(config.last_batch_padded), False
    shard_ids = tuple(range(shards))
    if data_shards:
        if len(data_shards) != shards:
            raise ValueError(
                f"the sharding has {len(data_shards)} data shards on this process, but there is "
                f"{shards} pipeline{'s' * (shards > 1)}. Pass one pipeline for each data shard"
            )
        shards = data_shards[0].num_shards
        shard_ids = tuple(shard.shard_id for shard in data_shards)
    if config.reader_name is not None:
        metas = reader_meta(built, config.reader_name)
        samples, shards = metas[0]["epoch_size"], metas[0]["number_of_shards"]
        padded, stick = bool(metas[0]["pad_last_batch"]), bool(metas[0]["stick_to_shard"])
        shard_ids = tuple(meta["shard_id"] for meta in metas)
        if config.last_batch_padded and not padded:
            raise ValueError(
                f"last_batch_padded=True, but reader {config.reader_name!r} has "
                "pad_last_batch=False. Omit last_batch_padded, which the reader determines"
            )
    elif samples < 0 and len(built) > 1:
        raise ValueError(
            f"{len(built)} pipelines without reader_name or size: only a single pipeline can "
            "end its epoch by StopIteration. Pass reader_name or size"
        )
    rules, plan = config.epoch_rules, None
    per_shard = rules is not None and rules.per_shard and not data_shards
    if samples > 0:
        policy, rows = config.last_batch_policy, built[0].max_batch_size
        plan = EpochPlan(samples, shards, rows, policy, padded, stick, per_shard)
        if policy is LastBatchPolicy.PARTIAL and len(built) > 1 and samples % shards:
            raise ValueError(
                f"last_batch_policy='partial' over {len(built)} pipelines, whose shards are "
                f"unequal ({samples} samples in {shards} shards): their last batches would "
                "differ in length. Use 'fill' with mask=True, which marks the padding"
            )
    if rules is not None:
        rules.check(config.reader_name or "", plan)
    return plan, shard_ids


def check_shards(
    built: Sequence[Pipeline],
    config: IteratorConfig,
    data_shards: Sequence[DataShard],
    factory: PipelineFactory,
) -> None:
    """Checks that the readers of each pipeline read the pipeline's own shard.

    Args:
        built: Built pipelines.
        config: Arguments of the iterator.
        data_shards: The data shard of each pipeline, if batches are placed by shards.
        factory: The factory of the pipelines.

    Raises:
        ValueError: If a reader reads a different shard, or two pipelines read the same shard of the
            same files.
    """
    expected: list[Shard | None] = [(shard.shard_id, shard.num_shards) for shard in data_shards]
    expected = expected or factory.shards()
    # If each of several hosts has its own sharding, its shards are a part of the reader's shards.
    is_part = bool(data_shards) and not config.over_processes and jax.process_count() > 1
    for name in _readers_of_batches(built[0], config.reader_name):
        metas = [pipeline.reader_meta().get(name) for pipeline in built]
        read = [(m["shard_id"], m["number_of_shards"]) for m in metas if m is not None]
        problem = _mismatch(read, expected, is_part) if len(read) == len(expected) else None
        if problem is None and len(set(read)) < len(read):
            problem = f"shard {read[0][0]} of {read[0][1]} in each of {len(read)} pipelines"
        if problem is not None and not _reads_own_files(built, name, read, factory):
            raise ValueError(
                f"reader {name!r} reads {problem}, so that samples are duplicated or missing. Pass "
                "both arguments to the reader: fn.readers.file(..., shard_id=shard_id, "
                "num_shards=num_shards)"
            )


Shard = tuple[int, int]  # index of the shard, and number of shards


def _readers_of_batches(pipeline: Pipeline, reader_name: str | None) -> list[str]:
    """Returns the names of readers with as many samples as ``reader_name``; all for None."""
    metas = pipeline.reader_meta()
    size = metas[reader_name]["epoch_size"] if reader_name is not None else None
    return sorted(name for name, meta in metas.items() if size in (None, meta["epoch_size"]))


def _mismatch(read: Sequence[Shard], shards: Sequence[Shard | None], is_part: bool) -> str | None:
    """Describes the first shard that differs from the expected shard; returns None if none does."""

    def fits(actual: Shard, expected: Shard) -> bool:
        if actual == expected or expected[1] == 1:
            return True
        parts, remainder = divmod(actual[1], expected[1])
        if not is_part or remainder:
            return False
        # A part of the shard, whether parts are assigned round-robin or contiguously.
        return actual[0] % expected[1] == expected[0] or actual[0] // parts == expected[0]

    expected_shards = [expected for expected in shards if expected is not None]
    if sorted(read) == sorted(expected_shards):
        return None
    for actual, expected in zip(read, shards):
        if expected is not None and not fits(actual, expected):
            return (
                f"shard {actual[0]} of {actual[1]} in the pipeline for shard {expected[0]} of "
                f"{expected[1]}"
            )
    return None


def _reads_own_files(
    built: Sequence[Pipeline], name: str, read: Sequence[Shard], factory: PipelineFactory
) -> bool:
    """Returns whether a reader without shards reads different files in each pipeline."""
    if set(read) != {(0, 1)}:
        return False
    graphs = [graph_operators(pipeline, factory, k) for k, pipeline in enumerate(built)]
    other_shard = factory.define_other_shard() if len(built) == 1 else None
    if other_shard is not None:
        graphs.append(operators_of(other_shard))
    files = [_paths(graph, name) for graph in graphs]
    return len(files) > 1 and len(set(files)) == len(files)


def graph_operators(pipeline: Pipeline, factory: PipelineFactory, index: int) -> list[Operator]:
    """Returns the operators of a pipeline, given its factory and its index."""
    if factory.serialized:  # a deserialized pipeline does not know its operators
        return list(serialized_operators(factory.serialized[index]))
    return operators_of(pipeline)


def _paths(graph: Sequence[Operator], reader: str) -> tuple[str, ...]:
    """Returns the arguments of a reader that are strings or lists, such as paths, as text."""
    arguments = next(arguments for _, name, arguments in graph if name == reader)
    names = sorted(k for k, v in arguments.items() if isinstance(v, (str, list)) and k[0] != "_")
    return tuple(f"{k}={arguments[k]}" for k in names)


def check_epochs(
    built: Sequence[Pipeline], config: IteratorConfig, factory: PipelineFactory
) -> None:
    """Checks an iterator whose epochs have an unknown end.

    Warns if all data come from DALI's readers, because the first epoch then never ends.

    Args:
        built: Built pipelines.
        config: Arguments of the iterator, without reader_name and size.
        factory: The factory of the pipelines.

    Raises:
        ValueError: If a mask is requested, but no epoch is defined.
    """
    kinds = {kind for kind, _, _ in graph_operators(built[0], factory, 0)}
    # If an external_source ends an epoch, all samples of its batches belong to the epoch.
    if not kinds or "external_source" in kinds:
        return
    names = sorted(built[0].reader_meta())
    named = next((name for name in names if not name.startswith("__")), None)
    if named is not None:
        cure = f"pass reader_name={named!r}"
    elif names:
        cure = "pass reader_name='reader', and name='reader' to the reader"
    else:
        cure = "pass size, the number of samples of an epoch"
    if config.mask is not None:
        raise ValueError(
            f"mask={config.mask!r} marks the samples of an epoch, but this iterator has no epochs: "
            f"{cure}"
        )
    if names:
        warn_user(
            f"the graph's readers are {names}, but without reader_name the iterator has no epochs: "
            f"it never raises StopIteration, and has no len(). To end epochs, {cure}",
            UserWarning,
        )


def check_orders(built: Sequence[Pipeline], factory: PipelineFactory) -> None:
    """Warns if the readers of a pipeline deliver their samples in different orders.

    Readers of pairs, such as images and masks, need the same order. Independent readers are valid,
    such as readers of labeled and of unlabeled images.

    Args:
        built: Built pipelines.
        factory: The factory of the pipelines.
    """
    for index, pipeline in enumerate(built):
        metas = pipeline.reader_meta()
        if len(metas) < 2:
            return
        operators = {
            operator[1]: operator for operator in graph_operators(pipeline, factory, index)
        }
        readers = [operators.get(name, ("", name, {})) for name in metas]
        orders = [_order(metas[name], kind, arguments) for kind, name, arguments in readers]
        differing = [
            key
            for key in dict.fromkeys(key for order in orders for key in order)
            if len({order[key] for order in orders if key in order}) > 1
        ]
        if differing or sum(order.get("seed") == _DERIVED for order in orders) > 1:
            labels = labels_of([(kind, name) for kind, name, _ in readers])
            texts = [f"{label} ({_text(order)})" for label, order in zip(labels, orders)]
            warn_user_once(
                f"the readers {', '.join(texts[:-1])} and {texts[-1]} differ in "
                f"{', '.join(differing) or 'seed'}, so that their orders differ: an image may get "
                "the mask of another image. Pass equally many files and equal arguments to the "
                "readers, and the same seed= if they shuffle. If they are independent, ignore this "
                "warning",
                UserWarning,
            )
            return


def _order(meta: Mapping[str, Any], kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that determine the order of a reader's samples, by name.

    Args:
        meta: DALI's metadata of the reader.
        kind: The kind of the reader, such as "readers.file".
        arguments: The arguments of the reader, or their texts.
    """
    names = ("random_shuffle", "shuffle_after_epoch")
    shuffles = {key: str(arguments.get(key, False)) == "True" for key in names}
    order = {
        "number of samples": meta["epoch_size"],
        "num_shards": meta["number_of_shards"],
        "shard_id": meta["shard_id"],
        "stick_to_shard": bool(meta["stick_to_shard"]) and meta["number_of_shards"] > 1,
        "pad_last_batch": bool(meta["pad_last_batch"]),
        **shuffles,
    }
    if any(shuffles.values()):
        order["kind of reader"] = reader_files.reader_of(kind) in _RECORD_READERS
    if shuffles["random_shuffle"]:
        order["initial_fill"] = str(arguments.get("initial_fill", _INITIAL_FILL))
        order["seed"] = str(arguments.get("seed", _DERIVED))
    return order


def _text(order: Mapping[str, Any]) -> str:
    """Describes the number of samples and the shuffling of a reader, given its `_order`."""
    shuffling = "shuffle_after_epoch" if order["shuffle_after_epoch"] else "not shuffled"
    if order["random_shuffle"]:
        seed = order["seed"]
        shuffling = "shuffled without seed=" if seed == _DERIVED else f"seed={seed}"
    return f"{order['number of samples']:,} samples, {shuffling}"


def warn_of_rotated_videos(pipeline: Pipeline) -> None:
    """Warns if a video reader of a graph reads a video whose frames players rotate.

    A source raises an error for such a video, but a reader reads the files itself.
    """
    for instance in getattr(pipeline, "_ops", None) or ():
        # Private in DALI. Serializing the pipeline would take long for long lists of files.
        operator = getattr(instance, "_op", None)
        if not getattr(operator, "schema_name", "").startswith(_VIDEO_READERS):
            continue
        files = reader_files.video_files(getattr(operator, "_init_args", {}))
        for number in spread(len(files), _MOST_VIDEOS).tolist():
            try:
                rotation = rotation_of(files[number])
            except (OSError, ValueError):  # the reader reports the file
                continue
            if rotation:
                warn_user(
                    f"the frames of {printable(files[number])} are {rotation} for display, which "
                    f"{operator_name(instance)} ignores. To store the frames as they are "
                    "displayed, convert such videos, e.g. by ffmpeg -i video.mp4 -c:v libvpx-vp9 "
                    "video.webm"
                )
                break
