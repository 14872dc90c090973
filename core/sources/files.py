"""Files of a folder, or of a list, as records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pipeline.schema import leaf
from ..state.reader_files import below_common_root, file_sizes
from .base import BaseSource
from .byte_files import WAITING_THREADS, fetch, filesystem, is_remote
from .identity import spread
from .names import Names
from .order import Indices
from .source import Field, Values

# The default of DALI's readers.file; whatever their case.
EXTENSIONS = (
    *("jpg", "jpeg", "png", "bmp", "tif", "tiff", "pnm", "ppm", "pgm", "pbm", "jp2", "webp"),
    *("flac", "ogg", "wav"),
)
_MOST_CHECKED = 1000  # paths of a list that must be files when the source is opened
_MOST_SIZES = 100_000  # of files whose sizes are part of the identity


class Files(BaseSource):
    """Files as records: class folders, a flat folder, or a list of paths.

    Of class folders a record has ``data``, the bytes of the file, and ``label``, an int32 scalar:
    the number of its folder among the sorted ones, as with ``fn.readers.file``, whose order the
    records are in. Files of deeper folders are records of the class folder, too, as in
    torchvision's ``ImageFolder``; that reader leaves them out. (Those whose name begins with a dot
    are left out.) Of a flat folder, or a list without labels, it has ``data`` alone. DALI's threads
    read local files (`dalijax.fn.read_file`), so that `read` gives their paths; of URLs, where
    fsspec is installed, it gives the contents.

    Args:
        folder: The folder, or its URL. Links are followed.
        paths: Paths of files instead, or URLs of one file system, in their order.
        labels: Their labels, whole numbers of 32 bits.
        extensions: Which files of the folder are records, whatever the case; empty: all.
        identity: What stands for the digest of names, sizes and contents in states.

    Attributes:
        fields: ``data`` (uint8 [bytes]), and ``label`` (int32) where there are labels.
        classes: Names of the class folders; empty where there are none.

    Raises:
        FileNotFoundError, NotADirectoryError: If the folder, or a file of the list, is not there;
            of long lists 1,000 evenly spread ones are looked at.
        ValueError: If there are no files, files beside class folders, or as many labels as paths
            are missing; for a link to a folder that it lies in.
    """

    gives_new_arrays = True  # nothing to check, see ReuseCheck
    read_threads = 4  # which open files, and wait for a disk

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        paths: Sequence[str | os.PathLike[str]] | None = None,
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
            if isinstance(paths, (str, bytes, os.PathLike)):
                raise TypeError(f"paths must be a list: Files({paths!r}) takes a folder")
            if not len(paths):
                raise ValueError("paths is empty: Files needs one at least")
            whole = [os.fspath(path) for path in paths]
            if any(map(is_remote, whole)):
                self._system, _ = filesystem(next(filter(is_remote, whole)))
                whole = [filesystem(path)[1] for path in whole]
            else:
                whole = list(map(os.path.abspath, whole))
            below = below_common_root(whole)
            self._root = os.fsencode(whole[0][: len(whole[0]) - len(below[0])])
            self._names = Names([(b"", [os.fsencode(name) for name in below])])
            if labels is not None:
                self._labels = _as_labels(labels, len(self._names))
            self._check_files()
        else:
            if labels is not None:
                raise TypeError("labels= goes with paths=; class folders have labels of their own")
            if not isinstance(folder, (str, os.PathLike)):
                raise TypeError(
                    f"Files takes the path of a folder, not {folder!r:.60}: a list of files is "
                    "paths="
                )
            root = os.fspath(folder)
            if is_remote(root):
                self._system, root = filesystem(root)
            else:
                root = os.path.abspath(root)
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
        root = os.fsdecode(self._root)
        if not folders:
            self._names = Names([(b"", files)])
            if not files:
                raise ValueError(f"{root} has neither class folders nor {_wanted(suffixes)}")
            return
        if files:
            raise ValueError(
                f"{root} has class folders ({_few(folders)}) and files beside them "
                f"({_few(files)}): move those away, or list what you want by paths= and labels="
            )
        counts = []

        def below() -> Iterator[tuple[bytes, list[bytes]]]:
            for folder in folders:
                names = sorted(self._below(folder, b"", suffixes, []))
                counts.append(len(names))
                yield folder + b"/", names

        self._names = Names(below())
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
        """The names of the files that are wanted in a class folder, and in those below it.

        Args:
            folder: The class folder.
            part: The folder below it.
            suffixes: What the files end in.
            above: The folders that it lies in, without links.
        """
        names, deeper = self._listed(os.path.join(folder, part), suffixes)
        yield from (part + name for name in names)
        if deeper and self._system is None:
            place = os.path.join(self._root, folder, part)
            target = os.path.realpath(place)
            if target in above:
                raise ValueError(
                    f"{os.fsdecode(place)} is a link to {os.fsdecode(target)}, in which it lies: "
                    "remove it, or list what you want by paths= and labels="
                )
            above = [*above, target]
        for name in deeper:
            if not name.startswith(b"."):
                below = os.path.join(part + name, b"")
                yield from self._below(folder, below, suffixes, above)

    def _listed(
        self, folder: bytes, suffixes: tuple[bytes, ...]
    ) -> tuple[list[bytes], list[bytes]]:
        """The sorted names of the files that are wanted, and of the folders, in a folder."""
        files: list[bytes] = []
        folders: list[bytes] = []
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
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif not suffixes or entry.name.lower().endswith(suffixes):
                        files.append(entry.name)
        files.sort()
        folders.sort()
        return files, folders

    def _check_files(self) -> None:
        most = _MOST_CHECKED if self._system is None else 0  # remote files would take a while
        for index in spread(len(self), most).tolist():
            path = self.name(index)
            if not os.path.isfile(path):
                there = "no file" if os.path.exists(path) else "not there"
                raise FileNotFoundError(f"paths[{index}] is {there}: {path}")


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
    if array.dtype.kind not in "iub" or not np.array_equal(array, array.astype(np.int32)):
        raise ValueError(f"labels must be whole numbers of 32 bits, not {array.dtype}")
    return array.astype(np.int32)


def _wanted(suffixes: tuple[bytes, ...]) -> str:
    return f"files that end in {', '.join(map(os.fsdecode, suffixes))}" if suffixes else "files"


def _few(names: Sequence[bytes]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(repr(os.fsdecode(name)) for name in names[:3]) + more
