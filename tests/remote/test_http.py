"""URLs, headers and answers of HTTP servers, which obstore reads and fsspec lists."""

import base64
import contextlib
import functools
import itertools
import os
import pickle
import sys
import urllib.parse

import numpy as np
import pytest

from dalijax.core.remote import native, retries
from dalijax.core.remote.locations import location_of, store_arguments
from dalijax.core.remote.redirects import check_server
from dalijax.core.remote.retries import RemoteError
from dalijax.core.threads.per_process import PerProcess
from dalijax.sources import Files, Tar
from range_server import serving, share_of_requests
from tars import numbered_bytes, write_numbered

pytest.importorskip("obstore")

FIELDS = {"data": "bin", "label": "cls"}
SAMPLES, SIZE = 10, 20_000  # more bytes than the gap that is read between two ranges


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    write_numbered(tmp_path / "served", 2, SAMPLES, SIZE)
    with serving(tmp_path / "served") as (url, server):
        server.url = url
        yield server


def check(source, records=range(2 * SAMPLES)):
    values = source.read(np.array(records), ["data", "label"])
    assert [v.tobytes() for v in values["data"]] == [numbered_bytes(k, SIZE) for k in records]
    assert values["label"].tolist() == list(records)


# URLs


@pytest.mark.parametrize("query", ("sig=a%2Fb+c&x", "é=ü"))
def test_queries_are_sent_as_they_are(query, server, tmp_path):
    signed = [f"{server.url}/{k}.tar?{query}{k}" for k in range(2)]
    source = Tar(signed, FIELDS)
    check(pickle.loads(pickle.dumps(source)))
    check(Tar(signed, FIELDS, cache=tmp_path / "ranges"))
    whole = Files(paths=signed).read(np.arange(2), ["data"])["data"]
    assert [v.tobytes() for v in whole] == [
        (server.folder / f"{k}.tar").read_bytes() for k in range(2)
    ]
    sent = urllib.parse.quote(query, "=%&+").lower()
    assert {target for target, _ in server.requests} == {f"/{k}.tar?{sent}{k}" for k in range(2)}


def test_paths_are_sent_as_they_are(server):
    os.link(server.folder / "0.tar", server.folder / "a b%.tar")
    for path in ("a%20b%25.tar", "%61%20b%25.tar", "/a%20b%25.tar", "none/../a%20b%25.tar"):
        check(Tar(f"{server.url}/{path}", FIELDS), range(SAMPLES))
    targets = [target for target, _ in server.requests]
    assert "/%61%20b%25.tar" in targets and "//a%20b%25.tar" in targets


def test_user_and_password_of_a_url(server):
    url = server.url.replace("://", "://me:se%40cret@")
    check(Tar([f"{url}/{k}.tar" for k in range(2)], FIELDS))
    token = base64.b64encode(b"me:se@cret").decode().lower()
    assert {headers["authorization"] for _, headers in server.requests} == {f"basic {token}"}


# Encodings


def bucket_options(server):
    """Returns the options with which the server's folder "bucket" is a bucket of S3."""
    (server.folder / "bucket").mkdir()
    os.link(server.folder / "0.tar", server.folder / "bucket" / "0.tar")
    return {"key": "a", "secret": "b", "region": "us-east-1", "endpoint_url": server.url}


def test_requests_ask_for_plain_bytes(server):
    options = {"headers": {"accept-encoding": "gzip", "X-Name": "me"}}
    check(Tar(f"{server.url}/0.tar", FIELDS, storage_options=options), range(SAMPLES))
    sent = {(headers["accept-encoding"], headers["x-name"]) for _, headers in server.requests}
    assert sent == {("identity", "me")}
    server.requests.clear()
    check(Tar("s3://bucket/*.tar", FIELDS, storage_options=bucket_options(server)), range(SAMPLES))
    assert {headers["accept-encoding"] for _, headers in server.requests} == {"identity"}


@pytest.mark.parametrize("encoding", ("identity", "", "aws-chunked"))
def test_bytes_that_are_not_encoded_are_read(encoding, server):
    server.encoding = encoding
    check(Tar(f"{server.url}/0.tar", FIELDS), range(SAMPLES))


@pytest.mark.parametrize("encoding", ("gzip", "BR", "gzip, identity"))
@pytest.mark.parametrize("way", ("tar", "file", "bucket"))
def test_encoded_bytes_are_refused(way, encoding, server, monkeypatch):
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.0))
    server.encoding = encoding
    url = f"{server.url}/0.tar" if way != "bucket" else "s3://bucket/0.tar"
    options = bucket_options(server) if way == "bucket" else None
    with pytest.raises(OSError, match=f"{url}.* Content-Encoding '{encoding}'.*download"):
        if way == "file":
            Files(paths=[url]).read(np.arange(1), ["data"])
        else:
            Tar(url, FIELDS, storage_options=options)


def test_ranges_that_a_proxy_compresses_are_requested_again(server):
    source = Tar([f"{server.url}/{k}.tar" for k in range(2)], FIELDS)
    server.fault = share_of_requests(0.4, ("gzip",), most=2)
    check(source, range(0, 2 * SAMPLES, 2))
    assert server.num_faults > 2


# Other answers


@pytest.mark.parametrize(
    ("kind", "text", "most"),
    [
        ("bare", "the server redirects without a Location. Check the URL", 1),
        ("loop", "the server redirects in a loop. Check the URL", 11),
        ("garbled", "the response is not HTTP. Check the scheme and the port", 5),
        ("chunked", "obstore requires a Content-Length, which chunked responses lack", 5),
        ("unsized", ".* and a Content-Range with the size of the file. Use another server", 5),
    ],
)
def test_answers_that_obstore_does_not_take_are_named(kind, text, most, server, monkeypatch):
    """They are not requested again for minutes: the test would not end."""
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.0))
    source = Tar(f"{server.url}/0.tar", FIELDS)
    server.fault = lambda *_: kind
    server.ranges.clear()
    with pytest.raises(OSError, match=f"^{server.url}/0.tar: {text}"):
        check(source, [3])
    assert len(server.ranges) == most
    with pytest.raises(OSError, match=f"^{server.url}/1.tar: {text}"):
        Tar(f"{server.url}/1.tar", FIELDS)
    server.fault = None
    check(source, [3])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("garbled", "the response is not HTTP. Check the scheme and the port"),
        ("403", "access is denied .403"),
        ("loop", "the server redirects in a loop"),
        ("503", "no answer for"),
    ],
)
@pytest.mark.parametrize("way", ("folder", "pattern", "chain"))
def test_answers_that_fsspec_does_not_take_are_named(way, kind, text, server, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.05))
    server.fault = lambda *_: kind
    options = {"storage_options": {"retry_timeout": 0.1}}
    with pytest.raises(RemoteError, match=f"{server.url}/a.*: {text}"):
        if way == "folder":
            Files(f"{server.url}/a", **options)
        elif way == "pattern":
            Files(paths=f"{server.url}/a/*.jpg", **options)
        else:
            Tar(f"zip://a.tar::{server.url}/a.zip", FIELDS, **options)


def test_a_redirect_of_a_bucket_without_a_location_means_another_region(server):
    options = bucket_options(server)
    server.fault = lambda *_: "bare"
    with pytest.raises(OSError, match="s3://bucket/0.tar: the bucket is in another region"):
        Tar("s3://bucket/0.tar", FIELDS, storage_options=options)


# Redirects

SECRET = {"X-Api-Key": "secret", "Authorization": "Bearer secret", "Cookie": "a=secret"}


@pytest.fixture
def other(server):
    """Another server with the same files, to which requests of the first one are redirected."""
    with serving(server.folder) as (url, other):
        other.url = url
        for name in ("0.tar", "a", "a/", "a.zip"):
            server.redirects[name] = f"{url}/{name}"
        yield other


def read_file(url, **options):
    return Files(paths=[url], **options).read(np.array([0]), ["data"])["data"][0].tobytes()


def ways(server, headers):
    """Returns functions that request files and folders with some headers."""
    options = {"storage_options": {"headers": headers}}
    chained = {"storage_options": {"https": {"headers": headers}, "http": {"headers": headers}}}
    return {
        "tar": lambda: Tar(f"{server.url}/0.tar", FIELDS, **options),
        "file": lambda: read_file(f"{server.url}/0.tar", **options),
        "folder": lambda: Files(f"{server.url}/a", **options),
        "pattern": lambda: Files(paths=f"{server.url}/a/*.jpg", **options),
        "chain": lambda: Tar(f"zip://a.tar::{server.url}/a.zip", FIELDS, **chained),
    }


WAYS = ("tar", "file", "folder", "pattern", "chain")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", ("port", "host", "second"))
def test_headers_are_not_sent_to_another_server(target, way, server, other):
    if way in WAYS[2:]:
        pytest.importorskip("aiohttp")
    for name, url in list(server.redirects.items()):
        if target == "host":
            server.redirects[name] = url.replace("127.0.0.1", "localhost")
        if target == "second":  # after a redirect to the same server
            server.redirects |= {name: f"/x/{name}", f"x/{name}": url}
    host = "localhost" if target == "host" else "127.0.0.1"
    port = other.url.rpartition(":")[2]
    text = f"redirects to http://{host}:{port}, which would receive the headers X-Api-Key of"
    with pytest.raises(RemoteError, match=text):
        ways(server, SECRET)[way]()
    assert not other.requests
    assert server.requests[0][1]["x-api-key"] == "secret"  # else the server might refuse it


@pytest.mark.parametrize("way", WAYS)
def test_headers_that_clients_drop_may_be_redirected(way, server, other):
    if way in WAYS[2:]:
        pytest.importorskip("aiohttp")
    headers = {"Authorization": "Bearer secret", "Cookie": "a=secret", "User-Agent": "me"}
    with contextlib.suppress(OSError):  # there are no folder and no archive
        ways(server, headers)[way]()
    assert other.requests
    for _, received in other.requests:
        assert received["user-agent"] == "me"
        assert "authorization" not in received and "cookie" not in received


def test_redirects_of_a_server_to_itself_are_followed(server):
    server.redirects = {"a.tar": "/b.tar", "b.tar": f"{server.url}/0.tar"}
    options = {"headers": SECRET}
    check(Tar(f"{server.url}/a.tar", FIELDS, storage_options=options), range(SAMPLES))


def test_each_opened_file_is_requested_once_more(server):
    urls = [f"{server.url}/{k}.tar" for k in range(2)]
    for headers, count in (({}, 1), ({"User-Agent": "me"}, 1), (SECRET, 2)):
        Tar(urls, FIELDS)
        server.requests.clear()
        source = Tar(urls, FIELDS, storage_options={"headers": headers})
        assert len(server.requests) == 2 * count
        server.requests.clear()
        check(source, [3, 13])
        assert len(server.requests) == 2


@pytest.mark.parametrize("kind", ("503", "reset", "404", "bare"))
def test_errors_of_the_first_request_are_those_of_any_request(kind, server, monkeypatch):
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.0))
    server.fault = lambda path, start, end, count: kind if count < 2 else ""
    make = functools.partial(Tar, f"{server.url}/0.tar", FIELDS)
    if kind in ("503", "reset"):
        check(make(storage_options={"headers": SECRET}), range(SAMPLES))
    else:
        with pytest.raises(OSError, match="does not exist|without a Location"):
            make(storage_options={"headers": SECRET})


def test_an_empty_file_with_headers(server):
    (server.folder / "é 1.bin").write_bytes(b"")
    assert read_file(f"{server.url}/é 1.bin?ü", storage_options={"headers": SECRET}) == b""
    assert [target for target, _ in server.requests] == ["/%c3%a9%201.bin?%c3%bc"] * 2


@pytest.mark.parametrize(
    ("start", "target", "is_same"),
    [
        ("http://a/x", "http://a:80/y", True),
        ("https://a/x", "https://A:443/y", True),
        ("http://a/x", "https://a/x", True),
        ("http://a:8080/x", "https://a/x", False),
        ("https://a/x", "http://a/x", False),
        ("https://a:8443/x", "http://a:8443/x", False),
        ("http://a/x", "http://b.a/x", False),
        ("http://a/x", "http://a:81/x", False),
        ("http://a/x", "http://a@b/x", False),
        ("http://a/x", "ftp://a/x", False),
    ],
)
def test_servers_of_redirects(start, target, is_same):
    with contextlib.nullcontext() if is_same else pytest.raises(RemoteError, match="redirects to"):
        check_server(start, start, target, ["X-Api-Key"])


def test_an_https_url_is_not_read_over_http():
    for url, is_allowed in (("https://h/a", False), ("http://h/a", True)):
        _, arguments = store_arguments(location_of(url), {}, {})
        assert arguments["client_options"]["allow_http"] is is_allowed


# Without obstore


WITHOUT_OBSTORE = {
    "tar": lambda url: Tar(url, FIELDS),
    "list": lambda url: Files(paths=[url]),
    "pattern": lambda url: Tar(f"{url}*", FIELDS),
}


@pytest.mark.parametrize("way", WITHOUT_OBSTORE)
def test_without_obstore_the_error_names_the_extra(way, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(native, "_module", PerProcess(native._imported))
    cure = r"obstore, which reads http, s3, gs and az URLs, can't be imported .*dalijax\[remote\]"
    for url in ("http://h/a.tar", "s3://b/a.tar", "gs://b/a.tar", "abfs://b/a"):
        with pytest.raises(ImportError, match=cure):
            WITHOUT_OBSTORE[way](url)
