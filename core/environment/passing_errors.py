"""Recognizes temporary errors of the machine, the network or a server."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "ETIMEDOUT", "ESTALE", "EPIPE"),
        *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
        *("EHOSTDOWN", "EHOSTUNREACH"),
    )
    if hasattr(errno, name)
)
_PASSING = frozenset((408, 425, 429))  # HTTP statuses below 500 of temporary errors
# Errors of HTTP clients that are not ConnectionErrors, by name to avoid importing the clients.
_CLIENT_ERRORS = {"ClientConnectionError", "ClientPayloadError", "IncompleteRead", "TransportError"}


def is_environment(error: BaseException) -> bool:
    """Returns whether the machine or the network caused an error, so that a retry may succeed.

    Such causes are exhausted memory or file descriptors, broken connections, timeouts, and server
    errors (HTTP 408, 425, 429 and 5xx).
    """
    return any(map(_is_environment, chain_of(error)))


def passes(status: int) -> bool:
    """Returns whether a request that failed with this HTTP status may succeed later."""
    return status in _PASSING or 500 <= status < 600


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of a client's error; 0 if it has none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "code", "status_code"):
            status = getattr(holder, name, None)
            if isinstance(status, int):
                if 100 <= status < 600:
                    return status
                break  # aiohttp warns if `code` is read, too
    return 0


def kinds_of(error: BaseException) -> set[str]:
    """Returns the names of an error's class and of its base classes."""
    return {kind.__name__ for kind in type(error).__mro__}


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its cause or context, the cause's cause, and so on, without repetitions."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_environment(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if not _CLIENT_ERRORS.isdisjoint(kinds_of(error)):
        return True
    return passes(status_of(error))
