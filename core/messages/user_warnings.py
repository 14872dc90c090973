"""Warnings that name the user's line of code."""

from __future__ import annotations

import functools
import inspect
import warnings

from .printable import printable_lines

# Packages whose code may be between the user's line and the warning. (Python's finalizers, which
# issue a warning when the user frees an iterator, are in weakref.)
_INTERNAL = (__name__.partition(".")[0], "nvidia", "grain", "weakref")


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issues a warning at the innermost line of code outside this package, DALI and Grain."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(printable_lines(message), category, stacklevel=level)


@functools.lru_cache(maxsize=256)
def warn_user_once(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issues a warning as `warn_user` does, unless this process has issued it recently."""
    warn_user(message, category)
