"""A line that says how far a long task is."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

_log = logging.getLogger("dalijax")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A function that is told how many bytes more were done.

    It draws a bar on stderr where that is a terminal and tqdm is installed.

    Args:
        what: What is done.
        total: Bytes in all.
    """
    _log.info("%s (%s bytes)", what, f"{total:,}")
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update
