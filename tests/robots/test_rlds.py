"""Steps of robot episodes compared with tf.data's reading; damaged and unsuitable episodes."""

import gzip
import itertools
import json
import os
import pathlib
import pickle
import shutil

import numpy as np
import pytest

from dalijax.core.formats import spooled_array
from dalijax.core.formats.buffered_reader import BufferedReader
from dalijax.core.formats.byte_files import open_files
from dalijax.core.formats.index import Index, save
from dalijax.core.formats.tfrecord_headers import masked_crc
from dalijax.core.remote.storage import Storage
from dalijax.core.robots.episode_columns import EpisodeFeatures, read_episodes
from dalijax.core.robots.episode_index import is_valid
from dalijax.sources import RLDS, Field, Mixture

pytest.importorskip("tensorflow")

from episodes import FIELDS, LENGTHS, STEPS, episode, episodes, message, steps_of, write, write_file

CAM = "steps/observation/cam"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def paths(folder):
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(scope="module")
def expected(paths):
    return steps_of(paths)


def assert_rows(values, rows):
    """Compares the columns of a source with rows of the oracle."""
    for name, column in values.items():
        for value, row in zip(column, rows, strict=True):
            if isinstance(row[name], bytes):
                assert value.tobytes() == row[name], name
            elif isinstance(row[name], str):
                assert value == row[name], name
            else:
                np.testing.assert_array_equal(value, row[name], name)


# Values


def test_steps_equal_those_of_tensorflow(paths, expected):
    source = RLDS(paths, FIELDS)
    assert len(source) == len(expected) == STEPS
    indices = np.array([*range(STEPS), 0, 9, 3, 3])
    values = source.read(indices, list(source.fields))
    assert list(source.fields) == [*FIELDS, "action_mask", "past_mask"]
    assert_rows(values, [expected[k] for k in indices])
    floats, numbers = np.dtype(np.float32), np.dtype(np.int32)
    assert dict(source.fields) == {
        **dict.fromkeys(("image", "before", "after"), Field(np.dtype(np.uint8), 1)),
        "state": Field(floats, 1, bypass=True),
        "gripper": Field(floats, bypass=True),
        "number": Field(numbers, bypass=True),
        "action": Field(floats, 2, bypass=True),
        "past": Field(floats, 1, bypass=True),
        "success": Field(numbers, bypass=True),
        **dict.fromkeys(("prompt", "path"), Field(None)),
        **dict.fromkeys(("action_mask", "past_mask"), Field(np.dtype(np.bool_), 1, bypass=True)),
    }
    assert repr(source) == f"RLDS(2 files: {STEPS} steps of 6 episodes)"


def test_names_and_episodes(paths):
    source = RLDS(paths, {"x": "steps/number"})
    lengths = [length for file in LENGTHS for length in file]
    assert source.first.tolist() == [0, *np.cumsum(lengths)]
    assert source.episode.tolist() == [k for k, n in enumerate(lengths) for _ in range(n)]
    names = [
        f"{path}: episode {number}, step {step}"
        for path, file in zip(paths, LENGTHS)
        for number, length in enumerate(file)
        for step in range(length)
    ]
    assert [source.name(index) for index in range(STEPS)] == names


def test_columns_of_all_steps(paths, expected):
    source = RLDS(paths, FIELDS)
    numbers = source.column("steps/number")
    assert numbers.tolist() == [row["number"] for row in expected]
    assert not numbers.flags.owndata and not numbers.flags.writeable  # memory-mapped
    states = np.array([row["state"] for row in expected])
    np.testing.assert_array_equal(source.column("steps/observation/state"), states)
    prompts = source.column("steps/language_instruction")
    assert prompts.tolist() == [row["prompt"] for row in expected]
    assert source.column("episode_metadata/success").tolist() == [0, 1, 0, 1, 0, 1]
    # A feature that no field uses is indexed when it is asked for.
    firsts = RLDS(paths, {"image": CAM}).column("steps/is_first")
    assert np.flatnonzero(firsts).tolist() == np.unique(source.first[:-1]).tolist()
    with pytest.raises(ValueError, match="contains images"):
        source.column(CAM)
    with pytest.raises(ValueError, match=r"episode 0 has no 'steps/x'. It has \['episode_meta"):
        source.column("steps/x")


def test_selected_steps(paths, expected):
    source = RLDS(paths, FIELDS)
    succeeded = source.column("episode_metadata/success")[source.episode] == 1
    good = source.select(succeeded)
    rows = [row for row in expected if row["success"]]
    assert len(good) == len(rows) < STEPS == len(source)
    assert_rows(good.read(np.arange(len(good)), list(good.fields)), rows)
    assert good.column("steps/number").tolist() == [row["number"] for row in rows]
    assert good.episode.tolist() == source.episode[succeeded].tolist()
    lengths = np.diff(good.first).tolist()
    assert lengths == [0, 1, 0, 4, 0, 1] and good.name(0).endswith(
        "-00000-of-00002: episode 1, step 0"
    )
    last = good.select(good.column("steps/number") >= 6).select([0, 2])
    numbers = source.column("steps/number")
    wanted = np.flatnonzero(succeeded & (numbers >= 6))[[0, 2]]
    assert last.column("steps/number").tolist() == numbers[wanted].tolist()
    assert source.select(wanted).identity() == last.identity()
    identities = [s.identity() for s in (source, good, last, source.select([0]))]
    assert len({*identities}) == 4
    assert source.select(np.ones(STEPS, bool)).identity() == source.identity()
    named = RLDS(paths, FIELDS, identity="robots 1")
    assert named.identity() == "robots 1" != named.select(wanted).identity()
    assert named.select(wanted).identity() != named.select([0]).identity()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (np.zeros(STEPS, bool), "leaves no record"),
        ([], "leaves no record"),
        (np.ones(3, bool), f"3 booleans for {STEPS} records"),
        ([0, STEPS], f"increasing numbers from 0 to {STEPS - 1}"),
        ([-1, 0], "increasing numbers"),
        ([2, 2], "numpy.unique"),
        ([1.5], r"numbers of records, .* not \[1.5\]"),
        ([[1]], r"not \[\[1\]\]"),
    ],
)
def test_unsuitable_selections_are_refused(paths, steps, words):
    source = RLDS(paths, {"x": "steps/number"})
    with pytest.raises((ValueError, TypeError), match=words):
        source.select(steps)


def test_sources_are_pickled_without_their_data(paths, expected):
    source = RLDS(paths, FIELDS).select(np.arange(STEPS) % 2 == 0)
    data = pickle.dumps(source)
    assert len(data) < 6000
    again = pickle.loads(data)
    assert_rows(again.read(np.arange(len(again)), list(again.fields)), expected[::2])
    assert again.identity() == source.identity() and again.first.tolist() == source.first.tolist()


# Features


def described(**features):
    """Returns TFDS's features.json of features of steps."""

    def tensor(dtype, *shape, encoding="none"):
        dimensions = {"dimensions": [str(length) for length in shape]} if shape else {}
        content = {"shape": dimensions, "dtype": dtype, "encoding": encoding}
        return {"pythonClassName": "...Tensor", "tensor": content}

    def dictionary(features):
        return {"pythonClassName": "...FeaturesDict", "featuresDict": {"features": features}}

    table = {k: v if isinstance(v, dict) else tensor(*v) for k, v in features.items()}
    zlib = tensor("float32", 2, encoding="zlib")
    table = {
        "zlib": zlib,
        "observation": dictionary({"cam": {"image": {"dtype": "uint8"}}}),
        **table,
    }
    steps = {
        "pythonClassName": "...Dataset",
        "sequence": {"feature": dictionary(table), "length": "-1"},
    }
    metadata = dictionary({"file_path": {"text": {}}, "success": tensor("bool")})
    return json.dumps(dictionary({"steps": steps, "episode_metadata": metadata}))


def numbers(**features):
    """Returns an episode of two steps with some features of numbers."""
    return {"steps/is_first": [1, 0], **{f"steps/{k}": v for k, v in features.items()}}


@pytest.mark.parametrize("place", ["next to the files", "in the parent"])
def test_the_description_of_tfds_defines_shapes_and_dtypes(tmp_path, place):
    row = numbers(
        flags=[1, 0], bytes=[0, 255, 7, 9], wide=[0.5, 1.5], matrix=np.arange(12.0), one=[3.0, 4.0],
        label=[2, 1], long=[1 << 40, -1], half=[0.5, 2.0],
    ) | {"episode_metadata/success": [1], CAM: [b"\xff\xd8a", b"\xff\xd8b"]}  # fmt: skip
    (path,) = write(tmp_path / "1.0.0", [[row]])
    names = ["flags", "bytes", "wide", "matrix", "one", "label", "long", "half"]
    fields = {name: f"steps/{name}" for name in names} | {"success": "episode_metadata/success"}
    text = described(
        flags=("bool",), bytes=("uint8", 2), wide=("float64",), matrix=("float32", 2, 3),
        one=("float32", 1), label={"classLabel": {"numClasses": "3"}}, long=("int64",),
        half=("float16",),
    )  # fmt: skip
    inferred = RLDS(path, fields).fields
    assert (inferred["matrix"].ndim, inferred["one"].ndim, inferred["flags"].dtype) == (1, 0, "i4")
    file = tmp_path / "1.0.0" / "features.json"
    (file if place == "next to the files" else tmp_path / "features.json").write_text(text)
    source = RLDS(path, {**fields, "window": ("steps/matrix", [-1, 0]), "image": CAM})
    values = source.read(np.array([0, 1]), list(source.fields))
    for name, dtype, array in [
        ("flags", np.bool_, [True, False]),
        ("bytes", np.uint8, [[0, 255], [7, 9]]),
        ("wide", np.float32, [0.5, 1.5]),  # records have 32 bits
        ("matrix", np.float32, np.arange(12).reshape(2, 2, 3)),
        ("one", np.float32, [[3], [4]]),
        ("label", np.int32, [2, 1]),
        ("long", np.int64, [1 << 40, -1]),
        ("half", np.float16, [0.5, 2]),
        ("success", np.bool_, [True, True]),
        ("window", np.float32, np.arange(12).reshape(2, 2, 3)[[[0, 0], [0, 1]]]),
    ]:
        np.testing.assert_array_equal(values[name], np.array(array, dtype), name, strict=True)
        assert source.fields[name] == Field(np.dtype(dtype), values[name].ndim - 1, bypass=True)


@pytest.mark.parametrize(
    ("spec", "values", "words"),
    [
        (("uint8",), [1, 256], r"'steps/x' of .*: episode 0 has the number 256, .* fit into uint8"),
        (("uint64",), [1, -1], "has the number -1, which does not fit into uint64"),
        (("bool",), [0, 2], "has the number 2, which does not fit into bool"),
        (("int32",), [0.5, 1.0], "has floats, but features.json describes int32"),
        (("float32",), [1, 2], "has integers, but features.json describes float32"),
        (
            ("float32", 3),
            [0.5] * 4,
            "has 4 numbers for 2 steps instead of 6, the shape .3,. of fea",
        ),
        (("float32", -1), [0.5] * 4, "'steps/x' of .* is ragged.*Pad it"),
        (("float32",), [b"a", b"b"], "has bytes, but features.json describes numbers"),
        ({"text": {}}, [1, 2], "has integers, but features.json describes texts"),
        ({"sequence": {"feature": {}, "length": "2"}}, [1, 2], "is ragged"),
        ("zlib", [b"a", b"b"], "'steps/zlib' of .* is a tensor with encoding='zlib'. Write it"),
    ],
)
def test_values_unlike_their_description_are_refused(tmp_path, spec, values, words):
    name = spec if isinstance(spec, str) else "x"
    (path,) = write(tmp_path, [[numbers(**{name: values})]])
    (tmp_path / "features.json").write_text(described(**({} if name == spec else {"x": spec})))
    with pytest.raises(ValueError, match=words):
        RLDS(path, {"x": f"steps/{name}"})


def test_descriptions_that_differ_or_are_damaged_are_refused(tmp_path):
    paths = [
        *write(tmp_path / "a", [[numbers(x=[1, 2])]]),
        *write(tmp_path / "b", [[numbers(x=[1, 2])]]),
    ]
    for name, dtype in (("a", "uint8"), ("b", "int32")):
        (tmp_path / name / "features.json").write_text(described(x=(dtype,)))
    assert RLDS(paths[0], {"x": "steps/x"}).fields["x"].dtype == np.uint8
    with pytest.raises(ValueError, match="describe 'steps/x' differently.*Mixture"):
        RLDS(paths, {"x": "steps/x"})
    for text in ('{"featuresDict"', "[]", '{"featuresDict": {"features": {"steps": 3}}}'):
        (tmp_path / "b" / "features.json").write_text(text)
        with pytest.raises(ValueError, match="b/features.json is not a description of features"):
            RLDS(paths[1], {"x": "steps/x"})


# Unsuitable data and arguments


def good(**changes):
    return {**episode(0, 0, 3), **{f"steps/{k}": v for k, v in changes.items()}}


def without(name):
    return {k: v for k, v in good().items() if k != name}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (good(action=[0.5] * 6), r"'steps/action' of .*: episode 1 has 6 numbers for 3 steps .* 9"),
        (good(action=[0.5] * 8), "episode 1 has 8 numbers for 3 steps"),
        (good(action=[]), "'steps/action' of .*: episode 1 has 0 numbers for 3 steps"),
        (good(action=[1, 2, 3]), "has integers, but earlier floats"),
        (good(language_instruction=[b"a"] * 2), "episode 1 has 2 values for 3 steps"),
        (good(language_instruction=[b"a", b"b", b"\xff"]), "episode 1 has bytes that are neither"),
        (good(**{"observation/cam": [b"\xff\xd8"] * 4}), "cam' of .* has 4 values for 3 steps"),
        (good(is_first=[1, 0]), "has 3 values for 2 steps|has 9 numbers for 2 steps"),
        (without("steps/action"), "episode 1 has no 'steps/action'. It has "),
        (without("episode_metadata/file_path"), "episode 1 has no 'episode_metadata/file_path'"),
        ({**good(), "episode_metadata/file_path": [b"a", b"b"]}, "has 2 values for the episode"),
        ({**good(), "episode_metadata/file_path": []}, "has 0 values for the episode"),
        (b"\x0a\x7fno message", r"episode 1 is not a tf.train.Example"),
    ],
)
def test_an_episode_unlike_the_first_is_named(tmp_path, row, words):
    paths = write(tmp_path, [[episode(0, 0, 3), row]])
    with pytest.raises(ValueError, match=words):
        RLDS(paths, {k: FIELDS[k] for k in ("image", "action", "prompt", "path")})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            good(action=[0.5] * 6),
            r"action' has .* float32 and the shape .2,. in .*1-of.*, but floats",
        ),
        (good(action=[1] * 9), "action' has .* int32 and .*1-of-00002, but floats of the shape"),
        (
            good(language_instruction=[b"\xff\xd8"] * 3),
            "instruction' of .*1-of.* is image, but text",
        ),
        (without("steps/action"), "1-of-00002: episode 0 has no 'steps/action'"),
    ],
)
def test_a_file_unlike_the_first_is_named(tmp_path, row, words):
    paths = write(tmp_path, [[episode(0, 0, 3)], [row]])
    with pytest.raises(ValueError, match=words):
        RLDS(paths, {k: FIELDS[k] for k in ("image", "action", "prompt", "path")})


def test_features_without_a_fixed_size_or_kind_are_refused(tmp_path):
    ragged = {"steps/x/ragged_flat_values": [1, 2, 3, 4], "steps/x/ragged_row_lengths_0": [1, 3]}
    (path,) = write(tmp_path, [[numbers(raw=[b"\0" * 8] * 2, none=[]) | ragged]])
    for feature, words in (
        ("steps/x", "episode 0 is ragged: steps have different numbers of values. Pad it"),
        ("steps/x/ragged_flat_values", "is ragged"),
        ("steps/raw", r"'steps/raw' of .*: episode 0 has bytes that are neither a JPEG, a PNG"),
        ("steps/none", "'steps/none' of .* has no values for 2 steps"),
    ):
        with pytest.raises(ValueError, match=words):
            RLDS(path, {"x": feature})


def test_steps_are_counted_by_other_features(tmp_path):
    rows = [{"steps/x": [0.5] * 2 * n, "steps/text": [b"a"] * n} for n in (2, 3, 0)]
    (path,) = write(tmp_path, [rows])
    source = RLDS(path, {"x": "steps/x", "text": "steps/text"})
    assert (len(source), source.fields["x"].ndim) == (5, 1) and source.first.tolist() == [
        0,
        2,
        5,
        5,
    ]
    with pytest.raises(
        ValueError, match="has neither 'steps/is_first' nor .* number of steps is unk"
    ):
        RLDS(path, {"x": "steps/x"})
    (tmp_path / "features.json").write_text(described(x=("float32", 2)))
    assert len(RLDS(path, {"x": "steps/x"})) == 5


def test_files_without_steps_and_damaged_files_are_refused(tmp_path, folder):
    for rows in ([], [episode(0, 0, 0)]):
        with pytest.raises(ValueError, match="has no steps"):
            RLDS(write_file(tmp_path / "none", rows), {"x": "steps/number"})
    data = pathlib.Path(sorted(folder.iterdir())[0]).read_bytes()
    for content, words in (
        (data[:-1], "cut: record 3 at byte .* is cut off"),
        (gzip.compress(data), "it is compressed"),
    ):
        (tmp_path / "cut").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            RLDS(tmp_path / "cut", {"x": "steps/number"})
    with pytest.raises(FileNotFoundError):
        RLDS(tmp_path / "gone*", {"x": "steps/number"})


def test_an_episode_of_4_gib_is_refused(tmp_path):
    size = (1 << 32).to_bytes(8, "little")
    path = tmp_path / "large"
    path.write_bytes(size + masked_crc(size).to_bytes(4, "little"))
    os.truncate(path, (1 << 32) + 16)  # sparse
    with pytest.raises(ValueError, match="episode 0 has 4,294,967,296 bytes, but at most"):
        RLDS(path, {"x": "steps/number"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "must map names of fields to features"),
        ({"x": ("steps/number", 1, 2)}, "must be a feature, or a pair of a feature and steps"),
        ({"x": 3}, "must be a feature"),
        ({1: "steps/number"}, "names of fields must be strings"),
        ({"x": ("steps/number", 1.5)}, "has the steps 1.5. Pass an integer"),
        ({"x": ("steps/number", True)}, "has the steps True"),
        ({"x": ("steps/number", range(0))}, r"has no steps: range\(0, 0\) is empty"),
        ({"x": ("episode_metadata/success", -1)}, "is a feature of the episode. Pass"),
        ({"x": (CAM, range(2)), "x_1": "steps/number"}, "'x_1', which is also the name of a value"),
        ({"x": ("steps/action", [0]), "x_mask": "steps/number"}, "the mask of the window 'x'"),
        ({"steps/number": "x"}, r"Did you mean \{'x': 'steps/number'\}"),
    ],
)
def test_unsuitable_fields_are_refused(paths, fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        RLDS(paths, fields)


def test_images_and_texts_of_a_window_have_a_field_each(paths):
    offsets, texts = [2, -1, 0], "steps/language_instruction"
    source = RLDS(paths, {"x": (CAM, offsets), "y": "steps/number", "z": (texts, offsets)})
    singles = {f"x_{k}": (CAM, step) for k, step in enumerate(offsets)}
    prompts = {f"z_{k}": (texts, step) for k, step in enumerate(offsets)}
    other = RLDS(paths, {**singles, "y": "steps/number", **prompts})
    assert list(source.fields) == [*other.fields, "x_mask", "z_mask"]
    steps = np.arange(STEPS)
    values, wanted = (s.read(steps, list(other.fields)) for s in (source, other))
    for name in other.fields:
        assert all(map(np.array_equal, values[name], wanted[name])), name
    after = source.first[source.episode + 1]
    inside = [steps + 2 < after, source.column("__step__") > 0, np.ones(STEPS, bool)]
    for name in ("x_mask", "z_mask"):
        np.testing.assert_array_equal(source.read(steps, [name])[name], np.stack(inside, axis=1))
    assert source.identity() != other.identity()


def test_png_cameras_are_opened_and_reported(tmp_path, caplog):
    png = b"\x89PNG\r\n\x1a\n"
    row = episode(0, 0, 2) | {"steps/depth": [png + b"a", png + b"b"]}
    (path,) = write(tmp_path, [[row]])
    source = RLDS(path, {"depth": "steps/depth", "image": CAM})
    assert "the fields ['depth'] are PNG images" in caplog.text
    assert [v.tobytes()[-1:] for v in source.read(np.array([1, 0]), ["depth"])["depth"]] == [
        b"b",
        b"a",
    ]


def test_images_of_an_episode(tmp_path):
    rows = [
        episode(k, 0, n) | {"episode_metadata/goal": [b"\xff\xd8%d" % k]}
        for k, n in enumerate((2, 0, 1))
    ]
    (path,) = write(tmp_path, [rows])
    values = RLDS(path, {"goal": "episode_metadata/goal"}).read(np.arange(3), ["goal"])["goal"]
    assert [value.tobytes() for value in values] == [b"\xff\xd80", b"\xff\xd80", b"\xff\xd82"]


def test_damaged_bytes_are_an_error_or_other_data(tmp_path):
    """Without checksums, damage is named, or read as other data; no read hangs."""
    rows = [{k: v for k, v in episode(n, 0, 2).items() if "wrist" not in k} for n in range(2)]
    for row in rows:
        row[CAM] = [b"\xff\xd8" + bytes(20)] * 2
    data = pathlib.Path(write_file(tmp_path / "a", rows)).read_bytes()
    fields = {k: v for k, v in FIELDS.items() if k not in ("after",)}
    rng, path = np.random.default_rng(3), tmp_path / "b"
    damages = [bytearray(data[:end]) for end in rng.integers(1, len(data), 25)]
    for bit in rng.integers(0, 8 * len(data), 100):
        damages.append(bytearray(data))
        damages[-1][bit // 8] ^= 1 << bit % 8
    features = {value if isinstance(value, str) else value[0] for value in fields.values()}
    wanted = EpisodeFeatures(tuple(features), {}, Storage(None), verify=False)
    num_errors = 0
    for number, damaged in enumerate(damages):
        path.write_bytes(damaged)
        try:
            (file,) = open_files([str(path)], wanted.storage)
            read_episodes(BufferedReader(file), wanted)
        except ValueError as error:
            num_errors += 1
            assert f"{path}: " in str(error)
        else:
            if number % 20 == 0:
                source = RLDS(path, fields, cache_dir=tmp_path / "c", verify=False)
                values = source.read(np.arange(len(source)), list(source.fields))
                assert all(len(column) == len(source) for column in values.values())
    assert 50 < num_errors < 125


# Indexes and identities


def test_the_index_is_stored_and_validated(paths, cache, caplog, expected):
    RLDS(paths, FIELDS)
    (file,) = cache.iterdir()
    stamp = file.stat().st_mtime_ns
    source = RLDS(paths, FIELDS)
    assert file.stat().st_mtime_ns == stamp and not caplog.records
    index = source._index
    save(
        str(file), Index(index.about, {**index.arrays, "text.ends": index.arrays["text.ends"][:-1]})
    )
    renewed = RLDS(paths, FIELDS)
    assert "belongs to other files" in caplog.text
    assert_rows(renewed.read(np.arange(STEPS), ["image", "prompt", "action"]), expected)


def test_damaged_arrays_of_an_index_are_found(paths, cache):
    index = RLDS(paths, FIELDS)._index
    wanted = EpisodeFeatures(tuple(index.about["kinds"]), {}, Storage(None))
    assert is_valid(index, wanted)
    texts = {f"{name}.value" for name, kind in index.about["kinds"].items() if kind == "text"}
    for name, array in index.arrays.items():
        wrongs = [array[:-1], array[:0], array.astype(np.complex64)]
        if not name.endswith(".value") or name in texts:
            wrongs.append(-np.ones_like(array, np.int32 if name in texts else np.int64))
            wrongs.append(np.full_like(array, 99_999) if array.itemsize > 1 else array[:2])
        for wrong in wrongs:
            assert not is_valid(Index(index.about, {**index.arrays, name: wrong}), wanted), name
        arrays = {key: value for key, value in index.arrays.items() if key != name}
        assert not is_valid(Index(index.about, arrays), wanted)
    assert not is_valid(Index(index.about, {**index.arrays, "x": array}), wanted)
    for key in ("names", "sizes", "first", "episodes", "kinds", "digests"):
        for wrong in (None, [], 3, [*index.about[key]][:1]):
            assert not is_valid(Index({**index.about, key: wrong}, index.arrays), wanted), key


def test_large_columns_are_written_to_disk(paths, monkeypatch, expected):
    fields = {**FIELDS, "huge": "steps/number"}
    usual = RLDS(paths, fields, cache_dir="/dev/null/none")._index
    monkeypatch.setattr(spooled_array, "MOST_BYTES", 10)
    source = RLDS(paths, fields, cache_dir="/dev/null/none")
    assert any(isinstance(a, np.memmap) for a in source._index.arrays.values())
    assert source._index.arrays.keys() == usual.arrays.keys()
    for name, array in usual.arrays.items():
        np.testing.assert_array_equal(source._index.arrays[name], array, name, strict=True)
    assert_rows(source.read(np.arange(STEPS), list(FIELDS)), expected)


def test_spooled_rows_keep_their_order_and_values(monkeypatch):
    monkeypatch.setattr(spooled_array, "MOST_BYTES", 40)
    for dtypes in itertools.product((np.int32, np.int64), repeat=3):
        spooled = spooled_array.SpooledArray()
        parts = [np.arange(12 * k, dtype=dtype).reshape(-1, 3) for k, dtype in enumerate(dtypes)]
        for part in parts:
            spooled.append(part)
        np.testing.assert_array_equal(spooled.array(), np.concatenate(parts))


def test_the_identity_depends_on_the_data_and_not_on_the_place(paths, tmp_path):
    identity = RLDS(paths, FIELDS).identity()
    moved = [shutil.copy(path, tmp_path) for path in paths]
    assert RLDS(moved, FIELDS).identity() == identity
    others = {**FIELDS, "action": ("steps/action", range(5))}, {k: FIELDS[k] for k in ("image",)}
    assert len({identity, *(RLDS(paths, fields).identity() for fields in others)}) == 3
    for change in ({"steps/gripper": [0.5] * 3}, {"steps/language_instruction": [b"do 1"] * 3}):
        files = episodes()
        files[0][0].update(change)
        assert RLDS(write(tmp_path, files), FIELDS).identity() != identity


def test_a_file_that_changed_is_refused(tmp_path):
    (path,) = write(tmp_path, [[episode(0, 0, 3)]])
    source = RLDS(path, FIELDS)
    os.link(path, tmp_path / "link")  # changes the ctime alone
    source.read(np.array([0]), ["image"])
    again, stat = RLDS(path, FIELDS), os.stat(path)
    changed = episode(0, 0, 3)
    changed["steps/gripper"][1] += 1
    write_file(path, [changed])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.path.getsize(path) == stat.st_size
    with pytest.raises(OSError, match="was changed after the source was opened"):
        again.read(np.array([0]), ["image"])
    with pytest.raises(OSError, match="was changed after the source was opened"):
        again.column("steps/is_first")


def test_a_mixture_of_two_cameras(paths, expected):
    cameras = [
        RLDS(paths, {"image": f"steps/observation/{name}", "number": "steps/number"})
        for name in ("cam", "wrist")
    ]
    mixture = Mixture([(camera, 1) for camera in cameras])
    values = mixture.read(np.arange(2 * STEPS), ["image", "number"])
    assert [v.tobytes() for v in values["image"][:STEPS]] == [row["image"] for row in expected]
    assert values["number"].tolist() == 2 * [row["number"] for row in expected]
    assert message(episode(0, 0, 1)).count(values["image"][STEPS].tobytes()) == 1


# Numbers of steps and episodes


def test_numbers_of_steps_and_episodes(paths):
    fields = {"step": "__step__", "episode": "__episode__", "image": CAM}
    source = RLDS(paths, fields)
    lengths = [length for file in LENGTHS for length in file]
    wanted = np.array([(step, k) for k, n in enumerate(lengths) for step in range(n)], np.int32)
    chosen = np.array([10, 0, 4, 7, 4])
    for numbers in (source, RLDS(paths, {k: fields[k] for k in ("step", "episode")})):
        values = numbers.read(chosen, ["step", "episode"])
        for column, name in enumerate(("step", "episode")):
            np.testing.assert_array_equal(values[name], wanted[chosen, column], strict=True)
            np.testing.assert_array_equal(numbers.column(fields[name]), wanted[:, column])
            assert numbers.fields[name] == Field(np.dtype(np.int32), bypass=True)
    some = source.select(np.arange(2, STEPS, 3))
    np.testing.assert_array_equal(some.column("__step__"), wanted[2::3, 0])
    assert some.read(np.array([1]), ["episode"])["episode"].tolist() == [wanted[5, 1]]
    assert pickle.loads(pickle.dumps(some)).identity() == some.identity() != source.identity()
    with pytest.raises(ValueError, match="'__step__' is of this step. Pass '__step__' alone"):
        RLDS(paths, {"step": ("__step__", range(4))})


# Folders


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        (
            ["r-test.tfrecord-00000-of-00001", "r-train.tfrecord-00000-of-00001"],
            "*-train.tfrecord*",
        ),
        (["r-test.tfrecord-00000-of-00001", "features.json"], "*-test.tfrecord*"),
        (["1.0.0/features.json", "1.0.1/r-val.tfrecord-0-of-1", "1.0.1/features.json"], None),
        (["a.tfrecord", "README.md", "notes"], "*.tfrecord"),
        (["a.tar", "README.md"], "*.tar"),
        (["a", "b"], "*"),
        ([".hidden"], "*"),
    ],
)
def test_a_folder_is_refused_with_a_pattern_of_its_files(files, pattern, tmp_path):
    for name in files:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).touch()
    wanted = tmp_path / "x" / (pattern or "1.0.1/*-val.tfrecord*")
    with pytest.raises(IsADirectoryError) as raised:
        RLDS(tmp_path / "x", FIELDS)
    assert str(raised.value).endswith(f"x is a directory. Pass its files, e.g. {wanted}")
