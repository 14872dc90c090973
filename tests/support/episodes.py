"""Robot episodes in RLDS's format, written by TensorFlow, and their steps as tf.data reads them."""

import io

import numpy as np
import tensorflow as tf
from PIL import Image

LENGTHS = ((3, 1, 0, 4), (2, 1))  # number of steps of the episodes of each file
STEPS = sum(map(sum, LENGTHS))
WIDTH = 3  # numbers of an action
FIELDS = {
    "image": "steps/observation/cam",
    "before": ("steps/observation/cam", -1),
    "after": ("steps/observation/wrist", 2),
    "state": "steps/observation/state",
    "gripper": "steps/observation/gripper",
    "number": "steps/number",
    "action": ("steps/action", range(4)),
    "past": ("steps/gripper", [-2, 0]),
    "prompt": "steps/language_instruction",
    "path": "episode_metadata/file_path",
    "success": "episode_metadata/success",
}


def jpeg(level, size=(16, 16)):
    """Returns a JPEG whose pixels all have one level."""
    file = io.BytesIO()
    Image.fromarray(np.full((*size, 3), level, np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def level_of(number, camera=0):
    """The level of the images of a step."""
    return 12 * number + 7 * camera


def feature(values):
    """Returns a tf.train.Feature of bytes, floats or integers."""
    values = list(values)
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], (float, np.floating)):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(v) for v in values]))


def episode(number, start, length):
    """Returns the features of an episode.

    Args:
        number: The number of the episode.
        start: The number of its first step.
        length: Its number of steps.
    """
    steps = range(start, start + length)
    rng = np.random.default_rng(number)
    floats = {
        "steps/action": rng.normal(size=length * WIDTH),
        "steps/observation/state": rng.normal(size=length * 2),
        "steps/observation/gripper": rng.random(length),
        "steps/gripper": rng.random(length),
    }
    return {
        "steps/observation/cam": [jpeg(level_of(k)) for k in steps],
        "steps/observation/wrist": [jpeg(level_of(k, 1)) for k in steps],
        **{name: values.astype(np.float32) for name, values in floats.items()},
        "steps/number": steps,
        "steps/is_first": [k == start for k in steps],
        "steps/language_instruction": [f"do {number} é".encode()] * length,
        "episode_metadata/file_path": [f"/x/{number}.h5".encode()],
        "episode_metadata/success": [number % 2],
    }


def episodes(lengths=LENGTHS):
    """Returns the episodes of each file."""
    files, number, start = [], 0, 0
    for file in lengths:
        files.append([])
        for length in file:
            files[-1].append(episode(number, start, length))
            number, start = number + 1, start + length
    return files


def message(features):
    """Returns an episode as a serialized tf.train.Example."""
    table = {name: feature(values) for name, values in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=table)).SerializeToString()


def write_file(path, rows):
    """Writes a file of episodes, or of serialized messages."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(row if isinstance(row, bytes) else message(row))
    return str(path)


def write(folder, files=None):
    """Writes files of episodes; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = episodes() if files is None else files
    return [
        write_file(folder / f"robot-train.tfrecord-{number:05d}-of-{len(files):05d}", rows)
        for number, rows in enumerate(files)
    ]


def steps_of(paths):
    """Returns the features of each step, with neighbors and windows, as tf.data reads them."""
    rows = []
    for raw in tf.data.TFRecordDataset(paths):
        table = {}
        for name, value in tf.train.Example.FromString(raw.numpy()).features.feature.items():
            table[name] = list(getattr(value, value.WhichOneof("kind")).value)
        count = len(table["steps/is_first"])
        arrays = {
            name: np.array(values).reshape(count, -1)
            for name, values in table.items()
            if name.startswith("steps/") and count and not isinstance(values[0], bytes)
        }
        for step in range(count):

            def at(offset, step=step, last=count - 1):
                return min(max(step + offset, 0), last)

            window, past = [at(k) for k in range(4)], [at(-2), step]
            rows.append(
                {
                    "image": table["steps/observation/cam"][step],
                    "before": table["steps/observation/cam"][at(-1)],
                    "after": table["steps/observation/wrist"][at(2)],
                    "state": arrays["steps/observation/state"][step],
                    "gripper": arrays["steps/observation/gripper"][step, 0],
                    "number": arrays["steps/number"][step, 0],
                    "action": arrays["steps/action"][window],
                    "action_mask": np.arange(step, step + 4) < count,
                    "past": arrays["steps/gripper"][past, 0],
                    "past_mask": np.array([step >= 2, True]),
                    "prompt": table["steps/language_instruction"][step].decode(),
                    "path": table["episode_metadata/file_path"][0].decode(),
                    "success": table["episode_metadata/success"][0],
                }
            )
    return rows
