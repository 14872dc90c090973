"""Files of a bucket are listed once, read ahead, and read only in the listed version."""

import os
import pickle
import time

import numpy as np
import pytest

from dalijax import data_iterator
from dalijax.core.sources import files as files_module
from dalijax.sources import Files
from range_server import serving

pytest.importorskip("obstore")

COUNT = 40
BUCKET = "s3://bucket/root"


def content(number):
    return b"%d," % number * (100 + number)


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "files" / "bucket" / "root"
    for number in range(COUNT):
        path = root / f"class {number * 2 // COUNT}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(number))
    with serving(tmp_path / "files") as (url, server):
        server.root = root
        keys = {"key": "a", "secret": "b", "region": "us-east-1"}
        server.options = {**keys, "endpoint_url": url, "retry_timeout": 5}
        yield server


def urls():
    return [f"{BUCKET}/class {k * 2 // COUNT}/{k:02d}.jpg" for k in range(COUNT)]


WAYS = {
    "folder": lambda **options: Files(BUCKET, **options),
    "pattern": lambda **options: Files(paths=f"{BUCKET}/**/*.jpg", **options),
    "list": lambda **options: Files(paths=urls(), **options),
}


def opened(server, way="folder", **options):
    return WAYS[way](storage_options=server.options, **options)


def check(source, expected=content):
    data = source.read(np.arange(COUNT), ["data"])["data"]
    assert [value.tobytes() for value in data] == [expected(k) for k in range(COUNT)]


@pytest.mark.parametrize("way", WAYS)
def test_listings_have_the_sizes_and_versions(way, server):
    source = opened(server, way)
    probes = [entry for entry in server.ranges if entry[0] != "bucket/root"]  # is it a file?
    assert not probes and len(server.lists) == (3 if way == "folder" else 1)
    server.ranges.clear()
    check(pickle.loads(pickle.dumps(source)))
    sizes = [(url.removeprefix("s3://"), 0, len(content(k))) for k, url in enumerate(urls())]
    assert sorted(server.ranges) == sorted(sizes)


@pytest.mark.parametrize("read_ahead", ("128MB", 0))
def test_batches_are_those_of_local_files_and_are_read_ahead(read_ahead, server):
    def batches(source):
        make = data_iterator(
            lambda data, label: (data, label), ["data", "label"], source=source, as_numpy=True
        )
        iterator = make(batch_size=1, num_threads=1, seed=3)
        return iterator, [next(iterator)["data"].tobytes() for _ in range(4)]

    data = {content(k) for k in range(COUNT)}
    source = opened(server, read_ahead=read_ahead)
    assert source._read_ahead == (128_000_000 if read_ahead else 0)
    server.ranges.clear()
    iterator, found = batches(source)
    assert set(found) <= data
    end = time.monotonic() + 30
    while read_ahead and len({*server.ranges}) < COUNT and time.monotonic() < end:
        time.sleep(0.01)
    assert (len({*server.ranges}) == COUNT) is bool(read_ahead)
    iterator.close()
    assert batches(opened(server, read_ahead=read_ahead))[1] == found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_announced", (False, True))
def test_a_changed_file_is_refused(is_announced, way, server):
    source = opened(server, way)
    path = server.root / "class 0" / "03.jpg"
    path.write_bytes(content(3).replace(b"3", b"4"))
    row = np.array([3])
    if is_announced:
        leases = source._announce(row, ["data"], row, None)
        assert source._range_bytes(row, ["data"]) == leases[0][0].num_bytes == len(content(3))
    with pytest.raises(OSError, match=r"class 0/03\.jpg was changed after the source was opened"):
        source.read(row, ["data"])
    check(opened(server, way), lambda k: path.read_bytes() if k == 3 else content(k))
    os.unlink(path)
    with pytest.raises(FileNotFoundError, match=r"class 0/03\.jpg does not exist"):
        source.read(row, ["data"])


@pytest.mark.parametrize("reason", ("denied", "missing", "many"))
def test_files_without_versions_are_read_whole(reason, server, monkeypatch):
    if reason == "denied":
        server.can_list = False
    elif reason == "missing":
        os.unlink(server.root / "class 1" / "39.jpg")
    else:
        monkeypatch.setattr(files_module, "MOST_KEPT", COUNT - 1)
    source = opened(server, "list")
    data = source.read(np.arange(COUNT - 1), ["data"])["data"]
    assert [value.tobytes() for value in data] == [content(k) for k in range(COUNT - 1)]
    assert source._read_ahead == 0 and source.read_threads == 16


def test_the_records_of_the_identity_are_requested_together(server):
    source, whole = opened(server), opened(server, read_ahead=0)
    server.latency = 0.02
    server.ranges.clear()
    identity = source.identity()
    assert server.most_in_flight > 8 and len(server.ranges) == COUNT
    server.latency = 0
    assert whole.identity() == identity


def test_empty_files(server):
    (server.root / "class 0" / "00.jpg").write_bytes(b"")
    check(opened(server), lambda k: content(k) if k else b"")
