"""The layout of packed data sets: names of features, and the descriptions that TFDS reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .dataset import TEXT, Feature, LeRobotDataset
from .image_encoding import is_jpeg

STEPS, METADATA = "steps", "episode_metadata"
INSTRUCTION, FIRST, LAST = "language_instruction", "is_first", "is_last"
TASK_INDEX, TIMESTAMP = "task_index", "timestamp"
_OBSERVATION = "observation"
_CLASSES = "tensorflow_datasets.core.features."
_DICT = f"{_CLASSES}features_dict.FeaturesDict"
_BOOL = Feature("bool", ())
_TEXT = Feature(TEXT, ())


def step_key(name: str) -> str:
    """Returns the key that a feature of the steps has in packed records.

    ``observation.state`` becomes ``steps/observation/state``, as in Open X-Embodiment. Other dots
    stay, because ``action`` and ``action.original`` may both exist.
    """
    prefix, _, rest = name.partition(".")
    return f"{STEPS}/{prefix}/{rest}" if prefix == _OBSERVATION and rest else f"{STEPS}/{name}"


def packed_features(dataset: LeRobotDataset) -> dict[str, Feature]:
    """Returns the features of the packed records, by key.

    Raises:
        ValueError: If a feature is named "observation", and others are named "observation.NAME".
    """
    features = {step_key(name): feature for name, feature in dataset.features.items()}
    folder = f"{STEPS}/{_OBSERVATION}"
    if folder in features and any(key.startswith(f"{folder}/") for key in features):
        raise ValueError(
            f"the feature {_OBSERVATION!r} can't be next to 'observation.' features in records. "
            f"Pass --exclude {_OBSERVATION}"
        )
    derived = {FIRST: _BOOL, LAST: _BOOL}
    if TASK_INDEX in dataset.features:
        derived[INSTRUCTION] = _TEXT
    for name, feature in derived.items():  # features of the data set take precedence
        features.setdefault(f"{STEPS}/{name}", feature)
    for name, value in episode_values(dataset, 0).items():
        features[f"{METADATA}/{name}"] = _feature_of(value)
    return features


def episode_values(dataset: LeRobotDataset, number: int) -> dict[str, Any]:
    """Returns the metadata of an episode, by name; the value of "task" is empty."""
    episode = dataset.episodes[number]
    values = {
        **episode.metadata,
        "episode_index": episode.number,
        "fps": dataset.fps,
        "length": episode.length,
    }
    if dataset.robot_type:
        values["robot_type"] = dataset.robot_type
    if TASK_INDEX in dataset.features:
        values["task"] = ""  # the caller sets the task of the first step
    return values


def _feature_of(value: Any) -> Feature:
    if isinstance(value, str):
        return _TEXT
    dtypes = {bool: "bool", int: "int64", float: "float32"}
    return Feature(dtypes[type(value)], ())


def features_json(features: Mapping[str, Feature]) -> str:
    """Returns the text of features.json, which TFDS reads."""
    tree: dict[str, Any] = {}
    for key in sorted(features):
        *folders, name = key.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = _described(features[key])
    steps = {
        "pythonClassName": f"{_CLASSES}dataset_feature.Dataset",
        "sequence": {"feature": _dictionary(tree[STEPS]), "length": "-1"},
    }
    return _json(_dictionary({**tree, STEPS: steps}))


def _dictionary(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns TFDS's description of a dict of features.

    Args:
        tree: Descriptions of features, or dicts of descriptions, by name.
    """
    children = {
        name: node if "pythonClassName" in node else _dictionary(node)
        for name, node in tree.items()
    }
    return {"featuresDict": {"features": children}, "pythonClassName": _DICT}


def _described(feature: Feature) -> dict[str, Any]:
    """Returns TFDS's description of a feature."""
    shape = {"dimensions": [str(size) for size in feature.shape]} if feature.shape else {}
    if feature.is_image:
        image = {
            "dtype": "uint8" if feature.depth is None else "uint16",
            "encodingFormat": "jpeg" if is_jpeg(feature) else "png",
            "shape": shape,
        }
        return {"image": image, "pythonClassName": f"{_CLASSES}image_feature.Image"}
    if feature.dtype == TEXT and not feature.shape:
        return {"pythonClassName": f"{_CLASSES}text_feature.Text", "text": {}}
    is_float = feature.dtype != TEXT and np.dtype(feature.dtype).kind == "f"
    tensor = {
        "dtype": "float32" if is_float else feature.dtype,  # records have floats of 32 bits
        "encoding": "none",
        "shape": shape,
    }
    kind = "tensor_feature.Tensor" if feature.shape else "scalar.Scalar"
    return {"pythonClassName": f"{_CLASSES}{kind}", "tensor": tensor}


def dataset_info_json(name: str, root: str, shards: Sequence[tuple[int, int]]) -> str:
    """Returns the text of dataset_info.json, which TFDS reads.

    Args:
        name: Name of the data set.
        root: Name of the LeRobot data set's folder.
        shards: The number of episodes, and the number of bytes, of each shard.
    """
    split = {
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        "name": "train",
        "numBytes": str(sum(num_bytes for _, num_bytes in shards)),
        "shardLengths": [str(episodes) for episodes, _ in shards],
    }
    return _json(
        {
            "description": f"Packed from the LeRobot data set {root} by dalijax.",
            "fileFormat": "tfrecord",
            "name": name,
            "splits": [split],
            "version": "1.0.0",
        }
    )


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
