"""A cache of remote files on a local disk: hits, damage, full disks, and several processes."""

import argparse
import functools
import gc
import itertools
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import socket
import stat
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from fsspec.implementations.tar import TarFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn

from dalijax import data_iterator
from dalijax.core.feeding.announcer import Announcer
from dalijax.core.formats.example_message import record_parts
from dalijax.core.messages.log_once import warn_once
from dalijax.core.order.samples import SamplePosition
from dalijax.core.remote import cache_folder, disk_cache, journals
from dalijax.core.remote.cache_contents import cached_objects, remove_objects
from dalijax.core.remote.cache_folder import (
    MARK,
    Space,
    existing_cache,
    object_name,
    open_cache,
    space_of,
)
from dalijax.core.remote.cache_users import names_in_use, register
from dalijax.core.remote.disk_cache import DiskCache
from dalijax.core.remote.journals import ENTRY, Journals
from dalijax.core.remote.locations import location_of, server_settings
from dalijax.core.remote.owned_files import locked, new_file
from dalijax.core.threads.per_process import PerProcess
from dalijax.core.tools import cache_command
from dalijax.sources import Files, Mixture, Tar, TFRecord
from range_server import serving
from tars import numbered_bytes, write_numbered, write_tar

pytest.importorskip("obstore")

TARS, SAMPLES = 3, 10
N, SIZE = TARS * SAMPLES, 6000
FIELDS = {"data": "bin", "label": "cls"}
QUICK = {"timeout": 0.5, "retry_timeout": 5}


def content(record):
    return numbered_bytes(record, SIZE)


def write(folder, shift=0):
    write_numbered(folder, TARS, SAMPLES, SIZE, shift)


@pytest.fixture(autouse=True)
def index_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))
    warn_once.cache_clear()


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    write(tmp_path / "served")
    with serving(tmp_path / "served") as (url, server):
        server.url = url
        yield server


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def opened(server, folder, **arguments):
    urls = [f"{server.url}/{k}.tar" for k in range(TARS)]
    source = Tar(urls, FIELDS, cache=folder, **{"storage_options": QUICK, **arguments})
    server.ranges.clear()
    return source


def check(source, records=range(N), shift=0):
    values = source.read(np.array(records), ["data", "label"])
    assert [v.tobytes() for v in values["data"]] == [content(k + shift) for k in records]
    assert values["label"].tolist() == list(records)


def filled(server, folder, **arguments):
    """Returns a source of which all records were stored by another source."""
    check(opened(server, folder, **arguments))
    return opened(server, folder, **arguments)


def files_of(folder, kind):
    return sorted((folder / kind).iterdir())


def graph(data, label):
    return fn.pad(data, shape=[SIZE + N]), label


def batches_of(stream, count):
    batches = [next(stream) for _ in range(count)]
    for batch in batches:
        for data, label in zip(batch["data"], batch["label"].tolist(), strict=True):
            assert data[: SIZE + label].tobytes() == content(label)
    return [batch["label"].tolist() for batch in batches]


# Hits


@pytest.mark.parametrize("read_ahead", ("128MB", 0))
def test_later_epochs_send_no_requests(server, folder, read_ahead):
    arguments = {"batch_size": 10, "num_threads": 1, "as_numpy": True, "seed": 3}

    def stream(source):
        return data_iterator(graph, ["data", "label"], source=source).stream(**arguments)

    with stream(Tar([*map(str, sorted(server.folder.iterdir()))], FIELDS)) as local:
        expected = batches_of(local, 9)
    source = opened(server, folder, read_ahead=read_ahead)
    with stream(source) as iterator:
        assert batches_of(iterator, 3) == expected[:3]
        state = iterator.get_state()
    check(source)
    another = opened(server, folder, read_ahead=read_ahead)
    server.fault = lambda *_: "404"  # of a request that is sent now
    with stream(source) as iterator:
        assert batches_of(iterator, 9) == expected
    with stream(another) as iterator:
        iterator.set_state(state)
        assert batches_of(iterator, 6) == expected[3:]
    assert not server.heads


def test_each_range_is_requested_once(server, folder):
    source, order = opened(server, folder, read_ahead=0), np.random.default_rng(0).permutation(N)
    for start in range(0, N, 7):
        check(source, order[start : start + 7].tolist() * 2)
    assert len(set(server.ranges)) == len(server.ranges) <= N
    server.ranges.clear()
    check(source)
    check(pickle.loads(pickle.dumps(source)))
    assert not server.ranges


def test_stored_records_are_announced_within_the_budget(server, folder):
    source = filled(server, folder, read_ahead=20 * SIZE)
    announcer = Announcer(source, ["data"], lambda _: np.arange(2), lambda position: position)
    announcer.restart(0, SamplePosition())
    for run in range(20):
        announcer.was_read(announcer.generation, run)
        announcer._workers.future(lambda: None).result()
        assert 0 < announcer._next - run - 1 <= 10
    announcer.close()
    assert announcer.error is None and not server.ranges


def test_parts_of_records(server, folder):
    check(opened(server, folder), range(0, N, 3))
    source = opened(server, folder)
    check(source, range(0, N, 3))
    assert not server.ranges
    check(source)
    assert server.ranges
    keys = Tar([f"{server.url}/0.tar"], {**FIELDS, "key": "__key__"}, cache=folder)
    assert keys.read(np.array([3, 9]), ["key"])["key"] == ["0003", "0009"]
    server.ranges.clear()
    assert keys.read(np.array([9, 3]), ["key"])["key"] == ["0009", "0003"]
    assert keys.read(np.array([9]), ["data"])["data"][0].tobytes() == content(9)
    assert not server.ranges


def message(number, content):
    """Returns a field of a message of Protobuf."""
    sizes = [len(content) & 127 | 128, len(content) >> 7 & 127 | 128, len(content) >> 14]
    return bytes([number << 3 | 2, *sizes]) + content


def test_mixtures_and_tfrecords(server, folder):
    with open(server.folder / "a.tfrecord", "wb") as file:
        for k in range(5):
            value = message(2, message(1, message(1, content(k))))
            example = message(1, message(1, message(1, b"image") + value))
            file.writelines(record_parts(example))
    url = f"{server.url}/a.tfrecord"
    records = TFRecord(url, {"data": "image"}, cache=str(folder), cache_bytes="1GB")
    tars = Tar(f"{server.url}/0.tar", {"data": "bin"}, cache=folder, cache_bytes=1e9)
    mixture = Mixture([(records, 1), (tars, 1)])
    for _ in range(2):
        server.ranges.clear()
        values = mixture.read(np.arange(15), ["data"])["data"]
        assert [v.tobytes() for v in values] == [content(k) for k in (*range(5), *range(10))]
    assert not server.ranges


def test_files_of_a_bucket(server, folder):
    bucket = server.folder / "bucket"
    for k in range(N):
        (bucket / f"{k % 2}").mkdir(parents=True, exist_ok=True)
        (bucket / f"{k % 2}" / f"{k:02d}.jpg").write_bytes(content(k) * (k > 0))
    keys = {"endpoint_url": server.url, "key": "a", "secret": "b", "region": "us-east-1"}
    files = sorted(bucket.rglob("*.jpg"))
    for _ in range(2):
        server.ranges.clear()
        source = Files("s3://bucket", storage_options=keys, cache=folder)
        values = source.read(np.arange(N), ["data"])["data"]
        assert [v.tobytes() for v in values] == [file.read_bytes() for file in files]
    assert not server.ranges and len(files_of(folder, "objects")) == N - 1
    with pytest.warns(UserWarning, match="These files are not cached. Pack them into tars"):
        source = Files(paths=[f"{server.url}/bucket/1/01.jpg"], cache=folder)
    assert source.read(np.array([0]), ["data"])["data"][0].tobytes() == content(1)


@pytest.mark.parametrize("tag", ("", None))
def test_files_without_a_version_are_not_cached(server, folder, tag, caplog):
    server.tag = tag
    source = opened(server, folder)
    check(source)
    server.ranges.clear()
    check(source)
    assert bool(server.ranges) == (tag == "")
    assert caplog.text.count("are not cached") == (tag == "")
    assert len(files_of(folder, "objects")) == (0 if tag == "" else TARS)


def test_another_version_uses_another_file(server, folder):
    old = filled(server, folder)
    write(server.folder, shift=1000)
    new = opened(server, folder)
    check(new, shift=1000)
    assert len(files_of(folder, "objects")) == 2 * TARS
    server.ranges.clear()
    check(old)
    check(new, shift=1000)
    assert not server.ranges
    names = {
        object_name(url, [9, ["ETag", tag]], options)
        for url in ("s3://a/b", "s3://a/c")
        for tag in ("x", "y")
        for options in ({}, {"endpoint_url": "http://minio"}, {"headers": {"Host": "b"}})
    }
    assert len(names) == 12 and len({name[:16] for name in names}) == 6
    assert names == {
        object_name(url, [9, ["ETag", tag]], {**options, "timeout": 3, "secret": "x"})
        for url in ("s3://a/b", "s3://a/c")
        for tag in ("x", "y")
        for options in (
            *(
                {"key": "a", "headers": {"X-Token": "b"}},
                {"endpoint_url": "http://minio", "sas_token": "t"},
            ),
            {"headers": {"Host": "b", "Authorization": "Bearer x"}, "anon": True},
        )
    }


@pytest.mark.parametrize("how", ("environment", "profile"))
def test_equal_urls_of_two_servers(how, tmp_path, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".aws").mkdir()
    for shift in (0, 1000):
        bucket = tmp_path / str(shift) / "bucket"
        bucket.mkdir(parents=True)
        contents = [content(k + shift)[:SIZE] for k in range(3)]
        write_tar(bucket / "a.tar", [(f"{k}.bin", data) for k, data in enumerate(contents)])
        with serving(bucket.parent) as (url, server):
            server.tag = '"equal"'
            if how == "environment":
                monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            keys = "aws_access_key_id=a\naws_secret_access_key=b\n"
            endpoint = f"endpoint_url={url}\n" if how == "profile" else ""
            (tmp_path / ".aws/config").write_text(f"[default]\n{keys}{endpoint}")
            source = Tar("s3://bucket/a.tar", {"data": "bin"}, cache=folder)
            values = source.read(np.arange(3), ["data"])["data"]
            assert [value.tobytes() for value in values] == contents


@pytest.mark.parametrize(
    ("url", "variable"),
    (
        ("s3://a/b", "AWS_ENDPOINT_URL_S3"),
        ("gs://a/b", "GOOGLE_BASE_URL"),
        ("az://a/b", "AZURE_STORAGE_ACCOUNT_NAME"),
    ),
)
def test_variables_that_choose_the_server(url, variable, tmp_path):
    environment = {"HOME": str(tmp_path), "AWS_SECRET_ACCESS_KEY": "secret", variable: "http://x"}
    assert server_settings(location_of(url), {}, environment) == {variable: "http://x"}
    assert server_settings(location_of("http://a/b"), {}, environment) == {}


def test_an_older_version_is_not_stored(server, folder):
    source = opened(server, folder)
    server.fault = lambda *_: "older"
    for _ in range(2):
        check(source, range(0, N, 5))  # so far apart that each is a request
    assert len(server.ranges) == len(range(0, N, 5))


@pytest.mark.parametrize("how", ("chain", "options"))
def test_files_of_archives_are_not_cached(how, tmp_path, folder, caplog):
    """An archive may be replaced by one with other contents, and with equal sizes and times."""
    for shift in (0, 1000):
        entries = [(f"{k:04d}.bin", content(k + shift)[:SIZE]) for k in range(3)]
        inner = pathlib.Path(write_tar(tmp_path / "inner.tar", entries)).read_bytes()
        path = str(tmp_path / ("outer.tar" if how == "chain" else f"{shift}.tar"))
        write_tar(path, [("inner.tar", inner)])
        TarFileSystem.clear_instance_cache()
        url = "tar://inner.tar" + (f"::file://{path}" if how == "chain" else "")
        options = {} if how == "chain" else {"fo": path}
        source = Tar(url, {"data": "bin"}, storage_options=options, cache=folder)
        values = source.read(np.arange(3), ["data"])["data"]
        assert [v.tobytes() for v in values] == [content(k + shift)[:SIZE] for k in range(3)]
    assert not files_of(folder, "objects") and "are not cached" in caplog.text


# Damage


def flip(path, random_numbers, count=1):
    data = bytearray(path.read_bytes())
    for _ in range(count):
        data[random_numbers.randrange(len(data))] ^= 1 << random_numbers.randrange(8)
    with open(path, "r+b") as file:  # the same file, which a source may have opened
        file.write(data)


def truncate(path, random_numbers, count=1):
    os.truncate(path, random_numbers.randrange(path.stat().st_size))


def clear(path, random_numbers, count=1):
    """Zeros some blocks, as after a loss of power."""
    with open(path, "r+b") as file:
        for _ in range(count):
            file.seek(random_numbers.randrange(path.stat().st_size) & ~511)
            file.write(bytes(512))


def remove(path, random_numbers, count=1):
    path.unlink()


def exchange(path, random_numbers, count=1):
    other = random_numbers.choice([p for p in path.parent.iterdir()])
    shutil.copyfile(other, path.with_name("new"))
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("reopens", (True, False))
@pytest.mark.parametrize("kind", ("objects", "journals"))
@pytest.mark.parametrize("damage", (flip, truncate, clear, remove, exchange))
def test_damage_is_repaired(server, folder, kind, damage, reopens, caplog):
    source = filled(server, folder)
    check(source)  # so that it has opened the files
    for seed in range(3):
        random_numbers = random.Random(seed)
        for path in files_of(folder, kind):
            damage(path, random_numbers, 5)
        source = opened(server, folder) if reopens else source
        check(source)
        server.ranges.clear()
        check(source)
        assert not server.ranges
    if kind == "objects" and damage is flip:
        assert caplog.text.count("damaged or missing") == 1


def test_foreign_files_in_the_folder_are_harmless(server, folder):
    source = filled(server, folder)
    random_numbers = random.Random(0)
    for kind in ("objects", "journals", "users"):
        (folder / kind / "note.txt").write_bytes(random_numbers.randbytes(1000))
        (folder / kind / "folder").mkdir()
        (folder / kind / "link").symlink_to("nothing")
    check(source)
    check(opened(server, folder))
    assert not server.ranges


def plant(kind, path):
    """Replaces a file by something that can't be read as a regular file."""
    if kind == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root reads all files")
        path.chmod(0)
        return
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # the whole path may be too long
        os.close(folder)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        path.symlink_to(path.name if kind == "loop" else path.with_name(kind))


PLANTED = ("FIFO", "socket", "folder", "device", "loop", "dangling", "link", "unreadable")


@pytest.mark.parametrize("reopens", (True, False))
@pytest.mark.parametrize("kind", PLANTED)
def test_special_files_are_replaced_by_objects(kind, reopens, server, folder, caplog):
    """Opening a FIFO would wait forever."""
    source = filled(server, folder)
    check(source)
    source._files._open.clear()  # the open files
    target = folder / "objects" / "link"
    target.write_bytes(b"x" * 100_000)
    for path in files_of(folder, "objects"):
        if path != target:
            plant(kind, path)
    source = opened(server, folder) if reopens else source
    check(source)
    assert server.ranges and "nothing is added" not in caplog.text
    server.ranges.clear()
    check(source)
    assert not server.ranges and target.read_bytes() == b"x" * 100_000
    assert all(path.is_file() and not path.is_symlink() for path in files_of(folder, "objects"))


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("part", ("journals", "users"))
def test_special_files_instead_of_journals_are_harmless(kind, part, server, folder):
    filled(server, folder)
    gc.collect()  # ends its use of the cache
    for path in files_of(folder, part):
        plant(kind, path)
    cache = existing_cache(folder)
    assert not any(item.is_used for item in cached_objects(cache))
    source = opened(server, folder)
    for _ in range(2):
        check(source)
    remove_objects(cache, cached_objects(cache)[:1])
    check(source)
    check(opened(server, folder))


def test_a_folder_that_is_removed_during_a_run(server, folder, caplog):
    source = opened(server, folder)
    check(source, range(10))
    shutil.rmtree(folder)
    for _ in range(2):
        check(source)
    assert caplog.text.count("nothing is added to the cache") == 1
    assert not folder.exists()


def test_entries_of_objects_that_were_removed(server, folder, caplog):
    check(opened(server, folder))
    for path in files_of(folder, "objects"):
        path.unlink()
    source = opened(server, folder)
    check(source)
    assert server.ranges and "damaged or missing" not in caplog.text


def test_damaged_ranges_are_not_found_until_they_are_stored_again(folder):
    cache = DiskCache(open_cache(folder, None), NAMES)
    store(cache, range(5))
    files, offsets, arrays = parts_of(range(5))
    sizes = SIZES[:5]
    assert len(cache.find(files, offsets, sizes)) == 5
    arrays[1] = arrays[1] ^ np.uint8(9)
    right = cache.are_right(files, offsets, arrays, sizes - [1, 0, 0, 0, 0])
    assert right.tolist() == [False, False, True, True, True]
    assert cache.find(files, offsets, sizes).tolist() == [2, 3, 4]
    store(cache, [1])
    assert cache.find(files, offsets, sizes).tolist() == [1, 2, 3, 4]


def test_checksums_are_part_of_the_format(folder):
    """Entries of journals of another algorithm would not be found; see `MARK`."""
    cache = DiskCache(open_cache(folder, None), NAMES)
    zero = np.zeros(1, np.int64)
    cache.store(zero, zero, [np.frombuffer(b"abc", np.uint8)])
    (journal,) = files_of(folder, "journals")
    (entry,) = np.fromfile(journal, ENTRY)
    assert entry["size"] == 3 and entry["checksum"] == 0x78AF5F94892F3950
    assert MARK == "dalijax-cache-2"


def test_without_xxhash_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r'xxhash, which cache= needs.*"dalijax\[remote\]"'):
        open_cache(folder, None)
    assert not folder.exists() and open_cache(None, None) is None


# Space


def test_a_cache_that_is_too_small_keeps_a_part(server, folder, caplog):
    source = opened(server, folder, cache_bytes=80_000)
    requested = []
    for seed in range(3):
        server.ranges.clear()
        for record in np.random.default_rng(seed).permutation(N).tolist():
            check(source, [record])
        requested.append({(path, start) for path, start, _ in server.ranges})
    assert len(requested[0]) == N and requested[1] == requested[2]
    assert N / 2 < len(requested[1]) < N - 5
    assert 40_000 < space_of(folder / "objects") <= 80_000
    assert caplog.text.count("is full") == 1 and "cache_bytes=" in caplog.text
    check(opened(server, folder, cache_bytes="1MB"))
    server.ranges.clear()
    check(opened(server, folder, cache_bytes=0))
    assert not server.ranges


@pytest.mark.parametrize("limit", (20_000, 0))
def test_a_disk_without_space(server, folder, limit, caplog):
    source = opened(server, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # EFBIG
    try:
        for record in range(N):
            check(source, [record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("nothing is added") == 1
    server.ranges.clear()
    source = opened(server, folder)
    check(source)
    assert len(server.ranges) > 0
    server.ranges.clear()
    check(source)
    assert not server.ranges


def test_a_partial_entry_of_a_journal(server, folder):
    source = opened(server, folder)
    check(source, range(10))
    (journal,) = files_of(folder, "journals")
    with open(journal, "ab") as file:
        file.write(b"partial")
    del source  # its journal is used again
    source = opened(server, folder)
    check(source)
    assert files_of(folder, "journals") == [journal]
    assert journal.stat().st_size == N * ENTRY.itemsize
    server.ranges.clear()
    check(opened(server, folder))
    assert not server.ranges


def test_ranges_are_stored_again_after_a_failure(folder, monkeypatch, caplog):
    cache = DiskCache(open_cache(folder, None), NAMES)
    (folder / "objects").rename(folder / "moved")
    store(cache, range(5))
    (folder / "moved").rename(folder / "objects")
    store(cache, range(5))
    assert not cache.stores and stored(cache) == []
    monkeypatch.setattr(disk_cache, "_PAUSE", 0.0)
    cache = DiskCache(open_cache(folder, None), NAMES)
    (folder / "objects").rename(folder / "moved")
    store(cache, range(5))
    (folder / "moved").rename(folder / "objects")
    store(cache, range(5))
    assert stored(cache) == [*range(5)]
    assert caplog.text.count("nothing is added to the cache") == 1


def test_processes_that_start_together_keep_the_limit(folder):
    limit, count, size = 64 << 20, 16, 1 << 18
    cache = open_cache(folder, limit)
    users = [register(cache, []) for _ in range(count)]
    spaces = {number: Space(cache) for number in range(count)}
    with open(folder / "objects" / NAMES[0], "wb") as file:
        total = 0
        while spaces:
            for number, space in [*spaces.items()]:
                if space.room(size) < size:
                    del spaces[number]
                    continue
                space.take(size)
                os.posix_fallocate(file.fileno(), total, size)
                total += size
    assert all(users) and 0.9 * limit < total <= limit + (count << 20)


# Folders


def test_folders_that_are_not_caches_are_refused(server, folder, tmp_path):
    folder.mkdir()
    (folder / "data.txt").write_text("mine")
    with pytest.raises(ValueError, match="has other files.*a new or empty folder"):
        opened(server, folder)
    assert [path.name for path in folder.iterdir()] == ["data.txt"]
    (folder / "data.txt").rename(folder / "dalijax-cache-0")
    with pytest.raises(ValueError, match="another version of dalijax. Remove it"):
        opened(server, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="requires a folder that can be written"):
        opened(server, tmp_path / "file")
    for text in ("s3://bucket/cache", ""):
        with pytest.raises(ValueError, match=f"a folder of a local disk, not '{text}'"):
            opened(server, text)
    for text, arguments in (
        ("cache_bytes must be a number of bytes", {"cache": folder, "cache_bytes": "many"}),
        ("cache_bytes must be a number of bytes", {"cache": folder, "cache_bytes": 1.5}),
        ("requires the folder of a cache", {"cache_bytes": "1GB"}),
    ):
        with pytest.raises(ValueError, match=text):
            Tar([f"{server.url}/0.tar"], FIELDS, **arguments)


def test_forms_of_the_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    expected = str(folder)
    for form in (folder, str(folder), os.fsencode(folder), "~/cache"):
        assert open_cache(form, 2e9) == cache_folder.CacheFolder(expected, 2_000_000_000)
    assert sorted(os.listdir(folder)) == [MARK, "journals", "objects", "users"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_cache(None, None) is None


@pytest.mark.parametrize("name", ("objects", "journals", "users"))
def test_links_are_refused(name, folder, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "0123456789abcdef").write_text("mine")
    folder.mkdir()
    (folder / MARK).touch()
    (folder / name).symlink_to("../victim")
    for function in (lambda: open_cache(folder, None), lambda: existing_cache(str(folder))):
        with pytest.raises(ValueError, match=f"{name} is not a folder, but a link"):
            function()
    (victim / "0123456789abcdef").unlink()
    victim.rmdir()  # nothing was added
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "other").mkdir()
    assert open_cache(tmp_path / "link", None).path == str(tmp_path / "other")


def test_foreign_files_are_not_removed(folder):
    cache = open_cache(folder, None)
    names = ("backup-2024", "x-" + "f" * 20, "0" * 16 + "-" + "f" * 16 + ".bak", "thesis.tex")
    for kind in ("objects", "journals", "users"):
        for name in names:
            (folder / kind / name).write_text("mine" * 20)
    store(DiskCache(cache, NAMES), range(5))
    cache_command.clean(str(folder), old=True, days=-1)
    for kind in ("objects", "journals", "users"):
        assert {*names} <= {*os.listdir(folder / kind)}
        assert all((folder / kind / name).read_text() == "mine" * 20 for name in names)


def test_files_are_locked_until_they_are_removed(folder, monkeypatch):
    cache = open_cache(folder, None)
    users = [os.path.join(cache.users, "0" * 16), os.path.join(cache.users, "1" * 16)]
    for user in users:
        pathlib.Path(user).touch()
    unlink, removed = os.unlink, []

    def checked(path):
        assert locked(path) is None
        removed.append(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", checked)
    assert names_in_use(cache) == set() and sorted(removed) == users


def in_child(function):
    """Runs a function in a forked child; returns its process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python and JAX, about threads and forks
        process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return process


def code_of(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


SIZES = np.arange(1000, 1000 + N, dtype=np.int64)
OFFSETS = np.cumsum(SIZES) - SIZES
NAMES = [object_name(f"http://a/{k}", [9, ["ETag", "x"]], {}) for k in range(2)]


def parts_of(records):
    """Returns the arguments of `DiskCache.store` of some ranges."""
    records = np.array(records)
    arrays = [np.frombuffer(content(k)[: SIZES[k]], np.uint8) for k in records.tolist()]
    return records % 2, OFFSETS[records], arrays


def store(cache, records):
    cache.store(*parts_of(records))


def stored(cache):
    """Returns the records that are found, after comparing their bytes."""
    files, offsets, arrays = parts_of(range(N))
    rows = cache.find(files, offsets, SIZES)
    found = [arrays[row] for row in rows.tolist()]
    assert cache.are_right(files[rows], offsets[rows], found, SIZES[rows]).all()
    for row in rows.tolist():
        with open(cache.path(files[row]), "rb") as file:
            assert os.pread(file.fileno(), SIZES[row], offsets[row]) == arrays[row].tobytes()
    return rows.tolist()


def test_a_folder_that_can_only_be_read(caplog):
    # Another user may not enter pytest's folders.
    folder = pathlib.Path("/tmp") / f"dalijax-test-{os.getpid()}"
    try:
        store(DiskCache(open_cache(folder, None), NAMES), range(5))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

        def child():
            if os.getuid() == 0:
                os.setegid(65534)
                os.seteuid(65534)
            cache = DiskCache(open_cache(folder, None), NAMES)
            assert stored(cache) == list(range(5))
            store(cache, range(9))
            assert not cache.stores and stored(cache) == list(range(5))
            assert "Permission denied" in caplog.text

        assert code_of(in_child(child)) == 0
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_of_another_user():
    if os.getuid():
        pytest.skip("only root can have files of several users")
    folder = pathlib.Path("/tmp") / f"dalijax-test-{os.getpid()}-other"
    try:
        store(DiskCache(open_cache(folder, None), NAMES), range(5))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)

        def child():
            os.seteuid(65534)
            cache = open_cache(folder, None)
            users = register(cache, NAMES)  # although root owns the objects
            assert users is not None and names_in_use(cache) == {*NAMES}
            os.seteuid(0)
            os.chown(folder / "users", 12345, -1)
            assert open_cache(folder, None) == cache  # by root
            os.seteuid(65534)
            with pytest.raises(ValueError, match="users belongs to user 12345"):
                open_cache(folder, None)

        assert code_of(in_child(child)) == 0
    finally:
        shutil.rmtree(folder)


# The command


def test_the_command_removes_old_versions(server, folder, capsys):
    source = filled(server, folder)
    check(source)
    write(server.folder, shift=1000)
    check(opened(server, folder), shift=1000)
    (folder / "objects" / "note.txt").write_text("")
    cache_command.clean(str(folder), old=True)  # the source uses the old versions
    assert "old versions: 3 files" in capsys.readouterr().out
    assert len(files_of(folder, "objects")) == 2 * TARS + 1
    del source
    gc.collect()
    cache_command.clean(str(folder))
    assert "removed" not in capsys.readouterr().out
    cache_command.clean(str(folder), old=True)
    assert "removed: 3 files" in capsys.readouterr().out
    (journal,) = files_of(folder, "journals")
    assert journal.stat().st_size == N * ENTRY.itemsize
    source = opened(server, folder)
    check(source, shift=1000)
    assert not server.ranges
    for path in files_of(folder, "objects"):
        os.utime(path, times=(0, 0))
    del source
    gc.collect()
    cache_command.clean(str(folder), days=1)
    assert "removed: 3 files" in capsys.readouterr().out
    assert [path.name for path in files_of(folder, "objects")] == ["note.txt"]
    check(opened(server, folder), shift=1000)
    assert server.ranges


def test_the_command_refuses_other_folders(tmp_path):
    parser = argparse.ArgumentParser()
    cache_command.add_command(parser.add_subparsers())
    options = parser.parse_args(["cache", str(tmp_path), "--remove-unused", "0"])
    with pytest.raises(SystemExit, match="is not a cache. Pass the folder"):
        options.run(options)
    options = parser.parse_args(["cache", open_cache(tmp_path / "new", None).path, "--remove-old"])
    options.run(options)


def test_commands_that_run_together(folder, monkeypatch):
    cache = open_cache(folder, None)
    store(DiskCache(cache, NAMES), range(9))
    objects = cached_objects(cache)
    assert len(objects) == 2
    (journal,) = files_of(folder, "journals")
    with monkeypatch.context() as patch:
        patch.setattr(journals, "_entries", lambda path, start: os.stat("/nothing"))
        remove_objects(cache, [])
    assert files_of(folder, "journals") == [journal]  # which could not be read
    for _ in range(2):
        remove_objects(cache, objects)
    assert not files_of(folder, "objects") and not files_of(folder, "journals")


def test_a_journal_that_another_thread_leaves(folder):
    class Raced(Journals):
        values: ClassVar = []
        _own = property(lambda self: self.values.pop(0), lambda self, value: None)

    cache = open_cache(folder, None)
    one = np.ones(1, np.int64)
    raced = Raced(cache.journals, one.astype(np.uint64))
    Raced.values[:] = [new_file(cache.journals), None]
    raced.append(one.astype(np.uint64), one, one, one.astype(np.uint64))
    assert raced.have(one.astype(np.uint64), one, one).all()


# Processes


def test_processes_find_what_others_have_stored(folder):
    caches = PerProcess(functools.partial(DiskCache, open_cache(folder, None), NAMES))
    store(caches.get(), [0])
    begin, end = os.pipe()

    def child(first):
        os.read(begin, 1)  # so that both children live at once
        for record in range(first, N, 3):
            store(caches.get(), [record])

    children = [in_child(lambda first=first: child(first)) for first in (1, 2)]
    os.write(end, b"12")
    store(caches.get(), range(3, N, 3))
    assert [code_of(child) for child in children] == [0, 0]
    os.close(begin)
    os.close(end)
    assert stored(caches.get()) == list(range(N))
    assert len(files_of(folder, "journals")) in (2, 3)  # a child may use that of an ended one
    assert stored(DiskCache(open_cache(folder, None), NAMES)) == list(range(N))


def test_threads_find_what_they_have_stored(folder):
    cache = DiskCache(open_cache(folder, None), NAMES)

    def work(first):
        for record in [*range(first, N, 4)] * 5:
            files, offsets, arrays = parts_of([record])
            size = np.array([arrays[0].size])
            cache.store(files, offsets, arrays)
            assert len(cache.find(files, offsets, size))
            assert cache.are_right(files, offsets, arrays, size).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert stored(cache) == list(range(N))


def test_processes_that_are_killed_while_they_store(folder):
    folder_of_cache = open_cache(folder, None)

    begin, end = os.pipe()

    def child():
        cache = DiskCache(folder_of_cache, NAMES)
        for count in itertools.count():
            store(cache, [count % N])
            if not count:
                os.write(end, b"1")

    for k in range(8):
        process = in_child(child)
        os.read(begin, 1)
        time.sleep(0.001 * k)
        os.kill(process, signal.SIGKILL)
        assert code_of(process) == -signal.SIGKILL
        stored(DiskCache(folder_of_cache, NAMES))
    assert len(files_of(folder, "journals")) == 1  # of ended processes, used again
    os.close(begin)
    os.close(end)
    cache = DiskCache(folder_of_cache, NAMES)
    store(cache, range(N))
    assert stored(cache) == list(range(N))


STEP = st.tuples(
    st.integers(0, 2), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=20)
)


@settings(max_examples=40)
@given(st.lists(STEP, max_size=12))
def test_journals_are_like_a_dict(tmp_path_factory, steps):
    """Compares three journals with a dict from ranges to checksums."""
    folder = str(tmp_path_factory.mktemp("journals"))
    readers = [Journals(folder, np.arange(3, dtype=np.uint64)) for _ in range(3)]
    expected = {}
    every = [(number, offset) for number in range(3) for offset in range(31)]
    objects, offsets = np.array(every).T
    columns = objects.astype(np.uint64), offsets, offsets + 1
    for checksum, (number, ranges) in enumerate(steps):
        added = np.array(ranges, np.int64).reshape(-1, 2).T
        sums = np.full(len(ranges), checksum, np.uint64)
        readers[number].append(added[0].astype(np.uint64), added[1], added[1] + 1, sums)
        for key in ranges:
            expected.setdefault(key, set()).add(checksum)
        found = readers[0].have(*columns).tolist()
        assert found == [key in expected for key in every]
    for checksum in range(len(steps) + 1):
        right = readers[1].agree(*columns, np.full(len(every), checksum, np.uint64))
        assert right.tolist() == [checksum in expected.get(key, ()) for key in every]
