"""Sources of URLs compared with the same files on disk: memory, and an HTTP server with ranges."""

import contextlib
import functools
import http.server
import os
import pathlib
import pickle
import re
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest

from dalijax.core.remote import fsspec_client
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
    """Serves files and parts of files."""

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


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # further connections would be repeated after a second


@contextlib.contextmanager
def served(folder, handler=Handler):
    server = Server(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    server.ranges = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.ranges
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def same(remote, local):
    indices = np.array([len(local) - 1, 0, 3, 0])
    first, second = (source.read(indices, list(FIELDS)) for source in (remote, local))
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
    with pytest.raises(OSError, match="when the source was opened. Reopen"):
        pickle.loads(pickle.dumps(source)).read(np.array([9]), ["data"])
    assert len(Tar(urls, FIELDS)) == 25


def test_a_file_that_changes_later_is_refused(memory, tmp_path, monkeypatch):
    for k, letter in enumerate("ab"):
        path = write_tar(tmp_path / f"{k}.tar", [("0.bin", letter.encode() * 100)])
        memory.pipe(f"/data/{k}.tar", pathlib.Path(path).read_bytes())
    source = Tar([f"memory://data/{k}.tar" for k in range(2)], {"data": "bin"})
    indices = np.array([0, 1])
    assert [v.tobytes() for v in source.read(indices, ["data"])["data"]] == [b"a" * 100, b"b" * 100]
    memory.pipe("/data/0.tar", pathlib.Path(path).read_bytes())
    monkeypatch.setattr(fsspec_client, "_CHECK_SECONDS", 0.0)  # instead of a minute
    with pytest.raises(OSError, match="0.tar was changed after the source was opened: {'created'"):
        source.read(indices, ["data"])


def test_one_call_reads_the_ranges_of_all_files(tmp_path, memory, monkeypatch):
    for k in range(3):
        path = write_tar(tmp_path / f"{k}.tar", samples(k * 40, k * 40 + 40))
        memory.pipe(f"/data/{k}.tar", pathlib.Path(path).read_bytes())
    source = Tar([f"memory://data/{k}.tar" for k in range(3)], FIELDS)
    calls = []
    whole = type(memory).cat_ranges

    def counted(self, paths, *args, **kwargs):
        calls.append(paths)
        return whole(self, paths, *args, **kwargs)

    monkeypatch.setattr(type(memory), "cat_ranges", counted)
    indices = np.array([110, 3, 50, 3, 39])
    values = source.read(indices, ["data"])["data"]
    assert [v.tobytes() for v in values] == [samples(i, i + 1)[0][1] for i in indices.tolist()]
    assert len(calls) == 1 and len(set(calls[0])) == 3


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
    fields = {"data": "x", "label": "y"}
    same(TFRecord("memory://a.tfrecord", fields), TFRecord(path, fields))


def test_files_in_memory(tmp_path, memory):
    for name in ("b/1.jpg", "a/2.jpg", "a/x[1].jpg", "a/3.jpg", "a/note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
        memory.pipe(f"/data/{name}", name.encode())
    memory.pipe("/empty.jpg", b"")
    (empty,) = Files(paths=["memory://empty.jpg"]).read(np.array([0]), ["data"])["data"]
    assert empty.shape == (0,) and empty.dtype == np.uint8
    local = Files(tmp_path)
    for source in (
        Files("memory://data"),
        Files(
            paths=[f"memory://data/{n}" for n in ("a/2.jpg", "a/3.jpg", "a/x[1].jpg", "b/1.jpg")],
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
        assert source.name(3).endswith("/data/b/1.jpg")
    memory.rm("/data/b/1.jpg")
    with pytest.raises(FileNotFoundError, match=r"b/1\.jpg"):
        source.read(np.array([0, 3]), ["data"])
    for url, error, text in (
        (
            "memory://nowhere",
            FileNotFoundError,
            "memory://nowhere is not a directory. Check the URL",
        ),
        ("memory://ro*", FileNotFoundError, r"memory://ro\* does not exist.* as paths="),
        (
            "memory://data/a/2.jpg",
            NotADirectoryError,
            "2.jpg is a file, but Files takes a directory",
        ),
    ):
        with pytest.raises(error, match=text):
            Files(url)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Tar("memory://nowhere.tar", FIELDS)


def test_a_tar_of_an_http_server_is_read_by_ranges(tmp_path):
    pytest.importorskip("obstore")
    path = write_tar(tmp_path / "a.tar", samples(0, 40))
    with served(str(tmp_path)) as (url, ranges):
        source = Tar(f"{url}/a.tar", FIELDS)
        ranges.clear()
        values = source.read(np.array([7, 30, 7]), ["data"])["data"]
        assert [v.tobytes() for v in values] == [samples(i, i + 1)[0][1] for i in (7, 30, 7)]
        assert sum(stop - start for start, stop in ranges) == sum(len(v) for v in values[:2])
        same(source, Tar(path, FIELDS))


class NamingHandler(Handler):
    """Stores the clients that send requests."""

    clients: ClassVar[list[str]] = []

    def send_head(self):
        self.clients.append(self.headers["User-Agent"].partition("/")[0])
        return super().send_head()


def test_a_folder_of_an_http_server_is_listed_by_fsspec_and_read_by_obstore(tmp_path):
    pytest.importorskip("obstore")
    pytest.importorskip("aiohttp")
    names = ["a/1.jpg", "a/2 x.jpg", "b/c/3.jpg", "b/\u00e9.jpg"]
    for name in names:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(name.encode())
    with served(str(tmp_path), NamingHandler) as (url, _):
        for make in (
            lambda: Files(f"{url}/root"),
            lambda: Files(f"{url}/root/"),
            lambda: Files(paths=f"{url}/root/**/*.jpg", labels=[0, 0, 1, 1]),
        ):
            NamingHandler.clients.clear()
            source = pickle.loads(pickle.dumps(make()))
            assert set(NamingHandler.clients) == {"Python"}
            NamingHandler.clients.clear()
            values = source.read(np.arange(4), ["data", "label"])
            assert sorted(v.tobytes().decode() for v in values["data"]) == names
            assert values["label"].tolist() == [0, 0, 1, 1]
            assert NamingHandler.clients == ["object_store"] * 4
        with pytest.raises(NotADirectoryError, match=r"1.jpg is a file, but Files takes a dir"):
            Files(f"{url}/root/a/1.jpg")


class BadHandler(Handler):
    """A server whose answers to range requests differ from the requests."""

    way = ""

    def send_head(self):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        path = self.translate_path(self.path)
        if not wanted or not self.way:
            return super().send_head()
        if self.way == "ignores":
            return http.server.SimpleHTTPRequestHandler.send_head(self)
        start, stop = int(wanted[1]), int(wanted[2]) + 1
        shift = {"other": 512, "before": -512}.get(self.way, 0)
        lengthen = {"short": -1, "long": 1, "empty": start - stop, "lies": -1}.get(self.way, 0)
        content = pathlib.Path(path).read_bytes()
        body = (content + bytes(512))[max(0, start + shift) : stop + shift + lengthen]
        self.send_response(500 if self.way == "fails" else 206)
        ends = (start, stop - 1) if self.way == "lies" else (start + shift, stop - 1 + shift)
        if self.way != "silent":
            self.send_header("Content-Range", f"bytes {ends[0]}-{ends[1]}/{len(content)}")
        missing = 1 if self.way in ("cut", "lies") else 0
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True
        return None


WAYS = ("ignores", "short", "long", "empty", "other", "before", "silent", "cut", "lies", "fails")


@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_another_range_are_refused(way, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    write_tar(tmp_path / "a.tar", samples(0, 40))
    with served(str(tmp_path), BadHandler) as (url, _):
        options = {"retry_timeout": 0.3}
        source = Tar(f"{url}/a.tar", FIELDS, storage_options=options)
        monkeypatch.setattr(BadHandler, "way", way)
        with pytest.raises(OSError, match=re.escape(f"{url}/a.tar")):
            source.read(np.array([7, 30]), ["data"])
        with pytest.raises(OSError, match=re.escape(f"{url}/a.tar")):
            Tar(f"{url}/a.tar", FIELDS, cache_dir=tmp_path / "other", storage_options=options)
        monkeypatch.setattr(BadHandler, "way", "")
        for _ in range(50):  # on a busy machine, a retry after a cut may take longer than 0.3 s
            with contextlib.suppress(OSError):
                values = source.read(np.array([7, 30]), ["data"])["data"]
                break
        assert [v.tobytes() for v in values] == [samples(i, i + 1)[0][1] for i in (7, 30)]


def test_pythons_server_is_refused_when_the_source_is_opened(tmp_path):
    pytest.importorskip("obstore")
    write_tar(tmp_path / "a.tar", samples(0, 40))
    message = r"a\.tar: the server ignores ranges.*download the files"
    plain = http.server.SimpleHTTPRequestHandler
    with served(str(tmp_path), plain) as (url, _), pytest.raises(OSError, match=message):
        Tar(f"{url}/a.tar", FIELDS)


class TaggedHandler(Handler):
    """Names the version of each file only by an ETag."""

    tag = ""

    def end_headers(self):
        if self.tag:
            self.send_header("ETag", self.tag)
        super().end_headers()

    def send_header(self, name, value):
        if name != "Last-Modified":
            super().send_header(name, value)


def test_another_etag_is_another_file(tmp_path, cache, monkeypatch, caplog):
    pytest.importorskip("obstore")
    write_tar(tmp_path / "a.tar", samples(0, 40))
    with served(str(tmp_path), TaggedHandler) as (url, _):
        for number, (tag, first) in enumerate((('"1"', 0), ('"1"', 0), ('"2"', 20))):
            monkeypatch.setattr(TaggedHandler, "tag", tag)
            write_tar(tmp_path / "a.tar", samples(first, first + 20))
            source = Tar(f"{url}/a.tar", FIELDS)
            assert source.read(np.array([3]), ["label"])["label"].tolist() == [first]
            assert len(os.listdir(cache)) == (1 if number < 2 else 2)
        monkeypatch.setattr(TaggedHandler, "tag", "")
        write_tar(tmp_path / "a.tar", samples(30, 50))
        assert Tar(f"{url}/a.tar", FIELDS).read(np.array([3]), ["label"])["label"].tolist() == [30]
        assert "has neither an ETag" in caplog.text and len(os.listdir(cache)) == 2
        # A server without versions is read like any other.
        assert len(Tar(f"{url}/a.tar", FIELDS).read(np.array([3]), ["data"])["data"]) == 1


class DatedHandler(Handler):
    """Names the version of each file only by its date."""

    date = "Mon, 01 Jan 2024 00:00:00 GMT"

    def date_time_string(self, timestamp=None):
        return self.date if timestamp else super().date_time_string()

    def end_headers(self):
        self.send_header("Last-Modified", self.date)
        super().end_headers()


@pytest.mark.parametrize(
    "handler, version",
    [(TaggedHandler, {"tag": '"2"'}), (DatedHandler, {"date": "Tue, 02 Jan 2024 00:00:00 GMT"})],
)
def test_a_remote_file_that_changes_between_two_reads_is_refused(
    handler, version, tmp_path, monkeypatch
):
    pytest.importorskip("obstore")
    path = write_tar(tmp_path / "a.tar", samples(0, 20))
    monkeypatch.setattr(TaggedHandler, "tag", '"1"')
    with served(str(tmp_path), handler) as (url, _):
        source = Tar(f"{url}/a.tar", FIELDS)
        source.read(np.array([3]), ["data", "label"])
        write_tar(path, [(n, c if b"7" in c else c[:-1] + b"7") for n, c in samples(0, 20)])
        for name, value in version.items():
            monkeypatch.setattr(handler, name, value)
        with pytest.raises(OSError, match=r"a\.tar was changed after the source.*Reopen"):
            source.read(np.array([3]), ["data", "label"])
        source = Tar(f"{url}/a.tar", FIELDS)
        assert len(source.read(np.array([3]), ["data"])["data"]) == 1


@pytest.mark.parametrize("change", [lambda b: b + b"x", lambda b: b[:-1], lambda b: b"", None])
def test_wrong_lengths_of_any_file_system_are_refused(change, tmp_path, memory, monkeypatch):
    path = write_tar(tmp_path / "a.tar", samples(0, 20))
    memory.pipe("/a.tar", pathlib.Path(path).read_bytes())
    options = {"retry_timeout": 0.2}
    source = Tar("memory://a.tar", FIELDS, storage_options=options)
    whole = type(memory).cat_file

    def fail(*args, **kwargs):
        raise RuntimeError("the client failed")

    other = fail if change is None else lambda *a, **k: change(whole(*a, **k))
    monkeypatch.setattr(type(memory), "cat_file", other)
    with pytest.raises(OSError, match="memory://a.tar(: requested bytes .*| can't be read: Run)"):
        source.read(np.array([7, 3]), ["data"])
    with pytest.raises(OSError, match="memory://a.tar(: requested bytes .*| can't be read: Run)"):
        Tar("memory://a.tar", FIELDS, cache_dir=tmp_path / "other", storage_options=options)


def test_without_fsspec_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match=r"fsspec is required to read ftp://bucket/a\.tar: pip install fsspec"
    ):
        Tar("ftp://bucket/a.tar", FIELDS)
