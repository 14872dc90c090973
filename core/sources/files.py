"""`Files`: files of a directory, or of a list, as records."""

from __future__ import annotations

import collections
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..formats.byte_files import WAITING_THREADS, ByteFiles, is_remote
from ..formats.field import Field
from ..formats.names import Names
from ..formats.paths import (
    Path,
    Paths,
    below_common_root,
    home_expanded,
    is_pattern,
    object_names,
    path_list,
    path_text,
)
from ..formats.spread import spread
from ..messages.printable import printable, printable_repr
from ..messages.redaction import redacted_url
from ..messages.user_warnings import warn_user, warn_user_once
from ..order.shuffle import Indices
from ..remote.folders import MOST_KEPT, Folders
from ..remote.range_cache import Lease
from ..remote.storage import Storage, open_storage
from ..state.reader_files import file_sizes
from .base import BaseSource
from .labels import LABEL, as_labels, class_names, class_numbers, few, misplaced_number
from .source import Values

_log = logging.getLogger("dalijax")

# The default of DALI's readers.file; case-insensitive.
EXTENSIONS = (
    *("jpg", "jpeg", "png", "bmp", "tif", "tiff", "pnm", "ppm", "pgm", "pbm", "jp2", "webp"),
    *("flac", "ogg", "wav"),
)
_HIDDEN = (b".", b"__MACOSX")  # macOS's archives have metadata of each file in __MACOSX
_MOST_CHECKED = 1000  # paths of a list whose existence is checked
_MOST_SIZES = 100_000  # files whose sizes are part of the identity


class Files(BaseSource):
    """Files as records: class directories, a flat directory, or a list of paths.

    A record of class directories has ``data``, the bytes of the file, and ``label``, an int32
    scalar: the index of its class directory in ``classes``, by default in sorted order. The records
    are sorted, so that they are those of ``fn.readers.file``. Files in nested directories belong to
    the class directory, as in torchvision's ``ImageFolder``; DALI's reader ignores them. A class
    directory without files keeps its label, with a warning. Directories whose names begin with a
    dot or ``__MACOSX`` are ignored.
    A record of a flat directory, or of a list without labels, has only ``data``.

    Local files are read by DALI's threads (`dalijax.fn.read_file`): `read` returns their paths.
    For URLs, `read` returns the contents as read-only arrays. The bucket is listed when the source
    is opened; its files are then read ahead and cached, and changed files raise an error. None of
    this applies to more than 200,000 files, nor to HTTP servers.

    FIFOs, sockets, devices and links to themselves are skipped with a warning.

    Args:
        folder: The directory or its URL; ``~`` is the home directory. Links are followed.
        paths: A path or URL, or a list of them, instead of a directory. Patterns such as ``*.jpg``
            and ``{000..127}.jpg`` are expanded.
        labels: A label for each path: numbers [paths], vectors [paths, values], such as multi-hot
            labels, or names of ``classes``. Integers are converted to int32, floats to float32.
        classes: Names of the class directories in the order of their labels, or a source with
            ``classes``. Validation data without some of the classes then have the labels of the
            training data. With ``labels``, the names of the labels.
        extensions: Extensions of the directory's files that are records, case-insensitive. If
            empty, all files are records.
        identity: A string that replaces the digest of names, sizes and contents in states.
        storage_options: Credentials and settings of remote files; see docs/sources.md.
        read_ahead: Number of bytes of files of a bucket that are requested before they are needed.
        cache: A folder on a local disk that stores the bytes that were read from a bucket, for
            later epochs and runs; see docs/sources.md.
        cache_bytes: Largest size of this folder, such as ``"200GB"``; None: all but a tenth of the
            disk.

    Attributes:
        fields: ``data``, a uint8 array, and ``label``, if there are labels.
        classes: Names of the classes in the order of their labels; empty if there are none.

    Raises:
        FileNotFoundError, NotADirectoryError: If the directory, or a file of the list, does not
            exist; in lists of more than 1,000 files, 1,000 evenly spread files are checked.
        ValueError: If there are no files, or files next to class directories; if ``classes`` lacks
            a class directory; if ``labels`` are not a number or a vector for each path; or if a
            link points to a directory that contains the link.
    """

    _gives_new_arrays = True  # read() returns new arrays, so that ReuseCheck is not needed
    read_threads = 4  # threads that look up image sizes open files, and wait for a disk

    @knows_its_names
    def __init__(
        self,
        folder: Path | None = None,
        *,
        paths: Paths | None = None,
        labels: Sequence[Any] | NDArray[Any] | None = None,
        classes: Any = None,
        extensions: Sequence[str] = EXTENSIONS,
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_ahead: int | str = "128MB",
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
    ):
        storage = open_storage(storage_options, read_ahead, cache, cache_bytes)
        if (folder is None) == (paths is None):
            raise TypeError("Files requires either a directory, or paths= (and labels=)")
        self.classes: tuple[str, ...] = () if classes is None else class_names(classes)
        self._labels: NDArray[np.int32] | NDArray[np.float32] | None = None
        self._storage: Storage | None = None  # of a list with URLs
        self._folders: Folders | None = None  # of a remote directory, except on HTTP servers
        if paths is not None:
            if isinstance(paths, (str, bytes, os.PathLike)) and os.path.isdir(paths):
                raise TypeError(f"paths={paths!r} is a directory. Pass it as Files({paths!r})")
            expanded_paths = path_list(paths, storage)
            if any(map(is_remote, expanded_paths)):
                self._storage = storage
            below = below_common_root(expanded_paths)
            self._root = os.fsencode(expanded_paths[0][: len(expanded_paths[0]) - len(below[0])])
            self._names = Names([(b"", [os.fsencode(name) for name in below])])
            if labels is not None:
                self._labels = as_labels(labels, len(self._names), self.classes)
            elif self.classes:
                raise TypeError("classes= with paths= requires labels=, as numbers or names")
            self._check_files()
        else:
            if labels is not None:
                raise TypeError("labels= requires paths=; class directories define the labels")
            if not isinstance(folder, (str, bytes, os.PathLike)):
                raise TypeError(
                    f"Files requires the path of a directory, not {printable_repr(folder, 60)}. "
                    "Pass a list of files as paths="
                )
            root = path_text(folder)
            if is_remote(root):
                self._folders, path = storage.folders(root)
                is_folder = self._folders.isdir(path)  # on HTTP servers, folders are files, too
                is_file = not is_folder and self._folders.isfile(path)
            else:
                root = path = os.path.abspath(home_expanded(root))
                is_folder, is_file = os.path.isdir(path), os.path.isfile(path)
            if is_file:
                raise NotADirectoryError(
                    f"{printable(root)} is a file, but Files takes a directory. Pass files as "
                    "paths=[...], and archives to Tar or TFRecord"
                )
            if not is_folder and (is_pattern(root) or (is_remote(root) and "*" in root)):
                raise FileNotFoundError(
                    f"{printable(root)} does not exist. Files takes one directory; pass a pattern "
                    "of files as paths="
                )
            if not is_folder and is_remote(root):
                raise FileNotFoundError(f"{printable(root)} is not a directory. Check the URL")
            # The path of a whole bucket is "".
            self._root = os.path.join(os.fsencode(path), b"") if path else b""
            self._list(_suffixes(extensions))
            if self._folders is not None and is_remote(path):  # paths of HTTP servers are URLs
                self._folders, self._storage = None, storage
        self._is_remote = self._storage is not None or self._folders is not None
        self._objects = self._with_versions(storage) if self._is_remote else None
        if self._is_remote and self._objects is None and cache is not None:
            warn_user(
                "Files caches at most 200,000 files of a bucket, which it can list. These files "
                "are not cached. Pack them into tars, and pass them to Tar",
                UserWarning,
            )
        self._read_ahead = 0 if self._objects is None else storage.read_ahead
        if self._is_remote and not self._read_ahead:
            self.read_threads = WAITING_THREADS
        fields = {"data": Field(np.dtype(np.uint8), 1, is_path=not self._is_remote)}
        if self._labels is not None:
            fields[LABEL] = Field(self._labels.dtype, self._labels.ndim - 1)
        super().__init__(fields, identity)

    def _with_versions(self, storage: Storage) -> ByteFiles | None:
        """Returns the files with their listed sizes and versions, for reading ahead.

        Returns None if there are more than 200,000 files, or listings do not contain all files.
        """
        if len(self) > MOST_KEPT:
            return None
        urls = [self._path(index) for index in range(len(self))]
        versions = storage.listed_versions(urls)
        if versions is None:
            return None
        now = time.time()
        stamps = [version.stamp(now) for version in versions]
        return ByteFiles(urls, [stamp[0] for stamp in stamps], stamps, storage=storage)

    def _list(self, suffixes: tuple[bytes, ...]) -> None:
        """Lists the directory, and sets the names, the labels and the classes.

        Args:
            suffixes: The suffixes of the wanted files; empty if all files are wanted.
        """
        files, folders = self._listed(b"", suffixes)
        root = printable(self._root)
        if self._folders is not None:
            root = printable(self._folders.unstrip_protocol(os.fsdecode(self._root)))
        if not folders:
            self._names = Names([(b"", files)])
            if not files:
                raise ValueError(
                    f"{root} has neither class directories nor {_file_kinds(suffixes)}"
                )
            if self.classes:
                raise ValueError(
                    f"classes= requires class directories, but {root} has none. Omit classes=, or "
                    "list the files by paths= and labels="
                )
            return
        if files:
            raise ValueError(
                f"{root} has class directories ({few(folders)}) and other files ({few(files)}). "
                "Move the files into class directories, or list the wanted files by paths= and "
                "labels="
            )
        names = tuple(map(os.fsdecode, folders))
        if not self.classes:
            self.classes = names
            _warn_of_text_order(root, names)
        numbers = class_numbers(names, self.classes, f"the class directories in {root}")
        counts = []

        def below() -> Iterator[tuple[bytes, list[bytes]]]:
            """Yields the prefix and the names of the files of each class directory."""
            for folder in folders:
                files = sorted(self._below(folder, b"", suffixes, []))
                counts.append(len(files))
                yield folder + b"/", files

        self._names = Names(below())
        empty = [folder for folder, count in zip(folders, counts) if not count]
        if empty and len(self._names):
            _log.warning(
                "%s: the class directories %s have no %s. They keep their labels. Remove them, or "
                "add files (extensions=)",
                root,
                few(empty),
                _file_kinds(suffixes),
            )
        if not len(self._names):
            raise ValueError(
                f"the {len(folders)} class directories of {root} have no {_file_kinds(suffixes)}"
            )
        self._labels = np.repeat(numbers, counts)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        location = f"{redacted_url(os.fsdecode(self._root))!r}, " if self._root else ""
        return f"Files({location}{len(self):,} records)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        columns: dict[str, Values] = {}
        for name in names:
            if name == LABEL and self._labels is not None:
                columns[name] = self._labels[indices]
            elif self._objects is not None:
                columns[name] = self._objects.read(
                    *self._ranges(self._objects, indices), lambda row: self.name(int(indices[row]))
                )
            else:
                paths = [self._root + self._names[i] for i in indices.tolist()]
                if self._storage is not None:
                    columns[name] = _arrays(self._storage.contents(list(map(os.fsdecode, paths))))
                elif self._folders is not None:
                    columns[name] = _arrays(self._folders.read(list(map(os.fsdecode, paths))))
                else:
                    columns[name] = [np.frombuffer(path, np.uint8) for path in paths]
        return columns

    def _ranges(self, files: ByteFiles, indices: Indices) -> tuple[Indices, Indices, Indices]:
        """Returns the file number, the offset 0 and the file size in bytes of each record."""
        return indices, np.zeros_like(indices), files.limits[indices]

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        """Returns the number of bytes that `_announce` requests for some records."""
        if self._objects is None or "data" not in names:
            return 0
        return self._objects.num_bytes(*self._ranges(self._objects, indices))

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        """Requests the files of records that will be read soon; see `ByteFiles.announce`."""
        if self._objects is None or "data" not in names:
            return []
        return self._objects.announce(*self._ranges(self._objects, indices), turns, freed)

    def name(self, index: int) -> str:
        """Returns the path or URL of a record, without the secrets of a URL."""
        return redacted_url(self._path(index))

    def _path(self, index: int) -> str:
        """Returns the path or URL of a record."""
        path = os.fsdecode(self._root + self._names[index])
        return path if self._folders is None else self._folders.unstrip_protocol(path)

    def _content(self) -> tuple[Any, ...]:
        """Returns the names and labels of files, and the sizes of local files, for the identity."""
        sizes = (
            []
            if self._is_remote
            else file_sizes([self._path(i) for i in spread(len(self), _MOST_SIZES).tolist()])
        )
        labels = b"" if self._labels is None else self._labels
        names = self._names
        if self._storage is not None and (b"?" in names.joined or b"@" in names.joined):
            urls = [self._path(index) for index in range(len(self))]
            names = Names([(b"", [os.fsencode(name) for name in object_names(urls)])])
        return names.joined, names.ends, labels, sizes

    def _below(
        self, folder: bytes, part: bytes, suffixes: tuple[bytes, ...], above: list[bytes]
    ) -> Iterator[bytes]:
        """Yields the names of the wanted files in a class directory and its subdirectories.

        Args:
            folder: The class directory.
            part: The subdirectory, with a final slash; b"" for the class directory itself.
            suffixes: The suffixes of the wanted files; empty if all files are wanted.
            above: Real paths of the parent directories, to detect cycles.
        """
        names, deeper = self._listed(os.path.join(folder, part), suffixes)
        yield from (part + name for name in names)
        if deeper and self._folders is None:
            place = os.path.join(self._root, folder, part)
            target = os.path.realpath(place)
            if target in above:
                raise ValueError(
                    f"{printable(place)} is a link to {printable(target)}, which contains it. "
                    "Remove it, or list the wanted files by paths= and labels="
                )
            above = [*above, target]
        for name in deeper:
            below = os.path.join(part + name, b"")
            yield from self._below(folder, below, suffixes, above)

    def _listed(
        self, folder: bytes, suffixes: tuple[bytes, ...]
    ) -> tuple[list[bytes], list[bytes]]:
        """Returns the sorted names of the wanted files and of the directories in a directory."""
        files: list[bytes] = []
        folders: list[bytes] = []
        special_files: list[bytes] = []
        dangling: list[bytes] = []
        if self._folders is not None:
            for found in self._folders.ls(os.fsdecode(self._root + folder)):
                name = os.fsencode(found["name"].rstrip("/").rpartition("/")[2])
                (folders if found["type"] == "directory" else files).append(name)
            files = [name for name in files if not suffixes or name.lower().endswith(suffixes)]
        else:
            try:
                entries = os.scandir(self._root + folder)
            except OSError as error:
                error.filename = os.fsdecode(
                    error.filename
                )  # so that its text has no bytes literal
                raise
            with entries:
                for entry in entries:
                    matches = not suffixes or entry.name.lower().endswith(suffixes)
                    kind = _kind(entry)
                    if kind == "folder":
                        folders.append(entry.name)
                    elif matches:
                        (files if kind == "file" else special_files).append(entry.name)
                    elif entry.is_symlink() and not os.path.exists(entry.path):
                        dangling.append(entry.name)  # may point to a directory that is not mounted
        if dangling:
            _log.warning(
                "%s: skipped %s, because the targets of these links do not exist. If they are "
                "class directories, the labels of later classes differ. Repair or remove the links",
                printable(self._root + folder),
                few(sorted(dangling)),
            )
        if special_files:
            _log.warning(
                "%s: skipped %s. Reading FIFOs, sockets and devices may block, and links to "
                "themselves can't be read. Remove them",
                printable(self._root + folder),
                few(sorted(special_files)),
            )
        files.sort()
        return files, sorted(name for name in folders if not name.startswith(_HIDDEN))

    def _check_files(self) -> None:
        """Raises FileNotFoundError if one of 1,000 evenly spread local files does not exist."""
        most = 0 if self._storage is not None else _MOST_CHECKED  # remote files would take long
        for index in spread(len(self), most).tolist():
            path = self._path(index)
            if not os.path.isfile(path):
                problem = "is not a file" if os.path.exists(path) else "does not exist"
                raise FileNotFoundError(f"paths[{index}] {problem}: {printable(path)}")


def _arrays(contents: Sequence[Any]) -> list[NDArray[np.uint8]]:
    """Returns the contents of files as read-only uint8 arrays, without copies."""
    return [np.frombuffer(c, np.uint8) if len(c) else np.zeros(0, np.uint8) for c in contents]


def _kind(entry: os.DirEntry[bytes]) -> str:
    """Returns the kind of a directory entry: "folder", "file" or "special" (e.g. a FIFO)."""
    try:
        # A dangling link is a record that can't be read, so that its name is reported.
        mode = entry.stat().st_mode if entry.is_symlink() else None
    except FileNotFoundError:
        return "file"
    except OSError as error:  # other errors, e.g. of permissions, are reported by reading it
        return "special" if error.errno == errno.ELOOP else "file"
    if mode is not None:
        is_folder, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
    else:
        is_folder, is_file = entry.is_dir(), entry.is_file()
    return "folder" if is_folder else "file" if is_file else "special"


def _suffixes(extensions: Sequence[str]) -> tuple[bytes, ...]:
    """Converts extensions such as "JPG", ".jpg" or "*.jpg" to suffixes such as b".jpg"."""
    if isinstance(extensions, str):
        raise TypeError(f"extensions must be a list, such as [{extensions!r}]")
    return tuple(
        os.fsencode("." + extension.removeprefix("*").removeprefix(".").lower())
        for extension in extensions
    )


def _warn_of_text_order(root: str, names: Sequence[str]) -> None:
    """Warns if class directories are named by numbers, but are not in the order of the numbers."""
    label = misplaced_number(names)
    if label is not None:
        warn_user_once(
            f"label {label} is the class directory {names[label]!r} of {root}: labels follow the "
            "order of the names as text, as in DALI and torchvision, and not the order of their "
            "numbers. Pass the names in the order of their labels as classes=",
            UserWarning,
        )


def _file_kinds(suffixes: tuple[bytes, ...]) -> str:
    return f"files ending in {', '.join(map(printable, suffixes))}" if suffixes else "files"
