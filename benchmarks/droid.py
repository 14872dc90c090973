"""Episodes in DROID's shape for benchmarks: RLDS TFRecords, written without TensorFlow.

An episode has three cameras, states, actions and texts. Its images are taken from a pool of JPEGs,
so that a large data set is written quickly.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterable

import numpy as np
from PIL import Image

import photos
from dalijax.core.formats.example_message import example_message, record_parts

CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
WINDOW = 16  # actions
FIELDS = {
    "image": f"steps/observation/{CAMERAS[0]}",
    "wrist": f"steps/observation/{CAMERAS[2]}",
    "joints": "steps/observation/joint_position",
    "gripper": "steps/observation/gripper_position",
    "actions": ("steps/action", range(WINDOW)),
    "prompt": "steps/language_instruction",
}
_POOL = 300  # different images of a camera


def _jpegs(size: tuple[int, int], rng: np.random.Generator) -> list[bytes]:
    """Returns random crops of photographs as JPEGs of about 16 kB at 320x180."""
    sources, found = photos.photographs(), []
    for number in range(_POOL):
        image = sources[number % len(sources)]
        left, top = rng.uniform(0, 0.4, 2) * image.size
        width = rng.uniform(0.4, 0.6) * image.size[0]
        box = left, top, left + width, top + min(width * size[1] / size[0], image.size[1] - top)
        file = io.BytesIO()
        image.resize(size, Image.Resampling.BICUBIC, box=box).save(file, "JPEG", quality=95)
        found.append(file.getvalue())
    return found


def _episode(number: int, steps: int, pool: list[bytes], rng: np.random.Generator) -> bytes:
    floats = {
        "steps/action": 7,
        "steps/action_dict/joint_position": 7,
        "steps/action_dict/gripper_position": 1,
        "steps/observation/joint_position": 7,
        "steps/observation/gripper_position": 1,
        "steps/observation/cartesian_position": 6,
        "steps/reward": 1,
    }
    numbers = np.arange(steps)
    images = rng.integers(0, len(pool), (len(CAMERAS), steps)).tolist()
    texts = {
        f"steps/language_instruction{k}": f"put cube {number % 40} away{k}" for k in ("", "_2")
    }
    return example_message(
        {
            **{
                f"steps/observation/{name}": [pool[k] for k in row]
                for name, row in zip(CAMERAS, images)
            },
            **{
                name: rng.normal(size=steps * width).astype(np.float32)
                for name, width in floats.items()
            },
            "steps/is_first": numbers == 0,
            "steps/is_last": numbers == steps - 1,
            **{name: [text.encode()] * steps for name, text in texts.items()},
            "episode_metadata/file_path": [f"/data/success/{number}.h5".encode()],
        }
    )


def _write(path: pathlib.Path, records: Iterable[bytes]) -> None:
    """Writes a TFRecord file."""
    with path.open("wb") as out:
        for data in records:
            out.writelines(record_parts(data))


def make(folder: pathlib.Path, episodes: int, files: int, size: tuple[int, int]) -> list[str]:
    """Writes episodes of 60 to 300 steps, and returns the paths of the files.

    Args:
        folder: The directory. A data set of the same arguments in it is not written again.
        episodes: Number of episodes.
        files: Number of files.
        size: Width and height of the images.
    """
    folder = folder / f"{episodes}-{files}-{size[0]}x{size[1]}"
    paths = [folder / f"droid-train.tfrecord-{k:05d}-of-{files:05d}" for k in range(files)]
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        pool = _jpegs(size, rng)
        for file, path in enumerate(paths):
            numbers = range(file * episodes // files, (file + 1) * episodes // files)
            lengths = [int(rng.integers(60, 301)) for _ in numbers]
            _write(path, (_episode(k, n, pool, rng) for k, n in zip(numbers, lengths)))
        done.touch()
    return [str(path) for path in paths]
