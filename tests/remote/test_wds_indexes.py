"""Remote tars are opened from the indexes of DALI's wds2idx, unless these belong to other tars."""

import os
import shutil
import tarfile

import numpy as np
import pytest
from wds2idx import IndexCreator

from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import Tar
from range_server import serving
from tars import write_tar

pytest.importorskip("obstore")

FIELDS = {"data": "jpg", "label": "cls"}
SIZE = 60_000  # more than the gap that is read between two ranges
TARS, SAMPLES = 3, 12


def members(first, size=SIZE, prefix="", label=0):
    random = np.random.default_rng(first)
    for k in range(first, first + SAMPLES):
        yield f"{prefix}{k:05d}.jpg", random.bytes(size + k)
        yield f"{prefix}{k:05d}.cls", b"%d" % (k * 7 + label)
        yield f"{prefix}{k:05d}.json", b"{}"


def wds2idx(path):
    """Writes the index of a tar like DALI's command wds2idx."""
    with IndexCreator(str(path), str(path.with_suffix(".idx")), verbose=False) as creator:
        creator.create_index()


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A folder of tars and their indexes."""
    folder = tmp_path_factory.mktemp("indexed")
    for k in range(TARS):
        write_tar(folder / f"{k}.tar", members(k * 100), tarfile.USTAR_FORMAT)
        wds2idx(folder / f"{k}.tar")
    return folder


@pytest.fixture
def server(indexed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(indexed, tmp_path / "files")
    with serving(tmp_path / "files") as (url, server):
        server.url = url
        yield server


def opened(server, numbers=range(TARS), fields=FIELDS, **options):
    paths = [f"{server.url}/{k}.tar" for k in numbers]
    indexes = [f"{server.url}/{k}.idx" for k in numbers]
    return Tar(paths, fields, index_paths=indexes, **options)


def same(source, server, numbers=range(TARS)):
    local = Tar([str(server.folder / f"{k}.tar") for k in numbers], FIELDS)
    for name, values in local._index.arrays.items():
        np.testing.assert_array_equal(source._index.arrays[name], values)
    assert source._index.about["first"] == local._index.about["first"]
    assert source.identity() == local.identity()


def test_few_bytes_are_read(server, monkeypatch):
    monkeypatch.setattr("dalijax.core.formats.cached_index._samples_digest", lambda *_: "")
    opened(server)
    read = sum(end - start for _, start, end in server.ranges if end is not None)
    # A header and a number of each sample, headers of four samples, and the ends of the tars.
    assert read < TARS * (SAMPLES * 1100 + 4 * 1100 + 11_000)
    total = sum(os.path.getsize(server.folder / f"{k}.tar") for k in range(TARS))
    assert read < total / 20
    assert sorted(path for path, _, end in server.ranges if end is None) == sorted(
        f"{k}.idx" for k in range(TARS)
    )


def test_samples_are_those_of_the_tars(server, caplog):
    same(opened(server), server)
    assert not caplog.records
    names = opened(server, fields={**FIELDS, "key": "__key__"}).read(np.arange(2), ["key"])["key"]
    assert list(names) == ["00000", "00001"]


def test_labels_that_are_no_integers_are_bad_records(server):
    path = server.folder / "0.tar"
    labels = (b"0", b"cat", b"2")
    write_tar(path, [(f"{k}.{e}", b) for k, b in enumerate(labels) for e in FIELDS.values()])
    wds2idx(path)
    source = opened(server, [0])
    same(source, server, [0])
    with pytest.raises(ValueError, match=r"0\.tar: 1\.cls must be an integer .*b'cat'"):
        source.read(np.arange(3), ["label"])


def test_files_without_versions_are_not_read(server, monkeypatch):
    monkeypatch.setattr("dalijax.core.formats.cached_index._samples_digest", lambda *_: "")
    server.tag = ""
    assert len(opened(server)) == TARS * SAMPLES
    assert max(end - start for _, start, end in server.ranges if end is not None) < 2 * SIZE


def test_index_paths_replace_a_shared_index(server, tmp_path):
    name = ".dalijax-tar.index"
    write_indexes([f"{server.url}/0.tar"], {}, str(tmp_path / name))
    (server.folder / name).write_bytes((tmp_path / name).read_bytes())
    server.ranges.clear()
    same(opened(server), server)
    assert name not in {path for path, _, _ in server.ranges}


@pytest.mark.parametrize("form", (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
def test_long_names_are_read_or_refused(form, server):
    """The offsets of wds2idx are wrong for members with GNU's headers of long names."""
    path = server.folder / "0.tar"
    entries = [entry for k in range(8) for entry in members(k * 100, prefix="x" * 120 * (k == 5))]
    write_tar(path, entries, form)
    wds2idx(path)
    if form == tarfile.PAX_FORMAT:  # whose offsets are right
        same(opened(server, [0]), server, [0])
        return
    message = r"0\.idx does not fit .*0\.tar: x+00500.*omit index_paths"
    with pytest.raises(ValueError, match=message):
        opened(server, [0])


def test_hidden_files_and_folders_between_members(server):
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    entries = [(".hidden", b"x" * 600), *members(0), folder, (".other", b""), *members(100)]
    write_tar(server.folder / "0.tar", entries, tarfile.USTAR_FORMAT)
    wds2idx(server.folder / "0.tar")
    same(opened(server, [0]), server, [0])


def rewritten(entries):
    def change(folder):
        write_tar(folder / "0.tar", entries, tarfile.USTAR_FORMAT)

    return change


def swapped(folder):
    os.rename(folder / "0.idx", folder / "x")
    os.rename(folder / "1.idx", folder / "0.idx")
    os.rename(folder / "x", folder / "1.idx")


def lines(change):
    def edit(folder):
        path = folder / "0.idx"
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return edit


CHANGES = {
    "other names": rewritten(members(300)),
    "other sizes": rewritten(members(0, SIZE + 512)),
    "a sample more": rewritten([*members(0), ("x.jpg", b"x"), ("x.cls", b"1")]),
    "a sample before": rewritten([("x.jpg", b"x"), ("x.cls", b"1"), *members(0)]),
    "fewer samples": rewritten([*members(0)][:6]),
    "another sample within": rewritten([*[*members(0)][:18], ("x.jpg", b"x"), *[*members(0)][18:]]),
    "longer label": rewritten([(n, c + b" " * 600 * (n == "00004.cls")) for n, c in members(0)]),
    "swapped": swapped,
    "no version": lines(lambda text: text[1:]),
    "older version": lines(lambda text: ["v1.1 12", *text[1:]]),
    "fewer lines": lines(lambda text: text[:-1]),
    "fewer samples in the index": lines(lambda text: ["v1.2 11", *text[1:-1]]),
    "a sample less in the index": lines(lambda text: ["v1.2 11", *text[1:5], *text[6:]]),
    "a word less": lines(lambda text: [*text[:-1], text[-1].rpartition(" ")[0]]),
    "negative": lines(lambda text: [*text[:-1], text[-1].replace("cls ", "cls -")]),
    "empty": lambda folder: (folder / "0.idx").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_of_another_tar_is_refused(change, server):
    CHANGES[change](server.folder)
    with pytest.raises(ValueError, match=r"0\.idx.*Write it again by wds2idx, or omit index_paths"):
        opened(server)


def test_other_contents_of_equal_sizes_are_read_from_the_tar(server):
    rewritten(members(0, label=1))(server.folder)
    same(opened(server), server)


def test_the_numbers_of_files_are_compared(server):
    with pytest.raises(ValueError, match="index_paths has 1 files for 2 tars"):
        Tar([f"{server.url}/{k}.tar" for k in range(2)], FIELDS, index_paths=f"{server.url}/0.idx")
    with pytest.raises(FileNotFoundError, match="none.idx"):
        Tar(f"{server.url}/0.tar", FIELDS, index_paths=f"{server.url}/none.idx")


def test_indexes_may_be_local(server):
    paths = [str(server.folder / f"{k}.idx") for k in range(TARS)]
    same(Tar([f"{server.url}/{k}.tar" for k in range(TARS)], FIELDS, index_paths=paths), server)
