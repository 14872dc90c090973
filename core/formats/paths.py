"""Expands paths in users' notation: patterns, braces, ``~``, bytes, a single path or several."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..messages.printable import printable, printable_repr
from ..remote.listing import common_start
from ..remote.storage import Storage
from .byte_files import is_remote

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Paths = Path | Sequence[Path]

_SPECIAL = re.compile(r"^~|[*?\[{]")
_CREDENTIALS = re.compile(r"(?<=://)[^/?#]*@|\?.*", re.DOTALL)  # user and query of a URL
_FRAGMENT = re.compile(r"(?<=http)(s?://[^#]*)#.*", re.DOTALL)  # in buckets, "#" is a part of a key
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
_MOST_PATHS = 10_000_000  # paths to which a range may expand


def path_list(paths: Any, storage: Storage | None = None) -> list[str]:
    """Returns one path or several as a list of absolute paths or URLs.

    Expands ``~``, braces (``{000..127}``, ``{a,b}``) and the patterns ``*``, ``?`` and ``[]``. The
    files of a pattern are sorted. The name of an existing file is never expanded, and ``?`` in a
    URL begins its query.

    Raises:
        FileNotFoundError: If a pattern matches no file.
        TypeError: If a path is not a string, bytes or a path object.
        ValueError: If there is no path, a path is empty, a range is too long, or a chained URL
            contains a pattern.
    """
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
    try:
        names = [path_text(path) for path in several]
    except TypeError as error:
        raise TypeError(
            f"paths must be a path, or a list of paths, not {printable_repr(paths)}: {error}"
        ) from None
    if not names:
        raise ValueError("paths is empty. A source needs at least one file")
    expanded_names: list[str] = []
    for name in names:
        if _SPECIAL.search(name):
            expanded_names += expanded(name, storage)
        else:
            expanded_names.append(name)
    return [name if is_remote(name) else os.path.abspath(name) for name in expanded_names]


def path_text(path: Any) -> str:
    """Returns a path, which may be bytes or a path object, as a string.

    Raises:
        TypeError: If the argument is not a path.
        ValueError: If the path is empty, which would otherwise mean the working directory.
    """
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise ValueError("a path is '', an empty string. Pass '.' for the working directory")
    return text


def home_expanded(path: str) -> str:
    """Returns a path with a leading ``~`` replaced, unless the path itself exists."""
    return path if os.path.lexists(path) else os.path.expanduser(path)


def is_pattern(path: str) -> bool:
    """Returns whether a local path is a pattern instead of an existing file or directory."""
    special = glob.has_magic(path) or next(braces(path)) != path
    return special and not os.path.lexists(path)


def expanded(name: str, storage: Storage | None = None) -> list[str]:
    """Returns the files that a path or URL with special characters denotes; see `path_list`.

    Raises:
        FileNotFoundError: If a pattern matches no file.
        ValueError: If a range is too long, or a chained URL contains a pattern.
    """
    if not is_remote(name) and os.path.lexists(name):
        return [name]
    names = [_matches(part, storage or Storage()) for part in braces(name)]
    return list(itertools.chain.from_iterable(names))


def _matches(name: str, storage: Storage) -> list[str]:
    """Returns the files that match a path or URL without braces, sorted.

    A path or URL without a pattern is returned even if it does not exist.
    """
    if is_remote(name):
        if not re.search(r"[*\[]", name):
            return [name]
        if "::" in name:
            raise ValueError(
                f"{printable(name)}: patterns in chained URLs are not supported. Pass a list"
            )
        folders, path = storage.folders(name)
        matches = [
            folders.unstrip_protocol(entry["name"])
            for entry in folders.glob(path)
            if entry["type"] != "directory" and not _is_hidden(entry["name"], path)
        ]
    else:
        name = home_expanded(name)
        if not glob.has_magic(name) or os.path.lexists(name):
            return [name]
        matches = [path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if not matches:
        raise FileNotFoundError(
            f"{printable(name)} matches no file. For names that contain *, ?, [ or braces, pass a "
            "list of files"
        )
    return sorted(matches)


def _is_hidden(path: str, pattern: str) -> bool:
    """Returns whether a path has a part with a leading dot that matches no such part of a pattern.

    In a shell, ``*`` does not match such names; in fsspec it does.
    """
    dotted = [part for part in pattern.split("/") if part.startswith(".")]
    return any(
        part.startswith(".")
        and not any(fnmatch.fnmatchcase(part, dotted_pattern) for dotted_pattern in dotted)
        for part in path.split("/")
    )


def braces(text: str) -> Iterator[str]:
    """Yields the expansions of braces, as a shell does.

    ``{a,b}`` are alternatives; ``{000..127}`` and ``{a..e..2}`` are ranges. They may be nested.
    Other braces are unchanged.

    Raises:
        ValueError: If a range is too long.
    """
    start = text.find("{", text.startswith("{}"))  # a shell does not expand {} at the start
    while start >= 0:
        parts = _parts(text, start)
        if parts is not None:
            alternatives, stop = parts
            for middle in alternatives:
                for end in braces(text[stop:]):
                    yield text[:start] + middle + end
            return
        start = text.find("{", start + 1)
    yield text


def _parts(text: str, start: int) -> tuple[list[str], int] | None:
    """Returns the expansions of a pair of braces, and the offset after the closing brace.

    Returns None if the braces contain neither alternatives nor a range.

    Args:
        text: The text.
        start: The offset of the opening brace.
    """
    depth, commas, dots = 0, [start], False
    for at in range(start, len(text)):
        dots |= depth == 1 and text.startswith("..", at) and text[at + 2 : at + 3] != "}"
        if text[at] == "}" and depth == 1 and len(commas) == 1 and not dots:
            continue  # a shell ends no brace before its first comma or dots: {}a,b} is }a and b
        depth += (text[at] == "{") - (text[at] == "}")
        if text[at] == "," and depth == 1:
            commas.append(at)
        if not depth:
            break
    else:
        return None
    if len(commas) == 1:
        bounds = _RANGE.fullmatch(text, start + 1, at)
        values = _range(*bounds.groups()) if bounds else None
        return (values, at + 1) if values is not None else None
    ends = [*commas[1:], at]
    parts = [text[a + 1 : b] for a, b in zip(commas, ends)]
    return [value for part in parts for value in braces(part)], at + 1


def _range(first: str, last: str, step: str | None) -> list[str] | None:
    """Returns the values of a range such as ``000..127``, padded to the width of the wider bound.

    Returns None if a bound is a letter and the other bound is a number.

    Raises:
        ValueError: If the range has more than 10,000,000 values.
    """
    if first.isalpha() != last.isalpha():
        return None
    convert = ord if first.isalpha() else int
    begin, end = convert(first), convert(last)
    stride = abs(int(step or 1)) or 1
    values = range(begin, end + 1, stride) if begin <= end else range(begin, end - 1, -stride)
    if len(values) > _MOST_PATHS:
        raise ValueError(f"{{{first}..{last}}} expands to {len(values):,} paths, which is too many")
    if first.isalpha():
        return list(map(chr, values))
    padded = any(re.fullmatch(r"-?0\d+", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{value:0{width}d}" for value in values]


def below_common_root(paths: Sequence[str]) -> list[str]:
    """Returns paths without their common directory."""
    first, last = min(paths), max(paths)  # their common start is the common start of all paths
    start = first.rfind("/", 0, common_start(first, last)) + 1
    return [path[start:] for path in paths]


def object_names(paths: Sequence[str]) -> list[str]:
    """Returns paths without their common directory; URLs without users, queries and fragments.

    Indexes and states contain these names. A query may be a signature, which soon expires.
    """
    return below_common_root(
        [
            _CREDENTIALS.sub("", _FRAGMENT.sub(r"\1", path)) if is_remote(path) else path
            for path in paths
        ]
    )
