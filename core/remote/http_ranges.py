"""Checks that HTTP servers return the requested byte ranges, of the opened version of a file."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ..messages.printable import printable
from .retries import WrongAnswerError, changed, ignores_ranges
from .versions import named_change

# fsspec's info of the file that is read; tasks of fsspec's event loop inherit the caller's value.
_opened: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "opened", default=MappingProxyType({})
)
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def http_options(timeout: float) -> dict[str, Any]:
    """Returns arguments of fsspec's HTTP file system that make it check each response.

    Args:
        timeout: Seconds without a byte after which a request fails.
    """
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    user = {**conf.get("http", {}), **conf.get("https", {})}.get("client_kwargs", {})
    limits = ClientTimeout(total=None, sock_connect=10, sock_read=timeout)
    return {"client_kwargs": {"timeout": limits, **user, "raise_for_status": check_range}}


@contextlib.contextmanager
def of_version(info: Mapping[str, Any]) -> Iterator[None]:
    """Makes `check_range` refuse other versions of a file while the block runs.

    Args:
        info: fsspec's info of the file, which has the ETag or the date of the opened version.
    """
    token = _opened.set(info)
    try:
        yield
    finally:
        _opened.reset(token)


async def check_range(response: Any) -> None:
    """Raises OSError if an ``aiohttp`` response has another range or version than requested.

    fsspec handles responses with an error status.
    """
    requested = response.request_info.headers.get("Range")
    if requested is None or response.status >= 400:
        return
    url = str(response.request_info.url)
    error: OSError | None = None
    if response.status != 206 and _RANGE.fullmatch(requested):
        error = ignores_ranges(url)
    elif problem := range_problem(response.headers, requested):
        error = WrongAnswerError(problem)
    elif change := version_change(_opened.get(), response.headers):
        error = changed(printable(url), change)
    if error is not None:
        response.close()  # aiohttp leaves the connection open if its callback raises
        raise error


def version_change(opened: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Returns in words how a response differs from the opened version; "" if it does not.

    Args:
        opened: fsspec's info of the opened file.
        headers: The headers of the response.
    """
    change = named_change(opened, headers)
    if change is not None:
        return change
    got = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    before, now = str(opened.get("size", "*")), got[3] if got else "*"
    return "" if "*" in (before, now) or before == now else f"{before} -> {now} bytes"


def range_problem(headers: Any, requested: str) -> str:
    """Returns in words how a response differs from the requested range; "" if it does not.

    Args:
        headers: The headers of the response.
        requested: The requested range, e.g. ``bytes=0-99``. Other forms are not checked.
    """
    match = _RANGE.fullmatch(requested)
    if match is None:
        return ""
    start, last = map(int, match.groups())
    answer = headers.get("Content-Range", "")
    got = _CONTENT_RANGE.fullmatch(answer.strip())
    if got is None or (int(got[1]), int(got[2])) != (start, last):
        return f"the server answered {requested} with {answer!r:.60}"
    length = headers.get("Content-Length", str(last - start + 1))
    if length != str(last - start + 1):
        return f"the server answered {requested} with {length:.20} bytes"
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        return f"the server answered {requested} with content in {encoding!r:.20}"
    return ""
