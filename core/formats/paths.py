"""Paths as users write them: patterns, ``~``, bytes, one path or several."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..printable import printable
from .byte_files import filesystem, is_remote

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Paths = Path | Sequence[Path]

_SPECIAL = re.compile(r"^~|[*?\[{]")
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
_MOST_PATHS = 10_000_000  # of one pattern


def path_list(paths: Any) -> list[str]:
    """Returns one path or several as a list of absolute paths, or of URLs.

    Expands ``~``, braces (``{000..127}``, ``{a,b}``) and the patterns ``*``, ``?`` and ``[]``. The
    files of a pattern are sorted. A name that exists is never expanded, and ``?`` of a URL begins
    its query.

    Raises:
        FileNotFoundError: If a pattern matches no file.
        TypeError: If a path is not text, bytes or a path object.
        ValueError: If there is no path.
    """
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
    try:
        names = [path_text(path) for path in several]
    except TypeError as error:
        raise TypeError(
            f"paths must be a path, or a list of paths, not {paths!r:.80}: {error}"
        ) from None
    if not names:
        raise ValueError("paths is empty: a source needs at least one file")
    whole: list[str] = []
    for name in names:
        if _SPECIAL.search(name):
            whole += expanded(name)
        else:
            whole.append(name)
    return [name if is_remote(name) else os.path.abspath(name) for name in whole]


def path_text(path: Any) -> str:
    """Returns a path, which may be bytes, as text.

    Raises:
        TypeError: If it is not a path.
    """
    return os.fsdecode(os.fspath(path))


def home_expanded(path: str) -> str:
    """Replaces ``~`` at the beginning of a path, unless it is the name of a file."""
    return path if os.path.lexists(path) else os.path.expanduser(path)


def is_pattern(path: str) -> bool:
    """Tells whether a local path is a pattern, and not the name of a file or a folder."""
    special = glob.has_magic(path) or next(braces(path)) != path
    return special and not os.path.lexists(path)


def expanded(name: str) -> list[str]:
    """Returns the files that a path or a URL with special characters means.

    Raises:
        FileNotFoundError: If a pattern matches no file.
    """
    if not is_remote(name) and os.path.lexists(name):
        return [name]
    return list(itertools.chain.from_iterable(map(_matches, braces(name))))


def _matches(name: str) -> list[str]:
    """Returns the files that a path or a URL without braces matches."""
    if is_remote(name):
        if not re.search(r"[*\[]", name):
            return [name]
        if "::" in name:
            raise ValueError(
                f"{printable(name)}: patterns in chained URLs are not supported: pass a list"
            )
        system, path = filesystem(name)
        if system.exists(path):
            return [name]
        entries = system.glob(path, detail=True).values()
        found = [
            str(system.unstrip_protocol(entry["name"]))
            for entry in entries
            if entry["type"] != "directory" and not _is_hidden(entry["name"], path)
        ]
    else:
        name = home_expanded(name)
        if not glob.has_magic(name) or os.path.lexists(name):
            return [name]
        found = [path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise FileNotFoundError(
            f"{printable(name)} matches no file. If a name contains *, ?, [ or braces, pass a list "
            "of files"
        )
    return sorted(found)


def _is_hidden(path: str, pattern: str) -> bool:
    """Tells if a path has a part with a leading dot that no part of the pattern has.

    As in a shell, ``*`` does not match such names; fsspec's patterns do.
    """
    dotted = [part for part in pattern.split("/") if part.startswith(".")]
    return any(
        part.startswith(".") and not any(fnmatch.fnmatchcase(part, wanted) for wanted in dotted)
        for part in path.split("/")
    )


def braces(text: str) -> Iterator[str]:
    """Yields the texts that braces stand for, as a shell does.

    ``{a,b}`` are alternatives and ``{000..127}`` and ``{a..e..2}`` are ranges, which may be nested.
    Other braces stay.

    Raises:
        ValueError: If a range is too long.
    """
    start = text.find("{")
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
    """The alternatives of the brace at a place, and its end; None for other braces."""
    depth, commas = 0, [start]
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "," and depth == 1:
            commas.append(place)
        if not depth:
            break
    else:
        return None
    if len(commas) == 1:
        found = _RANGE.fullmatch(text, start + 1, place)
        values = _range(*found.groups()) if found else None
        return (values, place + 1) if values is not None else None
    ends = [*commas[1:], place]
    parts = [text[a + 1 : b] for a, b in zip(commas, ends)]
    return [value for part in parts for value in braces(part)], place + 1


def _range(first: str, last: str, step: str | None) -> list[str] | None:
    """The values of a range, whose numbers are as wide as the wider end; None for other text."""
    if first.isalpha() != last.isalpha():
        return None
    convert = ord if first.isalpha() else int
    begin, end = convert(first), convert(last)
    stride = abs(int(step or 1)) or 1
    values = range(begin, end + 1, stride) if begin <= end else range(begin, end - 1, -stride)
    if len(values) > _MOST_PATHS:
        raise ValueError(f"{{{first}..{last}}} stands for {len(values):,} paths: it is too long")
    if first.isalpha():
        return list(map(chr, values))
    padded = any(re.fullmatch(r"-?0\d+", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{value:0{width}d}" for value in values]
