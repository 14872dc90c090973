"""Short texts for the data behind the path arguments of DALI's readers, under any root.

DALI goes on over a reshuffled list, or over other files of as many samples, without a warning. The
texts are equal for copies of the same data, and differ for other data; modification times are no
part of them.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nvidia.dali import backend

# How an argument is compared: by the content of its file ("list": lists, indexes, annotations);
# by name and size of the files ("files"); by size and samples of the content ("archive": tars
# and record files); by its value ("value"), or not at all ("ignored").
_VIDEO = {
    "enable_frame_num": "value",
    "file_list": "list",
    "file_root": "files",
    "filenames": "files",
}
_FILTERED = {
    "file_filter": "value",
    "file_list": "list",
    "file_root": "files",
    "files": "files",
}
_RECORDS = {"path": "archive", "index_path": "list"}
READERS: Mapping[str, Mapping[str, str]] = {
    "caffe": {"path": "archive"},
    "caffe2": {"path": "archive"},
    "coco": {
        "annotations_file": "list",
        "file_root": "files",
        "images": "value",  # names as the annotations have them
        "preprocessed_annotations": "list",
        "save_preprocessed_annotations_dir": "ignored",
    },
    "file": {
        "dir_filters": "value",
        "file_filters": "value",
        "file_list": "list",
        "file_root": "files",
        "files": "files",
    },
    "fits": _FILTERED,
    "mxnet": _RECORDS,
    "nemo_asr": {"manifest_filepaths": "list"},
    "numpy": {**_FILTERED, "out_of_bounds_policy": "value"},
    "sequence": {"file_root": "files"},
    "tfrecord": {**_RECORDS, "feature_names": "value"},
    "video": {
        **_VIDEO,
        "file_list_format": "value",
        "file_list_rounding": "value",
        "pad_mode": "value",
    },
    "video_resize": {**_VIDEO, "mode": "value"},
    "webdataset": {
        "ext": "value",
        "index_paths": "list",
        "missing_component_behavior": "value",
        "paths": "archive",
    },
}
_FILTERS = {
    "file": ("readers__File", "file_filters"),
    "fits": ("experimental__readers__Fits", "file_filter"),
    "numpy": ("readers__Numpy", "file_filter"),
}
_LISTING = ("files", "file_list", "filenames")  # where one of them is given, file_root is a prefix

_Stamp = tuple[int, int, int]  # size, time and inode, the key of a content in caches
_EDGE, _BLOCK = 1 << 16, 1 << 12  # bytes
_BLOCKS = 64  # of each archive
_MOST_BLOCKS = 1 << 12  # of all archives of an argument, but at least four of each
_MOST_SIZES = 100_000  # files whose sizes are asked for, evenly spaced among more


def reader_of(kind: str) -> str:
    """The name in `READERS` of an operator as users write it; "" if it is no reader."""
    module, _, name = kind.rpartition(".")
    if module.removeprefix("experimental.") == "readers":
        return name
    # The names before DALI 1.0: fn.file_reader, fn.video_reader_resize.
    legacy = re.fullmatch(r"(\w+)_reader(_resize)?", kind)
    return f"{legacy[1]}{legacy[2] or ''}" if legacy else ""


def described(reader: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The path arguments of a reader as short texts.

    Args:
        reader: Its name in `READERS`. Arguments of other readers that are paths are compared by
            the names and sizes of their files.
        arguments: Its arguments.

    Returns:
        A text for each path argument, such as ``"3 files, 120 bytes #5f0c..."``; "" if it is
        not compared. Files that can't be read (another machine's path, a URI) are "not read".
    """
    known = READERS.get(reader)
    if known is None:
        known = {k: "files" for k, v in arguments.items() if _names_a_path(v)}
    listed = any(arguments.get(name) for name in _LISTING)
    root = arguments.get("file_root") or ""
    texts: dict[str, str] = {}
    for name, value in arguments.items():
        how = known.get(name, "value")
        paths = [str(path) for path in (value if isinstance(value, (list, tuple)) else [value])]
        if how == "value":
            continue
        if how == "ignored" or not any(paths) or (name == "file_root" and listed):
            texts[name] = ""
        elif how == "archive":
            texts[name] = _archives(paths)
        elif how == "list":
            texts[name] = _lists(paths, reader, str(root) if name == "file_list" else "")
        elif isinstance(value, (list, tuple)) or name in _LISTING:
            base = str(root) if name == "files" else ""
            texts[name] = _files([os.path.join(base, path) for path in paths])
        else:
            texts[name] = _folder(paths[0], _filter(reader, arguments))
    return texts


def _names_a_path(value: Any) -> bool:
    paths = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(path, str) and os.path.exists(path) for path in paths)


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        digest.update(b"\0")
    return digest.hexdigest()[:12]


# Files by name and size


def _files(paths: Sequence[str]) -> str:
    """Files by their names below their common folder, and their sizes."""
    remote = [path for path in paths if "://" in path]
    whole = list(paths) if remote else [os.path.abspath(path) for path in paths]
    return _sized(below_common_root(whole), whole.__getitem__)


def _folder(root: str, matches: Callable[[str], Any] | None) -> str:
    """The files of a folder and of its subfolders, as deep as DALI's readers look."""
    try:
        names = sorted(_listed(root, matches))
    except OSError:
        return f"not read #{_digest([os.fsencode(os.path.basename(os.path.normpath(root)))])}"
    return _sized(names, lambda i: os.path.join(root, names[i]))


def _listed(root: str, matches: Callable[[str], Any] | None) -> Iterator[str]:
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir():
                with os.scandir(entry.path) as files:
                    for file in files:
                        if matches is None or matches(file.name):
                            yield f"{entry.name}/{file.name}"
            elif matches is None or matches(entry.name):
                yield entry.name


def _filter(reader: str, arguments: Mapping[str, Any]) -> Callable[[str], Any] | None:
    """The function that tells whether a reader takes a file's name; None if it takes all."""
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
    # Case is ignored: this at most compares a few files more than the reader reads.
    joined = "|".join(fnmatch.translate(str(text)) for text in texts)
    return re.compile(joined, re.IGNORECASE).match


def below_common_root(paths: Sequence[str]) -> list[str]:
    """Paths, or lines that begin with one, without their common folder."""
    first, last = min(paths), max(paths)  # all begin as these two do
    alike = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
    start = first.rfind("/", 0, alike) + 1
    return [path[start:] for path in paths]


def _sized(names: Sequence[str], path_of: Callable[[int], str]) -> str:
    """A text for names and the sizes of their files; of very many files, for the sizes of some."""
    count = min(len(names), _MOST_SIZES)
    sizes = file_sizes([path_of(i * len(names) // count) for i in range(count)])
    known = sum(size for size in sizes if size > 0)
    text = _digest((*map(os.fsencode, names), *(b"%d" % size for size in sizes)))
    asked = "" if count == len(names) else f" in {count:,} of them"
    missing = "" if known or not sizes or max(sizes) >= 0 else ", not read"
    return f"{len(names):,} files, {known:,} bytes{asked}{missing} #{text}"


def file_sizes(paths: Sequence[str]) -> list[int]:
    """The sizes of files in bytes, -1 for missing ones; cached in this process."""
    # A folder's time changes when files in it come or go.
    folders = {os.path.dirname(path) for path in paths}
    times = sorted((folder, _status(folder, "st_mtime_ns")) for folder in folders)
    key = _digest(map(os.fsencode, paths)), tuple(times)
    if (sizes := _known_sizes.get(key)) is None:
        size_of = {path: _status(path, "st_size") for path in dict.fromkeys(paths)}
        sizes = _known_sizes[key] = [size_of[path] for path in paths]
    return sizes


_known_sizes: dict[Any, list[int]] = {}


def _status(path: str, field: str) -> int:
    """A field of a file's status; -1 for a missing file."""
    try:
        value: int = getattr(os.stat(path), field)
    except (OSError, ValueError):
        return -1
    return value


# Lists, indexes and annotations by their content


def _lists(paths: Sequence[str], reader: str, root: str) -> str:
    """Files that list or index samples, by their content and the sizes of the files listed."""
    texts = [
        _of_file(path, lambda p, s: _list_digest(p, s, reader, root or os.path.dirname(p)))
        for path in _parts(paths)
    ]
    return texts[0] if len(texts) == 1 else _joined(texts)


def _of_file(path: str, describe: Callable[[str, _Stamp], str]) -> str:
    """The text of a file by ``describe(path, stamp)``; a digest of an unreadable file's name."""
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return describe(path, (status.st_size, status.st_mtime_ns, status.st_ino))
    except (OSError, ValueError):
        pass
    return f"not read #{_digest([os.fsencode(os.path.basename(path))])}"


def _joined(texts: Sequence[str]) -> str:
    missing = ", not read" if any(text.startswith("not read") for text in texts) else ""
    return f"{len(texts):,} files{missing} #{_digest(map(str.encode, texts))}"


def _parts(paths: Iterable[str]) -> list[str]:
    """Files, and the files in folders, without the locks of databases."""
    parts: list[str] = []
    for path in paths:
        try:
            with os.scandir(path) as entries:
                parts += sorted(e.path for e in entries if e.is_file() and e.name != "lock.mdb")
        except OSError:
            parts.append(path)
    return parts


@functools.lru_cache(maxsize=1 << 16)
def _list_digest(path: str, stamp: _Stamp, reader: str, root: str) -> str:
    with open(path, "rb") as file:
        content = file.read()
    names: list[str] = []  # of the listed files, with labels and the like behind some
    rests: list[str] = []  # of a manifest's lines
    if reader == "nemo_asr":
        names, rests = _manifest(content)
    elif os.path.isdir(root) and reader in ("file", "numpy", "fits", "video", "video_resize"):
        lines = [line.rstrip() for line in os.fsdecode(content).splitlines()]
        names = [line for line in lines if line]
    if not names:
        return f"{stamp[0]:,} bytes #{_digest([content])}"
    texts = names
    if all(name.startswith("/") for name in names):
        texts = below_common_root(names)
    if rests:
        texts = [f"{text} {rest}" for text, rest in zip(texts, rests)]
    return _sized(texts, lambda i: _entry(root, names[i]))


def _entry(root: str, line: str) -> str:
    """The file of a line of a list, which may be followed by a label and numbers of frames."""
    for count in (1, 0, 2, 3):
        parts = line.rsplit(None, count)
        path = os.path.join(root, parts[0]) if parts else root
        if os.path.isfile(path):
            return path
    return os.path.join(root, line)


def _manifest(content: bytes) -> tuple[list[str], list[str]]:
    """The audio paths of NeMo's manifest, and the rest of each line; both empty for other files."""
    try:
        entries = [json.loads(line) for line in content.splitlines() if line.strip()]
        paths = [str(entry.pop("audio_filepath")) for entry in entries]
        return paths, [json.dumps(entry, sort_keys=True) for entry in entries]
    except (ValueError, LookupError, AttributeError, RecursionError):
        return [], []


# Tars and record files by samples of their content


def _archives(paths: Sequence[str]) -> str:
    """Tars and record files, in this order, by their sizes and samples of their content."""
    files = _parts(paths)
    blocks = max(4, min(_BLOCKS, _MOST_BLOCKS // max(1, len(files))))
    return _joined([_of_file(path, lambda p, s: _archive_digest(p, s, blocks)) for path in files])


@functools.lru_cache(maxsize=1 << 16)
def _archive_digest(path: str, stamp: _Stamp, blocks: int) -> str:
    size = stamp[0]

    def pieces() -> Iterator[bytes]:
        yield b"%d" % size
        with open(path, "rb", buffering=0) as file:
            yield file.read(_EDGE)
            for number in range(blocks):
                file.seek(max(0, (size - _BLOCK) * number // max(1, blocks - 1)))
                yield file.read(_BLOCK)
            file.seek(max(0, size - _EDGE))
            yield file.read(_EDGE)

    return _digest(pieces())
