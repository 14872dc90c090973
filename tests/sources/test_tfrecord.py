"""TFRecord files compared with TensorFlow's reader and messages; damaged and truncated files."""

import gzip
import os
import pathlib
import pickle
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalijax.core.formats.example import floats, integers
from dalijax.core.formats.tfrecord_headers import masked_crc
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import Field, TFRecord
from full import FULL

tf = pytest.importorskip("tensorflow")

FIELDS = {"data": "image/encoded", "label": "image/class/label"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


def feature(value):
    values = value if isinstance(value, (list, tuple)) else [value]
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def example(values):
    features = tf.train.Features(feature={k: feature(v) for k, v in values.items()})
    return tf.train.Example(features=features).SerializeToString()


def write(path, rows):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(row if isinstance(row, bytes) else example(row))
    return str(path)


def row(i, size=3000):
    return {
        "image/encoded": bytes([i % 256]) * (size + i),
        "image/class/label": i - 4,
        "image/score": i / 8,
        "image/box": [float(i), 0.5, 1.0, 2.0],
        "tokens": list(range(-i, 200 * i, 7)),
        "image/text": f"té{i}".encode(),
    }


def test_records_by_number(tmp_path):
    paths = [write(tmp_path / f"{k}.tfrecord", map(row, range(k * 7, k * 7 + 7))) for k in range(3)]
    fields = {**FIELDS, "score": "image/score", "box": "image/box", "text": "image/text"}
    source = TFRecord(paths, fields, kinds={"text": Field(None)})
    assert len(source) == 21 and source.name(8) == f"{paths[1]}: record 1"
    assert dict(source.fields) == {
        "data": Field(np.dtype(np.uint8), 1),
        "label": Field(np.dtype(np.int32)),
        "score": Field(np.dtype(np.float32)),
        "box": Field(np.dtype(np.float32), 1),
        "text": Field(None),
    }
    indices = np.array([20, 0, 8, 8, 3])
    values = source.read(indices, list(source.fields))
    parsed = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(paths)]
    for place, index in enumerate(indices):
        known = parsed[index].features.feature
        assert values["data"][place].tobytes() == known["image/encoded"].bytes_list.value[0]
        assert values["label"][place] == known["image/class/label"].int64_list.value[0]
        assert values["score"][place] == known["image/score"].float_list.value[0]
        np.testing.assert_array_equal(values["box"][place], known["image/box"].float_list.value)
        assert values["text"][place] == f"té{index}"
    assert values["label"].dtype == np.int32 and values["box"][0].dtype == np.float32
    assert all(array.flags.aligned for array in values["box"])


def test_lists_of_numbers_of_any_length(tmp_path):
    path = write(tmp_path / "a", map(row, range(6)))
    source = TFRecord(path, {"x": "tokens"}, kinds={"x": Field(np.dtype(np.int64), 1)})
    for i, values in enumerate(source.read(np.arange(6), ["x"])["x"]):
        np.testing.assert_array_equal(values, np.array(row(i)["tokens"], np.int64), strict=True)
    narrow = TFRecord(path, {"x": "tokens"}, kinds={"x": Field(np.dtype(np.int32), 1)})
    assert narrow.read(np.array([5]), ["x"])["x"][0].dtype == np.int32
    path = write(tmp_path / "long", [{"x": list(range(5000)), "y": [0.5] * 5000}])
    long = TFRecord(path, {"x": "x", "y": "y"}).read(np.array([0]), ["x", "y"])
    np.testing.assert_array_equal(long["x"][0], np.arange(5000))
    np.testing.assert_array_equal(long["y"][0], np.full(5000, 0.5, np.float32))
    path = write(tmp_path / "b", [{"x": [1, 1 << 40]}])
    wide = TFRecord(path, {"x": "x"}, kinds={"x": Field(np.dtype(np.int32), 1)})
    with pytest.raises(
        ValueError, match=r"'x' of .*record 0 can't be read: .*does not fit into int32"
    ):
        wide.read(np.array([0]), ["x"])


def test_labels_of_64_bits_stay(tmp_path):
    path = write(tmp_path / "a", [{"x": 1}, {"x": -(1 << 62)}])
    source = TFRecord(path, {"x": "x"})
    assert source.fields["x"] == Field(np.dtype(np.int64))
    assert source.read(np.array([1]), ["x"])["x"][0] == -(1 << 62)


VALUE = st.one_of(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.lists(st.binary(max_size=300), min_size=1, max_size=1),
)


@settings(max_examples=60)
@given(row=st.dictionaries(st.text(max_size=5), VALUE, min_size=1, max_size=5))
def test_any_example_is_read_as_tensorflow_reads_it(row, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    path = write(folder / "a", [row])
    source = TFRecord(path, {f"f{n}": key for n, key in enumerate(row)}, cache_dir=folder)
    values = source.read(np.array([0]), list(source.fields))
    for (name, column), expected in zip(values.items(), row.values()):
        if source.fields[name].dtype == np.uint8:
            assert column[0].tobytes() == expected[0]
        else:
            np.testing.assert_array_equal(
                np.atleast_1d(column[0]), np.array(expected), strict=False
            )


def test_floats_at_any_address():
    numbers = np.arange(5, dtype=np.float32)
    for start in range(8):
        data = np.frombuffer(bytes(start) + numbers.tobytes(), np.uint8)[start:]
        assert floats(data).flags.aligned
        np.testing.assert_array_equal(floats(data), numbers, strict=True)


def test_the_context_of_sequence_examples(tmp_path):
    message = tf.train.SequenceExample(
        context=tf.train.Features(feature={"x": feature(7)}),
        feature_lists=tf.train.FeatureLists(
            feature_list={"x": tf.train.FeatureList(feature=[feature(1)])}
        ),
    )
    path = write(tmp_path / "a", [message.SerializeToString()])
    assert TFRecord(path, {"x": "x"}).read(np.array([0]), ["x"])["x"].tolist() == [7]


def tag(number, content):
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def test_numbers_that_are_not_packed(tmp_path):
    floats = b"".join(b"\x0d" + struct.pack("<f", x) for x in (1.5, 2.5))
    ints = b"\x08" + b"\xff" * 9 + b"\x01"  # -1
    features = [(b"f", tag(2, floats)), (b"one", tag(2, floats[:5])), (b"i", tag(3, ints))]
    entries = b"".join(tag(1, tag(1, name) + tag(2, value)) for name, value in features)
    path = write(tmp_path / "a", [tag(1, entries)])
    assert [f.name for f in tf.train.Example.FromString(tag(1, entries)).features.DESCRIPTOR.fields]
    values = TFRecord(path, {"x": "one", "y": "i"}).read(np.array([0]), ["x", "y"])
    assert values["x"].tolist() == [1.5] and values["y"].tolist() == [-1]
    with pytest.raises(ValueError, match="'f' of .*record 0 has numbers that are not packed"):
        TFRecord(path, {"x": "f"})


KINDS = {"list": Field(np.int64, 1), "text": Field(None)}


def random_record(random):
    """Returns a record's values, and its serialized Example; "label" is packed or not."""
    values = {
        "data": random.bytes(random.choice([0, 5, 5000])),
        "list": random.integers(-500, 500, random.integers(0, 4)).tolist(),
        "mixed": random.random(random.integers(0, 4)).astype(np.float32).tolist(),
        "text": "é" * random.integers(0, 3),
        "label": int(random.integers(-100, 100)),
        "other": int(random.integers(100)),
    }
    shown = {key: value for key, value in values.items() if key != "label"}
    shown["text"] = values["text"].encode()
    if not shown["mixed"]:  # would be a list of integers
        del shown["mixed"]
    if values["other"] < 20:
        del shown["other"]
        values["other"] = -1
    number = tf.train.Int64List(value=[values["label"]]).SerializeToString()
    packed = number if random.random() < 0.5 else b"\x08" + number[2:]
    return values, example(shown) + tag(1, tag(1, tag(1, b"label") + tag(2, tag(3, packed))))


def as_python(value):
    if isinstance(value, str):
        return value
    return value.tobytes() if value.dtype == np.uint8 else value.tolist()


@pytest.mark.parametrize("verify", (True, False))
@pytest.mark.parametrize("is_indexed", (False, True))
@pytest.mark.parametrize("seed", range(5))
def test_random_records_are_read_as_they_were_written(seed, is_indexed, verify, tmp_path):
    random, records, paths = np.random.default_rng(seed), [], []
    two = {"data": b"", "mixed": [0.5, 0.5], "text": b"", "label": 0, "list": [1]}
    for name in "abc":
        rows = [random_record(random) for _ in range(random.integers(9))]
        if not paths:  # the first record determines that "mixed" is a list
            rows.insert(0, ({**two, "text": "", "other": -1}, example(two)))
        path = pathlib.Path(write(tmp_path / name, [row for _, row in rows]))
        data, end = bytearray(path.read_bytes()), 0
        for number, (values, row) in enumerate(rows):
            end += 16 + len(row)
            is_damaged = (bool(paths) or number > 0) and random.random() < 0.2
            data[end - 1] ^= is_damaged  # the checksum, so that the values stay
            records.append((values, is_damaged))
        path.write_bytes(data)
        paths.append(str(path))
    if is_indexed:
        write_indexes(paths, {})
    source = TFRecord(
        paths,
        {key: key for key in records[0][0]},
        kinds=KINDS,
        defaults={"other": -1},
        verify=verify,
    )
    assert len(source) == len(records)
    for number, (values, is_damaged) in enumerate(records):
        if verify and is_damaged:
            with pytest.raises(ValueError, match="is damaged: its checksum is wrong"):
                source.read(np.array([number]), list(values))
            continue
        read = source.read(np.array([number]), list(values))
        assert {key: as_python(column[0]) for key, column in read.items()} == values


def test_packed_varints():
    numbers = [0, 1, 127, 128, 300, -1, -(1 << 63), (1 << 63) - 1]
    packed = tf.train.Int64List(value=numbers).SerializeToString()[2:]
    np.testing.assert_array_equal(integers(np.frombuffer(packed, np.uint8)), numbers)
    assert len(integers(np.zeros(0, np.uint8))) == 0
    for bad in (b"\x80", b"\x01\xff", b"\x80" * 10 + b"\x01"):
        with pytest.raises(ValueError, match="cut off|ten bytes"):
            integers(np.frombuffer(bad, np.uint8))


def test_checksums_match_tensorflow(tmp_path):
    sizes = [0, 1, 255, 256, 70_000]
    data = pathlib.Path(write(tmp_path / "a", [bytes(size) for size in sizes])).read_bytes()
    at = 0
    for size in sizes:
        assert masked_crc(data[at : at + 8]) == int.from_bytes(data[at + 8 : at + 12], "little")
        at += 16 + size


def test_a_truncated_file_is_refused_when_it_is_opened(tmp_path):
    data = pathlib.Path(write(tmp_path / "a", map(row, range(3)))).read_bytes()
    ends = [0]
    for _ in range(3):
        ends.append(ends[-1] + 16 + int.from_bytes(data[ends[-1] : ends[-1] + 8], "little"))
    for end in [*range(1, 20), *range(ends[1] - 3, ends[1] + 20), ends[2] + 11, ends[3] - 1]:
        if end in ends:
            continue
        (tmp_path / "cut").write_bytes(data[:end])
        number = sum(end > e for e in ends) - 1
        with pytest.raises(ValueError, match=rf"cut: record {number} at byte .* is cut off: "):
            TFRecord(tmp_path / "cut", FIELDS)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = write(tmp_path / "a", map(row, range(3)))
    data = bytearray(pathlib.Path(path).read_bytes())
    second = 16 + int.from_bytes(data[:8], "little")
    for at in (0, 5, 9, second, second + 10):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"b: the length of record {int(at >= second)} is damaged"
        ):
            TFRecord(tmp_path / "b", FIELDS)
    (tmp_path / "c.gz").write_bytes(gzip.compress(data))
    with pytest.raises(ValueError, match="it is compressed"):
        TFRecord(tmp_path / "c.gz", FIELDS)
    (tmp_path / "features.json").write_text('{\n  "name": "ein Würfel"\n}')
    with pytest.raises(ValueError, match="not a TFRecord file: it is text, such as JSON; omit it"):
        TFRecord(tmp_path / "features.json", FIELDS)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty has no records"):
        TFRecord(tmp_path / "empty", FIELDS)
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        TFRecord(tmp_path / "gone", FIELDS)
    write(tmp_path / "d", [row(0), b"\x0a\x7fno message"])
    with pytest.raises(ValueError, match=r"d: record 1 is not a tf\.train\.Example"):
        TFRecord(tmp_path / "d", FIELDS)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"y": 1}, r"record 1 has no 'x'. It has \['y'\]"),
        ({"x": b"1"}, "'x' of .*record 1 has bytes, but the first record has integers"),
        ({"x": [1, 2]}, "'x' of .*record 1 has 2 numbers, .* has one. Declare a list"),
        ({"x": []}, "'x' of .*record 1 has "),
    ],
)
def test_a_record_unlike_the_first_is_named(second, words, tmp_path):
    path = write(tmp_path / "a", [{"x": 1}, second])
    with pytest.raises(ValueError, match=words):
        TFRecord(path, {"x": "x"})


@pytest.mark.parametrize("first", ([], [{"x": 1}]))
def test_a_kind_that_no_feature_has_is_named(first, tmp_path):
    feature = b"\x0a\x01x\x12\x02\x22\x00"  # "x": field 4 of a Feature
    unlike = b"\x0a" + bytes([len(feature) + 2]) + b"\x0a" + bytes([len(feature)]) + feature
    path = write(tmp_path / "a", [*first, unlike])
    with pytest.raises(ValueError, match="'x' of .* has a value of kind 4, .*tf.train.Example"):
        TFRecord(path, {"x": "x"})


def test_unsuitable_arguments_are_refused(tmp_path):
    path = write(tmp_path / "a", [{"x": 1, "y": [b"1", b"2"], "steps/z": [b"1", b"2"]}])
    for fields, kinds, words in (
        ({}, None, "fields must map names of fields to features, as in .*, not {}"),
        ({"a": "x"}, {"b": Field(None)}, r"kinds has \['b'\]"),
        ({"a": "x"}, {"a": Field(None)}, "is integers, not"),
        ({"a": "y"}, {"a": Field(np.dtype(np.int32))}, "is bytes, not"),
        ({"a": "y"}, None, r"has 2 values instead of one. To .*=\{'a': \('y', range\(2\)\)\}"),
        ({"a": "steps/z"}, None, "has 2 values instead of one. dalijax.sources.RLDS reads steps"),
        ({"a": "z"}, None, r"record 0 has no 'z'. It has \['steps/z', 'x', 'y'\]"),
        ({"a": "z", "x": "x"}, None, r"record 0 has no 'z'. It has \['steps/z', 'x', 'y'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            TFRecord(path, fields, kinds=kinds)


@pytest.mark.parametrize("is_indexed", (False, True))
@pytest.mark.parametrize(
    ("fields", "more"),
    (
        ({"image/encoded": "data"}, {}),
        ({"image/class/label": "label"}, {"defaults": {"image/class/label": 0}}),
        ({"tokens": "x"}, {"kinds": {"tokens": Field(np.int64, 1)}}),
        ({"image/score": "score", "tokens": "tokens"}, {}),
    ),
)
def test_swapped_fields_are_named(fields, more, is_indexed, tmp_path):
    path = write(tmp_path / "a", map(row, range(3)))
    if is_indexed:
        write_indexes([path], {})
    swapped = {feature: name for name, feature in fields.items()}
    with pytest.raises(ValueError) as raised:
        TFRecord(path, fields, **more)
    assert f"not features to names. Did you mean {swapped}? If not," in str(raised.value)
    assert len(TFRecord(path, swapped)) == 3


@pytest.mark.parametrize("is_indexed", (False, True))
@pytest.mark.parametrize(
    "values, dtype, words",
    (
        ([1, 1 << 40], np.int32, "record 1 has the number 1099511627776, .* does not fit into int"),
        ([1, -2], np.uint8, "record 1 has the number -2, which does not fit into uint8"),
        ([1, (1 << 24) + 1], np.float32, "record 1 has the number 16777217, .* into float32"),
        ([0.5, 1e6], np.float16, "record 1 has the number 1000000.0, .* into float16"),
        ([0.5, 1.5], np.int32, "record 0 is floats, not int32 with 0 dimensions"),
        ([1, 0], np.bool_, "record 0 is integers, not bool with 0 dimensions"),
    ),
)
def test_a_number_that_does_not_fit_is_named(values, dtype, words, is_indexed, tmp_path):
    paths = [write(tmp_path / name, [{"x": value} for value in values]) for name in "ab"]
    if is_indexed:
        write_indexes(paths, {})
    with pytest.raises(ValueError, match=f"'x' of .*/a: {words}.* Change its entry in kinds="):
        TFRecord(paths, {"y": "x"}, kinds={"y": Field(dtype)})
    if words.startswith("record 1"):  # the number may also be in a later file
        later = [write(tmp_path / "0", [{"x": values[0]}] * 3), paths[1]]
        with pytest.raises(ValueError, match=f"'x' of .*/b: {words}"):
            TFRecord(later, {"y": "x"}, kinds={"y": Field(dtype)})


@pytest.mark.parametrize("is_indexed", (False, True))
def test_a_later_record_without_a_feature_is_named(is_indexed, tmp_path):
    path = write(tmp_path / "a", [{"x": 1, "y": 1}, {"y": 2}])
    if is_indexed:
        write_indexes([path], {})
    with pytest.raises(ValueError, match=r"record 1 has no 'x'. It has \['y'\]. If records may"):
        TFRecord(path, {"y": "x"})


@pytest.mark.parametrize("is_indexed", (False, True))
def test_a_feature_may_have_several_fields(is_indexed, tmp_path):
    path = write(tmp_path / "a", map(row, range(3)))
    if is_indexed:
        write_indexes([path], {})
    fields = {"bytes": "image/text", "text": "image/text", "i": "tokens", "f": "tokens"}
    kinds = {"text": Field(None), "i": Field(np.int64, 1), "f": Field(np.float32, 1)}
    values = TFRecord(path, fields, kinds=kinds).read(np.array([2]), list(fields))
    assert values["bytes"][0].tobytes().decode() == values["text"][0] == "té2"
    tokens = row(2)["tokens"]
    np.testing.assert_array_equal(values["i"][0], np.array(tokens), strict=True)
    np.testing.assert_array_equal(values["f"][0], np.array(tokens, np.float32), strict=True)


def example_in_order(values):
    """Serializes an Example with its features in this order; protobuf's order varies."""
    inner = b"".join(
        tf.train.Features(feature={k: feature(v)}).SerializeToString() for k, v in values.items()
    )
    assert 128 <= len(inner) < 1 << 14  # a varint of two bytes
    return bytes([0x0A, len(inner) & 0x7F | 0x80, len(inner) >> 7]) + inner


@pytest.mark.slow
def test_any_flipped_bit_is_an_error_or_data(tmp_path):
    """Without checksums, damage is named, or read as other data; no read hangs."""
    names = (*FIELDS.values(), "image/box", "image/text", "tokens")
    record = example_in_order({name: row(1, size=20)[name] for name in names})
    assert tf.train.Example.FromString(record).features.feature.keys() == set(names)
    data = pathlib.Path(write(tmp_path / "a", [record])).read_bytes()
    for bit in range(12 * 8, (12 + len(record)) * 8, 1 if FULL else 5):  # 5: a bit of each byte
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b").write_bytes(damaged)
        try:
            source = TFRecord(tmp_path / "b", FIELDS, cache_dir=tmp_path / "c", verify=False)
        except ValueError as error:
            assert "record 0" in str(error), bit
        else:
            assert len(source.read(np.array([0]), ["data"])["data"]) == 1


def test_the_stored_index_is_used_and_validated(tmp_path, cache, caplog):
    path = write(tmp_path / "a", map(row, range(9)))
    first = TFRecord(path, FIELDS)
    (kept,) = cache.iterdir()
    data, stamp = kept.read_bytes(), kept.stat().st_mtime_ns
    again = TFRecord(path, FIELDS)
    assert kept.stat().st_mtime_ns == stamp and not caplog.records
    write(tmp_path / "b", map(row, range(1, 9)))
    TFRecord(tmp_path / "b", FIELDS)
    (other,) = set(cache.iterdir()) - {kept}
    other.write_bytes(data)
    renewed = TFRecord(tmp_path / "b", FIELDS)
    assert "belongs to other files" in caplog.text and len(renewed) == 8
    assert renewed.read(np.array([0]), ["label"])["label"].tolist() == [-3]
    for source in (again, pickle.loads(pickle.dumps(first))):
        values = source.read(np.array([8, 2]), ["data", "label"])
        assert [v.tobytes() for v in values["data"]] == [row(i)["image/encoded"] for i in (8, 2)]
        assert values["label"].tolist() == [4, -2]
    assert len(pickle.dumps(first)) < 4000
    os.truncate(path, 20_000)
    with pytest.raises(OSError, match="Reopen the source"):
        again2 = pickle.loads(pickle.dumps(first))
        again2.read(np.array([0]), ["data"])


def test_the_identity_does_not_depend_on_the_path(tmp_path):
    path = write(tmp_path / "a", map(row, range(9)))
    (tmp_path / "else").mkdir()
    copy = shutil.copy(path, tmp_path / "else")
    identity = TFRecord(path, FIELDS).identity()
    assert TFRecord(copy, FIELDS).identity() == identity
    other = write(
        tmp_path / "else" / "a", [*map(row, range(8)), {**row(8), "image/class/label": 5}]
    )
    assert TFRecord(other, FIELDS).identity() != identity
