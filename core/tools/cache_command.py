"""The command ``python -m dalijax.sources cache``, which describes and cleans a cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from ..messages.printable import printable
from ..remote.cache_contents import CachedObject, cached_objects, remove_objects
from ..remote.cache_folder import existing_cache
from .command_line import write

_DAY = 86_400.0


def add_command(commands: Any) -> None:
    """Adds ``cache`` to the commands of a parser."""
    parser = commands.add_parser(
        "cache",
        help="describe or clean the cache of remote files",
        description="Prints what the folder of cache= holds, and removes files from it. Files that "
        "running processes use are never removed.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the folder of cache=")
    parser.add_argument(
        "--remove-old",
        action="store_true",
        help="remove the versions of files that were replaced by newer versions",
    )
    parser.add_argument(
        "--remove-unused",
        type=float,
        metavar="DAYS",
        help="remove the files that no process has opened for so many days",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        clean(options.folder, options.remove_old, options.remove_unused)
    except (OSError, ValueError) as error:
        raise SystemExit(f"the cache can't be read or cleaned: {error}") from error


def clean(folder: str, old: bool = False, days: float | None = None) -> None:
    """Prints the number and size of the files in a cache, and removes unneeded files.

    Files that running processes use are never removed.

    Args:
        folder: The folder of the cache.
        old: Whether to remove versions of files that were replaced by newer versions.
        days: Files that no process has opened for this number of days are removed; None: no file is
            removed because of its age.

    Raises:
        OSError: If a file can't be read or removed.
        ValueError: If the folder is not a cache.
    """
    cache = existing_cache(folder)
    objects = cached_objects(cache)
    lines = {
        "in all": objects,
        "used by running processes": [item for item in objects if item.is_used],
        "old versions": [item for item in objects if item.is_old],
    }
    write(printable(cache.path))
    for name, items in lines.items():
        write(f"  {name}: {_amount(items)}")
    before = -1.0 if days is None else time.time() - _DAY * days
    removed = [
        item
        for item in objects
        if not item.is_used and ((old and item.is_old) or item.last_used < before)
    ]
    if old or days is not None:
        remove_objects(cache, removed)
        write(f"  removed: {_amount(removed)}")


def _amount(items: Sequence[CachedObject]) -> str:
    return f"{len(items):,} files, {sum(item.num_bytes for item in items) / 1e9:,.1f} GB"
