"""Random episodes and random fields, compared with protobuf's parser and indexing by hand."""

import dataclasses

import numpy as np
import pytest

from dalijax.core.formats import spooled_array
from dalijax.core.robots import episode_columns
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import RLDS
from full import FULL

pytest.importorskip("tensorflow")

import tensorflow as tf
from episodes import write_file

NUMBERS = ("steps/scalar", "steps/vector", "steps/int", "steps/wide", "score", "box")
TEXTS, IMAGES = ("steps/text", "name"), ("steps/cam", "goal")
LENGTHS = (0, 0, 1, 1, 2, 3, 7, 20, 130)
SEEDS = range(200 if FULL else 12)


@dataclasses.dataclass
class Shape:
    """Sizes of arrays, and which features count the steps."""

    vector: int
    ints: int
    box: int
    counters: list[str]


def some_text(rng):
    return "".join(rng.choice(list("aé界 \n😀"), rng.choice([0, 1, 5, 127, 128, 300]))).encode()


def some_image(rng):
    """Returns bytes like those of an image, of sizes at which a varint becomes longer."""
    size = rng.choice([0, 1, *range(124, 128), 300, *range(16380, 16384)])
    return rng.choice([b"\xff\xd8", b"\x89PNG"]) + rng.bytes(int(size))


def some_episode(rng, length, shape):
    """Returns the features of an episode in a random order; images and texts are repeated."""
    images, texts = [some_image(rng) for _ in range(3)], [some_text(rng) for _ in range(3)]
    features = {
        "steps/cam": [images[k] for k in rng.integers(3, size=length)],
        "steps/text": [texts[k] for k in rng.integers(3, size=length)],
        "steps/scalar": rng.normal(size=length).astype(np.float32),
        "steps/vector": rng.normal(size=length * shape.vector).astype(np.float32),
        "steps/int": rng.integers(-300, 300, length * shape.ints),
        "steps/wide": rng.integers(-(1 << 62), 1 << 62, length),
        "steps/unused": rng.normal(size=rng.integers(4)).astype(np.float32),
        "name": [some_text(rng)],
        "score": [np.float32(rng.normal())],
        "box": rng.integers(-9, 1 << 40, shape.box),
        "goal": [some_image(rng)],
        **{name: np.arange(length) == 0 for name in shape.counters},
    }
    return {name: features[name] for name in rng.permutation(list(features)).tolist()}


def some_steps(rng):
    kind, start = rng.integers(4), int(rng.integers(-40, 40))
    ranges = range(start, start + int(rng.integers(1, 60)))
    return (None, start, ranges, rng.integers(-9, 9, rng.integers(1, 6)).tolist())[kind]


def some_fields(rng):
    fields = {}
    for number in range(rng.integers(1, 12)):
        feature = str(rng.choice([*NUMBERS, *TEXTS, *IMAGES]))
        steps = some_steps(rng) if feature.startswith("steps/") else None
        if feature not in NUMBERS and isinstance(steps, (range, list)):
            steps = -1
        fields[f"field {number}"] = feature if steps is None else (feature, steps)
    return fields


def parsed(record):
    """Returns the features of a tf.train.Example."""
    features = tf.train.Example.FromString(record.numpy()).features.feature
    kinds = {name: value.WhichOneof("kind") for name, value in features.items()}
    return {name: list(getattr(features[name], kind).value) for name, kind in kinds.items()}


def value_of(episode, length, feature, step):
    """Returns the value of a step, or of the episode."""
    values, of_steps = episode[feature], feature.startswith("steps/")
    width = len(values) // length if of_steps else len(values)
    part = values[step * width :][:width] if of_steps else values
    value = part if width > 1 else part[0]
    return value.decode() if feature in TEXTS else value


def wanted_value(episode, length, spec, step, is_mask):
    feature, steps = (spec, 0) if isinstance(spec, str) else spec

    def at(offset):
        return value_of(episode, length, feature, min(max(step + offset, 0), length - 1))

    if is_mask:
        return [0 <= step + offset < length for offset in steps]
    return at(steps) if isinstance(steps, int) else [at(offset) for offset in steps]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_episodes_equal_those_of_protobuf(seed, tmp_path, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(episode_columns, "_LOCAL_BUFFER", (1 << 20, 64, 1000)[seed % 3])
    monkeypatch.setattr(spooled_array, "MOST_BYTES", (1 << 24, 50)[seed % 2])
    counters = [f"steps/{name}" for name in ("is_first", "is_terminal") if rng.random() < 0.6]
    shape = Shape(*rng.choice([1, 2, 7], 3).tolist(), counters)
    files = [rng.choice(LENGTHS, rng.integers(5)).tolist() for _ in range(rng.integers(1, 4))]
    paths = [
        write_file(tmp_path / f"{k}.tfrecord", [some_episode(rng, n, shape) for n in file])
        for k, file in enumerate(files)
    ]
    lengths, fields = [length for file in files for length in file], some_fields(rng)
    features = {spec if isinstance(spec, str) else spec[0] for spec in fields.values()}
    try:
        source = RLDS(paths, fields, cache_dir=tmp_path / "cache")
    except ValueError as error:
        is_counted = counters or features & {"steps/cam", "steps/text"}
        words = "has no steps" if not sum(lengths) else "number of steps is unknown"
        assert (words in str(error) and not (is_counted and sum(lengths))) or not is_counted
        return
    episodes = [parsed(record) for record in tf.data.TFRecordDataset(paths)]
    steps = [(k, step) for k, length in enumerate(lengths) for step in range(length)]
    assert source.first.tolist() == [0, *np.cumsum(lengths)]
    assert source.episode.tolist() == [k for k, _ in steps]
    chosen = np.flatnonzero(rng.random(len(steps)) < 0.5)
    if len(chosen) and rng.random() < 0.5:
        source, steps = source.select(chosen), [steps[k] for k in chosen]
    indices = rng.integers(len(source), size=rng.integers(1, 40))
    for name, values in source.read(indices, list(source.fields)).items():
        is_mask, spec = name.endswith("_mask"), fields[name.removesuffix("_mask")]
        for index, value in zip(indices, values, strict=True):
            number, step = steps[index]
            want = wanted_value(episodes[number], lengths[number], spec, step, is_mask)
            if isinstance(want, (bytes, str)):
                assert (value if isinstance(value, str) else value.tobytes()) == want
            else:
                np.testing.assert_array_equal(value, want)
                assert (value.dtype, value.ndim) == (
                    source.fields[name].dtype,
                    source.fields[name].ndim,
                )
    for feature in features - {*IMAGES}:
        rows = steps if feature.startswith("steps/") else [(k, 0) for k in range(len(lengths))]
        want = [value_of(episodes[k], lengths[k], feature, step) for k, step in rows]
        np.testing.assert_array_equal(source.column(feature), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_indexes_of_random_episodes_are_those_of_a_scan(seed, tmp_path):
    rng = np.random.default_rng(seed)
    counters = [f"steps/{name}" for name in ("is_first", "is_terminal") if rng.random() < 0.6]
    shape = Shape(*rng.choice([1, 2, 7], 3).tolist(), counters)
    paths = [
        write_file(
            tmp_path / f"{k}.tfrecord",
            [some_episode(rng, n, shape) for n in rng.choice(LENGTHS, rng.integers(5))],
        )
        for k in range(rng.integers(1, 4))
    ]
    choices, indexes = [some_fields(rng) for _ in range(4)], []
    for folder in ("scanned", "shared"):
        for fields in choices:
            try:
                index = RLDS(paths, fields, cache_dir=tmp_path / folder)._index
            except ValueError as error:
                indexes.append(str(error))
            else:
                arrays = {name: (a.dtype, a.tolist()) for name, a in index.arrays.items()}
                indexes.append((index.about, arrays))
        if folder == "scanned":
            write_indexes(paths, {})
    assert indexes[: len(choices)] == indexes[len(choices) :]
