"""Describes the files that DALI's readers read, for fingerprints.

DALI resumes over a reshuffled list, or over other files with the same number of samples, without a
warning. A description therefore includes the names of the files relative to their common folder,
the sizes of at most 100,000 files, and the contents of at most 64 files. Small files are read
wholly, large files (tars and record files) in samples. A copy of the data in another folder has the
same description, because modification times are not included.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nvidia.dali import backend

from ..formats.paths import below_common_root
from ..formats.spread import spread
from ..remote.listing import common_start
from .envelope import digest

READERS = frozenset(
    {
        *("caffe", "caffe2", "coco", "file", "fits", "mxnet", "nemo_asr", "numpy", "sequence"),
        *("tfrecord", "video", "video_resize", "webdataset"),
    }
)
# Path arguments of these readers. For other readers, an argument is also a path if a file of this
# name exists.
PATHS = frozenset(
    {
        *("annotations_file", "file_list", "file_root", "filenames", "files", "index_path"),
        *("index_paths", "manifest_filepaths", "path", "paths", "preprocessed_annotations"),
    }
)
# Path arguments whose files are not compared.
IGNORED = frozenset({"save_preprocessed_annotations_dir"})
# The schema and the argument that filter the files of a directory, by reader.
_FILTERS = {
    "file": ("readers__File", "file_filters"),
    "fits": ("experimental__readers__Fits", "file_filter"),
    "numpy": ("readers__Numpy", "file_filter"),
}
_LISTING = ("files", "file_list", "filenames")  # arguments with which file_root is only a prefix
_LOCK = "lock.mdb"  # a file of LMDB databases, to which each reading process writes

_Stamp = tuple[int, int, int]  # size in bytes, modification time in ns, and inode of a file
_MOST_SIZES = 100_000  # files whose sizes are read, evenly spread over all files
_MOST_CONTENTS = 64  # files whose contents are read, evenly spread over all files
_MOST_BYTES = 1 << 26  # bytes to read in total; a file larger than its share is sampled
# Samples of a large file: bytes at each end, bytes per block, blocks per file, blocks in total.
_EDGE, _BLOCK, _BLOCKS, _MOST_BLOCKS = 1 << 16, 1 << 12, 64, 1 << 12


def reader_of(kind: str) -> str:
    """Returns the name of a reader, such as "file" for "readers.file"; "" for other operators."""
    module, _, name = kind.rpartition(".")
    if module.removeprefix("experimental.") == "readers":
        return name
    # The names before DALI 1.0: fn.file_reader, fn.video_reader_resize.
    legacy = re.fullmatch(r"(\w+)_reader(_resize)?", kind)
    return f"{legacy[1]}{legacy[2] or ''}" if legacy else ""


def described(reader: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Describes the path arguments of a reader.

    Args:
        reader: The reader's name, from `reader_of`.
        arguments: The reader's arguments.

    Returns:
        A text for each path argument, by name, such as ``"3 files, 120 bytes #5f0c..."``. The text
        is empty if the argument is not compared, and contains "not read" if no file of it can be
        read (paths of another machine, URIs).
    """
    return {
        name: _files(paths, matches) if paths else ""
        for name, paths, matches in _path_arguments(reader, arguments)
    }


def listed_files(reader: str, arguments: Mapping[str, Any]) -> list[str]:
    """Returns the files that a reader's path arguments name, and the files in directories.

    Args:
        reader: The reader's name, from `reader_of`.
        arguments: The reader's arguments.
    """
    files = []
    for _, paths, matches in _path_arguments(reader, arguments):
        files += [file for path in paths for file in _listed(path, matches)]
    return files


def _path_arguments(
    reader: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, list[str], Callable[[str], Any] | None]]:
    """Yields the path arguments of a reader.

    Yields:
        The name of an argument; its paths, which are empty if they are not compared; and a function
        that returns whether the reader reads a file in a directory, given the name of the file.
    """
    listed = any(arguments.get(name) for name in _LISTING)
    root = str(arguments.get("file_root") or "")
    for name, value in arguments.items():
        paths = [str(path) for path in (value if isinstance(value, (list, tuple)) else [value])]
        is_path = name in PATHS or (reader not in READERS and _names_a_path(value))
        if name not in IGNORED and not is_path:
            continue
        if name in IGNORED or not any(paths) or (name == "file_root" and listed):
            yield name, [], None
        else:
            prefix = root if name == "files" else ""
            matches = _filter(reader, arguments) if name == "file_root" else None
            yield name, [os.path.join(prefix, path) for path in paths], matches


def video_files(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the files that a video reader reads, given the reader's arguments."""
    if names := arguments.get("filenames"):
        return [names] if isinstance(names, str) else list(names)
    if root := str(arguments.get("file_root") or ""):
        return _listed(root, None)
    try:
        with open(str(arguments.get("file_list") or ""), errors="surrogateescape") as file:
            return [line.split()[0] for line in file if line.strip()]
    except OSError:
        return []


def _names_a_path(value: Any) -> bool:
    paths = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(path, str) and os.path.exists(path) for path in paths)


def _files(paths: Sequence[str], matches: Callable[[str], Any] | None) -> str:
    """Returns a description of files and of the files in directories; see `described`.

    Args:
        paths: Paths of files and directories.
        matches: Function that returns whether the reader reads a file in a directory, given the
            name of the file; None if the reader reads all files.
    """
    files = [file for path in paths for file in _listed(path, matches)]
    if not files:
        return "0 files"
    if not any("://" in file for file in files):
        files = [os.path.abspath(file) for file in files]
    sized = spread(len(files), _MOST_SIZES).tolist()
    sizes = dict(zip(sized, file_sizes([files[i] for i in sized])))
    chosen = spread(len(files), _MOST_CONTENTS).tolist()
    contents = {i: _content(files[i], len(chosen)) for i in chosen}
    sizes |= {i: content.size for i, content in contents.items()}
    names = below_common_root(files)
    if len(paths) == len(files) == 1 and sizes[0] >= 0:
        names = [""]  # a single file (a list, index or archive) may be renamed
    text = digest(
        os.fsencode("\0".join(names)),
        " ".join(str(sizes[i]) for i in sorted(sizes)).encode(),
        " ".join(content.digest for content in contents.values()).encode(),
    )
    known_bytes = sum(size for size in sizes.values() if size > 0)
    part = "" if len(sizes) == len(files) else f" in {len(sizes):,} of them"
    missing = ", not read" if max(sizes.values()) < 0 else ""
    return f"{len(files):,} files, {known_bytes:,} bytes{part}{missing} #{text}"


def _listed(path: str, matches: Callable[[str], Any] | None) -> list[str]:
    """Returns the paths of the files in a directory and its direct subdirectories, sorted.

    Returns ``[path]`` if the path is not a readable directory.
    """
    try:
        return sorted(_walk(path, matches))
    except OSError:  # a file, or an unreadable directory
        return [path]


def _walk(root: str, matches: Callable[[str], Any] | None) -> Iterator[str]:
    with os.scandir(root) as entries:
        for entry in entries:
            files: Iterable[os.DirEntry[str]] = [entry]
            if entry.is_dir():
                with os.scandir(entry.path) as inner:
                    files = list(inner)
            for file in files:
                if file.name != _LOCK and (matches is None or matches(file.name)):
                    yield file.path


def _filter(reader: str, arguments: Mapping[str, Any]) -> Callable[[str], Any] | None:
    """Returns a function that tests whether a reader reads a file, given the name of the file.

    Returns None if the reader reads all files of a directory, or if its filter is unknown.
    """
    if reader not in _FILTERS:
        return None
    schema, name = _FILTERS[reader]
    patterns = arguments.get(name)
    if not patterns:
        default = backend.GetSchema(schema).GetArgumentDefaultValueString(name)
        try:
            patterns = ast.literal_eval(default)
        except (ValueError, SyntaxError):
            return None
    texts = [patterns] if isinstance(patterns, str) else patterns
    # Case is ignored, so that at most a few additional files are compared.
    joined = "|".join(fnmatch.translate(str(text)) for text in texts)
    return re.compile(joined, re.IGNORECASE).match


def file_sizes(paths: Sequence[str]) -> list[int]:
    """Returns the sizes of files in bytes; -1 for a missing file.

    The sizes are cached in this process, until the modification time of a folder changes.
    """
    # The modification time of a directory changes if files are added or removed.
    folders = {os.path.dirname(path) for path in paths}
    times = sorted((folder, _status(folder, "st_mtime_ns")) for folder in folders)
    key = digest(os.fsencode("\0".join(paths))), tuple(times)
    if (sizes := _known_sizes.get(key)) is None:
        size_of = {path: _status(path, "st_size") for path in dict.fromkeys(paths)}
        sizes = _known_sizes[key] = [size_of[path] for path in paths]
    return sizes


_known_sizes: dict[Any, list[int]] = {}


def _status(path: str, field: str) -> int:
    """Returns a field of `os.stat` of a file; -1 for a missing file."""
    try:
        value: int = getattr(os.stat(path), field)
    except (OSError, ValueError):
        return -1
    return value


class _Content(NamedTuple):
    """The content of a file.

    Attributes:
        size: Number of bytes (of a small file, after `_below_own_root`); -1 for a missing file.
        digest: Digest of the same bytes, or of samples of a large file.
    """

    size: int = -1
    digest: str = ""


def _content(path: str, count: int) -> _Content:
    """Returns the size and the digest of a file; size -1 and no digest for a missing file.

    Args:
        path: The path of the file.
        count: The number of files that share `_MOST_BYTES`.
    """
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return _read(path, (status.st_size, status.st_mtime_ns, status.st_ino), count)
    except (OSError, ValueError):
        pass
    return _Content()


@functools.lru_cache(maxsize=1 << 16)
def _read(path: str, stamp: _Stamp, count: int) -> _Content:
    """Returns the size and the digest of a file, from samples if the file is large.

    Args:
        path: The path of the file.
        stamp: The current stamp of the file, so that the cached result of a changed file is not
            used.
        count: The number of files that share `_MOST_BYTES`.
    """
    size = stamp[0]
    with open(path, "rb", buffering=0) as file:
        if size <= _MOST_BYTES // count:
            content = _below_own_root(file.readall(), os.fsencode(path))
            return _Content(len(content), digest(content))
        pieces = [file.read(_EDGE)]
        blocks = max(4, min(_BLOCKS, _MOST_BLOCKS // count))
        for number in range(blocks):
            file.seek((size - _BLOCK) * number // (blocks - 1))
            pieces.append(file.read(_BLOCK))
        file.seek(size - _EDGE)
        return _Content(size, digest(*pieces, file.read(_EDGE)))


def _below_own_root(content: bytes, path: bytes) -> bytes:
    """Returns the content of a list of paths, without the directory that list and paths share.

    If a list of absolute paths and its files are moved together, the result does not change. Other
    files and lists of relative paths are returned unchanged.

    Args:
        content: The content of the file.
        path: The absolute path of the file.
    """
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        return content
    first = min(lines)
    prefix = first[: common_start(first, max(lines))]
    before, slash, after = prefix.partition(b"/")
    if before[-1:] not in (b"", b'"'):  # relative names
        return content
    name = slash + after
    root = name[: common_start(name, path)]
    root = root[: root.rfind(b"/") + 1]
    return b"\n".join(line.replace(root, b"", 1) for line in lines) if len(root) > 1 else content
