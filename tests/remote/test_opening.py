"""Requests that open tars in buckets and on HTTP servers: listings, shared indexes, scans."""

import itertools
import os
import shutil

import numpy as np
import pytest

from dalijax.core.formats.paths import path_list
from dalijax.core.remote import retries
from dalijax.core.remote.listing import listings_of
from dalijax.core.remote.storage import Storage
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import Files, Tar, TFRecord
from range_server import serving
from tars import FIELDS, samples, write_tar

pytest.importorskip("obstore")

TARS, SAMPLES = 12, 10
KEYS = {"key": "a", "secret": "b", "region": "us-east-1"}
INDEX = ".dalijax-tar.index"
MANY = [f"a/{k:04d}" for k in range(1001)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for k in range(TARS):
        write_tar(folder / f"{k:03d}.tar", samples(k * SAMPLES, (k + 1) * SAMPLES))
    return folder


@pytest.fixture
def server(tmp_path, shards):
    folder = tmp_path / "files" / "bucket" / "train"
    shutil.copytree(shards, folder)
    with serving(tmp_path / "files") as (url, server):
        server.url, server.train = url, folder
        server.options = {**KEYS, "endpoint_url": url, "retry_timeout": 5}
        yield server


def forget(server):
    server.ranges.clear()
    server.lists.clear()


def wholes(server):
    """Returns the requested whole files."""
    return [path for path, _, end in server.ranges if end is None]


def parts(server):
    """Returns the requested ranges of files."""
    return [entry for entry in server.ranges if entry[2] is not None]


def urls(numbers=range(TARS)):
    return [f"s3://bucket/train/{k:03d}.tar" for k in numbers]


def opened(server, paths=None, fields=FIELDS, **options):
    return Tar(
        urls() if paths is None else paths, fields, storage_options=server.options, **options
    )


def check(source, server, numbers=range(TARS), is_named=True):
    local = Tar([str(server.train / f"{k:03d}.tar") for k in numbers], FIELDS)
    first, second = (s.read(np.arange(len(local)), ["data", "label"]) for s in (source, local))
    assert [v.tobytes() for v in first["data"]] == [v.tobytes() for v in second["data"]]
    assert first["label"].tolist() == second["label"].tolist()
    assert (source.identity() == local.identity()) is is_named


# Listings


def test_one_listing_replaces_a_request_for_each_object(server):
    check(opened(server), server)
    forget(server)
    check(opened(server), server)
    assert server.lists == ["train/"] and not wholes(server) and not server.heads
    assert all(end - start > 1 for _, start, end in parts(server))


def test_objects_are_requested_if_the_bucket_can_not_be_listed(server):
    opened(server)
    server.can_list = False
    forget(server)
    source = opened(server)  # finds the stored index, because the ETags are those of the listing
    assert len(server.lists) == 1
    assert sorted(server.ranges) == [(f"bucket/train/{k:03d}.tar", 0, 1) for k in range(TARS)]
    check(source, server)


def test_a_listing_continues_after_a_page_that_fails(server, monkeypatch):
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.0))
    for k in range(2500):
        (server.train / f"{k:04d}.x").write_bytes(b"")
    server.list_fault = lambda number: number % 2  # so that a listing from the start never ends
    folders, pattern = Storage(server.options).folders("s3://bucket/train/**.x")
    assert len(folders.glob(pattern)) == 2500
    assert len(server.lists) == 6


def test_a_large_folder_is_not_listed_to_its_end(server):
    for k in range(4500):
        (server.train / f"005.{k:04d}").write_bytes(b"")
    opened(server, urls([0, TARS - 1]))
    forget(server)
    opened(server, urls([0, TARS - 1]))
    assert len(server.lists) == 4
    assert server.ranges == [(f"bucket/train/{TARS - 1:03d}.tar", 0, 1)]


def test_a_listing_has_several_pages(server):
    server.page_size = 100
    numbers = range(210)
    for k in numbers:
        os.link(server.train / "000.tar", server.train / f"x{k:04d}.tar")
    paths = [f"s3://bucket/train/x{k:04d}.tar" for k in numbers]
    opened(server, paths)
    forget(server)
    opened(server, paths)
    assert len(server.lists) == 3 and not server.ranges


@pytest.mark.parametrize(
    ("pattern", "names", "pages"),
    [
        ("0*.tar", [], 1),
        ("**/0*.tar", ["x/0000.tar"], 3),
        ("*/0*.tar", ["x/0000.tar"], 3),
    ],
)
def test_a_pattern_lists_folders_only_if_it_matches_them(pattern, names, pages, server):
    (server.train / "x").mkdir()
    os.link(server.train / "000.tar", server.train / "x" / "0000.tar")
    for k in range(2100):
        (server.train / "x" / f"{k}").write_bytes(b"")
    paths = [path for path in urls() if not pattern.startswith("*/")]
    paths += [f"s3://bucket/train/{name}" for name in names]
    assert sorted(path_list(f"s3://bucket/train/{pattern}", Storage(server.options))) == paths
    assert server.lists == ["train/"] * pages


@pytest.mark.parametrize("name", ("[0]*.tar", "0*.tar", "x/[0].tar"))
def test_the_name_of_an_object_is_not_a_pattern(name, server):
    (server.train / "x").mkdir()
    os.link(server.train / "000.tar", server.train / name)
    url = f"s3://bucket/train/{name}"
    assert path_list(url, Storage(server.options)) == [url]


def test_one_listing_expands_a_pattern_and_has_the_versions(server):
    check(opened(server, "s3://bucket/train/*.tar"), server)
    assert server.lists == ["train/"] * 3  # also before and after reading the headers
    forget(server)
    source = opened(server, "s3://bucket/train/*.tar")
    assert server.lists == ["train/"] and not wholes(server) and not server.ranges
    write_tar(server.train / "003.tar", samples(500, 510))
    with pytest.raises(OSError, match="003.tar was changed after the source was opened"):
        source.read(np.arange(len(source)), ["data"])
    check(opened(server, "s3://bucket/train/*.tar"), server)


@pytest.mark.parametrize("number", (3, 0, TARS - 1))
def test_a_missing_object_is_named(number, server):
    os.unlink(server.train / f"{number:03d}.tar")
    with pytest.raises(FileNotFoundError, match=f"train/{number:03d}.tar does not exist"):
        opened(server)


@pytest.mark.parametrize(
    ("kind", "keys", "listings"),
    [
        ("http", ["a/1", "a/2"], []),
        ("s3", ["a/1"], []),
        ("s3", ["a/1", "a/2"], [("a/", None, "a/2", 4)]),
        ("s3", ["a/x1", "a/x2"], [("a/", "a/x", "a/x2", 4)]),
        ("s3", ["a/b/x", "a/c/x"], [("a/", None, "a/c/x", 4)]),
        ("s3", ["a", "b"], [(None, None, "b", 4)]),
        ("s3", ["x1", "x2"], [(None, "x", "x2", 4)]),
        ("gs", ["a/x1", "a/x2"], [("a/", "a/x", "a/x2", 4)]),
        ("az", ["a/x1", "a/x2"], [("a/", None, None, 4)]),
        ("s3", MANY, [("a/", None, "a/0999", 4), ("a/", "a/0999", "a/1000", 4)]),
        ("gs", MANY, [("a/", None, "a/1000", 6)]),
        ("az", MANY, [("a/", None, None, 6)]),
    ],
)
def test_plans_of_listings(kind, keys, listings):
    planned = listings_of(kind, keys)
    assert [(p.prefix, p.offset, p.last, p.most_pages) for p in planned] == listings
    assert sorted(key for listing in planned for key in listing.keys) == (keys if listings else [])


# Shared indexes


def test_a_shared_index_needs_one_request(server, cache):
    write_indexes(urls(), server.options)
    assert (server.train / INDEX).exists()
    forget(server)
    source = opened(server, fields=FIELDS)
    assert server.lists == ["train/"] and wholes(server) == [f"bucket/train/{INDEX}"]
    assert len(parts(server)) <= 64  # records of the identity
    check(source, server)
    forget(server)
    opened(server)  # from the stored index
    assert server.lists == ["train/"] and not wholes(server) and not server.ranges


def test_without_an_index_the_size_is_reported(server, caplog):
    check(opened(server), server)
    size = sum(os.path.getsize(server.train / f"{k:03d}.tar") for k in range(TARS)) / 1e6
    assert f"up to {size:.1f} MB of {TARS} files such as s3://bucket/train/000.tar" in caplog.text
    assert "python -m dalijax.sources index" in caplog.text
    assert server.most_in_flight > 1  # tars at once


def test_a_changed_object_is_indexed_again(server, caplog):
    write_indexes(urls(), server.options)
    write_tar(server.train / "003.tar", samples(500, 510))
    forget(server)
    check(opened(server), server)
    assert f"does not fit 1 of {TARS} files" in caplog.text and "003.tar" in caplog.text
    forget(server)
    write_indexes(urls(), server.options)
    read = {path for path, _, end in parts(server) if end > 512}  # the first bytes tell the kind
    assert read == {"bucket/train/003.tar"}
    caplog.clear()
    check(opened(server, cache_dir=server.train.parent.parent / "cache"), server)
    assert not caplog.records


def test_renamed_objects_keep_their_records(server, caplog):
    write_indexes(urls(), server.options)
    os.rename(server.train / "002.tar", server.train / "x")
    os.rename(server.train / "003.tar", server.train / "002.tar")
    os.rename(server.train / "x", server.train / "003.tar")
    check(opened(server), server)
    assert f"does not fit 2 of {TARS} files" in caplog.text


def test_some_shards_in_another_order(server):
    write_indexes(urls(), server.options)
    forget(server)
    check(opened(server, urls([7, 2, 2])), server, [7, 2, 2])
    assert all(start > 0 for _, start, _ in parts(server))  # no header of a first member


def test_an_http_server_has_the_index_that_was_uploaded(server, tmp_path):
    paths = [f"{server.url}/bucket/train/{k:03d}.tar" for k in range(TARS)]
    with pytest.raises(ValueError, match="takes no files. Pass --output"):
        write_indexes(paths, {})
    write_indexes(paths, {}, str(tmp_path / INDEX))
    shutil.copy(tmp_path / INDEX, server.train)
    forget(server)
    source = Tar(paths, FIELDS)
    assert wholes(server) == [f"bucket/train/{INDEX}"] and not server.lists
    check(source, server)


def http_urls(server, numbers=range(TARS)):
    return [f"{server.url}/bucket/train/{k:03d}.tar" for k in numbers]


def upload_index(server, folder):
    write_indexes(http_urls(server), {}, str(folder / INDEX))
    shutil.copy(folder / INDEX, server.train)
    forget(server)


def test_only_a_file_without_a_version_is_indexed_again(server, tmp_path, caplog):
    upload_index(server, tmp_path)
    server.untagged = {"bucket/train/003.tar"}
    source = Tar(http_urls(server), FIELDS)
    read = {path for path, start, end in parts(server) if start == 0 and end > 512}
    assert read == {"bucket/train/003.tar"}
    assert f"does not fit 1 of {TARS} files" in caplog.text
    assert "003.tar has neither an ETag" in caplog.text
    check(source, server)


def test_a_server_without_versions_is_not_asked_for_an_index(server, tmp_path):
    upload_index(server, tmp_path)
    server.tag = ""
    check(Tar(http_urls(server), FIELDS), server)
    assert not wholes(server)


@pytest.mark.parametrize("kind", ("503", "403"))
def test_an_index_that_can_not_be_read_is_reported_once(kind, server, monkeypatch, caplog):
    monkeypatch.setattr(retries, "_OPENING", 0.5)
    for name in ("a", "b"):
        (server.train.parent / name).mkdir()
        os.link(server.train / "000.tar", server.train.parent / name / "0.tar")
    server.fault = lambda path, *_: kind if path.endswith(INDEX) else ""
    server.options.pop("retry_timeout")
    paths = [f"s3://bucket/{name}/0.tar" for name in ("a", "b")]
    assert len(opened(server, paths)) == 2 * SAMPLES
    (record,) = [r for r in caplog.records if "shared index" in r.getMessage()]
    message = record.getMessage()
    assert "2 of 2 folders can't be read, so that the files are read instead" in message
    assert f"s3://bucket/a/{INDEX}" in message and kind in message


def test_urls_with_queries_have_no_shared_index(server):
    write_indexes(urls(), server.options)
    forget(server)
    check(Tar([f"{url}?x" for url in http_urls(server)], FIELDS), server)
    assert not wholes(server)


def test_signatures_of_urls_are_neither_stored_nor_identities(server, cache):
    identities = set()
    for secret in ("hidden1", "hidden2"):
        paths = [f"{url}?X-Amz-Signature={secret}" for url in http_urls(server)]
        paths[1] = paths[1].replace("://", f"://{secret}:{secret}@")
        identities.add((Tar(paths, FIELDS).identity(), Files(paths=paths).identity()))
    assert len(identities) == 1
    stored = b"".join(path.read_bytes() for path in cache.rglob("*.index"))
    assert b"001.tar" in stored and b"hidden" not in stored


def test_records_are_read_in_parallel_and_found_in_an_index(server, caplog):
    tf = pytest.importorskip("tensorflow")
    for k in range(8):
        with tf.io.TFRecordWriter(str(server.train / f"{k}.tfrecord")) as writer:
            for i in range(20):
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[k * 20 + i]))
                data = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"%d" % i * 99]))
                features = tf.train.Features(feature={"y": label, "x": data})
                writer.write(tf.train.Example(features=features).SerializeToString())
    paths = [f"s3://bucket/train/{k}.tfrecord" for k in range(8)]
    fields = {"data": "x", "label": "y"}
    server.latency = 0.02

    def labels(**options):
        source = TFRecord(paths, fields, storage_options=server.options, **options)
        values = source.read(np.arange(160), ["data", "label"])
        assert [v.tobytes() for v in values["data"]] == [b"%d" % (k % 20) * 99 for k in range(160)]
        return values["label"].tolist()

    assert labels() == list(range(160))
    assert "of 8 files" in caplog.text and server.most_in_flight > 4
    write_indexes(paths, server.options)
    forget(server)
    caplog.clear()
    assert labels(cache_dir=server.train.parent.parent / "cache") == list(range(160))
    assert not caplog.records and wholes(server) == ["bucket/train/.dalijax-tfrecord.index"]
