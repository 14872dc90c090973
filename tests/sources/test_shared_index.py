"""Shared indexes give the records of the files, or they are not used."""

import io
import os
import pathlib
import pickle
import shutil
import tarfile
import zlib
from random import Random

import numpy as np
import pytest
from forks import run_fork

from dalijax.core.formats import index as indexes
from dalijax.core.formats.file_columns import (
    Column,
    FileColumns,
    Layout,
    of_files,
    packed,
    unpacked,
)
from dalijax.core.formats.shared_index import LAYOUTS, is_same
from dalijax.core.formats.tar_columns import index_tars, select_tars, tar_columns
from dalijax.core.remote.storage import Storage
from dalijax.core.tools import index_command
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import Field, Tar, TFRecord
from tars import write_tar

FIELDS = {"data": "jpg;png", "label": "cls", "text": "txt"}
NAMES = (".dalijax-tar.index", ".dalijax-tfrecord.index")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "shards"
    path.mkdir()
    return path


def entry(record, label=None, size=40):
    """Returns the members of a sample, with long names, folders and hidden files between them."""
    name = f"{'long' * 60 * (record % 7 == 3)}/{record:05d}"
    members = [
        (f"{name}.{'png' if record % 5 == 0 else 'jpg'}", bytes([record % 256]) * (size + record)),
        (f"{name}.cls", b"%d" % (record * 3 if label is None else label)),
        (f"{name}.txt", f"text {record}".encode()),
    ]
    if record % 11 == 0:
        members.insert(1, (f"{name}/.hidden", b"x" * 700))
    return members


def make(path, first, count=30, form=tarfile.PAX_FORMAT, **options):
    return write_tar(
        path, [m for k in range(first, first + count) for m in entry(k, **options)], form
    )


def shards(folder, count=4):
    forms = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    return [make(folder / f"{k}.tar", k * 100, 30 + k, forms[k % 2]) for k in range(count)]


def expected(paths, fields=FIELDS):
    """Returns the samples that Python's tarfile finds."""
    samples = []
    for path in paths:
        by_name = {}
        with tarfile.open(path) as tar:
            for member in tar:
                name, _, extension = member.name.rpartition("/")[2].partition(".")
                if member.isreg() and name:
                    by_name.setdefault(name, {})[extension] = tar.extractfile(member).read()
        for found in by_name.values():
            data = found.get("jpg", found.get("png"))
            samples.append((data, int(found["cls"]), found["txt"].decode()))
    return samples


def read(source):
    values = source.read(np.arange(len(source)), ["data", "label", "text"])
    data = [value.tobytes() for value in values["data"]]
    return list(zip(data, values["label"].tolist(), values["text"], strict=True))


def scan(*arguments, **options):
    raise AssertionError("a file is scanned")


@pytest.fixture
def no_scan(monkeypatch):
    """Makes reading all headers of a file an error."""
    for name in (
        "sources.tar.index_tars",
        "sources.tar.tar_columns",
        "sources.tfrecord.index_records",
        "sources.tfrecord.tfrecord_columns",
    ):
        monkeypatch.setattr(f"dalijax.core.{name}", scan)


def same_index(first, second):
    assert first._index.about == second._index.about
    assert first._index.arrays.keys() == second._index.arrays.keys()
    for name, values in first._index.arrays.items():
        np.testing.assert_array_equal(values, second._index.arrays[name])
        assert values.dtype == second._index.arrays[name].dtype
    assert first.identity() == second.identity() and first.fields == second.fields


ORDERS = ([0, 1, 2, 3], [2], [3, 0], [1, 1, 2], [3, 2, 1, 0])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_records_are_those_of_tarfile(order, folder, tmp_path, request):
    paths = shards(folder)
    chosen = [paths[k] for k in order]
    scanned = Tar(chosen, FIELDS, cache_dir=tmp_path / "other")
    write_indexes(paths, {})
    request.getfixturevalue("no_scan")
    source = Tar(chosen, FIELDS)
    assert read(source) == expected(chosen)
    same_index(source, scanned)
    assert read(pickle.loads(pickle.dumps(source))) == expected(chosen)


COMMAND = """
import runpy
runpy.run_module("dalijax.sources", run_name="__main__", alter_sys=True)
"""


def test_the_command_prints_the_index(folder):
    shards(folder)
    shown = run_fork(COMMAND, "index", folder / "*.tar").stdout
    assert f"{folder}/{NAMES[0]}: 126 samples of 4 files in " in shown
    failed = run_fork(COMMAND, "index", folder / "none.tar", code=1)
    assert "none.tar" in failed.stderr and "Traceback" not in failed.stderr


def test_other_fields_need_no_other_index(folder, no_scan):
    paths = shards(folder)
    write_indexes(paths, {})
    for fields in ({"text": "txt"}, {"label": "cls"}, {"data": "jpg;png"}):
        source = Tar(paths, fields)
        assert len(source) == 126
        source.read(np.arange(126), list(fields))


# Versions of files


def rewritten(path, new):
    os.replace(new, path)


def replaced_with_its_time(path, new):
    shutil.copystat(path, new)
    os.replace(new, path)


def renamed(path, new):
    other = path.with_name("2.tar")
    os.replace(path, new)
    os.replace(other, path)
    os.replace(new, other)


def linked(path, new):
    os.unlink(path)
    os.symlink(new, path)


def copied(path, new):
    shutil.copy2(path, new)
    os.replace(new, path)


@pytest.mark.parametrize("way", (rewritten, replaced_with_its_time, renamed, linked, copied))
def test_changed_files_are_indexed_again(way, folder, tmp_path, caplog):
    paths = shards(folder)
    write_indexes(paths, {})
    new = pathlib.Path(make(tmp_path / "new", 100, 31, tarfile.GNU_FORMAT, label=7))
    assert os.path.getsize(new) == os.path.getsize(paths[1])
    way(pathlib.Path(paths[1]), new)
    source = Tar(paths, FIELDS)
    assert read(source) == expected(paths)
    changed = 2 if way is renamed else 1
    assert f"does not fit {changed} of 4 files" in caplog.text
    assert "1.tar changed since it was written" in caplog.text or way is renamed
    assert "python -m dalijax.sources index" in caplog.text
    caplog.clear()
    write_indexes(paths, {})  # reads only the changed files
    again = Tar(paths, FIELDS, cache_dir=tmp_path / "other")
    assert read(again) == expected(paths) and not caplog.records


def test_new_files_are_indexed_and_removed_files_are_ignored(folder, caplog, monkeypatch):
    paths = shards(folder)
    write_indexes(paths, {})
    paths.append(make(folder / "4.tar", 900))
    os.unlink(paths.pop(0))
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert "4.tar is not in it" in caplog.text
    scanned = []
    whole = index_command.tar_columns

    def counted(names, storage):
        scanned.extend(names)
        return whole(names, storage)

    monkeypatch.setattr(index_command, "tar_columns", counted)
    write_indexes(paths, {})
    assert scanned == paths[-1:]


def test_two_data_sets_in_one_folder(folder, no_scan, tmp_path):
    first, second = shards(folder)[:2], shards(folder)[2:]
    other = write_tar(folder / "x.tar", [("1.cls", b"a word"), ("1.x", b"x"), ("2.x", b"y")])
    for paths in (first, [other], second):
        write_indexes(paths, {})
    assert Tar(other, {"x": "x"}).read(np.arange(2), ["x"])["x"][1].tobytes() == b"y"
    for fields in ({"data": "jpg;png"}, {"text": "txt"}):
        assert len(Tar(first + second, fields)) == 126


def test_labels_that_are_no_numbers_are_reported(folder, no_scan):
    path = write_tar(folder / "x.tar", [("1.cls", b"a word"), ("1.x", b"x")])
    write_indexes([path], {})
    with pytest.raises(ValueError, match=r"x\.tar: 1.cls must be an integer of .* not b'a word'"):
        Tar(path, {"label": "cls"})


def test_many_extensions(folder, tmp_path):
    names = [f"{k}.{'cls' if k % 3 else f'x{k}'}" for k in range(900)]
    path = write_tar(folder / "x.tar", [(name, b"%d" % k) for k, name in enumerate(names)])
    write_indexes([path], {})
    for fields in ({"label": "cls"}, {"x": "x0"}, {"x": "x897"}):
        scanned = Tar(path, fields, missing="skip", cache_dir=tmp_path / "other")
        os.rename(folder / NAMES[0], tmp_path / "index")
        plain = Tar(path, fields, missing="skip", cache_dir=tmp_path / "third")
        os.rename(tmp_path / "index", folder / NAMES[0])
        assert len(plain) == len(scanned)
        np.testing.assert_array_equal(plain._index.arrays["start"], scanned._index.arrays["start"])


# Samples that are not complete


def link(name, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a.jpg"
    return info


ODD = {
    "lacking": [
        ("a.jpg", b"1"),
        ("a.cls", b"1"),
        ("b.jpg", b"2"),
        ("c.jpg", b"3"),
        ("c.cls", b"3"),
    ],
    "apart": [("i/a.jpg", b"1"), ("i/b.jpg", b"2"), ("l/a.cls", b"1"), ("l/b.cls", b"2")],
    "scattered": [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"1"), ("b.cls", b"2")],
    "symbolic": [("a.jpg", b"1"), ("a.cls", b"1"), link("b.jpg"), ("b.cls", b"1")],
    "hard": [("a.jpg", b"1"), ("a.cls", b"1"), link("b.jpg", tarfile.LNKTYPE), ("b.cls", b"1")],
    "links": [link("a.jpg"), link("b.jpg"), ("b.cls", b"1")],
    "swapped": [("a.data", b"1"), ("a.label", b"1")],
    "twice": [("a.jpg", b"1"), ("a.png", b"1"), ("a.cls", b"1")],
    "again": [("a.jpg", b"1"), ("a.cls", b"1"), ("b.cls", b"2"), ("a.jpg", b"1"), ("a.cls", b"3")],
    "empty": [("note", b"1")],
}


def outcome(path, missing, folder):
    try:
        source = Tar(path, {"data": "jpg;png", "label": "cls"}, missing=missing, cache_dir=folder)
    except ValueError as error:
        return str(error)
    return source._index.about, {k: v.tolist() for k, v in source._index.arrays.items()}


@pytest.mark.parametrize("missing", ("raise", "skip"))
@pytest.mark.parametrize("case", ODD)
def test_odd_samples_are_reported_as_by_a_scan(case, missing, folder, tmp_path):
    path = write_tar(folder / "x.tar", ODD[case])
    scanned = outcome(path, missing, tmp_path / "other")
    write_indexes([path], {})
    assert outcome(path, missing, tmp_path / "third") == scanned


def random_entry(random):
    name = "".join(
        random.choice(part)
        for part in (
            ["", "a/", "b/", "__x__/"],
            "123.",
            [".", ""],
            ["jpg", "png", "cls", "JPG", ""],
        )
    )
    kind = random.random()
    if kind < 0.1:
        info = tarfile.TarInfo(name or "x")
        info.type = random.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
        info.linkname = "y"
        return info
    name = "q" * 150 + name if kind < 0.15 else name or "x"
    return name, random.choice([b"7", b"-5", b"12345678901", b"x" * 600]) if kind < 0.3 else b"1"


@pytest.mark.parametrize("seed", range(60))
def test_random_tars_have_the_index_of_a_scan(seed, tmp_path):
    random, storage = Random(seed), Storage()
    forms = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    paths = [
        write_tar(
            tmp_path / f"{k}.tar",
            [random_entry(random) for _ in range(random.randrange(1, 9))],
            random.choice(forms),
        )
        for k in range(random.randrange(1, 4))
    ]
    choices = (
        {"jpg": "d"},
        {"jpg": "d", "png": "d", "cls": "n"},
        {"cls": "n"},
        {"jpg": "d", "png": "e"},
    )
    extensions = random.choice(choices)
    try:
        scanned = index_tars(paths, extensions, storage)
    except ValueError:
        return  # a member twice, or a label that is no number
    about, arrays = packed(tar_columns(paths, storage)[1], LAYOUTS["tar"])
    table = unpacked(about, arrays, LAYOUTS["tar"], extensions)
    selected = select_tars(table, paths, scanned.about["sizes"], extensions, storage)
    assert scanned.arrays.keys() == selected.arrays.keys()
    for name, values in scanned.arrays.items():
        np.testing.assert_array_equal(selected.arrays[name], values)
    assert selected.about == scanned.about


def test_sparse_files_are_refused_as_by_a_scan(folder):
    info = tarfile.TarInfo("a.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    path = write_tar(folder / "x.tar", [info])
    with pytest.raises(ValueError, match="is a sparse file"):
        write_indexes([path], {})
    assert not (folder / NAMES[0]).exists()


# Damaged, old and foreign indexes


def test_every_flipped_bit_is_noticed(folder, caplog):
    paths = shards(folder, 1)
    write_indexes(paths, {})
    content = (folder / NAMES[0]).read_bytes()
    random = np.random.default_rng(0)
    for place in random.choice(len(content), 150, replace=False).tolist():
        changed = bytearray(content)
        changed[place] ^= 1 << int(random.integers(8))
        with pytest.raises(indexes.DamagedIndexError):
            indexes.from_bytes(bytes(changed), "x")
    (folder / NAMES[0]).write_bytes(changed)
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert "can't be used" in caplog.text and "python -m dalijax.sources index" in caplog.text


@pytest.mark.parametrize("size", (0, 1, 24, 100, -1, -33))
def test_truncated_indexes_are_noticed(size, folder, caplog):
    paths = shards(folder, 1)
    write_indexes(paths, {})
    content = (folder / NAMES[0]).read_bytes()
    (folder / NAMES[0]).write_bytes(content[:size])
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert "can't be used" in caplog.text


def forged(file, change):
    index = indexes.from_bytes(file.read_bytes(), "x")
    about, arrays = dict(index.about), {k: np.array(v) for k, v in index.arrays.items()}
    change(about, arrays)
    file.write_bytes(indexes.to_bytes(indexes.Index(about, arrays)))


def compressed(values, dtype="<i8"):
    planes = np.asarray(values, dtype).view(np.uint8).reshape(len(values), -1).T
    return np.frombuffer(zlib.compress(planes.tobytes()), np.uint8)


FORGERIES = {
    "version": lambda about, arrays: about.update(kind="shared 0 tar"),
    "kind": lambda about, arrays: about.update(kind="shared 1 tfrecord"),
    "no kind": lambda about, arrays: about.pop("kind"),
    "no files": lambda about, arrays: about.pop("files"),
    "fewer files": lambda about, arrays: about.update(files=[]),
    "names": lambda about, arrays: about.update(files=[1]),
    "first": lambda about, arrays: about.update(first=[0, -30]),
    "more": lambda about, arrays: about.update(first=[0, 31]),
    "fewer": lambda about, arrays: about.update(first=[0, 29]),
    "huge": lambda about, arrays: about.update(first=[0, 1 << 60]),
    "text": lambda about, arrays: about.update(first=["0", "30"]),
    "stamps": lambda about, arrays: about.update(stamps=[None]),
    "dtype": lambda about, arrays: about["dtypes"].update(start="|O8"),
    "array": lambda about, arrays: arrays.pop("start"),
    "zlib": lambda about, arrays: arrays.update(start=arrays["start"][:-2]),
    "bomb": lambda about, arrays: arrays.update(start=compressed([0] * 10_000)),
    "columns": lambda about, arrays: about.update(columns=[[1]]),
    "offsets": lambda about, arrays: (
        about["dtypes"].update(start="<i8"),
        arrays.update(start=compressed([1 << 40] * 30)),
    ),
    "negative": lambda about, arrays: (
        about["dtypes"].update(start="<i8"),
        arrays.update(start=compressed([-(1 << 40)] * 30)),
    ),
}


@pytest.mark.parametrize("planted", ("FIFO", "another user"))
def test_planted_indexes_are_not_used(planted, folder, caplog):
    paths = shards(folder, 1)
    write_indexes(paths, {})
    file = folder / NAMES[0]
    if planted == "another user":
        if os.geteuid():
            pytest.skip("needs root")
        os.chown(file, 12345, 12345)
    else:
        file.unlink()
        os.mkfifo(file)
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert f"{NAMES[0]} is not used: it " in caplog.text


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_indexes_are_not_used(forgery, folder, caplog):
    paths = shards(folder, 1)
    write_indexes(paths, {})
    forged(folder / NAMES[0], FORGERIES[forgery])
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert "shared index" in caplog.text


def test_the_index_of_another_folder_does_not_fit(folder, tmp_path, caplog):
    paths = shards(folder)
    (tmp_path / "b").mkdir()
    others = [make(tmp_path / "b" / f"{k}.tar", k * 100 + 50, 30 + k) for k in range(4)]
    write_indexes(others, {})
    shutil.copy(tmp_path / "b" / NAMES[0], folder)
    assert read(Tar(paths, FIELDS)) == expected(paths)
    assert "does not fit 4 of 4 files" in caplog.text


@pytest.mark.parametrize(
    ("stored", "stamp", "same"),
    [
        ([5, 1, 2, 3], [5, 1, 2, 3], True),
        ([5, 1, 2, 3], [5, 1, 2, 4], False),
        ([5, 1, 2, 3], [5, ["ETag", '"a"']], False),
        ([5, ["ETag", '"a"']], [5, ["ETag", '"a"']], True),
        ([5, ["ETag", '"a"']], [5, ["ETag", 'W/"a"']], True),
        ([5, ["ETag", '"a"']], [5, ["ETag", "a"], ["LastModified", "x"]], True),
        ([5, ["ETag", '"a"']], [6, ["ETag", '"a"']], False),
        ([5, ["ETag", '"a"']], [5, ["ETag", '"b"']], False),
        ([5, ["Last-Modified", "a"]], [5, ["Last-Modified", "b"]], False),
        ([5, ["Last-Modified", "a"]], [5, ["Last-Modified", "a"]], True),
        ([5, ["ETag", '"a"']], [5], False),
        ([5], [5, ["ETag", '"a"']], False),
        ([5], [5], False),
    ],
)
def test_stamps_of_different_clients(stored, stamp, same):
    assert is_same(stored, stamp) is same


# Columns


@pytest.mark.parametrize("layout", (Layout(512, 512), Layout(0, 1)), ids=str)
def test_columns_are_unpacked_as_they_were(layout):
    random = np.random.default_rng(0)
    first = np.array([0, 0, 7, 7, 100, 130, 130])
    rows = int(first[-1])
    columns = {}
    for name, kind in (("a", 1), ("b", 2), ("c\udcff", 3)):
        states = random.integers(0, 3, rows).astype(np.uint8)
        places = random.integers(0, 1 << 60, (2, rows)) * (states == 1)
        values = random.integers(-(1 << 63), 1 << 63, rows, endpoint=False) * (states == 1)
        value = {"a": values, "b": None, "c\udcff": values.astype(np.float32)}[name]
        columns[name] = Column(kind, states, *places, value, kind == 2)
    starts, flags = random.integers(0, 1 << 60, rows), (states == 2, states == 1)
    table = FileColumns(first, starts, *flags, columns, {"x"}, False)
    about, arrays = packed(table, layout)
    again = unpacked(about, arrays, layout)
    some_rows = np.r_[0:7, 100:130, 7:100, 0:7]
    some_files = of_files(again, np.array([1, 4, 0, 3, 1]))
    for found, rows_of_table in ((again, np.arange(rows)), (some_files, some_rows)):
        np.testing.assert_array_equal(found.starts, table.starts[rows_of_table])
        np.testing.assert_array_equal(found.repeated, table.repeated[rows_of_table])
        np.testing.assert_array_equal(found.damaged, table.damaged[rows_of_table])
        assert found.unknown == table.unknown and found.is_complete == table.is_complete
        for name, column in columns.items():
            other = found.columns[name]
            assert (column.kind, column.has_list) == (other.kind, other.has_list)
            for key in ("states", "offsets", "sizes", "values"):
                values = getattr(column, key)
                values = None if values is None else values[rows_of_table]
                np.testing.assert_array_equal(getattr(other, key), values)
    assert again.first_rows.tolist() == first.tolist()
    assert some_files.first_rows.tolist() == [0, 7, 37, 37, 130, 137]
    some = unpacked(about, arrays, layout, ["b"])
    assert list(some.columns) == ["b"]
    np.testing.assert_array_equal(some.columns["b"].offsets, columns["b"].offsets)


def test_an_index_has_about_four_bytes_for_each_record(folder):
    random = np.random.default_rng(0)
    sizes = random.lognormal(7, 0.4, 5_000).astype(int).tolist()
    with tarfile.open(folder / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for k, size in enumerate(sizes):
            for extension, content in (
                ("jpg", bytes(size)),
                ("cls", b"%d" % random.integers(1000)),
            ):
                info = tarfile.TarInfo(f"{k:06d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    write_indexes([str(folder / "x.tar")], {})
    assert os.path.getsize(folder / NAMES[0]) < 4.5 * len(sizes)


# TFRecords


tf = pytest.importorskip("tensorflow")


def features(record, kind):
    train = tf.train
    made = {
        "image": train.Feature(bytes_list=train.BytesList(value=[b"%d" % record * 50])),
        "label": train.Feature(int64_list=train.Int64List(value=[record * 7 - 20])),
        "score": train.Feature(float_list=train.FloatList(value=[record / 3])),
        "box": train.Feature(float_list=train.FloatList(value=[0.5] * (record % 4))),
        "text": train.Feature(bytes_list=train.BytesList(value=[f"é {record}".encode()])),
        "words": train.Feature(bytes_list=train.BytesList(value=[b"a"] * (record % 3))),
    }
    if kind == "lacking" and record % 3 == 1:
        del made["label"], made["text"], made["box"]
    return made


def write_records(path, first, count=40, kind=""):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in range(first, first + count):
            example = tf.train.Example(features=tf.train.Features(feature=features(record, kind)))
            writer.write(example.SerializeToString())
    return str(path)


CHOICES = {
    "plain": ({"data": "image", "label": "label", "score": "score"}, {}),
    "lists": ({"data": "image", "box": "box"}, {}),
    "a number as a list": ({"label": "label"}, {"kinds": ("label", np.int32, 1)}),
    "a wide number": ({"label": "label"}, {"kinds": ("label", np.int64, 0)}),
    "text": ({"text": "text"}, {"kinds": ("text", None, 0)}),
    "defaults": ({"label": "label", "text": "text"}, {"defaults": {"label": -1, "text": b"-"}}),
    "no default": ({"label": "label"}, {}),
    "several values": ({"words": "words"}, {}),
    "no feature": ({"x": "none"}, {}),
    "wrong kind": ({"data": "image"}, {"kinds": ("data", np.int32, 0)}),
    "wrong default": ({"label": "label"}, {"defaults": {"label": "x"}}),
}


def records_of(paths, choice, folder):
    fields, options = CHOICES[choice]
    options = dict(options)
    if "kinds" in options:
        name, dtype, ndim = options["kinds"]
        options["kinds"] = {name: Field(dtype, ndim)}
    try:
        source = TFRecord(paths, fields, cache_dir=folder, **options)
    except ValueError as error:
        return str(error)
    values = source.read(np.arange(len(source)), list(fields))
    shown = {name: [np.asarray(v).tolist() for v in column] for name, column in values.items()}
    return shown, source.identity(), repr(source.fields), source._index.about


@pytest.mark.parametrize("kind", ("", "lacking"))
@pytest.mark.parametrize("choice", CHOICES)
def test_features_are_those_of_a_scan(choice, kind, folder, tmp_path):
    paths = [write_records(folder / f"{k}", k * 100, 20 + k, kind) for k in range(3)]
    chosen = [paths[k] for k in (2, 0)]
    scanned = records_of(chosen, choice, tmp_path / "other")
    write_indexes(paths, {})
    assert records_of(chosen, choice, tmp_path / "third") == scanned


def test_records_are_those_of_tensorflow(folder, request):
    paths = [write_records(folder / f"{k}", k * 100, 20 + k) for k in range(3)]
    write_indexes(paths, {})
    request.getfixturevalue("no_scan")
    # The first record has no number in "box", and other records have one or several.
    fields = {"data": "image", "label": "label", "box": "box"}
    source = TFRecord(paths, fields)
    values = source.read(np.arange(len(source)), list(fields))
    for row, raw in enumerate(tf.data.TFRecordDataset(paths).as_numpy_iterator()):
        found = tf.train.Example.FromString(raw).features.feature
        assert values["data"][row].tobytes() == found["image"].bytes_list.value[0]
        assert values["label"][row] == found["label"].int64_list.value[0]
        assert values["box"][row].tolist() == found["box"].float_list.value
    assert row == len(source) - 1


def test_changed_records_are_indexed_again(folder, caplog):
    paths = [write_records(folder / f"{k}", k * 100) for k in range(3)]
    write_indexes(paths, {})
    write_records(folder / "1", 101)
    source = TFRecord(paths, {"label": "label"})
    labels = source.read(np.arange(120), ["label"])["label"].tolist()
    assert labels == [k * 7 - 20 for first in (0, 101, 200) for k in range(first, first + 40)]
    assert "does not fit 1 of 3 files" in caplog.text


def test_kinds_may_be_in_one_folder(folder, no_scan):
    tars, records = shards(folder), write_records(folder / "a", 0)
    write_indexes(tars, {})
    write_indexes([records], {})
    assert {*NAMES} <= {*os.listdir(folder)}
    assert len(Tar(tars, FIELDS)) == 126 and len(TFRecord(records, {"y": "label"})) == 40
