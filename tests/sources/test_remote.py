"""Sources of URLs against the same files on disk: memory, and an HTTP server that knows ranges."""

import contextlib
import functools
import http.server
import os
import pathlib
import pickle
import re
import sys
import threading

import numpy as np
import pytest

from dalijax.sources import Files, Tar, TFRecord
from tars import FIELDS, samples, write_tar

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files and parts of them."""

    def send_head(self):
        path = self.translate_path(self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not os.path.isfile(path) or not wanted:
            return super().send_head()
        size = os.path.getsize(path)
        start = int(wanted[1])
        stop = min(int(wanted[2] or size - 1), size - 1) + 1
        self.server.ranges.append((start, stop))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))
        return None

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(folder):
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=folder)
    )
    server.ranges = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.ranges
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def same(remote, local):
    indices = np.array([len(local) - 1, 0, 3, 0])
    first, second = (source.read(indices, list(FIELDS.values())) for source in (remote, local))
    assert [v.tobytes() for v in first["data"]] == [v.tobytes() for v in second["data"]]
    np.testing.assert_array_equal(first["label"], second["label"])
    assert remote.identity() == local.identity()
    assert remote.fields == local.fields


def test_tars_in_memory(tmp_path, memory, caplog):
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k * 5, k * 5 + 5)) for k in range(2)]
    for path in paths:
        memory.pipe("/data/" + os.path.basename(path), pathlib.Path(path).read_bytes())
    urls = [f"memory://data/{k}.tar" for k in range(2)]
    source = Tar(urls, FIELDS)
    same(source, Tar(paths, FIELDS))
    assert source.name(7) == "memory://data/1.tar: 0007"
    caplog.clear()
    same(Tar(urls, FIELDS), Tar(paths, FIELDS))
    assert not caplog.records
    longer = write_tar(tmp_path / "x.tar", samples(0, 20))
    memory.pipe("/data/1.tar", pathlib.Path(longer).read_bytes())
    with pytest.raises(OSError, match="when the source was opened: open it anew"):
        pickle.loads(pickle.dumps(source)).read(np.array([9]), ["data"])
    assert len(Tar(urls, FIELDS)) == 25


def test_records_in_memory(tmp_path, memory):
    tf = pytest.importorskip("tensorflow")
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(6):
            bytes_ = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"%d" % i * 100]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
            features = tf.train.Features(feature={"x": bytes_, "y": label})
            writer.write(tf.train.Example(features=features).SerializeToString())
    memory.pipe("/a.tfrecord", pathlib.Path(path).read_bytes())
    names = {"x": "data", "y": "label"}
    same(TFRecord("memory://a.tfrecord", names), TFRecord(path, names))


def test_files_in_memory(tmp_path, memory):
    for name in ("b/1.jpg", "a/2.jpg", "a/x[1].jpg", "a/3.jpg", "a/note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
        memory.pipe(f"/root/{name}", name.encode())
    memory.pipe("/empty.jpg", b"")
    (empty,) = Files(paths=["memory://empty.jpg"]).read(np.array([0]), ["data"])["data"]
    assert empty.shape == (0,) and empty.dtype == np.uint8
    local = Files(tmp_path)
    for source in (
        Files("memory://root"),
        Files(
            paths=[f"memory://root/{n}" for n in ("a/2.jpg", "a/3.jpg", "a/x[1].jpg", "b/1.jpg")],
            labels=[0, 0, 0, 1],
        ),
    ):
        assert not source.fields["data"].is_path and len(source) == len(local) == 4
        values = source.read(np.array([3, 0, 2, 0]), ["data", "label"])
        assert [v.tobytes() for v in values["data"]] == [
            b"b/1.jpg",
            b"a/2.jpg",
            b"a/x[1].jpg",
            b"a/2.jpg",
        ]
        assert list(values["label"]) == [1, 0, 0, 0]
        assert source.name(3) == "memory:///root/b/1.jpg"
    memory.rm("/root/b/1.jpg")
    with pytest.raises(FileNotFoundError, match=r"b/1\.jpg"):
        source.read(np.array([0, 3]), ["data"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Files("memory://nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Tar("memory://nowhere.tar", FIELDS)


def test_a_tar_of_an_http_server_is_read_by_ranges(tmp_path):
    pytest.importorskip("aiohttp")
    path = write_tar(tmp_path / "a.tar", samples(0, 40))
    with served(str(tmp_path)) as (url, ranges):
        source = Tar(f"{url}/a.tar", FIELDS)
        ranges.clear()
        values = source.read(np.array([7, 30, 7]), ["data"])["data"]
        assert [v.tobytes() for v in values] == [samples(i, i + 1)[0][1] for i in (7, 30, 7)]
        assert sum(stop - start for start, stop in ranges) == sum(len(v) for v in values)
        same(source, Tar(path, FIELDS))


def test_without_fsspec_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match=r"s3://bucket/a\.tar is read by fsspec: pip install fsspec"
    ):
        Tar("s3://bucket/a.tar", FIELDS)
