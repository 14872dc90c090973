"""`Files`: files of a directory, or of a list, as records."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..formats.stamps import digest_of_stamps
from ..messages.printable import printable, printable_repr
from ..messages.redaction import redacted_url
from ..messages.user_warnings import warn_user, warn_user_once
from ..order.shuffle import Indices
from ..remote.folders import MOST_KEPT, Folders
from ..remote.range_cache import Lease
from ..remote.storage import Storage, open_storage
from ..state.reader_files import file_sizes
from .base import BaseSource
from .file_lists import LocalFolders, files_below, listed
from .labels import LABEL, as_labels, class_names, class_numbers, few, misplaced_number
from .source import Values

_log = logging.getLogger("dalijax")

# The default of DALI's readers.file; case-insensitive.
EXTENSIONS = (
    *("jpg", "jpeg", "png", "bmp", "tif", "tiff", "pnm", "ppm", "pgm", "pbm", "jp2", "webp"),
    *("flac", "ogg", "wav"),
)
_MOST_CHECKED = 1000  # paths of a list whose existence is checked
_MOST_SIZES = 100_000  # files whose sizes are part of the identity


class Files(BaseSource):
    """Files as records: class directories, a flat directory, or a list of paths.

    A record of class directories has ``data``, the bytes of the file, and ``label``, an int32
    scalar: the index of its class directory in ``classes``, by default in sorted order. The records
    are sorted, like the records of ``fn.readers.file``. Files in nested directories belong to the
    class directory, as in torchvision's ``ImageFolder``; DALI's reader ignores them. A class
    directory without files keeps its label, with a warning. Directories whose names begin with a
    dot or ``__MACOSX`` are ignored. A record of a flat directory, or of a list without labels, has
    only ``data``.

    Local files are read by DALI's threads (`dalijax.fn.read_file`): `read` returns their paths.
    For URLs, `read` returns the contents as read-only arrays. The bucket is listed when the source
    is opened. Its files are then read ahead, and cached if ``cache=`` is given, and changed files
    raise an error. With more than 200,000 files, or on HTTP servers, files are neither read ahead
    nor cached, and changes are not detected.

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
        classes: Names of the classes in the order of their labels; empty without classes.

    Raises:
        FileNotFoundError, NotADirectoryError: If the directory, or a file of the list, does not
            exist; in lists of more than 1,000 files, 1,000 evenly spread files are checked.
        ValueError: If there are no files, or files next to class directories; if ``classes`` lacks
            a class directory; if ``labels`` are not a number or a vector for each path; or if a
            link points to a directory that contains the link.
    """

    _gives_new_arrays = True  # read() returns new arrays, so that ReuseCheck is not needed
    read_threads = 4  # threads open files to read image sizes, and wait for a disk
    # What errors suggest to callers who pass something else than a directory.
    _for_lists = "Pass a list or a pattern of files as paths="
    _for_files = "Pass files as paths=[...], and archives to Tar or TFRecord"
    _labels: NDArray[np.int32] | NDArray[np.float32] | None

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
        self._begin(storage)
        if paths is not None:
            if isinstance(paths, (str, bytes, os.PathLike)) and os.path.isdir(paths):
                raise TypeError(f"paths={paths!r} is a directory. Pass it as Files({paths!r})")
            expanded_paths = path_list(paths, storage)
            self._is_remote = self._are_urls = any(map(is_remote, expanded_paths))
            below = below_common_root(expanded_paths)
            self._root = os.fsencode(expanded_paths[0][: len(expanded_paths[0]) - len(below[0])])
            self._names = Names([(b"", [os.fsencode(name) for name in below])])
            if labels is not None:
                self._labels = as_labels(labels, len(self._names), self.classes)
            elif self.classes:
                raise TypeError("classes= with paths= requires labels=, as numbers or names")
            if not self._is_remote:  # it would take long
                self._check_files()
        else:
            if labels is not None:
                raise TypeError("labels= requires paths=; class directories define the labels")
            lister = self._open_folder(folder, storage)
            self._list(lister, _suffixes(extensions))
        fields = {"data": self._open_files(storage)}
        if self._labels is not None:
            fields[LABEL] = Field(self._labels.dtype, self._labels.ndim - 1)
        super().__init__(fields, identity)

    def _begin(self, storage: Storage) -> None:
        """Sets the attributes that are the same for directories and lists of paths."""
        self._labels = None
        # Return the contents of remote files, as `Storage.contents`, and the URL of a file, given
        # paths.
        self._read: Callable[..., Sequence[Any]] = storage.contents
        self._url: Callable[[str], str] = str

    def _open_folder(self, folder: Any, storage: Storage) -> Folders | LocalFolders:
        """Opens a directory: sets its root, and how its files are read; returns its lister.

        Raises:
            FileNotFoundError, NotADirectoryError, TypeError: If it is not a directory.
        """
        if not isinstance(folder, (str, bytes, os.PathLike)):
            raise TypeError(
                f"{type(self).__name__} requires the path of a directory, not "
                f"{printable_repr(folder, 60)}. {self._for_lists}"
            )
        root = path_text(folder)
        self._is_remote = is_remote(root)
        if self._is_remote:
            lister: Folders | LocalFolders
            lister, path = storage.folders(root)
            self._are_urls = is_remote(path)  # as on HTTP servers
            if not self._are_urls:
                self._read, self._url = lister.read, lister.unstrip_protocol
        else:
            root = path = os.path.abspath(home_expanded(root))
            lister, self._are_urls = LocalFolders(), False
        is_folder = lister.isdir(path)  # on HTTP servers, folders are files, too
        is_file = not is_folder and lister.isfile(path)
        if is_file:
            raise NotADirectoryError(
                f"{printable(root)} is a file, but {type(self).__name__} takes a directory. "
                f"{self._for_files}"
            )
        if not is_folder and (is_pattern(root) or (is_remote(root) and "*" in root)):
            raise FileNotFoundError(
                f"{printable(root)} does not exist. {type(self).__name__} takes one directory. "
                f"{self._for_lists}"
            )
        if not is_folder and is_remote(root):
            raise FileNotFoundError(f"{printable(root)} is not a directory. Check the URL")
        # The path of a whole bucket is "".
        self._root = os.path.join(os.fsencode(path), b"") if path else b""
        return lister

    def _open_files(self, storage: Storage) -> Field:
        """Prepares to read the files with the names ``_names``; returns the field of their data."""
        self._objects = self._with_versions(storage) if self._is_remote else None
        if self._is_remote and self._objects is None and storage.cache is not None:
            warn_user(
                f"{type(self).__name__} caches at most 200,000 files of a bucket, which it can "
                "list. These files are not cached. Pack them into tars, and pass them to Tar",
                UserWarning,
            )
        self._read_ahead = 0 if self._objects is None else storage.read_ahead
        if self._is_remote and not self._read_ahead:
            self.read_threads = WAITING_THREADS
        return Field(np.dtype(np.uint8), 1, is_path=not self._is_remote)

    def _with_versions(self, storage: Storage) -> ByteFiles | None:
        """Returns the files with their listed sizes and versions, for reading ahead.

        Returns None if there are more than 200,000 files, or listings do not contain all files.
        """
        if len(self) > MOST_KEPT:
            return None
        urls = [self._url(self._path(index)) for index in range(len(self))]
        versions = storage.listed_versions(urls)
        if versions is None:
            return None
        now = time.time()
        stamps = [version.stamp(now) for version in versions]
        return ByteFiles(urls, [stamp[0] for stamp in stamps], stamps, storage=storage)

    def _list(self, lister: Folders | LocalFolders, suffixes: tuple[bytes, ...]) -> None:
        """Lists the directory, and sets the names, the labels and the classes.

        Args:
            lister: Lists the directory.
            suffixes: The suffixes of the wanted files; empty if all files are wanted.
        """
        files, folders = listed(lister, self._root, suffixes)
        root = printable(lister.unstrip_protocol(os.fsdecode(self._root)))
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
                prefix = folder + b"/"
                files = sorted(files_below(lister, self._root + prefix, suffixes))
                counts.append(len(files))
                yield prefix, files

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

    @property
    def _version(self) -> str | None:
        """A digest of the stamps of the files; of files without stamps, the given identity."""
        if not self._is_remote:
            return digest_of_stamps(self._path(index) for index in range(len(self)))
        return self._given_identity if self._objects is None else self._objects.version()

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        location = f"{redacted_url(os.fsdecode(self._root))!r}, " if self._root else ""
        return f"{type(self).__name__}({location}{len(self):,} records)"

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
                data: Sequence[Any] = [self._root + self._names[i] for i in indices.tolist()]
                if self._is_remote:  # DALI reads local files, given their paths
                    data = self._read(list(map(os.fsdecode, data)))
                # Arrays without copies; np.frombuffer does not take empty files.
                columns[name] = [
                    np.frombuffer(c, np.uint8) if len(c) else np.zeros(0, np.uint8) for c in data
                ]
        return columns

    def _heads(self, indices: Indices, name: str, num_bytes: int) -> Sequence[Any] | None:
        """Returns the first bytes of remote files; None for local files, which are not read."""
        if not self._is_remote or name != "data":
            return None
        if self._objects is None:
            paths = [self._path(index) for index in indices.tolist()]
            return self._read(paths, most_bytes=num_bytes)
        files, offsets, sizes = self._ranges(self._objects, indices)
        return self._objects.read(
            *(files, offsets, np.minimum(sizes, num_bytes)),
            lambda row: self.name(int(indices[row])),
            stores=False,
        )

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
        return redacted_url(self._url(self._path(index)))

    def _path(self, index: int) -> str:
        """Returns the path of a record: a key in a bucket, or a URL on HTTP servers."""
        return os.fsdecode(self._root + self._names[index])

    def _content(self) -> tuple[Any, ...]:
        """Returns the names and labels of files, and the sizes of local files, for the identity."""
        sizes = (
            []
            if self._is_remote
            else file_sizes([self._path(i) for i in spread(len(self), _MOST_SIZES).tolist()])
        )
        labels = b"" if self._labels is None else self._labels
        names = self._names
        if self._are_urls and (b"?" in names.data or b"@" in names.data):
            urls = [self._path(index) for index in range(len(self))]
            names = Names([(b"", [os.fsencode(name) for name in object_names(urls)])])
        return names.data, names.ends, labels, sizes

    def _check_files(self) -> None:
        """Raises FileNotFoundError if one of 1,000 evenly spread local files does not exist."""
        for index in spread(len(self), _MOST_CHECKED).tolist():
            path = self._path(index)
            if not os.path.isfile(path):
                problem = "is not a file" if os.path.exists(path) else "does not exist"
                raise FileNotFoundError(f"paths[{index}] {problem}: {printable(path)}")


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
