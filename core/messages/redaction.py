"""Removes secrets from URLs, and from texts that contain URLs or values of storage options.

Of a URL, only the scheme, the host, the path and the names of query parameters are shown, because a
list of names of secret parameters would never be complete. Of storage options, only the names are
shown.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_HIDDEN = "..."
# Quantifiers are bounded, since a text may be hostile.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}\Z", re.IGNORECASE)
# Separates the parts of a chained URL, such as zip://a.jpg::https://host/a.zip.
_LINK = re.compile(r"::(?=(?:\w{1,30}::){0,4}[a-z][a-z0-9+.-]{0,30}://)", re.IGNORECASE)
_HOST = re.compile(r"(?:\[[^\s\[\]@/]+\]|[\w.~%${},*-]+)(?::\d+)?")
# A host on the internet, an address or "localhost", unlike the start of a password.
_FULL_HOST = re.compile(
    r"(?:(?:[^.]+\.)+[^\W\d_]{2,}\.?|\[.*:.*\]|\d+(?:\.\d+){3}|localhost)(?::\d+)?"
)
_WEB = frozenset({"http", "https"})
_PATHS = frozenset({"file", "local", "memory", "tar", "zip", "libarchive"})  # without a host
_BUCKETS = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "hf"})  # "#" is a part of a key
_AZURE = frozenset({"az", "abfs", "abfss", "wasb", "wasbs"})  # may have the form container@account
_NAME = re.compile(r"[\w.~$%\[\]-]{1,60}")  # of a parameter of a query
_MOST_ENDS = 20  # places that may be the end of a password
_MOST_NESTED = 8  # URLs in the path of a URL

# A URL in a text ends before a space, or a quote that no letter follows.
_QUOTE = re.compile(r"(['\"`])(?:\w{1,30}::){0,4}\Z")
_MOST_PREFIX = 200  # characters before a URL that are searched for its quote
_TOKEN = re.compile(r"(?:[^\s\"<>`']|'(?![\s,:;.)\]}>]|\Z))*")
_PUNCTUATION = ",:;)]}>'."
# A URL without a host in errors of urllib3. After other words, "?" may be a part of a local path.
_TARGET = re.compile(r"(\burl[:=]\s?['\"]?/[^\s?]*\?)([^\s'\"]+)", re.IGNORECASE)
_LEAST = 5  # characters of a secret that is also hidden outside of URLs
_WORD = re.compile(rf"\w{{{_LEAST},}}")


class _Scheme(NamedTuple):
    """The scheme of a URL in a text.

    Attributes:
        name: The scheme in lower case.
        start: The offset of the scheme.
        end: The offset of the end of the slashes after the scheme.
    """

    name: str
    start: int
    end: int


def redacted_url(url: str) -> str:
    """Returns a path or URL without user information, values of its query, and fragment.

    Dots replace the hidden parts. A chained URL is redacted in each part. Local paths are
    unchanged, because ``?``, ``@`` and ``#`` have no meaning there.
    """
    return _split(url)[0] if ":/" in url else url


def redacted(
    text: str, urls: Iterable[str] = (), options: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Returns a text of any library without the secrets of the URLs in it; see `redacted_url`.

    Args:
        text: The text.
        urls: URLs that the text may contain. Their secrets are removed in other notations, too, and
            if spaces or quotes make the end of a URL in the text unclear.
        options: Storage options, whose values are replaced by their names.
    """
    # The first URL may have the same user information as the others.
    named = [url for n, url in enumerate(urls) if ":/" in url and (not n or _name(url) in text)]
    secrets = dict(_secrets(named, options, text))
    for url in named:
        text = text.replace(url, redacted_url(url))
    shown, end = [], 0
    while scheme := _next_scheme(text, end):
        shown.append(text[end : scheme.start])
        end = _end_of_url(text, scheme)
        shown.append(redacted_url(text[scheme.start : end]))
    text = _TARGET.sub(lambda found: found[1] + _query(found[2])[0], "".join(shown) + text[end:])
    longest_first = sorted(map(re.escape, secrets), key=len, reverse=True)
    pattern = "|".join(longest_first)
    return re.sub(pattern, lambda found: secrets[found[0]], text) if secrets else text


def _name(url: str) -> str:
    """Returns the last part of the path of a URL."""
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]


def _next_scheme(text: str, begin: int) -> _Scheme | None:
    """Returns the first scheme after an offset that slashes follow, or None.

    pathlib replaces the two slashes of a URL by one slash.
    """
    colon = text.find(":/", begin)
    while colon >= 0:
        scheme = _SCHEME.search(text, max(begin, colon - 31), colon)
        has_two = text.startswith("//", colon + 1)
        if scheme and (has_two or scheme[0].lower().endswith(tuple(_WEB))):
            return _Scheme(scheme[0].lower(), scheme.start(), colon + 2 + has_two)
        colon = text.find(":/", colon + 1)
    return None


def _split(url: str) -> tuple[str, list[str]]:
    """Returns a path or URL without its secrets, and the secrets."""
    parts = [_split_part(part) for part in _LINK.split(url)]
    return "::".join(shown for shown, _ in parts), [s for _, secrets in parts for s in secrets]


def _split_part(url: str) -> tuple[str, list[str]]:
    """Returns a path, or a URL that is not chained, without its secrets, and the secrets."""
    head, end, secrets = "", "", list[str]()
    for _ in range(_MOST_NESTED):  # URLs, each in the path of the previous URL
        scheme = _next_scheme(url, 0)
        if scheme is None:
            return f"{head}{url}{end}", secrets
        head, rest = head + url[: scheme.end], url[scheme.end :]
        if scheme.name in _PATHS:
            url = rest
            continue
        user, rest = _without_user(scheme.name, rest)
        if user is not None:
            head += _HIDDEN if rest[:1] in ("", *"/?#") else f"{_HIDDEN}@"
            secrets += [user, *user.split(":", 1)]
        fragment = ""
        if scheme.name not in _BUCKETS:
            rest, hash_sign, fragment = rest.partition("#")
            end = f"{hash_sign}{fragment and _HIDDEN}{end}"
        url, question_mark, query = rest.partition("?")
        query, values = _query(query)
        end = f"{question_mark}{query}{end}"
        secrets += [fragment, *values]
    return f"{head}{_HIDDEN}{end}", [*secrets, url]


def _query(text: str) -> tuple[str, list[str]]:
    """Returns a query without its values, and the values.

    A parameter without a value may be a secret itself, which base64 ends with "=". A text before
    "=" that is not a name may be the rest of a value that contains "&".
    """
    shown, values = [], []
    for part in text.split("&") if text else ():
        name, _, value = part.partition("=")
        has_value = value.strip("=") != "" and _NAME.fullmatch(name) is not None
        shown.append(f"{name}={_HIDDEN}" if has_value else _HIDDEN)
        values.append(value if has_value else part)
    return "&".join(shown), values


def _without_user(scheme: str, rest: str) -> tuple[str | None, str]:
    """Splits a URL, without its scheme, into the user information and the rest.

    Clients end the host at the first ``/``, ``?`` or ``#``. Passwords with these characters must be
    escaped, but users forget it. So the user information may end at a later ``@``.

    Returns:
        The user information or None, and the rest. If the URL has neither a valid host nor an
        ``@``, everything before the path is returned as user information.
    """
    authority = _authority(rest)
    user, at, host = authority.rpartition("@")
    if at and scheme in _AZURE and ":" not in user:
        return None, rest
    is_invalid = bool(authority) and not _HOST.fullmatch(host)
    later = [found.end() for found in re.finditer("@", rest) if found.start() >= len(authority)]
    if later and (is_invalid or ((at or scheme in _WEB) and not _FULL_HOST.fullmatch(host))):
        has_user = is_invalid or bool(at)
        ends = [end for end in later[-_MOST_ENDS:] if _is_host_at(rest, end, has_user)]
        if is_invalid or ends:
            end = ends[-1] if ends else later[-1]
            return rest[: end - 1], rest[end:]
    if is_invalid:
        return authority, rest[len(authority) :]
    return (user, rest[len(user) + 1 :]) if at else (None, rest)


def _is_host_at(rest: str, begin: int, has_user: bool) -> bool:
    """Returns whether a host may begin after an ``@``, unlike in the path ``/cat@2x.jpg``.

    Args:
        rest: A URL without its scheme.
        begin: The offset after the ``@``.
        has_user: Whether the URL certainly has user information.
    """
    host = _authority(rest[begin:])
    is_folder = rest.startswith("/", begin + len(host))
    is_in_path = re.search("[?#]", rest[:begin]) is None
    is_likely = _FULL_HOST.fullmatch(host) is not None or (has_user and is_in_path)
    return _HOST.fullmatch(host) is not None and (":" in host or (is_folder and is_likely))


def _authority(rest: str) -> str:
    """Returns the user information and the host of a URL, given the text after its scheme."""
    return re.split("[/?#]", rest, maxsplit=1)[0]


def _end_of_url(text: str, scheme: _Scheme) -> int:
    """Returns the offset of the end of a URL in a text."""
    begin, line_end = scheme.end, text.find("\n", scheme.end)
    line_end = len(text) if line_end < 0 else line_end
    if quote := _QUOTE.search(text, max(0, scheme.start - _MOST_PREFIX), scheme.start):
        closing = re.compile(rf"{quote[1]}(?=[\s,:;.)\]}}>]|\Z)").search(text, begin, line_end)
        if closing and ": " not in text[begin : closing.start()]:
            return closing.start()
    end = _end_of_token(text, begin)
    authority = _authority(text[begin:end])
    at = text.rfind("@", end, line_end)
    if at >= 0 and authority and not _HOST.fullmatch(authority.rpartition("@")[2]):
        # The password contains a space.
        end = _end_of_token(text, at)
    return end


def _end_of_token(text: str, begin: int) -> int:
    """Returns the end of the characters of a URL, without the punctuation of a sentence."""
    match = _TOKEN.match(text, begin)
    token = match[0] if match else ""
    end = token.rstrip(_PUNCTUATION)
    if token[len(end) :].startswith("]") and "[" in end:  # an IPv6 address
        end += "]"
    if token[len(end) :].startswith(_HIDDEN):  # the result of an earlier call
        end += _HIDDEN
    return begin + len(end)


def _secrets(
    urls: Iterable[str], options: Mapping[str, Any], text: str
) -> Iterator[tuple[str, str]]:
    """Yields the secrets of URLs and options, as they are in a text, and their replacements."""
    values = [(secret, _HIDDEN) for url in urls for secret in _split(url)[1]]
    for option, value in options.items():
        values += _secrets_of_option(str(option), value)
    visible = " ".join(map(redacted_url, urls))
    for secret, name in values:
        for form in (secret, urllib.parse.unquote(secret)):
            notations = [
                form,
                urllib.parse.quote(form, ""),
                urllib.parse.quote_plus(form),
                base64.b64encode(form.encode(errors="surrogateescape")).decode(),  # of basic auth
                *_WORD.findall(form),
            ]
            for notation in notations:
                if len(notation) >= _LEAST and notation in text and notation not in visible:
                    yield notation, name


def _secrets_of_option(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the secrets in the value of an option, which may be nested, with their names."""
    if isinstance(value, Mapping):
        for key, nested in value.items():
            yield from _secrets_of_option(str(key), nested)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for nested in value:
            yield from _secrets_of_option(name, nested)
    elif isinstance(value, (bytes, bytearray)):
        yield from _secrets_of_option(name, value.decode("latin1"))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value), f"<{name}>"
    elif isinstance(value, (str, os.PathLike)):
        scheme = _next_scheme(value := str(value), 0)
        if scheme is not None and not scheme.start:
            yield from ((secret, f"<{name}>") for secret in _split(value)[1])
            return
        yield value, f"<{name}>"
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(document := json.loads(value), Mapping):  # such as the key of an account
                yield from _secrets_of_option(name, document)
