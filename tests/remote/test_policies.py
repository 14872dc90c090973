"""Policies of remote reads that need no server: errors, delays, URLs, credentials and versions."""

import ast
import datetime
import errno
import itertools
import json
import pathlib
import random
import re
import threading
import time
import types

import pytest

from dalijax import sources
from dalijax.core.remote import retries
from dalijax.core.remote.locations import (
    Location,
    aws_profile,
    fsspec_options,
    location_of,
    needs_boto3,
    store_arguments,
)
from dalijax.core.remote.object_client import ObjectClient
from dalijax.core.remote.request_threads import Job, RequestThreads
from dalijax.core.remote.retries import (
    RemoteError,
    WrongAnswerError,
    each,
    exhausted,
    refusal,
    repeated,
)
from dalijax.core.remote.versions import Version, has_version, is_settled, plain
from dalijax.core.threads.workers import Result

URL = "s3://bucket/a.tar"
IDENTITY = {"Accept-Encoding": "identity"}


def error_of(name, text="", base=Exception):
    """Returns an error of a class that has the name of one of obstore's classes."""
    return type(name, (base,), {})(text)


def obstore_error(name, text):
    """Returns an error that has the base class of obstore's errors."""
    return error_of(name, text, type("BaseError", (Exception,), {}))


def with_status(number):
    """Returns an error like those of HTTP clients in Python."""
    error = RuntimeError("x")
    error.status = number
    return error


def caused(error):
    """Returns the error that fsspec raises after any error of an HTTP client."""
    missing = FileNotFoundError("a.zip")
    missing.__cause__ = error
    return missing


def status(number):
    return f"Error performing GET {URL} in 2ms - Server returned non-2xx status code: {number} x: y"


FINAL = [
    (FileNotFoundError("k"), FileNotFoundError, "does not exist .404"),
    (error_of("PermissionDeniedError", status(403)), PermissionError, "denied .403.*anon"),
    (error_of("UnauthenticatedError", status(401)), PermissionError, "denied .401.*~/.aws"),
    (error_of("PreconditionError", status(412)), OSError, "was changed.*Reopen"),
    (error_of("NotSupportedError", "Range request not"), OSError, "ignores ranges.*download"),
    (error_of("GenericError", "redirect without LOCATION"), OSError, "region"),
    (error_of("GenericError", status(400)), OSError, "status 400"),
    (error_of("GenericError", status(416)), OSError, "status 416"),
    # of file systems of fsspec
    (PermissionError(13, "no"), PermissionError, "denied .403"),
    (with_status(403), PermissionError, "denied .403"),
    (with_status(404), FileNotFoundError, "does not exist"),
    (with_status(412), OSError, "was changed.*Reopen"),
    (caused(with_status(403)), PermissionError, "denied .403"),
    (caused(with_status(404)), FileNotFoundError, "does not exist"),
    (caused(KeyError("a.jpg")), FileNotFoundError, "does not exist"),
    (error_of("RepositoryNotFoundError"), FileNotFoundError, "does not exist"),
    (
        error_of("GenericError", "source: BadScheme"),
        OSError,
        "redirects from https to http",
    ),
    (obstore_error("InvalidPathError", "a//b"), OSError, "listed: a//b. Rename.*URLs"),
    (obstore_error("NotImplementedError", "none"), OSError, "can't be read.*none"),
    (ValueError("odd"), OSError, "can't be read: ValueError.'odd'"),
]


def test_final_errors_have_the_url_and_a_remedy():
    for error, kind, text in FINAL:
        final = refusal(error, URL)
        assert isinstance(final, RemoteError) and str(final).startswith(URL), error
        assert refusal(final, URL) is final
        with pytest.raises(kind, match=text):
            raise final


def test_other_errors_are_retried():
    errors = [
        *(error_of("GenericError", status(n)) for n in (408, 429, 500, 502, 503, 504)),
        error_of("GenericError", "HTTP error: error sending request"),
        error_of("GenericError", "HTTP error: request or response body error"),
        obstore_error("GenericError", "HTTP error: operation timed out"),
        error_of("GenericError", "Requested 5..9, got 6..10"),
        WrongAnswerError("requested bytes 1 to 2"),
        ConnectionResetError(),
        TimeoutError(),
        *map(with_status, (408, 429, 500, 503)),
        OSError(errno.EBUSY, "SlowDown"),
        caused(with_status(503)),
        caused(ConnectionResetError()),
    ]
    assert {repr(error): refusal(error, URL) for error in errors} == dict.fromkeys(
        map(repr, errors)
    )


def test_errors_after_the_last_attempt():
    error = exhausted(URL, 300.0, error_of("GenericError", status(503)))
    assert isinstance(error, TimeoutError) and error.was_retried
    assert str(error).startswith(f"{URL}: no answer for 300 s") and "503" in str(error)
    wrong = error_of("GenericError", "Requested 5..9, got 6..10")
    assert "faulty" in str(exhausted(URL, 1.0, wrong))
    certificate = error_of("GenericError", "x\nerror: InvalidCertificate(\n  UnknownIssuer,")
    assert "certificate of the server is not valid (UnknownIssuer)" in str(
        exhausted(URL, 1.0, certificate)
    )


def test_only_failed_requests_are_repeated(monkeypatch):
    monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(0.0))
    attempts = []

    def attempt(rows):
        attempts.append(rows)
        return [row if row < len(attempts) else ConnectionResetError() for row in rows]

    assert repeated(attempt, [URL] * 4, 60.0) == [0, 1, 2, 3]
    assert attempts == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    with pytest.raises(retries.Unneeded):
        monkeypatch.setattr(retries, "_delays", lambda: itertools.repeat(60.0))
        repeated(lambda rows: [ConnectionResetError()], [URL], 100.0, lambda: False)


def test_requests_end_after_two_errors_in_a_row():
    sent = []

    def read(row):
        sent.append(row)
        if row in failing:
            raise ConnectionResetError
        return row

    failing = {1, 3}
    assert [isinstance(result, int) for result in each(read, range(5))] == [1, 0, 1, 0, 1]
    failing, sent = {1, 2}, []
    assert [isinstance(result, int) for result in each(read, range(5))] == [1, 0, 0, 0, 0]
    assert sent == [0, 1, 2]


def test_delays_double_up_to_the_longest():
    delays = list(itertools.islice(retries._delays(), 8))
    for delay, middle in zip(delays, (0.25, 0.5, 1, 2, 4, 5, 5, 5), strict=True):
        assert 0.5 * middle <= delay <= 1.5 * middle


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("http://host:80/a/b.tar", Location("http", "http://host:80/", "a/b.tar")),
        ("https://host/a%20b.tar", Location("http", "https://host/", "a b.tar")),
        ("s3://bucket/a b/c%20.tar", Location("s3", "bucket", "a b/c%20.tar")),
        ("s3a://bucket/a", Location("s3", "bucket", "a")),
        ("gs://bucket/a", Location("gs", "bucket", "a")),
        ("gcs://bucket/a", Location("gs", "bucket", "a")),
        ("az://box/a", Location("az", "box", "a")),
        ("abfs://box@me.dfs.core.windows.net/a", Location("az", "box", "a", "me")),
        ("memory://a.tar", None),
        ("simplecache::s3://bucket/a", None),
        ("hf://datasets/a/b", None),
        ("zip://a.jpg::https://host/a.zip", None),
        ("/local/a.tar", None),
        ("HTTPS://host/%c3%A4.tar", Location("http", "https://host/", "ä.tar")),
        (
            "http://host/a.tar?signature=x%2F",
            Location("http", "http://host/?signature=x%2F", "a.tar"),
        ),
        ("http://me:secret@host/a.tar", Location("http", "http://me:secret@host/", "a.tar")),
        # obstore would change these paths, which belong to the root
        ("http://host/a%2Fb.tar", Location("http", "http://host/a%2Fb.tar", "")),
        ("http://host//a.tar?x", Location("http", "http://host//a.tar?x", "")),
        ("http://host/a/../b.tar", Location("http", "http://host/a/../b.tar", "")),
        ("http://host", Location("http", "http://host/", "")),
    ],
)
def test_locations(url, location):
    assert location_of(url) == location


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/a//b", "Rename the object, or pass a presigned https:// URL"),
        ("gs://bucket/a/../b", "reads neither keys with empty parts"),
        ("az://bucket/a/", "Rename the object"),
        ("s3://bucket/a\tb", r"a\\tb: obstore reads neither"),
        ("s3://bucket/a?versionId=3", "nor versions of objects"),
        ("s3://bucket/", "names no object"),
        ("s3://bucket", "names no object"),
        ("http:///a.tar", "has no host"),
    ],
)
def test_urls_that_no_client_reads(url, reason):
    with pytest.raises(ValueError, match=reason):
        location_of(url)


S3, GS, AZ = Location("s3", "b", "k"), Location("gs", "b", "k"), Location("az", "b", "k", "me")


@pytest.mark.parametrize(
    ("location", "options", "config"),
    [
        (S3, {"anon": True}, {"skip_signature": True}),
        (
            S3,
            {"key": "a", "secret": "b", "endpoint_url": "http://minio:9000", "region": "x"},
            {
                "access_key_id": "a",
                "secret_access_key": "b",
                "endpoint": "http://minio:9000",
                "region": "x",
            },
        ),
        (S3, {}, {"access_key_id": "AK", "secret_access_key": "SK", "region": "eu-west-1"}),
        (S3, {"profile": "other"}, {"access_key_id": "OK", "secret_access_key": "OS"}),
        (GS, {"token": "anon"}, {"skip_signature": True}),
        (GS, {"token": "/key.json"}, {"service_account_path": "/key.json"}),
        (AZ, {"account_key": "s"}, {"account_name": "me", "account_key": "s"}),
        (AZ, {"account_name": "you", "sas_token": "s"}, {"account_name": "you", "sas_key": "s"}),
    ],
)
def test_options_of_stores(location, options, config, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id=AK\naws_secret_access_key=SK\n"
        "[other]\naws_access_key_id=OK\naws_secret_access_key=OS\n"
    )
    (tmp_path / ".aws/config").write_text("[default]\nregion=eu-west-1\n[profile sso]\nsso_url=x\n")
    home = {"HOME": str(tmp_path)}
    assert store_arguments(location, options, home)[1]["config"] == config
    assert needs_boto3("sso", home) and not needs_boto3("default", home)
    with pytest.raises(ValueError, match="the profile 'none' is not in .*config or .*credentials"):
        aws_profile("none", home, is_required=True)
    assert aws_profile("none", home) == {}
    (tmp_path / "cfg").write_text("[profile 'my dev']\nregion=a\n[profile  two]\nregion=b\n")
    for profile, region in (("my dev", "a"), ("two", "b")):
        elsewhere = {**home, "AWS_CONFIG_FILE": "~/cfg"}
        assert aws_profile(profile, elsewhere, is_required=True) == {"region": region}
    assert aws_profile("default", {"HOME": str(tmp_path / "nobody")}) == {}
    given = {**home, "AWS_ACCESS_KEY_ID": "E"}  # obstore reads the environment itself
    if not options:
        assert store_arguments(location, options, given)[1]["config"] == {}


def test_options_of_http_and_unknown_options():
    location = Location("http", "http://h/", "k")
    name, arguments = store_arguments(location, {"headers": {"A": "b"}, "timeout": 3}, {})
    assert name == "HTTPStore" and arguments["url"] == "http://h/"
    assert arguments["client_options"]["default_headers"] == {"A": "b", **IDENTITY}
    headers = {"headers": {"accept-encoding": "gzip"}}
    assert (
        store_arguments(location, headers, {})[1]["client_options"]["default_headers"] == IDENTITY
    )
    assert arguments["client_options"]["read_timeout"] == "3s"
    with pytest.raises(ValueError, match="storage_options has 'keys', which s3:// does not take"):
        store_arguments(S3, {"keys": 1}, {})


SERVICE = {"type": "service_account", "client_email": "a", "private_key_id": "1"}
WRONG_SETTINGS = {
    "no key file": ("gs://b/a.tar", {"token": "none.json"}, {}, "file from <token>: No such"),
    "cut key file": ("gs://b/a.tar", {"token": "cut.json"}, {}, "decode service account"),
    "key file without a key": ("gs://b/a.tar", {"token": "key.json"}, {}, "pem"),
    "variable with no key file": (
        *("gs://b/a.tar", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "none.json"}, "none.json"),
    ),
    "Azure without an account": ("az://c/a.tar", {}, {}, "Account must be specified"),
    "Azure's key": ("az://c/a.tar", {"account_name": "me", "account_key": "?"}, {}, "Access Key"),
    "Azure's signature": ("az://c/a.tar", {"account_name": "me", "sas_token": "%"}, {}, "SAS"),
    "Azure's server": (
        *("az://c/a.tar", {"account_name": "me", "endpoint_url": "azurite:10000"}, {}),
        "endpoint_url is not valid. Pass a URL",
    ),
    "S3's server": (
        *("s3://b/a.tar", {"endpoint_url": "no url", "key": "a", "secret": "b"}, {}),
        "endpoint_url is not valid. Pass a URL",
    ),
    "variable with no server": (
        *("s3://b/a.tar", {}, {"AWS_ENDPOINT_URL": "minio:9000"}),
        "AWS_ENDPOINT_URL is not valid. Pass a URL",
    ),
    "S3's profile": (
        "s3://b/a.tar",
        {"profile": "nobody"},
        {},
        "the profile '<profile>' is not in",
    ),
    "HTTP's header": ("https://h/a.tar", {"headers": {"a b": "c"}}, {}, "invalid HTTP header name"),
}


URLS = {
    "http://127.0.0.1:9000": True,
    "https://minio.local/path": True,
    "http://[::1]:9000": True,
    "http://user:secret@host:1": True,
    "minio:9000": False,
    "http://${HOST}:9000": False,
    "http://127.0.0.1:99999": False,
    "http://:9000": False,
    "http://ho<st": False,
    "http://host:9000\n": False,
}


@pytest.mark.parametrize("url", URLS)
def test_urls_of_servers(url, tmp_path):
    home = {"HOME": str(tmp_path)}
    (tmp_path / ".aws").mkdir()
    settings = [
        (S3, {"endpoint_url": url}, home),
        (S3, {}, {**home, "AWS_ENDPOINT_URL": url}),
        (AZ, {"endpoint_url": url}, home),
        (GS, {}, {**home, "GOOGLE_BASE_URL": url}),
    ]
    if "\n" not in url:
        (tmp_path / ".aws/config").write_text(f"[profile p]\nendpoint_url={url}\n")
        settings.append((S3, {"profile": "p"}, home))
    for location, options, environment in settings:
        if URLS[url]:
            store_arguments(location, options, environment)
        else:
            with pytest.raises(ValueError, match="Pass a URL"):
                store_arguments(location, options, environment)


@pytest.mark.parametrize(
    ("location", "options", "variables"),
    [
        (AZ, {}, {"AZURE_USE_FABRIC_ENDPOINT": "true"}),
        (AZ, {}, {"AZURE_MSI_ENDPOINT": "x"}),
        (S3, {}, {"AWS_PROFILE": "none", "AWS_SKIP_SIGNATURE": "true"}),
        (S3, {"endpoint_url": "http://127.0.0.1:9000"}, {"AWS_ENDPOINT_URL": "minio:9000"}),
        (S3, {}, {"AWS_ENDPOINT_URL_S3": "http://a", "AWS_ENDPOINT_URL": "minio:9000"}),
    ],
)
def test_settings_that_are_not_used_are_not_checked(location, options, variables, tmp_path):
    store_arguments(location, options, {"HOME": str(tmp_path), **variables})


def test_a_store_that_can_be_made_later_is_no_wrong_setting(monkeypatch):
    native = pytest.importorskip("obstore._obstore")
    client = ObjectClient({})

    class Later:
        def __init__(self, error):
            self.error = error

        def HTTPStore(self, **_):
            raise self.error

    for error in (
        obstore_error("GenericError", "Generic HTTP client error: builder error"),
        OSError(errno.EMFILE, "too many open files"),
    ):
        module = types.SimpleNamespace(_store=Later(error), exceptions=native)
        with pytest.raises(type(error), match="builder|open files"):
            client._new_store(module, Location("http", "http://h/", "k"))


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_settings_with_which_no_request_can_be_sent(case, tmp_path, monkeypatch):
    """They are not retried: the test would not end."""
    url, options, variables, reason = WRONG_SETTINGS[case]
    pytest.importorskip("obstore")
    (tmp_path / "cut.json").write_text("{")
    (tmp_path / "key.json").write_text(json.dumps({**SERVICE, "private_key": "none"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError, match=r"://\S+ can't be opened: ") as caught:
        sources.Tar(url, {"image": "jpg"}, storage_options={**options, "retry_timeout": 1e6})
    assert reason in str(caught.value) and "Check storage_options= and" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("s3://b/a", "AWS_ACCESS_KEY_ID and other environment variables, ~/.aws"),
        ("gs://b/a", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfs://b/a", "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY"),
        ("ftp://h/a", "environment variables"),
    ],
)
def test_where_the_credentials_of_a_refused_request_can_be(url, places):
    cure = f"Check the credentials: {places} or storage_options=; for a public bucket, pass"
    assert cure in str(refusal(PermissionError("denied"), url))
    assert "{'headers': " in str(refusal(PermissionError("denied"), "https://h/a"))


def test_options_of_fsspec():
    options = {"username": "me", "timeout": 3, "retry_timeout": 5}
    assert fsspec_options(options) == {"username": "me"}


DAY = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)


def test_versions():
    tagged = Version.of({"size": 5, "e_tag": '"1"', "last_modified": DAY, "version": None})
    dated = Version.of({"size": 5, "e_tag": None, "last_modified": DAY})
    none = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
    nameless = Version.of({"size": 5, "e_tag": None, "last_modified": none})
    for version in (tagged, dated, nameless):
        stamp = version.stamp(0.0)
        assert Version.from_stamp(stamp) == version and version.difference(version) == ""
    recent = dated.stamp(DAY.timestamp() + 1)
    assert Version.from_stamp(recent) == dated and plain(recent) == dated.stamp(0.0)
    assert not has_version(recent) and has_version(dated.stamp(0.0)) and has_version([5, 1, 2, 3])
    assert nameless.stamp(0.0) == [5] and not has_version([5])
    for seconds, expected in ((1, False), (4.9, False), (5.1, True), (-4.9, False), (-6, True)):
        now = DAY.timestamp() + seconds
        assert is_settled(DAY.isoformat(), now) is expected
    assert not is_settled("yesterday", 0.0) and not is_settled("2024", 0.0)
    assert (tagged.match, Version(5, 'W/"1"').match, dated.match) == ('"1"', None, None)
    assert tagged.difference(Version(5, 'W/"1"')) == ""
    assert tagged.difference(Version(5, '"2"')) == "ETag '\"1\"' -> '\"2\"'"
    assert tagged.difference(Version(6, '"1"')) == "5 -> 6 bytes"
    assert dated.difference(Version(5, None, "x")).startswith("Last-Modified")
    assert tagged.difference(dated) == "ETag '\"1\"' -> none" and dated.difference(tagged) == ""


def test_running_requests_do_not_delay_others():
    threads, go = RequestThreads(), threading.Event()
    try:
        blocked = [threads.call(go.wait, 60) for _ in range(5)]
        order = []
        jobs = [Job(lambda _, k=k: order.append(k), 1, lambda: True) for k in range(3)]
        assert [threads.call(int, k).get() for k in range(8)] == list(range(8))
        for job in jobs:
            threads.add([job])
        while len(order) < 3:
            time.sleep(0.001)
        assert sorted(order) == [0, 1, 2]
        assert not any(result._is_set for result in blocked)
    finally:
        go.set()
    assert [result.get() for result in blocked] == [True] * 5


def test_urgent_jobs_run_first_in_their_order(monkeypatch):
    monkeypatch.setattr("dalijax.core.remote.request_threads._MOST_THREADS", 1)
    threads, go, order = RequestThreads(), threading.Event(), []
    blocked = threads.call(go.wait, 60)
    for name, urgent in (("a", False), ("b", True), ("c", False), ("d", True)):
        threads.add([Job(lambda _, name=name: order.append(name), 1, lambda: True)], urgent)
    last = Result()
    threads.add([Job(lambda _: last.set(None), 1, lambda: True)])
    go.set()
    last.get()
    assert blocked.get() and order == ["b", "d", "a", "c"]


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sources.md"
ROWS = re.findall(
    r"^\| ([^|]+) \| (?:`(\w+://\S+)`)? *\| `(\{.*\})`", PAGE.read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("name", "url", "options"), ROWS, ids=[name for name, *_ in ROWS])
def test_the_options_in_the_docs_make_stores(name, url, options, tmp_path, monkeypatch):
    native = pytest.importorskip("obstore._obstore")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[research]\naws_access_key_id=AK\naws_secret_access_key=SK\n"
    )
    options = ast.literal_eval(options.replace("...", "YWJj"))
    kinds = [url] if url else ["https://host/a", "s3://bucket/a", "gs://bucket/a", "az://box/a"]
    for address in kinds:
        location = location_of(address)
        if not url and location.kind == "az":
            location = location._replace(account="me")
        kind, arguments = store_arguments(location, options, {"HOME": str(tmp_path)})
        if options.get("token") == "key.json":
            with pytest.raises(Exception, match=r"key\.json"):
                getattr(native._store, kind)(**arguments)
        else:
            getattr(native._store, kind)(**arguments)


def test_the_docs_have_every_kind_of_storage():
    assert len(ROWS) == 11 and {url.partition(":")[0] for _, url, _ in ROWS} == {
        *("https", "s3", "gs", "az", "")
    }


def test_delays_do_not_use_the_random_numbers_of_the_user():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    assert len(set(itertools.islice(retries._delays(), 8))) == 8
    assert random.random() == expected
