"""Classifies errors by their cause (a record, the graph, the environment), and retries calls."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from ..environment.passing_errors import is_environment

T = TypeVar("T")

# DALI names the operator, then the line of the graph function that called it, then the error.
_OPERATOR = re.compile(r"Error in (?:\w+ )?operator `([\w.]+)`")
_BEGIN = "\nencountered:\n"
# Lines after the error: the location in DALI's code, a Python traceback, a misleading remark.
_END = re.compile(r"\n(?:C\+\+ context:|Stacktrace|At:\n|Current pipeline object is no longer)")
_PREFIX = re.compile(
    r'^(?:Critical error in pipeline:\s*)+|^\w*PythonFunction error: |^Assert on ".*?" failed: '
)
_DECODERS = re.compile(r"(?:experimental\.)?(?:decoders\.|peek_image_shape|imgcodec\b)")
_SAMPLE = re.compile(r"\bsample #(\d+)")  # as in "Failed to decode sample #8"
_READERS = re.compile(r"(?:\w+\.)?readers\.")  # also experimental.readers and legacy.readers
_OTHER_READS = re.compile(r"io\.file\.read|(?:experimental\.)?inputs\.")
# Decoders that crop raise these errors because of the graph's window, not because of a bad file.
_WINDOW = re.compile(r"cropping window|crop window|out of bounds", re.IGNORECASE)

_ENVIRONMENT = re.compile(
    r"too many open files|cannot allocate memory|std::bad_alloc|\bMemoryError\b|out of memory"
    r"|CUDA(?: \w+)? allocation failed|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|connection (?:reset|refused|aborted|timed out)|resource temporarily unavailable",
    re.IGNORECASE,
)
# Decoders of parts that may differ between epochs. A damaged image may have undamaged parts.
_DECODE_PARTS = re.compile(r"image_(slice|random_crop)$")
_INTERNAL = (f"{__name__.partition('.')[0]}.", "nvidia.dali")  # modules without code of users
RETRY_DELAYS = (0.05, 0.2, 0.8)  # seconds


class EnvironmentFailure(Exception):
    """Raised if a run failed because of the machine or the network; a retry may succeed."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describes a failed run of DALI.

    Attributes:
        operator: The operator, as users write it: "decoders.image", "math.add"; "" if unknown.
        message: DALI's error, without the surrounding lines.
        environment: Whether the machine or the network failed, so that a retry may succeed.
        row: The index of a row of the batch that failed, if DALI names the row. Other rows may
            fail, too.
    """

    operator: str
    message: str
    environment: bool
    row: int | None = None

    def is_like(self, other: Failure) -> bool:
        """Returns whether two runs failed in the same operator, or both in reading or decoding."""
        if self.reads_file or other.reads_file:
            return self.reads_file and other.reads_file
        return self.operator == other.operator

    @property
    def stops_reader(self) -> bool:
        """Returns whether a reader failed; unlike other operators, readers can't run again."""
        return _READERS.match(self.operator) is not None

    @property
    def is_read(self) -> bool:
        """Returns whether an operator that reads files failed, e.g. because a file is missing."""
        return self.stops_reader or _OTHER_READS.match(self.operator) is not None

    @property
    def is_permanent(self) -> bool:
        """Returns whether the record's file can't be read or decoded, whatever part is needed."""
        return self.reads_file and _DECODE_PARTS.search(self.operator) is None

    @property
    def reads_file(self) -> bool:
        """Returns whether reading or decoding a file failed: the record may be at fault."""
        decodes = _DECODERS.match(self.operator) is not None
        return self.is_read or (decodes and not _WINDOW.search(self.message))

    @property
    def subject(self) -> str:
        """The failed operator, in words: "operator decoders.image"."""
        return f"operator {self.operator}" if self.operator else "the graph"


def failure_of(error: BaseException) -> Failure:
    """Parses an error of DALI: operator, message, row, and whether the environment failed."""
    text = str(error)
    match = _OPERATOR.search(text)
    operator = _public_name(match[1]) if match else ""
    begin = text.rfind(_BEGIN)
    body = text[begin + len(_BEGIN) :] if begin >= 0 else _PREFIX.sub("", text.strip())
    message = _PREFIX.sub("", _END.split(body, maxsplit=1)[0].strip()).strip(" :") or text.strip()
    environment = _ENVIRONMENT.search(message) is not None or is_environment(error)
    named = _SAMPLE.search(message)
    row = int(named[1]) if named else None
    return Failure(operator, message, environment, row)


class Cause(enum.Enum):
    """The cause of a failed run of DALI."""

    ENVIRONMENT = enum.auto()  # the machine or the network: a retry may succeed
    RECORDS = enum.auto()  # some records, without which the run succeeds
    GRAPH = enum.auto()  # the graph, which fails for every record
    UNKNOWN = enum.auto()  # no record fails alone


def cause_of(
    failure: Failure,
    num_bad: int,
    num_records: int,
    has_unread: bool,
    works_elsewhere: Callable[[], bool],
) -> Cause:
    """Returns the cause of a failed run, after its records were run again in parts.

    Args:
        failure: The failure, whose message does not blame the environment.
        num_bad: The number of records of the run that fail alone.
        num_records: The number of records of the run.
        has_unread: Whether stand-ins replaced bad records before the run.
        works_elsewhere: Returns whether the graph can process any record. It is called only if
            every record of the run fails.
    """
    if num_bad == num_records and not failure.reads_file and not works_elsewhere():
        return Cause.GRAPH
    if num_bad or has_unread:
        return Cause.RECORDS
    return Cause.ENVIRONMENT if failure.is_read else Cause.UNKNOWN  # alone, every file was read


def _public_name(name: str) -> str:
    """Returns an operator's name as users write it: math.add for nvidia.dali.math.add."""
    name = name.removeprefix("nvidia.dali.").removeprefix("fn.")
    if not name.startswith("ops."):
        return name
    # An operator class: ops._JaxFunction is jax_function.
    module, _, kind = name.removeprefix("ops.").rpartition(".")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.lstrip("_")).lower()
    return f"{module}.{snake}" if module else snake


def can_open_files() -> bool:
    """Returns whether this process can open a further file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def strip_tracebacks(error: BaseException) -> None:
    """Replaces the tracebacks of an error and its causes by notes with the lines of user code.

    A traceback refers to the variables of its functions and of all their callers: to the batch, and
    to the error itself. The reference cycle would keep the batch until Python's garbage collection.
    (Python 3.10 does not print notes.)
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()  # errors may refer to each other, and `raise from` refers to one twice
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if current.__traceback__ is not None:
            if note := _lines_of_user(current.__traceback__):
                vars(current).setdefault("__notes__", []).append(note)
            current.__traceback__ = None
        todo += [current.__cause__, current.__context__]


def _lines_of_user(trace: TracebackType) -> str:
    """Returns the part of a traceback outside this package and DALI, as text; "" if it is empty."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(trace)
        if not str(frame.f_globals.get("__name__", "")).startswith(_INTERNAL)
    ]
    lines = traceback.StackSummary.extract(iter(frames)).format()
    return "Raised at:\n" + "".join(lines).rstrip() if lines else ""


def with_retries(call: Callable[[], T]) -> T:
    """Calls a function, a few times if the environment fails, and returns its result.

    Raises:
        Exception: The last error of the environment, or the first other error.
    """
    for delay in RETRY_DELAYS:
        try:
            return call()
        except Exception as error:
            if not is_environment(error) or getattr(error, "was_retried", False):
                raise
        time.sleep(delay)
    return call()
