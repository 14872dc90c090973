"""Policy of retries: which errors of a client are final, and how long to wait between attempts.

Object stores answer 503 while they scale, and networks fail for minutes. A training run should
survive that, but a wrong URL or expired credentials should stop it at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from ..messages.printable import printable

FEW = 5  # attempts with answers that a repetition rarely changes
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = frozenset((408, 425, 429))  # statuses below 500 that pass
_RANGES = (
    "the server ignores ranges. Tars and TFRecords need a server that supports range requests "
    "(python -m http.server does not). Use another server, or download the files"
)


class NoAnswerError(TimeoutError):
    """A server did not answer for as long as `Patience` allows."""

    was_retried = True  # `with_retries` does not repeat it


class WrongAnswerError(OSError):
    """A response has other bytes than requested."""


class ChangedError(OSError):
    """A file has another version than when it was opened."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Waiting times between attempts.

    Attributes:
        seconds: Time after which no further attempt begins.
        first: First delay in seconds; each delay is twice as long as the one before.
        longest: Longest delay in seconds.
    """

    seconds: float = 300.0
    first: float = 0.25
    longest: float = 5.0  # a run goes on soon after an outage

    def delays(self) -> Iterator[float]:
        """Yields the delays in seconds, without jitter."""
        delay = self.first
        while True:
            yield delay
            delay = min(2 * delay, self.longest)

    def jittered(self, delay: float, random: float) -> float:
        """Returns a delay of 0.5 to 1.5 times the length, given a number in [0, 1)."""
        return delay * (0.5 + random)


def refusal(error: BaseException, url: str) -> BaseException | None:
    """Returns the error to raise at once, with URL and remedy; None if a retry may succeed.

    Args:
        error: The error of a client. obstore's classes are recognized by name, because a forked
            process has another copy of them.
        url: The URL.
    """
    shown = printable(url)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).partition("\n")[0]
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if isinstance(error, ChangedError):
        return error
    if "FileNotFoundError" in kinds or "NotFoundError" in kinds or status == 404:
        return FileNotFoundError(f"{shown} does not exist (404). Check the URL")
    if kinds & {"PermissionDeniedError", "UnauthenticatedError"} or status in (401, 403):
        return PermissionError(
            f"{shown}: access is denied ({status or 403}). Check the credentials: environment "
            "variables, ~/.aws or storage_options=; for a public bucket, pass "
            "storage_options={'anon': True}"
        )
    if "PreconditionError" in kinds or status == 412:
        return changed(shown, "412, precondition failed")
    if "NotSupportedError" in kinds and "Range request" in text:
        return OSError(f"{shown}: {_RANGES}")
    if "redirect without LOCATION" in text:
        return OSError(
            f"{shown}: the bucket is in another region. Pass storage_options={{'region': ...}}"
        )
    if status and status < 500 and status not in _PASSING:
        return OSError(f"{shown}: the server answered with status {status}. {text:.300}")
    if kinds & {"UnknownConfigurationKeyError", "InvalidPathError", "ValueError", "TypeError"}:
        return error
    if isinstance(error, Exception):
        return None
    return error


def is_odd(error: BaseException) -> bool:
    """Returns whether an answer is rarely changed by a repetition, such as one of other bytes."""
    return isinstance(error, WrongAnswerError) or bool(
        re.search(r"Requested \d+\.\.\d+, got", str(error))
    )


def changed(shown: str, difference: str) -> ChangedError:
    """Returns the error about a file that was changed."""
    return ChangedError(
        f"{shown} was changed after the source was opened: {difference}. Reopen the source"
    )


def exhausted(url: str, seconds: float, error: BaseException) -> OSError:
    """Returns the error to raise after the last attempt."""
    text = str(error).partition("\n")[0]
    if is_odd(error):
        return OSError(
            f"{printable(url)}: {text:.300}. The file was changed, or the server is faulty. Reopen "
            "the source, or download the file"
        )
    return NoAnswerError(
        f"{printable(url)}: no answer for {seconds:.0f} s. The last error: {text:.300}"
    )
