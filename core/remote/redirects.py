"""Refuses redirects of HTTP servers that would send the user's headers to another server.

Clients follow redirects, and send all headers except Authorization and Cookie to the new server.
aiohttp reports each redirect. obstore does not, so that a file is first requested by urllib.
"""

from __future__ import annotations

import functools
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.printable import printable
from .locations import http_request, stall_seconds
from .retries import RemoteError

# Headers that are not secret, or that clients do not send to another server.
_SAFE = frozenset(
    ("accept", "accept-encoding", "accept-language", "authorization", "cookie", "user-agent")
)


def secret_headers(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the headers that a redirect must not send to another server.

    Args:
        options: The user's storage options, or the options of fsspec's HTTP file system.
    """
    return tuple(name for name in options.get("headers") or () if name.lower() not in _SAFE)


def check_redirects(url: str, options: Mapping[str, Any]) -> None:
    """Requests a byte of a file, and checks that no redirect leads to another server.

    Sends no request if the options have no secret headers.

    Args:
        url: The URL of the file on an HTTP server.
        options: The user's storage options.

    Raises:
        RemoteError: If the server redirects to another server.
        OSError: If the request fails. Statuses of wrong ranges or redirects are ignored, because
            the next request reports them.
    """
    names = secret_headers(options)
    if not names:
        return
    address, headers = http_request(url, options)
    parts = urllib.parse.urlsplit(address)
    path, query = (urllib.parse.quote(part, "/~!$&'()*+,;=:@?%") for part in parts[2:4])
    request = urllib.request.Request(
        parts._replace(path=path, query=query).geturl(),
        headers={"User-Agent": "dalijax", **headers, "Range": "bytes=0-0"},
    )
    try:
        https = urllib.request.HTTPSHandler(context=_https_context())
        opener = urllib.request.build_opener(_Redirects(url, names), https)
        opener.open(request, timeout=stall_seconds(options)).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 and not 300 <= error.code < 400:
            raise
    except urllib.error.URLError as error:
        raise ConnectionError(str(error.reason)) from error


@functools.lru_cache(maxsize=1)  # loading the certificates takes 40 ms
def _https_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows the redirects of a server to itself.

    Args:
        url: The URL of the file, for errors.
        names: The names of the secret headers.
    """

    def __init__(self, url: str, names: Sequence[str]):
        self._url, self._names = url, names

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 lacks it

    def redirect_request(self, req: Any, fp: Any, *arguments: Any) -> Any:
        """Returns the request of a redirect; see `HTTPRedirectHandler`."""
        try:
            check_server(self._url, req.full_url, arguments[-1], self._names)
        except RemoteError:
            fp.close()
            raise
        return super().redirect_request(req, fp, *arguments)


@functools.lru_cache(maxsize=64)  # fsspec has an instance of a file system for equal arguments
def redirect_trace(names: tuple[str, ...]) -> Any:
    """Returns a TraceConfig of aiohttp that refuses redirects to another server.

    Args:
        names: The names of the secret headers.
    """
    from aiohttp import TraceConfig

    async def check(session: Any, context: Any, redirect: Any) -> None:
        start, target = str(redirect.response.url), redirect.response.headers.get("Location", "")
        redirect.response.close()  # aiohttp leaves the connection open if its callback raises
        check_server(start, start, urllib.parse.urljoin(start, target), names)

    trace = TraceConfig()
    trace.on_request_redirect.append(check)
    return trace


def check_server(url: str, start: str, target: str, names: Sequence[str]) -> None:
    """Checks that a redirect does not lead to another server.

    Args:
        url: The URL of the file, for the error.
        start: The URL of the request.
        target: The target of the redirect.
        names: The names of the secret headers.

    Raises:
        RemoteError: If host or port differ, or the scheme, except for http to https at their ports.
    """
    before, after = _server(start), _server(target)
    is_upgrade = before[::2] == ("http", 80) and after[::2] == ("https", 443)
    if before == after or (is_upgrade and before[1] == after[1]):
        return
    scheme, host, port = after
    raise RemoteError(
        f"{printable(url)}: the server redirects to {printable(f'{scheme}://{host}:{port}')}, "
        f"which would receive the headers {', '.join(names)} of storage_options. Pass a URL of "
        "that server without these headers, or a secret as the header Authorization"
    )


def _server(url: str) -> tuple[str, str, int]:
    """Returns the scheme, the host and the port of a URL."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port if parts.port is not None else {"http": 80}.get(parts.scheme, 443)
    return parts.scheme, parts.hostname or "", port
