"""Warnings that name the user's line of code."""

from __future__ import annotations

import inspect
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Issues a RuntimeWarning at the innermost line of code outside the package."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
