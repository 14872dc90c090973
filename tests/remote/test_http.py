"""URLs, headers and answers of HTTP servers, which obstore reads and fsspec lists."""

import base64
import os
import pickle
import sys
import urllib.parse

import numpy as np
import pytest

from dalijax.core.per_process import PerProcess
from dalijax.core.remote import native
from dalijax.sources import Files, Tar
from range_server import serving
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


# Without obstore


@pytest.mark.parametrize("url", ("http://h/a.tar", "s3://b/a.tar", "gs://b/a.tar", "abfs://b/a"))
@pytest.mark.parametrize("way", ("tar", "list", "pattern"))
def test_without_obstore_the_error_names_the_extra(way, url, monkeypatch):
    ways = {
        "tar": lambda: Tar(url, FIELDS),
        "list": lambda: Files(paths=[url]),
        "pattern": lambda: Tar(f"{url}*", FIELDS),
    }
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(native, "_module", PerProcess(native._imported))
    cure = r"obstore, which reads http, s3, gs and az URLs, can't be imported .*dalijax\[remote\]"
    with pytest.raises(ImportError, match=cure):
        ways[way]()
