"""Warnings that are logged once for each process, and a filter of all log records."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from .printable import printable_lines
from .redacted_errors import redacted_error

_log = logging.getLogger("dalijax")


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged the same message recently."""
    _log.warning("%s", message)


def _redact(record: logging.LogRecord) -> bool:
    """Escapes the texts of a log record, and removes secrets; see `printable_lines`."""
    record.msg = printable_lines(str(record.msg))
    if isinstance(record.args, Mapping):
        record.args = {name: _shown(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_shown, record.args))
    if record.exc_info and record.exc_info[1] is not None:
        error = redacted_error(record.exc_info[1])
        record.exc_info = type(error), error, error.__traceback__
    return True


def _shown(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else printable_lines(str(value))


_log.addFilter(_redact)
