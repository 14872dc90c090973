"""Checksums of TFRecord files, compared with TensorFlow; damaged records and episodes."""

import pathlib

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from episodes import episode, write_file

from dalijax import data_iterator
from dalijax.core.formats import tfrecord_headers
from dalijax.core.tools.index_command import write_indexes
from dalijax.errors import BatchError
from dalijax.sources import RLDS, Mixture, TFRecord
from full import FULL
from range_server import serving

COUNT = 5
RECORDS = {"data": "data", "label": "label"}
STEPS = {
    "image": "steps/observation/cam",
    "action": ("steps/action", range(2)),
    "path": "episode_metadata/file_path",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url(tmp_path):
    """The URL of the folder of the test."""
    with serving(tmp_path) as (url, _):
        yield url


def content(number):
    return np.random.default_rng(number).bytes(300 + number)


def record(number, other=b""):
    def feature(**values):
        return tf.train.Feature(**values)

    features = {
        "data": feature(bytes_list=tf.train.BytesList(value=[content(number)])),
        "label": feature(int64_list=tf.train.Int64List(value=[number + 7])),
        "other": feature(bytes_list=tf.train.BytesList(value=[other])),
    }
    message = tf.train.Example(features=tf.train.Features(feature=features))
    return message.SerializeToString(deterministic=True)


def write_records(path, numbers=range(COUNT), other=b""):
    return write_file(path, [record(number, other) for number in numbers])


def write_episodes(path, numbers=range(COUNT)):
    """Writes episodes of 3 steps."""
    return write_file(path, [episode(number, 3 * (number % 7), 3) for number in numbers])


def places(path):
    """Returns the start of the content and the end of the checksum of each record of a file."""
    data, at, found = pathlib.Path(path).read_bytes(), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        found.append((at + 12, at + 16 + size))
        at += 16 + size
    return found


def flip(path, at):
    """Inverts a bit of a byte, in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def damage(path, *numbers):
    """Flips a bit in the middle of records."""
    found = places(path)
    for number in numbers:
        flip(path, sum(found[number]) // 2)
    return path


def intact_records(path):
    """Returns how many records of a damaged file TensorFlow reads before it raises an error."""
    count = 0
    with pytest.raises(tf.errors.DataLossError):
        for _ in tf.data.TFRecordDataset(path):
            count += 1
    return count


@pytest.mark.parametrize("first", (0, 2))
def test_each_flipped_bit_is_a_bad_record(first, tmp_path):
    path = write_records(tmp_path / "a")
    begin, end = places(path)[first]
    step = 1 if FULL else 17
    for at in [*range(begin, end - 4, step), end - 4, end - 1]:
        flip(path, at)
        if at == begin:
            assert intact_records(path) == first
        source = TFRecord(path, RECORDS, cache_dir=tmp_path / "c")
        assert len(source) == COUNT
        others = np.delete(np.arange(COUNT), first)
        values = source.read(others, ["data", "label"])
        assert [value.tobytes() for value in values["data"]] == [*map(content, others)], at
        np.testing.assert_array_equal(values["label"], others + 7)
        for names in (["data", "label"], ["label"]):
            with pytest.raises(ValueError, match=rf"a: record {first} is damaged.*verify=False"):
                source.read(np.array([4, first]), names)
        flip(path, at)


def test_each_flipped_bit_is_a_bad_episode(tmp_path):
    path = write_episodes(tmp_path / "a")
    wanted = RLDS(path, STEPS).read(np.delete(np.arange(15), [3, 4, 5]), [*STEPS, "action_mask"])
    begin, end = places(path)[1]
    for at in range(begin, end, 11 if FULL else 211):
        flip(path, at)
        source = RLDS(path, STEPS, cache_dir=tmp_path / "c")
        assert len(source) == 3 * COUNT - 2
        assert source.episode.tolist() == [0] * 3 + [1] + [2] * 3 + [3] * 3 + [4] * 3
        values = source.read(np.delete(np.arange(13), 3), list(source.fields))
        for name, column in values.items():
            for value, other in zip(column, wanted[name], strict=True):
                np.testing.assert_array_equal(value, other, name)
        for name in source.fields:
            with pytest.raises(ValueError, match="a: episode 1, step 0 is damaged"):
                source.read(np.array([2, 3]), [name])
        flip(path, at)


def test_columns_of_damaged_episodes_are_refused(tmp_path):
    source = RLDS(damage(write_episodes(tmp_path / "a"), 1), STEPS)
    for name in ("steps/action", "episode_metadata/file_path", "steps/is_first"):
        with pytest.raises(ValueError, match=r"select\(source.episode != 1\)"):
            source.column(name)
    chosen = source.select(source.episode != 1)
    assert chosen.column("steps/is_first").tolist() == [1, 0, 0] * 4
    assert len(chosen.column("episode_metadata/file_path")) == COUNT
    assert len(source.identity()) == len(chosen.identity()) == 32


@pytest.mark.parametrize("on_error", ("raise", "skip", "mask"))
@pytest.mark.parametrize("kind", ("records", "episodes", "mixture"))
def test_a_damaged_record_is_subject_to_on_error(kind, on_error, tmp_path):
    if kind == "episodes":
        path = damage(write_episodes(tmp_path / "a", range(7)), 2)
        source = RLDS(path, {"x": "steps/number"})
        values = [*range(6), None, *range(9, 21)]
    else:
        path = damage(write_records(tmp_path / "a", range(19)), 6)
        source = TFRecord(path, {"x": "label"})
        values = [*range(7, 13), None, *range(14, 26)]
    if kind == "mixture":
        source = Mixture([(source, 1)])
    make = data_iterator(
        lambda x: x + 0, ["x"], source=source, on_error=on_error, mask="m", as_numpy=True
    )
    iterator, delivered = iter(make(batch_size=4, shuffle=False)), []
    for number in range(5):
        try:
            batch = next(iterator)
        except BatchError as error:
            assert on_error == "raise" and number == 1
            assert str(tmp_path / "a") in str(error) and "its checksum is wrong" in str(error)
        except StopIteration:
            assert on_error == "skip" and number == 4
        else:
            delivered += batch["x"][batch["m"]].tolist()
    lost = values[6:7] if on_error == "mask" else values[4:8]
    assert delivered == [value for value in values if value not in lost]


def test_records_are_verified_again_when_they_are_read(tmp_path):
    """Unless the fields are less than half of the bytes of the records."""
    whole = write_records(tmp_path / "whole")
    part = write_records(tmp_path / "part", other=bytes(1000))
    sources = {path: TFRecord(path, {"data": "data"}) for path in (whole, part)}
    for path, source in sources.items():
        indices = np.arange(COUNT)
        assert len(source.read(indices, ["data"])["data"]) == COUNT  # opens the file
        flip(path, places(path)[2][1] - 1)
        for number in (0, COUNT - 1):
            (value,) = source.read(np.array([number]), ["data"])["data"]
            assert value.tobytes() == content(number)
    with pytest.raises(ValueError, match="whole: record 2 is damaged: its checksum is wrong"):
        sources[whole].read(np.arange(COUNT), ["data"])
    assert len(sources[part].read(np.arange(COUNT), ["data"])["data"]) == COUNT


def test_damaged_records_can_be_read(tmp_path):
    path = write_records(tmp_path / "a")
    flip(path, pathlib.Path(path).read_bytes().index(content(3)))
    flip(path, places(path)[1][1] - 1)
    source = TFRecord(path, RECORDS, verify=False)
    values = source.read(np.arange(COUNT), ["data", "label"])
    assert [v.tobytes() == content(n) for n, v in enumerate(values["data"])] == [1, 1, 1, 0, 1]
    assert values["label"].tolist() == [7, 8, 9, 10, 11]
    path = write_episodes(tmp_path / "b")
    flip(path, places(path)[1][1] - 1)
    assert len(RLDS(path, STEPS)) == 13 and len(RLDS(path, STEPS, verify=False)) == 15
    write_indexes([path], {})
    options = {"cache_dir": tmp_path / "c"}
    assert len(RLDS(path, STEPS, **options)) == 13
    assert len(RLDS(path, STEPS, verify=False, **options)) == 15


@pytest.mark.parametrize("kind", (TFRecord, RLDS))
def test_files_without_checksums_are_refused_with_the_fix(kind, tmp_path):
    write, fields = (
        (write_records, RECORDS) if kind is TFRecord else (write_episodes, {"x": "steps/number"})
    )
    path = write(tmp_path / "a")
    with open(path, "r+b") as file:
        for _, end in places(path):
            file.seek(end - 4)
            file.write(bytes(4))
    with pytest.raises(ValueError, match="every record of .* has a wrong checksum.*verify=False"):
        kind(path, fields)
    assert len(kind(path, fields, verify=False)) == (COUNT if kind is TFRecord else 3 * COUNT)
    with pytest.raises(ValueError, match="every record of .* has a wrong checksum"):
        write_indexes([path], {})


DAMAGES = ([(0, 0)], [(1, 2), (1, 4)], [(0, k) for k in range(COUNT)], [(2, 4), (1, 1)])


@pytest.mark.parametrize("damages", DAMAGES, ids=str)
@pytest.mark.parametrize("kind", (TFRecord, RLDS))
def test_all_indexes_contain_the_damaged_records(kind, damages, url, tmp_path):
    """The index of local files, that of remote files, and that from a shared index."""
    write, fields = (write_records, RECORDS) if kind is TFRecord else (write_episodes, STEPS)
    paths = [write(tmp_path / str(k), range(COUNT * k, COUNT * k + COUNT)) for k in range(3)]
    for file, number in damages:
        damage(paths[file], number)
    sources = [
        kind(paths, fields, cache_dir=tmp_path / "local"),
        kind([f"{url}/{k}" for k in range(3)], fields, cache_dir=tmp_path / "remote"),
    ]
    write_indexes(paths, {})
    sources.append(kind(paths, fields, cache_dir=tmp_path / "shared"))
    for source in sources:
        assert [is_read(source, index) for index in range(len(source))].count(False) == len(damages)
        for name, array in sources[0]._index.arrays.items():
            np.testing.assert_array_equal(source._index.arrays[name], array, name)
        assert source._index.about["columns"] == sources[0]._index.about["columns"]


def is_read(source, index):
    try:
        source.read(np.array([index]), list(source.fields))
    except ValueError:
        return False
    return True


def test_large_records_are_verified_in_parts(url, tmp_path, monkeypatch):
    path = write_episodes(tmp_path / "a")
    expected = RLDS(path, STEPS)
    monkeypatch.setattr(tfrecord_headers, "_LOCAL_PART", 1000)
    monkeypatch.setattr(tfrecord_headers, "_REMOTE_PART", 1000)
    damage(write_episodes(tmp_path / "b"), 1)
    for place in (str(tmp_path / "{}"), f"{url}/{{}}"):
        source = RLDS(place.format("a"), STEPS, cache_dir=tmp_path / "c")
        for name, array in expected._index.arrays.items():
            np.testing.assert_array_equal(source._index.arrays[name], array)
        assert len(RLDS(place.format("b"), STEPS)) == 13
