"""Stored indexes belong to a version of the files, and their content is validated."""

import concurrent.futures
import json
import os
import pathlib
import pickle
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

from dalijax.core.formats import index as indexes
from dalijax.core.formats.example_message import record_parts
from dalijax.sources import Tar, TFRecord
from full import combinations
from tars import write_tar

FIELDS = {"data": "bin", "label": "cls", "text": "txt", "meta": "json"}
COUNT, CHANGED = 200, 100  # a record that the digest of 64 records does not cover


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


def make_tar(path, **changed):
    """Writes a tar in which a record has other members."""
    entries = []
    for i in range(COUNT):
        members = {"bin": b"%04d" % i * 9, "cls": b"1", "txt": b"some text", "json": b'{"a": 10}'}
        if i == CHANGED:
            members |= {name: text.encode() for name, text in changed.items()}
        entries += [(f"{i:04d}.{name}", text) for name, text in members.items()]
    return write_tar(path, entries)


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


def nested(*tags_and_content):
    *tags, content = tags_and_content
    for tag in reversed(tags):
        content = bytes([tag << 3 | 2]) + varint(len(content)) + content
    return content


def make_tfrecord(path, label=1, text=b"some text"):
    with open(path, "wb") as file:
        for i in range(COUNT):
            values = {
                b"data": nested(1, 1, b"%04d" % i * 9),
                b"label": nested(3, 1, varint(label if i == CHANGED else 1)),
                b"text": nested(1, 1, text if i == CHANGED else b"some text"),
            }
            example = b"".join(nested(1, nested(1, k) + nested(2, v)) for k, v in values.items())
            record = nested(1, example)
            file.writelines(record_parts(record))
    return str(path)


def open_tar(path, **options):
    return Tar(path, FIELDS, **options)


def open_tfrecord(path, **options):
    return TFRecord(path, {name: name for name in ("data", "label", "text")}, **options)


KINDS = {"tar": (make_tar, open_tar), "tfrecord": (make_tfrecord, open_tfrecord)}


def replaced(path, new):
    os.replace(new, path)


def replaced_by_a_copy_with_its_time(path, new):
    shutil.copystat(path, new)
    os.replace(new, path)


def written_in_place(path, new):
    with open(path, "r+b") as file:
        file.write(pathlib.Path(new).read_bytes())


def written_in_place_with_its_time(path, new):
    status = os.stat(path)
    written_in_place(path, new)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def linked(path, new):
    os.unlink(path)
    os.symlink(new, path)


WAYS = (
    replaced,
    replaced_by_a_copy_with_its_time,
    written_in_place,
    written_in_place_with_its_time,
    linked,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_corrected_label_is_detected(kind, way, tmp_path):
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    first = open_it(path)
    identity = first.identity()
    new = make(tmp_path / "b", **{"cls" if kind == "tar" else "label": "2" if kind == "tar" else 2})
    assert os.path.getsize(new) == os.path.getsize(path)
    way(path, new)
    second = open_it(path)
    rows = np.arange(CHANGED - 1, CHANGED + 2)
    assert first.read(rows, ["label"])["label"].tolist() == [1, 1, 1]
    assert second.read(rows, ["label"])["label"].tolist() == [1, 2, 1]
    assert second.identity() != identity


@pytest.mark.parametrize(
    ("name", "member", "text", "value"),
    [
        ("text", "txt", "short", "short"),
        ("text", "txt", "a longer text", "a longer text"),
        ("meta", "json", '{"a":2}', {"a": 2}),
        ("meta", "json", '{"a": 3000}', {"a": 3000}),
    ],
)
def test_texts_of_another_length_are_detected(name, member, text, value, tmp_path):
    path = make_tar(tmp_path / "a")
    identity = open_tar(path).identity()
    replaced(path, make_tar(tmp_path / "b", **{member: text}))
    second = open_tar(path)
    assert second.read(np.array([CHANGED]), [name])[name] == [value]
    assert second.identity() != identity


@pytest.mark.parametrize("kind", KINDS)
def test_tars_of_equal_names_have_separate_indexes(kind, tmp_path, cache):
    make, open_it = KINDS[kind]
    paths = []
    for folder, label in (("x", 1), ("y", 2)):
        (tmp_path / folder).mkdir()
        options = {"cls": str(label)} if kind == "tar" else {"label": label}
        paths.append(make(tmp_path / folder / "train", **options))
    for _ in range(2):
        labels = [open_it(p).read(np.array([CHANGED]), ["label"])["label"].item() for p in paths]
        assert labels == [1, 2] and len(os.listdir(cache)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_depends_on_the_content(kind, tmp_path):
    make, open_it = KINDS[kind]
    (tmp_path / "x").mkdir()
    path = make(tmp_path / "a")
    moved = shutil.copy(path, tmp_path / "x")
    assert open_it(path).identity() == open_it(moved).identity()
    os.utime(path, (0, 0))
    assert open_it(path).identity() == open_it(moved).identity()


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_belongs_to_the_opened_files(kind, tmp_path):
    """It is known even after the files were replaced."""
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    first, asked = open_it(path), open_it(path).identity()
    replaced(
        path, make(tmp_path / "b", **({"txt": "other txt"} if kind == "tar" else {"label": 2}))
    )
    assert first.identity() == asked
    assert (open_it(path).identity() == asked) == (kind == "tar")  # it is not one of the 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_matching_index_is_neither_rebuilt_nor_rewritten(kind, tmp_path, cache, monkeypatch):
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    open_it(path)
    (file,) = cache.iterdir()
    before = file.stat()
    monkeypatch.setattr("dalijax.core.formats.each_file.open_files", None)
    open_it(path)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_indexed_is_refused(kind, tmp_path, cache, monkeypatch):
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    name = f"dalijax.core.sources.{kind}.index_{'tars' if kind == 'tar' else 'records'}"
    module = sys.modules[f"dalijax.core.sources.{kind}"]
    build = getattr(module, name.rpartition(".")[2])

    def build_and_touch(*args):
        index = build(*args)
        os.utime(path)
        return index

    monkeypatch.setattr(name, build_and_touch)
    with pytest.raises(OSError, match="a changed while it was indexed. Create the source"):
        open_it(path)
    assert not cache.exists()


def test_remote_files_are_indexed_again_when_their_version_changes(tmp_path, cache):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    make_tar(tmp_path / "a")
    for label in ("1", "2"):
        system.pipe("/a.tar", pathlib.Path(make_tar(tmp_path / "a", cls=label)).read_bytes())
        for _ in range(2):
            source = open_tar("memory://a.tar")
            assert source.read(np.array([CHANGED]), ["label"])["label"].item() == int(label)
    assert len(os.listdir(cache)) == 2


@pytest.mark.parametrize("way", [*WAYS, os.truncate])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_before_its_first_read_is_refused(kind, way, tmp_path):
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    source = open_it(path)
    pickled = pickle.dumps(source)
    new = make(tmp_path / "b", **{"cls" if kind == "tar" else "label": "2" if kind == "tar" else 2})
    way(path, 20_000 if way is os.truncate else new)
    for opened in (source, pickle.loads(pickled)):
        with pytest.raises(OSError, match="/a .* when|after the source was opened. Reopen"):
            opened.read(np.arange(3), ["data"])


def test_a_remote_file_that_changes_before_its_first_read_is_refused(tmp_path):
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.pipe("/a.tar", pathlib.Path(make_tar(tmp_path / "a")).read_bytes())
    source = open_tar("memory://a.tar")
    system.pipe("/a.tar", pathlib.Path(make_tar(tmp_path / "a", cls="2")).read_bytes())
    with pytest.raises(OSError, match="a.tar was changed after the source was opened"):
        source.read(np.arange(3), ["data"])


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_another_owner_or_mode_are_read(kind, tmp_path):
    make, open_it = KINDS[kind]
    source = open_it([make(tmp_path / "a"), make(tmp_path / "b")])
    for name in ("a", "b"):
        os.chmod(tmp_path / name, 0o640)
        os.link(tmp_path / name, tmp_path / f"{name}2")
    for opened in (source, pickle.loads(pickle.dumps(source))):
        assert len(opened.read(np.array([3, COUNT + 3]), ["data"])["data"]) == 2


# The files of the cache


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_other_users_may_read_an_index_if_the_umask_allows_it(umask, tmp_path, cache):
    before = os.umask(umask)
    try:
        open_tar(make_tar(tmp_path / "a"))
    finally:
        os.umask(before)
    (file,) = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def rewritten(file, change):
    """Writes an index of the cache with other content and a valid digest."""
    index = indexes.load(str(file))
    about = json.loads(json.dumps(index.about))
    arrays = {name: np.array(array) for name, array in index.arrays.items()}
    change(about, arrays)
    indexes.save(str(file), indexes.Index(about, arrays))


def about(**entries):
    return lambda about, arrays: about.update(entries)


def without(name):
    return lambda about, arrays: about.pop(name)


def array(name, change):
    return lambda about, arrays: arrays.update({name: change(arrays[name])})


def first_row(value):
    def change(old):
        old[0] = value
        return old

    return change


FORGERIES = {
    "no sizes": without("sizes"),
    "no first": without("first"),
    "no names": without("names"),
    "no stamps": without("stamps"),
    "NaN": about(first=[0, float("nan")]),
    "infinite": about(first=[0, float("inf")]),
    "fraction": about(first=[0, 200.0]),
    "negative count": about(first=[0, -200]),
    "huge count": about(first=[0, 1 << 80]),
    "more records": about(first=[0, COUNT + 1]),
    "fewer records": about(first=[0, COUNT - 1]),
    "text": about(first=["0", "200"]),
    "no list": about(first=200),
    "true": about(first=[False, 200]),
    "more files": about(first=[0, 100, 200]),
    "other sizes": about(sizes=[1 << 40]),
    "nothing": about(sizes=None),
    "odd reasons": lambda about, arrays: about.update(reasons=[7], kinds={"data": "value"}),
    "odd texts": lambda about, arrays: about.update(incomplete=True, kinds={"data": [1]}),
    "nested": about(names=[[]]),
    "no text": about(columns=7),
    "missing array": lambda about, arrays: arrays.pop("data.size"),
    "further array": lambda about, arrays: arrays.update(more=arrays["start"]),
    "other name": lambda about, arrays: arrays.update({"x.size": arrays.pop("data.size")}),
    "wrong dtype": array("data.offset", lambda old: old.astype(np.float64)),
    "label of bytes": array("label.value", lambda old: old.astype(bool)),
    "shorter": array("data.offset", lambda old: old[:-1]),
    "matrix": array("data.offset", lambda old: old.reshape(2, -1)),
    "scalar": array("data.offset", lambda old: old[0]),
    "negative offset": array("data.offset", first_row(-1)),
    "lowest offset": array("data.offset", first_row(-(1 << 63))),
    "offset outside": array("text.offset", first_row(1 << 40)),
    "highest offset": array("text.offset", first_row((1 << 63) - 1)),
    "negative size": array("data.size", first_row(-1)),
    "size outside": array("data.size", first_row(1 << 40)),
    "highest size": array("data.size", first_row((1 << 63) - 1)),
    "negative start": array("start", first_row(-1)),
    "start outside": array("start", first_row(1 << 40)),
}


@pytest.mark.parametrize(("forgery", "kind"), combinations(2, FORGERIES, KINDS))
def test_a_forged_index_is_rebuilt(kind, forgery, tmp_path, cache, caplog):
    make, open_it = KINDS[kind]
    path = make(tmp_path / "a")
    first = open_it(path)
    (file,) = cache.iterdir()
    genuine = file.read_bytes()
    rewritten(file, FORGERIES[forgery])
    assert file.read_bytes() != genuine
    again = open_it(path)
    assert "rebuilt" in caplog.text and file.read_bytes() == genuine
    for name in first.fields:
        before, after = (list(s.read(np.arange(3), [name])[name]) for s in (first, again))
        assert all(map(np.array_equal, before, after))


def test_a_forged_header_is_refused(tmp_path):
    """The header of a file with a valid digest."""
    path = tmp_path / "a.index"
    shapes = {"x": ["<i8", [2]]}
    for about_, arrays in (
        ([], shapes),
        (None, shapes),
        ({}, []),
        ({}, None),
        ({}, {"x": []}),
        ({}, {"x": ["<i8"]}),
        ({}, {"x": [7, [2]]}),
        ({}, {"x": ["O", [2]]}),
        ({}, {"x": ["|O8", [2]]}),
        ({}, {"x": ["<i8,<i8", [1]]}),
        ({}, {"x": ["<i8", 2]}),
        ({}, {"x": ["<i8", [-2]]}),
        ({}, {"x": ["<i8", [2.0]]}),
        ({}, {"x": ["<i8", [float("nan")]]}),
        ({}, {"x": ["<i8", [1 << 70]]}),
        ({}, {"x": ["<i8", [1 << 10] * 40]}),
        ({}, {"x": ["<i8", [3]]}),
    ):
        with open(path, "w+b") as file:
            indexes.write_head(file, about_, arrays)
            file.write(bytes(16))
            indexes.seal(file)
        with pytest.raises(indexes.DamagedIndexError, match=r"a\.index is damaged"):
            indexes.load(str(path))
    for head in (b"[" * 100_000, b"{}", b"null", b"\xff", b""):
        for length in (len(head), 1 << 62):
            with open(path, "w+b") as file:
                file.write(indexes._MAGIC + length.to_bytes(8, "little") + head + bytes(64))
                indexes.seal(file)
            with pytest.raises(indexes.DamagedIndexError, match=r"a\.index is damaged"):
                indexes.load(str(path))


def test_ranges_outside_of_a_file_are_never_read(tmp_path, cache, monkeypatch):
    """In very large indexes, only the rows that are read are checked."""
    path = make_tar(tmp_path / "a")
    open_tar(path)
    (file,) = cache.iterdir()
    monkeypatch.setattr("dalijax.core.formats.index_checks.MOST_ROWS", 0)
    for name in ("data.offset", "data.size"):
        for value in (-1, 1 << 40, (1 << 63) - 1, -(1 << 63)):
            rewritten(file, array(name, first_row(value)))
            source = open_tar(path)
            with pytest.raises(OSError, match="the stored index is damaged: .* Remove the index"):
                source.read(np.array([1, 0]), ["data"])
            assert len(source.read(np.array([1]), ["data"])["data"]) == 1
            rewritten(file, array(name, first_row(0)))


@pytest.mark.parametrize("planted", ["link", "FIFO", "folder", "empty", "unreadable"])
def test_a_link_in_place_of_an_index_is_not_followed(planted, tmp_path, cache, caplog):
    path = make_tar(tmp_path / "a")
    open_tar(path)
    (file,) = cache.iterdir()
    (tmp_path / "precious").write_bytes(file.read_bytes())
    file.unlink()
    if planted == "link":
        file.symlink_to(tmp_path / "precious")
    elif planted == "FIFO":
        os.mkfifo(file)
    elif planted == "folder":
        file.mkdir()
    else:
        file.write_bytes(b"")
        if planted == "unreadable":
            if os.geteuid() == 0:
                pytest.skip("root reads all files")
            file.chmod(0)
    content = (tmp_path / "precious").read_bytes()
    assert len(open_tar(path)) == COUNT
    assert "rebuilt" in caplog.text and (tmp_path / "precious").read_bytes() == content
    if planted not in ("folder", "unreadable"):
        assert file.is_file() and not file.is_symlink() and file.read_bytes() == content


def test_a_default_folder_of_another_user_is_not_used(tmp_path, cache, caplog):
    if os.geteuid():
        pytest.skip("needs root")
    path = make_tar(tmp_path / "a")
    cache.parent.mkdir()
    cache.mkdir()
    os.chown(cache, 12345, 12345)
    assert len(open_tar(path)) == COUNT and not os.listdir(cache)
    assert "belongs to user 12345" in caplog.text and "cache_dir=" in caplog.text
    open_tar(path, cache_dir=cache)
    assert len(os.listdir(cache)) == 1  # named by the user


def test_a_default_folder_that_all_users_write_to_is_not_used(tmp_path, cache, caplog):
    path = make_tar(tmp_path / "a")
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    for _ in range(2):
        assert len(open_tar(path)) == COUNT and not os.listdir(cache)
    assert caplog.text.count("can be written by all users") == 1  # a single warning for a folder
    open_tar(path, cache_dir=cache)
    assert len(os.listdir(cache)) == 1


def test_indexes_that_are_not_used_are_removed(tmp_path, cache):
    path = make_tar(tmp_path / "a")
    open_tar(path)
    (cache / "notes.index").write_bytes(b"")
    files = sorted(cache.iterdir())
    for file in files:
        os.utime(file, (0, 0))
    open_tar(path)  # which is a use
    os.utime(path)
    open_tar(path)
    assert len(os.listdir(cache)) == 3
    os.utime(files[0], (0, 0))
    os.utime(path)
    open_tar(path)
    assert len(os.listdir(cache)) == 3 and not files[0].exists() and files[1].exists()


def test_several_writers_share_an_index(tmp_path, cache):
    """Threads replace processes, since the kernel locks open files."""
    path = make_tar(tmp_path / "a")
    open_tar(path)

    def open_often():
        for _ in range(20):
            for file in cache.glob("*.index"):
                file.unlink(missing_ok=True)
            assert open_tar(path).read(np.arange(COUNT), ["label"])["label"].tolist() == [1] * COUNT

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(open_often) for _ in range(3)]:
            future.result()
    assert {file.suffix for file in cache.iterdir()} <= {".index"}


def test_a_mapped_index_outlives_its_replacement(tmp_path, cache):
    path = make_tar(tmp_path / "a")
    first = open_tar(path)
    (file,) = cache.iterdir()
    rewritten(file, about(first=None))
    open_tar(path)
    assert first.read(np.arange(COUNT), ["label"])["label"].tolist() == [1] * COUNT


def test_an_index_is_never_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(indexes.DamagedIndexError, match="not an index"):
        indexes.load(str(tmp_path / "a.npy"))
    source = pathlib.Path(indexes.__file__).parent
    text = subprocess.run(
        ["grep", "-rnE", "allow_pickle|pickle\\.load|np\\.load", source], capture_output=True
    ).stdout
    assert not text
