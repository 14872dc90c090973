"""Checks that HTTP servers return the requested byte ranges."""

from __future__ import annotations

import re
from typing import Any

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def http_options() -> dict[str, Any]:
    """Options of fsspec's HTTP file system that check each response before its body is read."""
    from fsspec.config import conf

    user = {**conf.get("http", {}), **conf.get("https", {})}.get("client_kwargs", {})
    return {"client_kwargs": {**user, "raise_for_status": check_range}}


async def check_range(response: Any) -> None:
    """Raises OSError if an ``aiohttp`` response to a range request has different bytes.

    Responses with an error status are left to fsspec.
    """
    wanted = response.request_info.headers.get("Range")
    if wanted is None or response.status >= 400:
        return
    if problem := range_problem(response.status, response.headers, wanted):
        response.close()  # aiohttp leaves the connection open if its callback raises
        raise OSError(
            f"{response.request_info.url}: {problem}. Tars and TFRecords need a server that "
            "supports range requests (python -m http.server does not). Use another server, or "
            "download the files"
        )


def range_problem(status: int, headers: Any, wanted: str) -> str:
    """Describes how a response differs from the requested range; "" if it does not.

    Args:
        status: The status of the response.
        headers: The headers of the response.
        wanted: The requested range, e.g. ``bytes=0-99``.
    """
    asked = _RANGE.fullmatch(wanted)
    if asked is None:
        return ""
    if status != 206:
        return f"the server ignores ranges: it answered {wanted} with status {status}"
    start, last = map(int, asked.groups())
    answer = headers.get("Content-Range", "")
    got = _CONTENT_RANGE.fullmatch(answer.strip())
    if got is None or (int(got[1]), int(got[2])) != (start, last):
        return f"the server answered {wanted} with {answer!r:.60}"
    length = headers.get("Content-Length", str(last - start + 1))
    if length != str(last - start + 1):
        return f"the server answered {wanted} with {length:.20} bytes"
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        return f"the server answered {wanted} with content in {encoding!r:.20}"
    return ""
