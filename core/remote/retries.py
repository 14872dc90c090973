"""Repeats failed requests, and distinguishes temporary errors from permanent errors.

Object stores answer 503 while they scale, and networks fail for minutes. A training run should
survive that, but a wrong URL or expired credentials should stop it at once.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from ..environment.passing_errors import (
    chain_of,
    is_environment,
    kinds_of,
    passes,
    status_of,
)
from ..messages.printable import printable
from ..messages.redaction import redacted
from .locations import credentials_cure, kind_of

T = TypeVar("T")
Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})

_log = logging.getLogger("dalijax")

_PATIENCE = 300.0  # seconds after which no further attempt begins
_OPENING = 30.0  # the same limit when a source is being opened, since its URL may be wrong
_FEW = 5  # attempts with wrong answers, which another attempt rarely changes
_LONGEST = 5.0  # seconds between two attempts, so that a run continues soon after an outage
_RECHECK = 0.1  # seconds between checks whether a result is still needed
_QUIET = 5.0  # seconds of waiting before a warning
_REPEATED = 60.0  # seconds between warnings
_STATUS = re.compile(r"status code: (\d{3})")  # in errors of obstore
# s3fs raises errors with these numbers if a server fails or is busy.
_SERVER_ERRNOS = frozenset((errno.EBUSY, errno.EIO))
_RANGES = (
    "the server ignores ranges. Tars and TFRecords need a server that supports range requests "
    "(python -m http.server does not). Use another server, or download the files"
)
_FAULTY = "The file was changed, or the server is faulty. Reopen the source, or download the file"
_NO_HTTP = "the response is not HTTP. Check the scheme and the port of the URL"
# Errors of obstore after wrong answers, and their descriptions; obstore shows its inner errors.
_WRONG_ANSWERS = (
    (re.compile(r"(Requested \d+\.\.\d+, got.*)"), rf"\1. {_FAULTY}"),
    (
        re.compile(r"source: (?:MissingContentLength|\w+ContentRange)\b"),
        "obstore requires a Content-Length, which chunked responses lack, and a Content-Range with "
        "the size of the file. Use another server, or download the file",
    ),
    (re.compile(r"hyper::Error\(\s*Parse\(|error: InvalidMessage\("), _NO_HTTP),
    (
        re.compile(r"error: InvalidCertificate\(\s*(\w+)"),
        r"the certificate of the server is not valid (\1). Check the URL, or SSL_CERT_FILE",
    ),
)
_REDIRECTS = {
    "TooManyRedirects": "the server redirects in a loop",
    "BadScheme": "the server redirects from https to http, or to another scheme",
}
_MOST_SHOWN = 300  # characters of an error of another library
_last_warning = -_REPEATED
_random = random.Random()  # its own generator, because a user may have seeded `random`


class RemoteError(OSError):
    """A remote file can't be read. Its records do not count as bad records."""


class MissingError(FileNotFoundError, RemoteError):
    """A remote file does not exist."""


class DeniedError(PermissionError, RemoteError):
    """A remote file may not be read."""


class ChangedError(RemoteError):
    """A remote file has another version than when it was opened."""


class NoAnswerError(TimeoutError, RemoteError):
    """A server did not answer for a long time."""

    was_retried = True  # `with_retries` does not repeat it


class WrongAnswerError(OSError):
    """A response has other bytes than requested; another attempt may succeed."""


class Unneeded(Exception):
    """The result of a request is no longer needed."""


def patience(options: Mapping[str, Any], opens: bool = False) -> float:
    """Returns the number of seconds after which no further attempt of a request begins.

    Args:
        options: The user's storage options.
        opens: Whether a source is being opened. The limit is then at most 30 s, since the URL may
            be wrong.
    """
    seconds = float(options.get("retry_timeout", _PATIENCE))
    return min(seconds, _OPENING) if opens else seconds


def repeated(
    attempt: Callable[[list[int]], Sequence[T | Exception]],
    urls: Sequence[str],
    seconds: float,
    is_wanted: Callable[[], bool] = lambda: True,
    options: Options = _NONE,
) -> list[T]:
    """Sends requests, repeats failed requests until all succeed, and returns the results.

    Args:
        attempt: Sends the requests with the given numbers; returns the result or the error of each
            request.
        urls: The URL of each request.
        seconds: Time after which no further attempt begins.
        is_wanted: Returns whether the results are still needed.
        options: The user's storage options, whose values errors must not contain.

    Returns:
        The result of each request.

    Raises:
        RemoteError: If a request can't succeed, or did not succeed in time.
        Unneeded: If the results are no longer needed.
    """
    results: list[Any] = [None] * len(urls)
    rows = list(range(len(urls)))
    began, num_wrong, delays = time.monotonic(), 0, _delays()
    while True:
        for row, result in zip(rows, attempt(rows), strict=True):
            results[row] = result
        rows = [row for row in rows if isinstance(results[row], Exception)]
        if not rows:
            return results
        for row in rows:
            if (final := refusal(results[row], urls[row], options)) is not None:
                raise final from None
        error, url = results[rows[0]], urls[rows[0]]
        num_wrong += any(wrong_answer(results[row]) for row in rows)
        waited, delay = time.monotonic() - began, next(delays)
        if waited + delay > seconds or num_wrong >= _FEW:
            raise exhausted(url, waited, error, options) from None
        _warn(url, waited, seconds, error, options)
        end = time.monotonic() + delay
        while (left := end - time.monotonic()) > 0:
            if not is_wanted():
                raise Unneeded
            time.sleep(min(left, _RECHECK))


def patiently(call: Callable[[], T], url: str, options: Options, opens: bool = False) -> T:
    """Calls a function, which sends a request, until it succeeds, and returns its result.

    Args:
        call: The function.
        url: The URL of the request.
        options: The user's storage options.
        opens: Whether a source is being opened; see `patience`.

    Raises:
        RemoteError: If the request can't succeed, or did not succeed in time.
    """
    seconds = patience(options, opens)
    return repeated(lambda rows: each(lambda _: call(), rows), [url], seconds, options=options)[0]


def each(read: Callable[[int], T], rows: Sequence[int]) -> list[T | Exception]:
    """Sends requests one after the other; returns the result or the error of each request.

    After two errors in a row, the other requests are not sent, because the server may be
    overloaded. The last error is the result of each of the other requests.

    Args:
        read: Sends the request with a given number, and returns its result.
        rows: The numbers of the requests.
    """
    results: list[T | Exception] = []
    for row in rows:
        try:
            results.append(read(row))
        except Exception as error:
            results.append(error)
            if all(isinstance(result, Exception) for result in results[-2:]) and len(results) > 1:
                return results + [error] * (len(rows) - len(results))
    return results


def _delays() -> Iterator[float]:
    """Yields the seconds between attempts: they double up to 5 s, times a random factor."""
    delay = 0.25
    while True:
        yield delay * _random.uniform(0.5, 1.5)
        delay = min(2 * delay, _LONGEST)


def _shown(text: str, url: str, options: Options) -> str:
    """Returns the first line of a text of another library, without secrets; see `redacted`.

    The text is redacted before it is shortened, because a part of a secret is not recognized.
    """
    return redacted(text, [url], options).partition("\n")[0][:_MOST_SHOWN]


def _text(error: Exception, url: str, options: Options) -> str:
    """Returns the text of an error of another library, as it is shown."""
    return _shown(str(error), url, options) or type(error).__name__


def refusal(error: Exception, url: str, options: Options = _NONE) -> Exception | None:
    """Returns the error to raise without a retry, with URL and remedy; None if a retry may succeed.

    Args:
        error: The error of a client. obstore's classes are recognized by name, because a forked
            process has another copy of the classes.
        url: The URL of the request.
        options: The user's storage options, whose values the error must not contain.
    """
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        is_of_client = is_environment(cause) or status_of(cause) or "ClientError" in kinds_of(cause)
        if is_of_client or isinstance(cause, RemoteError):
            error = cause  # fsspec raises FileNotFoundError also for other errors of HTTP clients
    shown, kinds = printable(url), kinds_of(error)
    text = str(error).partition("\n")[0]
    found = _STATUS.search(text)
    status = int(found[1]) if found else status_of(error)
    if isinstance(error, (RemoteError, ImportError)):
        return error
    if wrong_answer(error):
        return None
    if any(kind.endswith("NotFoundError") for kind in kinds) or status == 404:
        return MissingError(f"{shown} does not exist (404). Check the URL")
    if kinds & {"PermissionError", "PermissionDeniedError", "UnauthenticatedError"} or (
        status in (401, 403)
    ):
        return DeniedError(f"{shown}: access is denied ({status or 403}). {credentials_cure(url)}")
    if "PreconditionError" in kinds or status == 412:
        return changed(shown, "412, precondition failed")
    if "NotSupportedError" in kinds and "Range request" in text:
        return RemoteError(f"{shown}: {_RANGES}")
    if "InvalidPathError" in kinds:
        return RemoteError(
            f"{shown} can't be listed: {_text(error, url, options)}. Rename the object, or pass "
            "the URLs of the files instead of a pattern or a folder"
        )
    if "redirect without LOCATION" in text:
        problem = "the server redirects without a Location. Check the URL"
        if kind_of(url) == "s3":
            problem = "the bucket is in another region. Pass storage_options={'region': ...}"
        return RemoteError(f"{shown}: {problem}")
    for sign, problem in _REDIRECTS.items():
        if f"source: {sign}" in str(error) or sign in kinds:
            return RemoteError(f"{shown}: {problem}. Check the URL")
    if status and not passes(status):
        answer = f"{shown}: the server answered with status {status}"
        return RemoteError(f"{answer}. {_text(error, url, options)}")
    if (
        type(error).__name__ in ("GenericError", "WrongAnswerError")  # of obstore and this module
        or is_environment(error)
        or (isinstance(error, OSError) and error.errno in _SERVER_ERRNOS)
    ):
        return None
    return RemoteError(f"{shown} can't be read: {_shown(repr(error), url, options)}")


def misconfigured(url: str, error: Exception, options: Options) -> RemoteError:
    """Returns the error about invalid settings of a store, with which no request can be sent."""
    text = _text(error, url, options).rstrip(".")
    return RemoteError(
        f"{printable(url)} can't be opened: {text}. Check storage_options= and the "
        "environment variables of the storage"
    )


def wrong_answer(error: Exception) -> str:
    """Returns a description of a wrong answer of a server, with a remedy; "" for other errors.

    Another attempt rarely changes the answer.
    """
    if isinstance(error, WrongAnswerError):
        return f"{error!s:.300}. {_FAULTY}"
    if any("BadHttpMessage" in kinds_of(cause) for cause in chain_of(error)):  # of aiohttp
        return _NO_HTTP
    for pattern, description in _WRONG_ANSWERS:
        if found := pattern.search(str(error)):
            return found.expand(description)
    return ""


def wrong_length(start: int, end: int, count: int) -> WrongAnswerError:
    """Returns the error about a response with another number of bytes than requested."""
    return WrongAnswerError(f"requested bytes {start:,} to {end:,}, but received {count:,} bytes")


def changed(shown: str, difference: str) -> ChangedError:
    """Returns the error about a file that was changed after it was opened.

    Args:
        shown: The URL, without credentials.
        difference: A description of the change.
    """
    return ChangedError(
        f"{shown} was changed after the source was opened: {difference}. Reopen the source"
    )


def exhausted(url: str, seconds: float, error: Exception, options: Options = _NONE) -> RemoteError:
    """Returns the error to raise after the last attempt.

    Args:
        url: The URL of the request.
        seconds: Time since the first attempt.
        error: The error of the last attempt.
        options: The user's storage options, whose values the error must not contain.
    """
    if description := wrong_answer(error):
        return RemoteError(f"{printable(url)}: {redacted(description, [url], options)}")
    return NoAnswerError(
        f"{printable(url)}: no answer for {seconds:.0f} s. The last error: "
        f"{_text(error, url, options)}"
    )


def _warn(url: str, waited: float, seconds: float, error: Exception, options: Options) -> None:
    """Logs a warning about a server that does not answer, at most once a minute."""
    global _last_warning
    now = time.monotonic()
    if waited > _QUIET and now - _last_warning > _REPEATED:
        _last_warning = now
        _log.warning(
            "%s: no answer for %.0f s. It is requested for up to %.0f s. The last error: %s",
            printable(url),
            waited,
            seconds,
            _text(error, url, options),
        )
