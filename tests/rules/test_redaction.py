"""Errors, logs and warnings show the places of files, but no passwords, signatures or options."""

import copy
import json
import logging
import pathlib
import pickle
import traceback
import warnings

import pytest

from dalijax.core.messages.printable import printable, printable_repr, printable_text
from dalijax.core.messages.redacted_errors import redacted_error
from dalijax.core.messages.redaction import redacted, redacted_url
from dalijax.core.messages.user_warnings import warn_user
from dalijax.errors import StateError

HOST = "127.0.0.1:80"
PASSWORD = "SECRET"  # as a name, since tracebacks contain lines of this file
# SECRET is a part of each secret. User, host and path are RFC 3986's unless the URL is malformed.
URLS = {
    f"http://bob:SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:pa@SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:my SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:pa/SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:pa#SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:pa?SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    f"http://bob:p@s/w#o?r'd SECRET@{HOST}/a.tar": f"http://...@{HOST}/a.tar",
    "http://bob:SECRET@minio:9000/a.tar": "http://...@minio:9000/a.tar",
    "http://bob:SECRET@minio/cat@2x.jpg": "http://...@minio/cat@2x.jpg",
    "http://bob:p@s/SECRET@h.com/cat@2x.jpg": "http://...@h.com/cat@2x.jpg",
    "http://bob:12/SECRET@h.com/a.tar": "http://...@h.com/a.tar",
    "HTTPS://bob:SECRET@[::1]:80/a.tar": "HTTPS://...@[::1]:80/a.tar",
    "https://bob:SECRET@bücher.example/ä b.tar": "https://...@bücher.example/ä b.tar",
    "https://bob:SECRET@h.com/cat@2x.jpg": "https://...@h.com/cat@2x.jpg",
    "http://bob:SECRET": "http://...",
    "ftp://bob:SECRET@h/a": "ftp://...@h/a",
    "https://h.com/a.tar?auth=SECRET&zz=SECRET#SECRET": "https://h.com/a.tar?auth=...&zz=...#...",
    "https://h.com/a.tar?hdnts=exp=1~hmac=SECRET": "https://h.com/a.tar?hdnts=...",
    "https://h.com/a.tar?SECRET": "https://h.com/a.tar?...",
    "https://h.com/a.tar?SECRET==&a=1;b=SECRET": "https://h.com/a.tar?...&a=...",
    "https://h.com/a.tar?next=http://bob:SECRET@h/b?x=y": "https://h.com/a.tar?next=...",
    "https://h.com/web/http://bob:SECRET@h/b": "https://h.com/web/http://...@h/b",
    "az://box/a.tar?sv=1&sig=SECRET%3D": "az://box/a.tar?sv=...&sig=...",
    "s3://KEY:SEC/SECRET@bucket/a.tar": "s3://...@bucket/a.tar",
    "zip://a@2x?.jpg::https://bob:SECRET@h/x.zip": "zip://a@2x?.jpg::https://...@h/x.zip",
    "zip:///a?b/https://bob:SECRET@h/x": "zip:///a?b/https://...@h/x",
    "simplecache::https://bob:SECRET@h/x?k=SECRET": "simplecache::https://...@h/x?k=...",
    "https://bob:SECRET@h/{000..127}.tar?k=SECRET": "https://...@h/{000..127}.tar?k=...",
    "/data/https:/bob:SECRET@h.com/a?k=SECRET": "/data/https:/...@h.com/a?k=...",  # of pathlib
}
PLAIN = (
    "/data/user@host.jpg",
    "/data/a?b=c#d.jpg",
    "me:word@host",
    "file:///data/a?b=c@d#e.jpg",
    "s3://bucket/cat@2x#1.jpg",
    "http://minio:9000/cats@v2/cat@2x.jpg",
    "http://minio/cats@v2/cat@2x.jpg",
    "https://h.com/a.tar",
    "http://[::1]:80/a.tar",
    "abfs://box@me.dfs.core.windows.net/a.tar",
    "hf://datasets/me/cats@main/a.tar",
    "s3://bucket-{a,b}/[0-9]*.tar",
)


def test_urls_are_shown_without_their_secrets():
    assert {url: redacted_url(url) for url in URLS} == URLS
    assert {url: printable(url) for url in URLS} == URLS
    assert {shown: redacted_url(shown) for shown in URLS.values()} == {v: v for v in URLS.values()}


def test_texts_are_shown_without_the_secrets_of_a_given_url():
    for url, shown in URLS.items():
        text = f"GET {url}: refused; see '{url}', \"{url}\" ({url}), <{url}>, [{url}]."
        assert redacted(text, [url]) == text.replace(url, shown)


@pytest.mark.parametrize("path", PLAIN)
def test_paths_without_secrets_are_unchanged(path):
    text = f"{path}: no such file. See {path}, ({path}), '{path}' and [{path}]."
    assert printable(path) == path and printable_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("url='http://h/a?k=it's SECRET', x", "url='http://h/a?k=...', x"),
        ("retries exceeded with url: /a?k=SECRET (by", "retries exceeded with url: /a?k=... (by"),
        ("see http://h/a?k=SECRET, or b", "see http://h/a?k=..., or b"),
        (
            "http://h/a?k=...: 0001 of http://...@h/b: x@y",
            "http://h/a?k=...: 0001 of http://...@h/b: x@y",
        ),
        ("http://bob:my SECRET@h.com/a is gone\nx@y", "http://...@h.com/a is gone\nx@y"),
        ('{"url": "https://bob:SECRET@h/a", "n": 1}', '{"url": "https://...@h/a", "n": 1}'),
        (
            "OSError('http://h.com/a?k=SECRET: no answer')",
            "OSError('http://h.com/a?k=...: no answer')",
        ),
    ],
)
def test_urls_in_texts_of_other_libraries(text, shown):
    assert redacted(text) == shown


def test_names_replace_the_values_of_options():
    key = json.dumps({"type": "service_account", "private_key": "-----\nSECRET/key+="})
    options = {
        "headers": {"X-Api-Key": "api SECRET", "Authorization": b"Bearer SECRET2"},
        "token": key,
        "endpoint_url": "http://bob:SECRET3@minio:9000",
        "auth": ("bob", "SECRET4"),
        "password": 12345678,
        "anon": True,
    }
    text = (
        "api%20SECRET, api+SECRET, Bearer SECRET2, {'a': 'SECRET4'}, 12345678, Ym9iOlNFQ1JFVDM=, "
        f"no file {key}, at http://bob:SECRET3@minio:9000/a and minio:9000"
    )
    assert redacted(text, [], options) == (
        "<X-Api-Key>, <X-Api-Key>, <Authorization>, {'a': '<auth>'}, <password>, <endpoint_url>, "
        "no file <token>, at http://...@minio:9000/a and minio:9000"
    )
    assert "SECRET" not in redacted(json.dumps([key]), [], options)


class TwoParts(Exception):
    """An error with its own constructor and text, as of HTTP clients."""

    def __init__(self, url, status):
        self.url, self.status = url, status
        super().__init__(url, status)

    def __str__(self):
        return f"{self.status} of {self.url}"


def raise_chain():
    try:
        try:
            raise TwoParts(f"http://bob:{PASSWORD}@h.com/a", 503)
        except TwoParts as error:
            error.__notes__ = [f"while reading http://h/a?k={PASSWORD}"]
            raise KeyError(f"http://h/a?k={PASSWORD}") from error
    except KeyError:
        raise OSError(5, "input", f"http://h.com/a?k={PASSWORD}")


def test_errors_and_their_causes_are_redacted():
    with pytest.raises(OSError) as raised:
        raise_chain()
    error = redacted_error(raised.value)
    inner = error.__context__.__cause__
    assert (type(error).__name__, error.errno, inner.status) == ("OSError", 5, 503)
    assert isinstance(error, OSError) and isinstance(inner, TwoParts)
    trace = "".join(traceback.format_exception(error))
    assert "http://...@h.com/a" in trace and "in raise_chain" in trace
    assert str(error) == "[Errno 5] input: 'http://h.com/a?k=...'"
    for text in (
        trace,
        str(pickle.loads(pickle.dumps(error))),
        repr(copy.copy(inner)),
        *error.args,
    ):
        assert "SECRET" not in text
    plain = ValueError("a?k=b of /data/me@host.jpg")
    assert redacted_error(plain) is plain


def test_logs_warnings_and_errors_of_this_package_are_redacted(caplog):
    url = pathlib.PurePosixPath("/data/https:/bob:SECRET@h.com/a")
    log = logging.getLogger("dalijax")
    with caplog.at_level(logging.DEBUG, "dalijax"):
        log.debug("%s of %d: %s", ["http://h/a?k=SECRET"], 3, url)
        log.warning("%(url)s", {"url": "http://SECRET@h.com/a"})
        try:
            raise_chain()
        except OSError:
            log.exception("http://h/a?k=SECRET")
    assert caplog.records[0].args[1] == 3
    assert "['http://h/a?k=...'] of 3: /data/https:/...@h.com/a" in caplog.text
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("http://bob:SECRET@h.com/a")
    error = StateError("http://bob:SECRET@h.com/a")
    texts = [
        caplog.text,
        str(caught[0].message),
        str(error),
        repr(error),
        printable_repr([str(url)]),
    ]
    assert "SECRET" not in "".join(texts)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**3,
        "a::" * 10**3,
        "http://a" * 10**3,
        "'http://a:b" * 10**3,
        "x://?" + "@&#" * 10**3,
    ],
)
def test_hostile_texts_end(text):
    assert redacted_url(redacted(f"{text}://", [text], {"a": text}))
