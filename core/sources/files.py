"""Files of a folder, or of a list, as records."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.byte_files import WAITING_THREADS, fetch, filesystem, is_remote
from ..formats.names import Names
from ..formats.paths import Path, Paths, home_expanded, is_pattern, path_list, path_text
from ..order.shuffle import Indices
from ..pipeline.schema import leaf
from ..printable import printable
from ..state.reader_files import below_common_root, file_sizes
from .base import BaseSource
from .identity import spread
from .source import Field, Values

_log = logging.getLogger("dalijax")

# The default of DALI's readers.file; whatever their case.
EXTENSIONS = (
    *("jpg", "jpeg", "png", "bmp", "tif", "tiff", "pnm", "ppm", "pgm", "pbm", "jp2", "webp"),
    *("flac", "ogg", "wav"),
)
_MOST_CHECKED = 1000  # paths of a list that must be files when the source is opened
_MOST_SIZES = 100_000  # of files whose sizes are part of the identity


class Files(BaseSource):
    """Files as records: class folders, a flat folder, or a list of paths.

    A record of class folders has ``data``, the bytes of the file, and ``label``, an int32 scalar:
    the number of its class folder in sorted order, as with ``fn.readers.file``, in whose order the
    records are. Files of deeper folders belong to the class folder, as in torchvision's
    ``ImageFolder``; that reader leaves them out. A class folder without files keeps its number, and
    a warning names it. Folders whose names begin with a dot are left out. A record of a flat
    folder, or of a list without labels, has ``data`` alone.

    DALI's threads read local files (`dalijax.fn.read_file`): `read` returns their paths. For URLs,
    if fsspec is installed, it returns the contents.

    FIFOs, sockets, devices and links to themselves in a folder are left out with a warning.

    Args:
        folder: The folder, or its URL; ``~`` is the home folder. Links are followed.
        paths: A path or URL, or a list of them, instead. Patterns like ``*.jpg`` and
            ``{000..127}.jpg`` are expanded.
        labels: The labels of the paths, whole numbers of 32 bits.
        extensions: Endings of the folder's files that are records, in any case; empty: all files.
        identity: Text that replaces the digest of names, sizes and contents in states.

    Attributes:
        fields: ``data`` (uint8 [bytes]), and ``label`` (int32) if there are labels.
        classes: Names of the class folders; empty without class folders.

    Raises:
        FileNotFoundError, NotADirectoryError: If the folder, or a file of the list, does not exist;
            1,000 evenly spread files of a longer list are checked.
        ValueError: If there are no files, files next to class folders, or a different number of
            labels than paths; for a link to a folder that contains it.
    """

    gives_new_arrays = True  # nothing to check, see ReuseCheck
    read_threads = 4  # which open files, and wait for a disk

    def __init__(
        self,
        folder: Path | None = None,
        *,
        paths: Paths | None = None,
        labels: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
        identity: str | None = None,
    ):
        if (folder is None) == (paths is None):
            raise TypeError("Files takes a folder, or paths= (and labels=)")
        self.classes: tuple[str, ...] = ()
        self._labels: NDArray[np.int32] | None = None
        self._system: Any = None  # fsspec's, of URLs
        if paths is not None:
            if isinstance(paths, (str, bytes, os.PathLike)) and os.path.isdir(paths):
                raise TypeError(f"paths={paths!r} is a folder: Files({paths!r}) takes a folder")
            whole = path_list(paths)
            if any(map(is_remote, whole)):
                self._system, _ = filesystem(next(filter(is_remote, whole)))
                whole = [filesystem(path)[1] for path in whole]
            below = below_common_root(whole)
            self._root = os.fsencode(whole[0][: len(whole[0]) - len(below[0])])
            self._names = Names([(b"", [os.fsencode(name) for name in below])])
            if labels is not None:
                self._labels = _as_labels(labels, len(self._names))
            self._check_files()
        else:
            if labels is not None:
                raise TypeError("labels= goes with paths=; class folders have labels of their own")
            if not isinstance(folder, (str, bytes, os.PathLike)):
                raise TypeError(
                    f"Files takes the path of a folder, not {folder!r:.60}: a list of files is "
                    "paths="
                )
            root = path_text(folder)
            if is_remote(root):
                self._system, path = filesystem(root)
                is_folder, is_file = self._system.isdir(path), self._system.isfile(path)
            else:
                root = path = os.path.abspath(home_expanded(root))
                is_folder, is_file = os.path.isdir(path), os.path.isfile(path)
            if is_file:
                raise NotADirectoryError(
                    f"{root} is a file: Files takes a folder, or files by paths=[...]; Tar and "
                    "TFRecord take archives"
                )
            if not is_folder and (is_pattern(root) or (is_remote(root) and "*" in root)):
                raise FileNotFoundError(
                    f"{root} is not there: Files takes one folder, and a pattern of files as paths="
                )
            if not is_folder and is_remote(root):
                raise FileNotFoundError(f"{root} is no folder: check the URL")
            root = path
            self._root = os.path.join(os.fsencode(root), b"")
            self._list(_suffixes(extensions))
        if self._system is not None:
            self.read_threads = WAITING_THREADS
        fields = {"data": Field(np.dtype(np.uint8), 1, is_path=self._system is None)}
        if self._labels is not None:
            fields["label"] = Field(np.dtype(np.int32))
        super().__init__(fields, identity)

    def _list(self, suffixes: tuple[bytes, ...]) -> None:
        """Lists the folder."""
        files, folders = self._listed(b"", suffixes)
        root = printable(self._root)
        if not folders:
            self._names = Names([(b"", files)])
            if not files:
                raise ValueError(f"{root} has neither class folders nor {_wanted(suffixes)}")
            return
        if files:
            raise ValueError(
                f"{root} has class folders ({_few(folders)}) and other files ({_few(files)}): move "
                "the files into class folders, or list the wanted files by paths= and labels="
            )
        counts = []

        def below() -> Iterator[tuple[bytes, list[bytes]]]:
            for folder in folders:
                names = sorted(self._below(folder, b"", suffixes, []))
                counts.append(len(names))
                yield folder + b"/", names

        self._names = Names(below())
        empty = [folder for folder, count in zip(folders, counts) if not count]
        if empty and len(self._names):
            _log.warning(
                "%s: the class folders %s have no %s. They keep their labels: remove them, or add "
                "files (extensions=)",
                root,
                _few(empty),
                _wanted(suffixes),
            )
        if not len(self._names):
            raise ValueError(
                f"the {len(folders)} class folders of {root} have no {_wanted(suffixes)}"
            )
        self._labels = np.repeat(np.arange(len(folders), dtype=np.int32), counts)
        self.classes = tuple(map(os.fsdecode, folders))

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        where = f"{os.fsdecode(self._root)!r}, " if self._root else ""
        return f"Files({where}{len(self):,} records)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """See `dalijax.sources.Source`."""
        columns: dict[str, Values] = {}
        for name in names:
            if name == "label" and self._labels is not None:
                columns[name] = self._labels[indices]
            else:
                paths = [self._root + self._names[i] for i in indices.tolist()]
                if self._system is None:
                    columns[name] = [np.frombuffer(path, np.uint8) for path in paths]
                else:
                    columns[name] = list(map(leaf, fetch(self._system, paths)))
        return columns

    def name(self, index: int) -> str:
        """The path of a record, or its URL."""
        path = os.fsdecode(self._root + self._names[index])
        return path if self._system is None else str(self._system.unstrip_protocol(path))

    def _content(self) -> tuple[Any, ...]:
        sizes = (
            []
            if self._system is not None
            else file_sizes([self.name(i) for i in spread(len(self), _MOST_SIZES).tolist()])
        )
        labels = b"" if self._labels is None else self._labels
        return self._names.joined, self._names.ends, labels, sizes

    def _below(
        self, folder: bytes, part: bytes, suffixes: tuple[bytes, ...], above: list[bytes]
    ) -> Iterator[bytes]:
        """Yields the names of the wanted files in a class folder and in folders below it.

        Args:
            folder: The class folder.
            part: The folder below it.
            suffixes: Endings of the wanted files.
            above: The real paths of the folders above it.
        """
        names, deeper = self._listed(os.path.join(folder, part), suffixes)
        yield from (part + name for name in names)
        if deeper and self._system is None:
            place = os.path.join(self._root, folder, part)
            target = os.path.realpath(place)
            if target in above:
                raise ValueError(
                    f"{printable(place)} is a link to {printable(target)}, in which it lies: "
                    "remove it, or list the wanted files by paths= and labels="
                )
            above = [*above, target]
        for name in deeper:
            below = os.path.join(part + name, b"")
            yield from self._below(folder, below, suffixes, above)

    def _listed(
        self, folder: bytes, suffixes: tuple[bytes, ...]
    ) -> tuple[list[bytes], list[bytes]]:
        """The sorted names of the wanted files, and of the folders, in a folder."""
        files: list[bytes] = []
        folders: list[bytes] = []
        left_out: list[bytes] = []
        dangling: list[bytes] = []
        if self._system is not None:
            for entry in self._system.ls(os.fsdecode(self._root + folder), detail=True):
                name = os.fsencode(entry["name"].rstrip("/").rpartition("/")[2])
                (folders if entry["type"] == "directory" else files).append(name)
            files = [name for name in files if not suffixes or name.lower().endswith(suffixes)]
        else:
            try:
                entries = os.scandir(self._root + folder)
            except OSError as error:
                error.filename = os.fsdecode(error.filename)  # else its text would have bytes
                raise
            with entries:
                for entry in entries:
                    wanted = not suffixes or entry.name.lower().endswith(suffixes)
                    kind = _kind(entry)
                    if kind == "folder":
                        folders.append(entry.name)
                    elif wanted:
                        (files if kind == "file" else left_out).append(entry.name)
                    elif entry.is_symlink() and not os.path.exists(entry.path):
                        dangling.append(entry.name)  # perhaps of a folder that is not mounted
        if dangling:
            _log.warning(
                "%s: %s left out, as the targets of these links do not exist. If they are class "
                "folders, the numbers of later classes differ: repair or remove the links",
                printable(self._root + folder),
                _few(sorted(dangling)),
            )
        if left_out:
            _log.warning(
                "%s: %s left out: reading FIFOs, sockets and devices may block, and links to "
                "themselves can't be read. Remove them",
                printable(self._root + folder),
                _few(sorted(left_out)),
            )
        files.sort()
        return files, sorted(name for name in folders if not name.startswith(b"."))

    def _check_files(self) -> None:
        most = _MOST_CHECKED if self._system is None else 0  # remote files would take a while
        for index in spread(len(self), most).tolist():
            path = self.name(index)
            if not os.path.isfile(path):
                there = "no file" if os.path.exists(path) else "not there"
                raise FileNotFoundError(f"paths[{index}] is {there}: {printable(path)}")


def _kind(entry: os.DirEntry[bytes]) -> str:
    """The kind of an entry of a folder: "folder", "file" or "special"."""
    try:
        # A link to nothing is a record that can't be read, so that its name is reported.
        mode = entry.stat().st_mode if entry.is_symlink() else None
    except FileNotFoundError:
        return "file"
    except OSError as error:  # reading a record reports all other errors, as of permissions
        return "special" if error.errno == errno.ELOOP else "file"
    if mode is not None:
        is_folder, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
    else:
        is_folder, is_file = entry.is_dir(), entry.is_file()
    return "folder" if is_folder else "file" if is_file else "special"


def _suffixes(extensions: Sequence[str]) -> tuple[bytes, ...]:
    if isinstance(extensions, str):
        raise TypeError(f"extensions must be a list, like [{extensions!r}]")
    return tuple(
        os.fsencode("." + one.removeprefix("*").removeprefix(".").lower()) for one in extensions
    )


def _as_labels(labels: Any, count: int) -> NDArray[np.int32]:
    array = np.asarray(labels)
    if array.shape != (count,):
        raise ValueError(
            f"there are {count} paths, and labels of shape {array.shape}: one for each"
        )
    whole = array.dtype.kind in "iub"
    fits = array.astype(np.int32) == array if whole else np.zeros(count, bool)
    if not fits.all():
        bad = array[np.argmin(fits)].tolist()
        names = isinstance(bad, (str, bytes))
        cure = ": classes, labels = np.unique(names, return_inverse=True) numbers names" * names
        raise ValueError(f"labels must be whole numbers of 32 bits, not {bad!r}{cure}")
    return array.astype(np.int32)


def _wanted(suffixes: tuple[bytes, ...]) -> str:
    return f"files that end in {', '.join(map(os.fsdecode, suffixes))}" if suffixes else "files"


def _few(names: Sequence[bytes]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(repr(os.fsdecode(name)) for name in names[:3]) + more
