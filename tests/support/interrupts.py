"""Interrupts a call like Ctrl-C, but at a line that the test chooses."""

import contextlib
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Files that store positions. The files below them, which read states or define pipelines, are pure,
# or the engines discard their results.
FILES = (
    "adapters/",
    "core/iterator/",
    "core/feeding/fed_engine",
    "core/feeding/record_",
    "core/feeding/source_engine",
    "core/feeding/stream_",
    "core/pipeline/engine",
    "core/threads",
)


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end pytest."""


@functools.cache
def _is_watched(filename):
    path = pathlib.Path(filename).resolve()
    if ROOT not in path.parents:
        return False
    return path.relative_to(ROOT).as_posix().startswith(FILES)


def lines_of(call):
    """Returns the lines that a call runs, as distinct pairs of file and line, in order."""
    lines = {}

    def trace(frame, event, _):
        if not _is_watched(frame.f_code.co_filename):
            return None
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno] = None
        return trace

    _traced(trace, call)
    return list(lines)


def interrupt_at(line, call):
    """Calls a function and raises `Interrupt` before the first execution of a line.

    Returns:
        Whether the line was reached.
    """
    reached = []

    def trace(frame, event, _):
        if reached or not _is_watched(frame.f_code.co_filename):
            return None
        if event == "line" and (frame.f_code.co_filename, frame.f_lineno) == line:
            reached.append(line)
            raise Interrupt
        return trace

    with contextlib.suppress(Interrupt):
        _traced(trace, call)
    return bool(reached)


def _traced(trace, call):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
