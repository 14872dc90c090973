"""Draws episodes of a robot arm and writes them as RLDS TFRecords, so that no download is needed.

The arm has two joints, and reaches for one of three discs that its instruction names. A camera
shows the scene, and another follows the hand.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue")
MOST_STEPS = 60  # of an episode


def points(angles: Any) -> list[tuple[float, float]]:
    """Returns the pixels of the shoulder, the elbow and the hand."""
    sums = np.cumsum(angles)
    x, y = 64 + np.cumsum(np.sin(sums) * (28, 20)), 104 - np.cumsum(np.cos(sums) * (28, 20))
    return [(64, 104), *zip(x.tolist(), y.tolist())]


def jpeg(image: Image.Image, box: tuple[float, ...]) -> bytes:
    """Returns a part of an image as a JPEG."""
    image.crop(tuple(map(round, box))).save(file := io.BytesIO(), "JPEG", quality=90)
    return file.getvalue()


def draw_episode(rng: np.random.Generator) -> dict[str, list[Any]]:
    """Draws an episode; returns its features, each a list of the values of all steps."""
    angles, goals = rng.uniform(-1, 1, 2), rng.uniform((-1.2, 0.3), (1.2, 1.5), (3, 2))
    color, is_close, steps = int(rng.integers(3)), False, list[dict[str, list[Any]]]()
    while not is_close and len(steps) < MOST_STEPS:
        action = np.clip((goals[color] - angles) / 4, -0.15, 0.15) + rng.normal(0, 0.01, 2)
        pen = ImageDraw.Draw(image := Image.new("RGB", (128, 128), "beige"))
        for name, goal in zip(COLORS, goals):
            pen.circle(points(goal)[-1], 6, fill=name)
        pen.line(points(angles), "black", 4)
        x, y = points(angles)[-1]
        steps.append(
            {
                "observation/front": [jpeg(image, (16, 32, 112, 128))],
                "observation/wrist": [jpeg(image, (x - 16, y - 16, x + 16, y + 16))],
                "observation/state": angles.tolist(),
                "action": action.tolist(),
                "language_instruction": [f"reach the {COLORS[color]} disc".encode()],
                "is_first": [int(not steps)],
            }
        )
        is_close, angles = np.abs(goals[color] - angles).max() < 0.05, angles + action
    return {f"steps/{name}": [v for step in steps for v in step[name]] for name in steps[0]}


def write_episodes(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes two TFRecord files of episodes, as TFDS does: each is a tf.train.Example."""
    import tensorflow as tf  # needed only to write

    def feature(values: list[Any]) -> Any:
        if isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if isinstance(values[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        with tf.io.TFRecordWriter(f"{folder}/arm-train.tfrecord-0000{number}-of-00002") as writer:
            for _ in range(count // 2):
                table = {name: feature(values) for name, values in draw_episode(rng).items()}
                features = tf.train.Features(feature=table)
                writer.write(tf.train.Example(features=features).SerializeToString())
    return folder
