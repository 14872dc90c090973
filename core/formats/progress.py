"""Shows progress bars, and logs long tasks."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..messages.printable import printable

_log = logging.getLogger("dalijax")

T = TypeVar("T", bound=tuple[Any, ...])


@contextlib.contextmanager
def progress(task: str, total: int, unit: str = "bytes") -> Iterator[Callable[[int], object]]:
    """Shows the progress of a long task while the block runs.

    Draws a bar if stderr is a terminal and tqdm is installed; always logs the task.

    Args:
        task: A description of the task.
        total: Total size of the task in units.
        unit: Name of the unit in the plural, e.g. "files".

    Yields:
        A function to call with the size processed since its last call.
    """
    _log.info("%s (%s %s)", task, f"{total:,}", unit)
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    short = "B" if unit == "bytes" else f" {unit}"
    with tqdm(total=total, desc=task, unit=short, unit_scale=True, file=sys.stderr) as bar:
        yield bar.update


def counted(
    items: Iterable[T], size: int, advance: Callable[[int], object], step: int = 1000
) -> Iterator[T]:
    """Yields the given items of a file, and reports their bytes to a progress bar.

    Args:
        items: Tuples that begin with the offset of the item in the file.
        size: The size of the file in bytes.
        advance: Called with the number of bytes since the last call.
        step: The number of items between two reports.
    """
    at = 0
    for number, item in enumerate(items):
        if number % step == 0:
            advance(item[0] - at)
            at = item[0]
        yield item
    advance(size - at)


def report_remote(paths: Sequence[str], num_bytes: int, can_share: bool) -> None:
    """Logs how many bytes of remote files will be read to index them, and how to avoid it.

    Args:
        paths: The files.
        num_bytes: The total size of the files.
        can_share: Whether shared indexes exist for this kind of files.
    """
    size = f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
    _log.warning(
        "up to %s of %s files such as %s are read to index them%s",
        size,
        f"{len(paths):,}",
        printable(paths[0]),
        ". Index them once for all users: python -m dalijax.sources index, followed by the URLs"
        if can_share
        else ", and the index is stored in cache_dir=",
    )
