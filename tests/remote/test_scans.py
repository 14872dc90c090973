"""Headers of remote tars are read ahead, and give the index of local files."""

import pathlib
import random

import numpy as np
import pytest

from dalijax.core.formats.buffered_reader import BufferedReader
from dalijax.core.formats.byte_files import ObjectFile, RemoteFile, open_files
from dalijax.core.remote.storage import Storage
from dalijax.sources import Tar
from range_server import serving, share_of_requests
from tars import FIELDS, sample, write_tar

pytest.importorskip("obstore")

BUFFER = 4096
SIZE = 100_000


@pytest.fixture(autouse=True)
def small_buffers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kind in (ObjectFile, RemoteFile):
        monkeypatch.setattr(kind, "buffer_size", BUFFER)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    with serving(tmp_path / "files") as (url, server):
        server.url = url
        yield server


def make(server, count, size=40, name="0.tar"):
    return write_tar(server.folder / name, [e for i in range(count) for e in sample(i, size)])


def same_index(source, local):
    assert source._index.about["first"] == local._index.about["first"]
    for name, values in local._index.arrays.items():
        np.testing.assert_array_equal(source._index.arrays[name], values)


def requested(server):
    return sum((SIZE if end is None else end) - start for _, start, end in server.ranges)


@pytest.mark.parametrize("ahead", (0, 1, 5))
@pytest.mark.parametrize("seed", range(4))
def test_random_reads_return_the_bytes_of_the_file(seed, ahead, server):
    rng = random.Random(seed)
    content = rng.randbytes(SIZE)
    (server.folder / "file").write_bytes(content)
    (file,) = open_files([f"{server.url}/file"], Storage())
    take, at = BufferedReader(file, 1000, ahead), 0
    for _ in range(60):
        count = rng.choice((0, 1, 512, 999, 1000, 5000))
        if rng.random() < 0.5:
            assert take(at, count) == content[at : at + count]
        data, start = take.buffered(at, count)
        assert data == content[start : start + len(data)]
        assert start <= at and start + len(data) >= min(at + count, SIZE)
        at += rng.choice((0, 1, 512, count, count, 999, 1001, 2500, 9000, -at // 2))


@pytest.mark.parametrize("ahead", (1, 5))
def test_reads_continue_after_errors(ahead, server):
    content = random.Random(0).randbytes(SIZE)
    (server.folder / "file").write_bytes(content)
    (file,) = open_files([f"{server.url}/file"], Storage())
    server.fault = share_of_requests(0.3, ("404",), most=1)
    take, at, num_errors = BufferedReader(file, 1000, ahead), 0, 0
    while at < SIZE:
        try:
            data = take(at, 1500)
        except FileNotFoundError:
            num_errors += 1
            continue
        assert data == content[at : at + 1500]
        at += 1700
    assert num_errors


def test_one_tar_is_read_by_requests_in_parallel(server, caplog):
    path = make(server, 300)
    server.latency = 0.01
    source = Tar(f"{server.url}/0.tar", FIELDS)
    assert server.most_in_flight > 8
    size = pathlib.Path(path).stat().st_size
    assert f"up to {size / 1e6:.1f} MB of 1 files" in caplog.text
    same_index(source, Tar(path, FIELDS))


def test_contents_larger_than_buffers_are_skipped(server, monkeypatch):
    monkeypatch.setattr("dalijax.core.formats.cached_index._samples_digest", lambda *_: "")
    monkeypatch.setattr(ObjectFile, "buffer_size", 16 * BUFFER)
    path = make(server, 8, 5 * 16 * BUFFER)
    source = Tar(f"{server.url}/0.tar", FIELDS)
    assert requested(server) < pathlib.Path(path).stat().st_size / 10
    same_index(source, Tar(path, FIELDS))


@pytest.mark.parametrize(("count", "size"), ((60, 40), (8, 3 * BUFFER)))
def test_failed_requests_are_repeated(count, size, server):
    path = make(server, count, size)
    server.fault = share_of_requests(0.06, ("503", "reset", "short"), most=1)
    source = Tar(f"{server.url}/0.tar", FIELDS)
    assert server.num_faults
    same_index(source, Tar(path, FIELDS))


def test_files_of_fsspec_are_read_ahead(server):
    system = pytest.importorskip("fsspec").filesystem("memory")
    path = make(server, 200)
    system.pipe("/scans/0.tar", pathlib.Path(path).read_bytes())
    same_index(Tar("memory://scans/0.tar", FIELDS), Tar(path, FIELDS))
