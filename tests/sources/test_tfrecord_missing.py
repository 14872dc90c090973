"""Records that lack a feature, compared with tf.io.parse_single_example."""

import numpy as np
import pytest

from dalijax import data_iterator
from dalijax.sources import Field, TFRecord

tf = pytest.importorskip("tensorflow")

BOX = [1.0, 2.0, 3.0, 4.0]
LISTS = {
    "float32": (BOX, Field(np.float32, 1), tf.float32),
    "int64": ([5, -6, 7], Field(np.int64, 1), tf.int64),
    "one number": ([5], Field(np.int64, 1), tf.int64),
}
VALUES = {
    "int": ([5], 9, -1, None, tf.int64),
    "float": ([0.5], 9.0, 1, None, tf.float32),
    "bytes": ([b"abc"], b"de", b"", None, tf.string),
    "text": (["té".encode()], b"d", "none", Field(None), tf.string),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def feature(values):
    if values is None:
        return tf.train.Feature()
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def write(path, rows):
    """Writes rows of a number y and a feature x, which may be empty (None) or "missing"."""
    examples = []
    for number, values in enumerate(rows):
        named = {"y": feature([number])}
        if values != "missing":
            named["x"] = feature(values)
        examples.append(tf.train.Example(features=tf.train.Features(feature=named)))
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            writer.write(example.SerializeToString())
    return str(path)


def parsed(path, spec):
    return [
        tf.io.parse_single_example(record, {"x": spec})["x"]
        for record in tf.data.TFRecordDataset(path)
    ]


def orders(values):
    lacking = ("missing", None)
    yield from ([first, values, second, values] for first in lacking for second in lacking)
    yield [values, "missing", None]


@pytest.mark.parametrize("kind", LISTS)
def test_lists_are_empty_like_varlen_features(kind, tmp_path):
    values, field, dtype = LISTS[kind]
    for number, rows in enumerate(orders(values)):
        path = write(tmp_path / str(number), rows)
        source = TFRecord(path, {"x": "x"}, kinds={"x": field})
        read = source.read(np.arange(len(rows)), ["x"])["x"]
        for value, wanted in zip(read, parsed(path, tf.io.VarLenFeature(dtype)), strict=True):
            np.testing.assert_array_equal(value, wanted.values.numpy(), strict=True)
    # Several numbers in the first record that has the feature are a list.
    for rows in ([values * 2, "missing", values], ["missing", values * 2, values]):
        read = TFRecord(write(tmp_path / "x", rows), {"x": "x"}).read(np.arange(3), ["x"])["x"]
        wanted = [[] if row == "missing" else row for row in rows]
        assert [value.tolist() for value in read] == wanted


@pytest.mark.parametrize("kind", VALUES)
def test_defaults_match_fixed_length_features(kind, tmp_path):
    values, other, default, field, dtype = VALUES[kind]
    kinds = {"x": field} if field else None
    for number, rows in enumerate([*orders(values), [values, [other], "missing"]]):
        path = write(tmp_path / str(number), rows)
        source = TFRecord(path, {"x": "x", "y": "y"}, kinds=kinds, defaults={"x": default})
        read = source.read(np.arange(len(rows)), ["x"])["x"]
        spec = tf.io.FixedLenFeature([], dtype, default_value=default)
        for value, wanted in zip(read, parsed(path, spec), strict=True):
            if dtype == tf.string:
                data = value.encode() if kind == "text" else value.tobytes()
                assert data == wanted.numpy()
            else:
                assert value == wanted.numpy() and value.dtype.itemsize == 4
        before = source.identity()
        more = TFRecord(
            path, {"x": "x", "y": "y"}, kinds=kinds, defaults={"x": default * 3 or b"3"}
        )
        if default:
            assert more.identity() != before
        with pytest.raises(ValueError, match=r"pass defaults=\{'x': \.\.\.\}"):
            TFRecord(path, {"x": "x"}, kinds=kinds)


def test_defaults_of_lists_reach_the_batch(tmp_path):
    path = write(tmp_path / "a", [None, BOX, "missing"])
    source = TFRecord(path, {"x": "x", "y": "y"}, defaults={"x": [0, 0, 0, 1]})
    batch = next(
        data_iterator(lambda x, y: (x, y), ["x", "y"], as_numpy=True)(
            source=source, batch_size=3, shuffle=False
        )
    )
    wanted = [
        value.numpy()
        for value in parsed(path, tf.io.FixedLenFeature([4], tf.float32, [0.0, 0.0, 0.0, 1.0]))
    ]
    np.testing.assert_array_equal(batch["x"], wanted, strict=True)
    np.testing.assert_array_equal(batch["y"], np.arange(3, dtype=np.int32), strict=True)


def test_mistakes_are_named(tmp_path):
    path = write(tmp_path / "a", ["missing", [5], "missing"])
    words = r"a: record 0 has no 'x'. It has \['y'\]. If records may lack it, pass defaults=\{'x'"
    with pytest.raises(ValueError, match=words):
        TFRecord(path, {"x": "x"})
    with pytest.raises(ValueError, match="record 0 has no value of 'x'. If records may lack it"):
        TFRecord(write(tmp_path / "b", [None, [5]]), {"x": "x"})
    # A feature that no record has is a mistake, whatever its default.
    for more in ({"kinds": {"z": Field(np.int64, 1)}}, {"defaults": {"z": 0}}):
        with pytest.raises(ValueError, match=r"no record has 'zz'. The first record has \['y'\]"):
            TFRecord(path, {"z": "zz"}, **more)
    for default in (0.5, "text", [1], b"x"):
        with pytest.raises(
            ValueError,
            match="requires an integer that fits into int.. as its default in defaults=, not",
        ):
            TFRecord(path, {"x": "x"}, defaults={"x": default})
    with pytest.raises(
        ValueError, match="requires a list of integers .* as its default in defaults=, not 1"
    ):
        TFRecord(path, {"x": "x"}, kinds={"x": Field(np.int64, 1)}, defaults={"x": 1})
    with pytest.raises(ValueError, match=r"defaults has \['w'\], but the fields are \['x'\]"):
        TFRecord(path, {"x": "x"}, defaults={"w": 0})
    with pytest.raises(ValueError, match="has floats, but the first record has integers"):
        TFRecord(write(tmp_path / "c", ["missing", [5], [0.5]]), {"x": "x"}, defaults={"x": 0})


@pytest.mark.parametrize(
    "values, default, kind, words",
    (
        ([5], 1 << 70, None, "an integer that fits into int64"),
        ([5], 300, Field(np.int8), "an integer that fits into int8"),
        ([0.5], 1e300, None, "a number that fits into float32"),
        ([0.5, 1.0], [1e300], None, "a list of numbers that fit into float32"),
        ([5, 6], [[1], [1, 2]], None, "a list of integers"),
        ([b"a"], b"\xff", Field(None), "text in UTF-8"),
        ([b"a"], bytearray(b"a"), None, "bytes or text"),
    ),
)
def test_unsuitable_defaults_are_named(values, default, kind, words, tmp_path):
    path = write(tmp_path / "a", [values, "missing"])
    kinds = {"x": kind} if kind else None
    with pytest.raises(ValueError, match=rf"'x' of .*a: record 0 requires {words}"):
        TFRecord(path, {"x": "x"}, kinds=kinds, defaults={"x": default})


def test_the_identity_has_whole_defaults(tmp_path):
    path = write(tmp_path / "a", [[b"a"], *["missing"] * 2, *[[b"a"]] * 200])
    middle = [
        TFRecord(path, {"x": "x"}, defaults={"x": bytes(2000) + byte + bytes(2000)}).identity()
        for byte in (b"a", b"b")
    ]
    assert middle[0] != middle[1]


@pytest.mark.parametrize(
    "arguments, kind, words",
    (
        ({"fields": {1: "x"}}, TypeError, "the names of fields must be strings, not 1"),
        ({"fields": {"": "x"}}, TypeError, "the names of fields must be strings, not ''"),
        ({"fields": {"x": b"x"}}, TypeError, r"fields\['x'\] must be a feature, .*, not b'x'"),
        ({"fields": {"x": None}}, TypeError, r"fields\['x'\] must be a feature, .*, not None"),
        ({"fields": {"x": (b"x", 1)}}, TypeError, r"must be a feature, .*, not \(b'x', 1\)"),
        ({"kinds": {"x": np.int64}}, TypeError, r"kinds\['x'\] must be a dalijax.sources.Field"),
        ({"kinds": [1]}, TypeError, r"kinds must be a dict"),
        ({"defaults": 5}, TypeError, r"defaults must be a dict"),
    ),
)
def test_arguments_of_other_types_are_named(arguments, kind, words, tmp_path):
    with pytest.raises(kind, match=words):
        TFRecord(write(tmp_path / "a", [[5]]), **{"fields": {"x": "x"}, **arguments})
