"""Shared indexes of episodes: the index of a scan, or its error, without reading the images."""

import dataclasses
import os
import pathlib
import shutil

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from episodes import FIELDS, STEPS, episode, message, steps_of, write, write_file

from dalijax.core.formats import index as indexes
from dalijax.core.formats.file_columns import (
    PRESENT,
    FileColumns,
    concat_tables,
    item_offsets,
    of_files,
    packed,
    unpacked,
)
from dalijax.core.formats.shared_index import LAYOUTS
from dalijax.core.remote.storage import Storage
from dalijax.core.robots.episode_ranges import episode_ranges
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import RLDS, TFRecord
from range_server import serving

NAME = ".dalijax-rlds.index"
KEYS = {"key": "a", "secret": "b", "region": "us-east-1"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_scan(monkeypatch):
    """Makes reading all of a file an error."""

    def scan(*arguments, **options):
        raise AssertionError("a file is scanned")

    for name in ("index_episodes", "episode_ranges"):
        monkeypatch.setattr(f"dalijax.core.robots.rlds.{name}", scan)


def outcome(paths, fields, cache_dir):
    """Returns the index of a source, or the error."""
    try:
        source = RLDS(paths, fields, cache_dir=cache_dir)
    except ValueError as error:
        return str(error)
    arrays = source._index.arrays
    return source._index.about, {k: (a.dtype, a.tolist()) for k, a in arrays.items()}


@pytest.mark.parametrize("order", ([0, 1], [1, 0], [1], [0, 1, 0]), ids=str)
@pytest.mark.parametrize("names", (list(FIELDS), ["image", "path"], ["number"], ["prompt"]))
def test_the_index_of_any_fields_is_that_of_a_scan(order, names, tmp_path, request):
    paths = write(tmp_path / "a")
    chosen, fields = [paths[k] for k in order], {name: FIELDS[name] for name in names}
    scanned = outcome(chosen, fields, tmp_path / "other")
    write_indexes(paths, {})
    request.getfixturevalue("no_scan")
    assert outcome(chosen, fields, tmp_path / "third") == scanned and not isinstance(scanned, str)


def test_steps_are_those_of_tensorflow(tmp_path, request):
    paths = write(tmp_path / "a")
    write_indexes([str(tmp_path / "a/*")], {})
    request.getfixturevalue("no_scan")
    source = RLDS(paths, FIELDS)
    values = source.read(np.arange(STEPS), list(source.fields))
    for number, row in enumerate(steps_of(paths)):
        for name, wanted in row.items():
            value = values[name][number]
            if isinstance(wanted, bytes):
                assert value.tobytes() == wanted
            else:
                np.testing.assert_array_equal(value, wanted, name)
    np.testing.assert_array_equal(source.column("steps/is_first").nonzero()[0], [0, 3, 4, 8, 10])


def changed(**features):
    return episode(0, 0, 3) | {f"steps/{name}": values for name, values in features.items()}


def with_entry(name, value):
    """Returns an episode with a serialized feature."""
    row = {key: values for key, values in episode(0, 0, 3).items() if key != name}
    entry = b"\x0a%c%b\x12%c%b" % (len(name), name.encode(), len(value), value)
    return message(row) + b"\x0a%c\x0a%c%b" % (len(entry) + 2, len(entry), entry)


ODD = {
    "fewer actions": changed(action=[0.5] * 6),
    "no actions": changed(action=[]),
    "integers": changed(action=[1] * 9),
    "fewer texts": changed(language_instruction=[b"a"] * 2),
    "no text": changed(language_instruction=[b"a", b"b", b"\xff"]),
    "other steps": changed(is_first=[1, 0]),
    "lacking": {k: v for k, v in episode(0, 0, 3).items() if k != "steps/action"},
    "no counter": {k: v for k, v in episode(0, 0, 3).items() if k != "steps/is_first"},
    "two paths": {**episode(0, 0, 3), "episode_metadata/file_path": [b"a", b"b"]},
    "unset": with_entry("steps/action", b""),
    "unpacked": with_entry("steps/number", b"\x1a\x06" + b"\x08\x05" * 3),
}


@pytest.mark.parametrize("place", ("episode", "file", "first"))
@pytest.mark.parametrize("case", ODD)
def test_odd_episodes_are_reported_as_by_a_scan(case, place, tmp_path):
    files = {
        "episode": [[episode(1, 0, 3), ODD[case]]],
        "file": [[episode(1, 0, 3)], [ODD[case]]],
        "first": [[ODD[case], episode(1, 0, 3)]],
    }[place]
    paths = write(tmp_path / "a", files)
    choices = [{name: FIELDS[name] for name in names} for names in (FIELDS, ("path",), ("number",))]
    scanned = [outcome(paths, fields, tmp_path / "other") for fields in choices]
    write_indexes(paths, {})
    assert [outcome(paths, fields, tmp_path / "third") for fields in choices] == scanned


def test_sizes_at_which_a_length_takes_more_bytes(tmp_path, request):
    sizes = [0, 1, 127, 128, 16383, 16384, 2097151, 2097152, 5]
    images = [b"\xff\xd8" + bytes(max(0, size - 2)) for size in sizes]
    row = {"steps/cam": images, "steps/is_first": [1] + [0] * (len(sizes) - 1)}
    (path,) = write(tmp_path / "a", [[row]])
    write_indexes([path], {})
    request.getfixturevalue("no_scan")
    values = RLDS(path, {"image": "steps/cam"}).read(np.arange(len(sizes)), ["image"])["image"]
    assert [value.tobytes() for value in values] == images


def test_columns_of_lists_are_unpacked_as_they_were(tmp_path):
    paths = write(tmp_path / "a")
    tables = [episode_ranges([path], Storage()) for path in paths]
    table = concat_tables(tables)
    again = unpacked(*packed(table, LAYOUTS["rlds"]), LAYOUTS["rlds"])
    for files, parts in (([1, 0, 1], [tables[1], tables[0], tables[1]]), ([0, 1], tables)):
        assert_equal(of_files(again, np.array(files)), concat_tables(parts))
    cam = again.columns["steps/observation/cam"]
    content = pathlib.Path(paths[0]).read_bytes()
    offsets, count = item_offsets(cam), int(cam.counts[:4].sum())
    images = [row["image"] for row in steps_of(paths[:1])]
    places = zip(offsets[:count].tolist(), cam.items[:count].tolist())
    assert [content[at : at + size] for at, size in places] == images


def assert_equal(table, other):
    assert isinstance(table, FileColumns) and table.columns.keys() == other.columns.keys()
    for name, column in table.columns.items():
        for field in dataclasses.fields(column):
            values = (getattr(column, field.name), getattr(other.columns[name], field.name))
            np.testing.assert_array_equal(*values, f"{name} {field.name}")


def test_features_json_that_comes_later_is_used(tmp_path, request):
    (path,) = write(tmp_path / "a", [[{"steps/x": [1, 2], "steps/is_first": [1, 0]}]])
    write_indexes([path], {})
    request.getfixturevalue("no_scan")
    assert RLDS(path, {"x": "steps/x"}).fields["x"].dtype == np.int32
    tensor = '{"tensor": {"shape": {}, "dtype": "uint8", "encoding": "none"}}'
    steps = f'{{"sequence": {{"feature": {{"featuresDict": {{"features": {{"x": {tensor}}}}}}}}}}}'
    (tmp_path / "a/features.json").write_text(
        f'{{"featuresDict": {{"features": {{"steps": {steps}}}}}}}'
    )
    assert RLDS(path, {"x": "steps/x"}).fields["x"].dtype == np.uint8


def test_changed_and_new_files_are_indexed_again(tmp_path, caplog):
    paths = write(tmp_path / "a")
    write_indexes(paths, {})
    write_file(paths[1], [episode(9, 12, 2)])
    paths.append(write_file(tmp_path / "a/new", [episode(10, 15, 3)]))
    source = RLDS(paths, {"image": FIELDS["image"], "number": FIELDS["number"]})
    assert source.column("steps/number").tolist() == [*range(8), 12, 13, 15, 16, 17]
    assert "does not fit 2 of 3 files" in caplog.text
    caplog.clear()
    write_indexes(paths, {})
    again = RLDS(paths, {"number": FIELDS["number"]}, cache_dir=tmp_path / "b")
    assert again.column("steps/number").tolist() == source.column("steps/number").tolist()
    assert not caplog.records


def test_the_command_tells_episodes_from_records(tmp_path, capsys):
    folder = tmp_path / "a"
    (path,) = write(folder, [[episode(0, 0, 3)]])
    empty = write_file(folder / "empty", [])
    write_indexes([empty, path], {})
    assert f"{NAME}: 1 episodes of 2 files" in capsys.readouterr().out
    other = write_file(folder / "x", [{"number": [3]}])
    write_indexes([other], {})
    assert {NAME, ".dalijax-tfrecord.index"} <= {*os.listdir(folder)}
    assert len(RLDS([empty, path], FIELDS)) == 3 and len(TFRecord(other, {"x": "number"})) == 1


def forged(file, change):
    index = indexes.from_bytes(file.read_bytes(), "x")
    table = unpacked(index.about, index.arrays, LAYOUTS["rlds"])
    change(table.columns["steps/observation/cam"])
    about, arrays = packed(table, LAYOUTS["rlds"])
    kept = {key: index.about[key] for key in ("kind", "files", "stamps")}
    file.write_bytes(indexes.to_bytes(indexes.Index(about | kept, arrays)))


def longer_item(column):
    column.items[0] += 1


def other_count(column):
    column.counts[[0, 1]] = column.counts[[1, 0]]


def outside(column):
    column.offsets[column.states == PRESENT] += 1 << 40


def negative(column):
    column.counts[0] = -1


@pytest.mark.parametrize("change", (longer_item, other_count, outside, negative))
def test_forged_places_are_not_used(change, tmp_path, caplog):
    paths = write(tmp_path / "a")
    scanned = outcome(paths, FIELDS, tmp_path / "other")
    write_indexes(paths, {})
    forged(tmp_path / "a" / NAME, change)
    assert outcome(paths, FIELDS, tmp_path / "third") == scanned
    assert "can't be used" in caplog.text


def test_remote_episodes_are_opened_without_reading_images(tmp_path):
    pytest.importorskip("obstore")
    folder, image = tmp_path / "files/bucket/train", b"\xff\xd8" + bytes(200_000)
    rows = [
        episode(k, k, 3) | {f"steps/observation/{name}": [image] * 3 for name in ("cam", "b")}
        for k in range(8)
    ]
    paths = write(folder, [rows[:4], rows[4:]])
    fields = {"image": FIELDS["image"], "action": FIELDS["action"], "prompt": FIELDS["prompt"]}
    total = sum(map(os.path.getsize, paths))
    with serving(tmp_path / "files") as (url, server):
        options = {**KEYS, "endpoint_url": url, "retry_timeout": 5}
        write_indexes(["s3://bucket/train/robot*"], options)
        assert (folder / NAME).exists()
        server.ranges.clear()
        source = RLDS("s3://bucket/train/robot*", fields, storage_options=options)
        records = {(start, end) for _, start, end in server.ranges if end and end - start > 100_000}
        assert len(records) <= 24  # images of the identity, which has 64 records
        others = [end - start for _, start, end in server.ranges if end and end - start <= 100_000]
        assert sum(others) < total / 100
        found = source.read(np.arange(24), ["image", "prompt"])
    assert {value.tobytes() for value in found["image"]} == {image}
    assert found["prompt"] == [f"do {k} é" for k in range(8) for _ in range(3)]
    shutil.rmtree(folder)
