"""Warnings that are logged once for each process."""

from __future__ import annotations

import functools
import logging


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged the same message recently."""
    logging.getLogger("dalijax").warning("%s", message)
