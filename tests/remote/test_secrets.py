"""Passwords, signatures and storage options are in no error, log, name, page or stored index."""

import json
import logging
import pickle
import traceback
import warnings

import numpy as np
import pytest

from dalijax import data_iterator, sources
from dalijax.core.environment.passing_errors import chain_of
from dalijax.core.tools.command_line import arguments_of, load
from dalijax.core.tools.index_command import write_indexes
from dalijax.show import show
from dalijax.sources import Files, Mixture, Named, Records, Selection, Tar
from range_server import serving
from tars import samples, write_tar

pytest.importorskip("obstore")

SECRET = "hunter2-SECRET"
FIELDS = {"data": "jpg", "label": "cls", "url": "__url__"}
OPTIONS = {"timeout": 2, "retry_timeout": 0.1}
URLS = {
    "password": "http://bob:%s@{}/a.tar",
    "space": "http://bob:my %s@{}/a.tar",
    "at, slash": "http://bob:p@s/%s@{}/a.tar",
    "slash": "http://bob:12a/%s@{}/a.tar",
    "bracket": "http://bob:[%s]@{}/a.tar",
    "query": "http://{}/a.tar?X-Amz-Signature=%s&jwt=my %s",
    "name": "http://{}/a.tar?%s",
    "fragment": "http://{}/a.tar#%s",
    "chain": "simplecache::http://bob:%s@{}/a.tar?k=%s",
    "range": "http://bob:%s@{}/{{0..1}}.tar",
    "scheme": "HTTP://bob:%s@{}/a.tar",
    "path": "https:/bob:%s@{}/a.tar",
}
OPENED = {name: URLS[name] for name in ("password", "space", "query", "name", "fragment")}


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))
    (tmp_path / "files").mkdir()
    write_tar(tmp_path / "files" / "a.tar", samples(0, 6))
    with serving(tmp_path / "files") as (url, server):
        server.address = url.removeprefix("http://")
        server.indexes = tmp_path / "indexes"
        yield server


def with_secret(template, address):
    return template.format(address).replace("%s", SECRET)


def told(caplog, call):
    """Calls a function; returns the value or error, and all texts that a user may see of it."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG, "dalijax"):
        warnings.simplefilter("always")
        try:
            result = call()
            texts = [repr(result)]
        except (Exception, SystemExit) as error:
            result, texts = error, [traceback.format_exc(), repr(error.args)]
            texts += [repr(pickle.loads(pickle.dumps(error)))]
            texts += [repr(chained) for chained in chain_of(error)]
    texts += [caplog.text, *(str(warning.message) for warning in caught)]
    return result, "\n".join(texts)


@pytest.mark.parametrize("kind", URLS)
def test_errors_of_opening(kind, server, caplog):
    if kind == "chain":  # fsspec reads it
        pytest.importorskip("aiohttp")
    server.fault = lambda path, start, end, count: "503" if path == "a.tar" else "404"
    for address in (server.address, "127.0.0.1:1"):  # the second refuses connections
        url = with_secret(URLS[kind], address)
        for make in (lambda: Tar(url, FIELDS, storage_options=OPTIONS), lambda: show(url)):
            error, text = told(caplog, make)
            assert isinstance(error, Exception) and SECRET[:7] not in text, text
            assert f"{address}/" in str(error)


def test_errors_keep_words_that_are_also_in_the_query(server):
    url = f"http://{server.address}/a.tar?kind=samples"
    with pytest.raises(ValueError, match=r"^6 samples lack a member .*/a.tar\?kind=\.\.\.: 0000"):
        Tar(url, {"data": "png"}, storage_options=OPTIONS)


@pytest.mark.parametrize("kind", OPENED)
def test_names_and_stored_indexes(kind, server, caplog):
    url = with_secret(OPENED[kind], server.address)
    source, text = told(caplog, lambda: Tar(url, FIELDS, storage_options=OPTIONS))
    source = pickle.loads(pickle.dumps(source))  # which still reads the URL
    named = Named(Mixture([(Selection(source, np.arange(4)), 1.0)]), "name")
    files = Files(paths=[url], storage_options=OPTIONS)
    batch = named.read(np.arange(2), ["name", "url", "label"])
    place = url.partition("@")[2] or url.partition("://")[2]
    assert (
        batch["label"][1] == -2 and place[:20] in batch["name"][1] and ": 0001" in batch["name"][1]
    )

    @data_iterator(output_map=["label"])
    def labels(label):
        return label

    with labels(source=named, batch_size=2) as iterator:
        text += repr([next(iterator), iterator.get_state(), iterator])
    page = show(source)
    text += repr([batch, source.fields, source, named, files, files.name(0), page, page.html])
    text += repr([path.read_bytes() for path in server.indexes.rglob("*.index")])
    server.fault = lambda *_: "503"
    text += told(caplog, lambda: source.read(np.arange(2), ["data"]))[1]
    text += told(caplog, files.identity)[1]
    assert "no answer for" in text and SECRET[:7] not in text


@pytest.mark.parametrize(
    ("url", "options", "cause"),
    [
        (
            "s3://b/a.tar",
            {"endpoint_url": f"http://bob:{SECRET}@127.0.0.1:1"},
            "127.0.0.1:1/b/a.tar",
        ),
        ("s3://b/a.tar", {"endpoint_url": f"bob:{SECRET}@minio:9000"}, "endpoint_url is not valid"),
        ("gs://b/a.tar", {"token": json.dumps({"private_key": SECRET})}, "<token>"),
        ("az://b/a.tar", {"account_name": "me", "sas_token": f"%{SECRET}"}, "SAS"),
        ("http://127.0.0.1:1/a.tar", {"headers": {"X-Api-Key": f"\n{SECRET}"}}, "header"),
        ("memory://a.tar", {"nested": [{"token": SECRET}], "fo": SECRET}, "memory://"),
    ],
)
def test_storage_options(url, options, cause, caplog, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    error, text = told(caplog, lambda: Tar(url, FIELDS, storage_options={**OPTIONS, **options}))
    assert cause in str(error) and SECRET[:7] not in text


class Failing:
    """Records of which some can't be read, as if from a server."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index >= self.first:
            raise OSError(f"GET https://bob:{SECRET}@h.com/x?k={SECRET}")
        return {"label": index}


def test_errors_of_a_users_records(caplog):
    @data_iterator(output_map=["label"])
    def labels(label):
        return label

    def read(**options):
        with labels(source=source, batch_size=2, shuffle=False, **options) as iterator:
            return [*iterator], [*iterator.errors]

    source = Records(Failing(4))
    for call in (
        lambda: Records(Failing(0)),
        read,
        lambda: read(on_error="skip"),
        lambda: read(on_error="mask", mask=True),
        source.identity,
    ):
        _, text = told(caplog, call)
        assert "GET https://...@h.com/x?k=..." in text and SECRET not in text


def test_commands_and_misplaced_urls(caplog, tmp_path):
    url = with_secret(URLS["query"], "127.0.0.1:1")
    nothing = type("Options", (), {"arg": [], "source": url})
    for call in (
        lambda: write_indexes([url], OPTIONS),
        lambda: arguments_of(nothing, lambda path: Tar(path, FIELDS, storage_options=OPTIONS)),
        lambda: data_iterator(url),
        lambda: data_iterator(lambda label: label)(source=url, batch_size=2),
        lambda: sources.Named(url),
        lambda: sources.Tar([url, 3], FIELDS),
        lambda: sources.Tar(url, FIELDS, url),
        lambda: sources.Tar(url, FIELDS, cache=url),
        lambda: sources.Files([url]),
    ):
        error, text = told(caplog, call)
        assert "127.0.0.1:1" in str(error) and SECRET[:7] not in text, text


def failing_graph(label):
    raise OSError(f"http://bob:{SECRET}@host/a.tar can't be opened")


URL = f"http://bob:{SECRET}@host/a.tar?k={SECRET}"


@pytest.mark.parametrize(
    "call",
    [
        lambda: data_iterator(lambda label: label + 0, ["x"])(
            source=Records([{"label": URL}]), batch_size=1
        ),
        lambda: data_iterator(failing_graph, ["x"])(source=Records([{"label": 1}]), batch_size=1),
        lambda: data_iterator(lambda label: label + 0, ["x"])(
            source=Records([{"label": 1}]), batch_size=1, seed=URL
        ),
        # The end of the user information is not among the first characters.
        lambda: Mixture([(f"https://{SECRET * 10}@host", 1)]),
        lambda: Records([{"x": 1}], f"https://{SECRET * 10}@host"),
        lambda: load(f"https://bob:{SECRET}@host/a.tar"),
    ],
)
def test_errors_of_new_iterators_and_of_long_values(call, caplog):
    error, text = told(caplog, call)
    assert isinstance(error, (Exception, SystemExit))
    assert SECRET[:7] not in text, text
