"""Lists the files of local and remote folders for `Files`."""

from __future__ import annotations

import collections
import errno
import logging
import os
import stat
from collections.abc import Iterator

from ..messages.printable import printable
from ..remote.folders import Entry, Folders
from .labels import few

_log = logging.getLogger("dalijax")

_HIDDEN = (b".", b"__MACOSX")  # archives from macOS contain metadata in __MACOSX


class LocalFolders:
    """Lists local folders, by the same methods as `dalijax.core.remote.folders.Folders`.

    An entry of a folder may also have the types "special" (e.g. a FIFO), "dangling" (a link whose
    target can't be found) and "loop" (a link to itself).
    """

    isdir = staticmethod(os.path.isdir)
    isfile = staticmethod(os.path.isfile)

    def ls(self, path: str) -> Iterator[Entry]:
        """Yields an entry for each file and each folder in a folder."""
        with os.scandir(path) as entries:
            for entry in entries:
                yield {"name": entry.name, "type": _kind(entry)}

    def unstrip_protocol(self, path: str) -> str:
        """Returns the path, which is its own name in errors."""
        return path


def _kind(entry: os.DirEntry[str]) -> str:
    """Returns the type of an entry of a local folder; see `LocalFolders`."""
    if not entry.is_symlink():
        return "directory" if entry.is_dir() else "file" if entry.is_file() else "special"
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return "loop" if error.errno == errno.ELOOP else "dangling"
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special"


def listed(
    lister: Folders | LocalFolders, folder: bytes, suffixes: tuple[bytes, ...]
) -> tuple[list[bytes], list[bytes]]:
    """Returns the sorted names of the wanted files and of the folders in a folder.

    Args:
        lister: Lists the folder.
        folder: The path of the folder.
        suffixes: The suffixes of the wanted files; empty if all files are wanted.
    """
    wanted, others = collections.defaultdict[str, list[bytes]](list), list[bytes]()
    for entry in lister.ls(os.fsdecode(folder)):
        name, kind = os.fsencode(entry["name"].rstrip("/").rpartition("/")[2]), entry["type"]
        if kind == "directory" or not suffixes or name.lower().endswith(suffixes):
            wanted[kind].append(name)
        elif kind in ("dangling", "loop"):
            others.append(name)  # may point to a directory that is not mounted
    if others:
        _log.warning(
            "%s: skipped %s, because the targets of these links do not exist. If they are class "
            "directories, the labels of later classes differ. Repair or remove the links",
            printable(folder),
            few(sorted(others)),
        )
    if special_files := sorted(wanted["special"] + wanted["loop"]):
        _log.warning(
            "%s: skipped %s. Reading FIFOs, sockets and devices may block, and links to "
            "themselves can't be read. Remove them",
            printable(folder),
            few(special_files),
        )
    # A dangling link stays a record: reading it raises an error with its name.
    files = sorted(wanted["file"] + wanted["dangling"])
    return files, sorted(name for name in wanted["directory"] if not name.startswith(_HIDDEN))


def files_below(
    lister: Folders | LocalFolders,
    folder: bytes,
    suffixes: tuple[bytes, ...],
    above: tuple[bytes, ...] = (),
) -> Iterator[bytes]:
    """Yields the names of the wanted files in a folder and its subfolders, relative to the folder.

    Args:
        lister: Lists the folders.
        folder: The path of the folder, with a final slash.
        suffixes: The suffixes of the wanted files; empty if all files are wanted.
        above: Real paths of the parent folders, to detect cycles.

    Raises:
        ValueError: If a link points to a folder that contains the link.
    """
    files, folders = listed(lister, folder, suffixes)
    yield from files
    if folders and isinstance(lister, LocalFolders):
        target = os.path.realpath(folder)
        if target in above:
            raise ValueError(
                f"{printable(folder)} is a link to {printable(target)}, which contains it. "
                "Remove it, or list the wanted files by paths= and labels="
            )
        above = (*above, target)
    for name in folders:
        part = name + b"/"
        yield from (part + file for file in files_below(lister, folder + part, suffixes, above))
