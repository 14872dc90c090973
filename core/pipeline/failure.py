"""Classifies errors: a record's, the graph's, or the environment's."""

from __future__ import annotations

import dataclasses
import errno
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# DALI names the operator, then prints where the graph's function called it, then the error.
_OPERATOR = re.compile(r"Error in (?:\w+ )?operator `([\w.]+)`")
_BEGIN = "\nencountered:\n"
# Lines after the error: the place in DALI's code, a Python traceback, a false remark.
_END = re.compile(r"\n(?:C\+\+ context:|Stacktrace|At:\n|Current pipeline object is no longer)")
_PREFIX = re.compile(
    r'^(?:Critical error in pipeline:\s*)+|^\w*PythonFunction error: |^Assert on ".*?" failed: '
)
_DECODERS = re.compile(r"(?:experimental\.)?(?:decoders\.|peek_image_shape|imgcodec\b)")
_FILE_READS = re.compile(r"io\.file\.read|(?:experimental\.)?(?:readers|inputs)\.")
# Decoders that crop raise this for a window of the graph's, and not for a bad file.
_WINDOW = re.compile(r"cropping window|crop window|out of bounds", re.IGNORECASE)

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "ETIMEDOUT", "ESTALE", "EPIPE"),
        *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
        *("EHOSTDOWN", "EHOSTUNREACH"),
    )
    if hasattr(errno, name)
)
_HTTP_STATUS = (408, 425, 429)  # and those of 500 and more
_ENVIRONMENT = re.compile(
    r"too many open files|cannot allocate memory|std::bad_alloc|\bMemoryError\b|out of memory"
    r"|CUDA(?: \w+)? allocation failed|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|connection (?:reset|refused|aborted|timed out)|resource temporarily unavailable",
    re.IGNORECASE,
)
# Errors of HTTP clients, which are no ConnectionError. Naming them imports nothing.
_CLIENT_ERRORS = {"ClientConnectionError", "ClientPayloadError", "IncompleteRead", "TransportError"}
RETRY_DELAYS = (0.05, 0.2, 0.8)  # seconds


class EnvironmentFailure(Exception):
    """The machine or the network made a run fail; a retry may succeed."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed run of DALI.

    Attributes:
        operator: The operator, as users write it: "decoders.image", "math.add"; "" if DALI does
            not name it.
        message: DALI's error, without the lines around it.
        reads_file: Whether a decoder or a read of a file failed.
        environment: Whether the machine or the network failed, so that a retry may succeed.
    """

    operator: str
    message: str
    reads_file: bool
    environment: bool

    def is_like(self, other: Failure) -> bool:
        """Whether the same operator failed, or both failed to read or decode a file."""
        if self.reads_file or other.reads_file:
            return self.reads_file and other.reads_file
        return self.operator == other.operator

    @property
    def subject(self) -> str:
        """The operator with the word before it."""
        return f"operator {self.operator}" if self.operator else "the graph"


def failure_of(error: BaseException) -> Failure:
    """Parses the error of a failed run."""
    text = str(error)
    match = _OPERATOR.search(text)
    operator = _public_name(match[1]) if match else ""
    begin = text.rfind(_BEGIN)
    rest = text[begin + len(_BEGIN) :] if begin >= 0 else _PREFIX.sub("", text.strip())
    message = _PREFIX.sub("", _END.split(rest, maxsplit=1)[0].strip()).strip(" :") or text.strip()
    reads = _FILE_READS.match(operator) is not None
    decodes = _DECODERS.match(operator) is not None and not _WINDOW.search(message)
    environment = _ENVIRONMENT.search(message) is not None or is_environment(error)
    return Failure(operator, message, reads or decodes, environment)


def _public_name(name: str) -> str:
    """An operator's name in the user's code: math.add for nvidia.dali.math.add."""
    name = name.removeprefix("nvidia.dali.").removeprefix("fn.")
    if not name.startswith("ops."):
        return name
    # A class of operators: ops._JaxFunction is jax_function.
    module, _, kind = name.removeprefix("ops.").rpartition(".")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.lstrip("_")).lower()
    return f"{module}.{snake}" if module else snake


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_environment(error: BaseException) -> bool:
    """Whether the machine or the network failed, and not a record: a retry may succeed.

    These are exhausted memory or file descriptors, broken connections, timeouts, and a server's
    errors (HTTP 408, 425, 429 and 5xx).
    """
    return any(map(_is_environment, _chain(error)))


def _is_environment(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if not _CLIENT_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return True
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status", "code", "status_code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and (status in _HTTP_STATUS or 500 <= status < 600):
                return True
    return False


def with_retries(call: Callable[[], T]) -> T:
    """Calls a function again, a few times, if the environment made it fail.

    Raises:
        Exception: The last error; another error at once.
    """
    for delay in RETRY_DELAYS:
        try:
            return call()
        except Exception as error:
            if not is_environment(error):
                raise
        time.sleep(delay)
    return call()
