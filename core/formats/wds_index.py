"""Reads the indexes of DALI's ``wds2idx``, so that tars on a network need not be read completely.

Such an index has the offset, the size and the name of each member, but not its content, such as a
label. The index may also belong to another tar, and ``wds2idx`` gives wrong offsets for members
with long names. So four members of each tar are compared with their headers. Members next to a gap
between two members are also compared, because the gap may contain an extended header.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ..messages.printable import printable
from ..order.shuffle import Indices
from ..remote.storage import Storage
from .byte_files import ByteFiles, Stamp, is_remote
from .file_columns import FileColumns, concat_tables
from .file_kinds import pointer_fault
from .spread import spread
from .tar_columns import columns_of_samples
from .tar_headers import BLOCK, Member, members
from .tar_samples import grouped, kind_of_extension, split_name

_VERSION = "v1.2"
_CHECKED = 4  # members of each tar that are compared with their headers
_MOST_TAIL = 1 << 20  # bytes after the last member that are read
_WORDS = 4  # words of a member in a line: extension, offset, size and name
_CURE = "Write it again by wds2idx, or omit index_paths="


def columns_of_wds(
    paths: Sequence[str],
    index_paths: Sequence[str],
    stamps: Sequence[Stamp],
    names: Collection[str],
    storage: Storage,
) -> FileColumns:
    """Returns the columns of tars, from the indexes of wds2idx and a few ranges of the tars.

    Args:
        paths: The tars.
        index_paths: The index of each tar.
        stamps: The stamps of the tars.
        names: The wanted extensions. Members of extensions of numbers, e.g. "cls", are read.
        storage: Access to remote files.

    Raises:
        OSError: If a file can't be read.
        ValueError: If an index is damaged, or belongs to another tar.
    """
    remote = iter(storage.contents([path for path in index_paths if is_remote(path)]))
    contents = [
        bytes(next(remote)) if is_remote(path) else pathlib.Path(path).read_bytes()
        for path in index_paths
    ]
    sizes = [int(stamp[0]) for stamp in stamps]
    found = [
        members_of(content, index_path, size)
        for content, index_path, size in zip(contents, index_paths, sizes, strict=True)
    ]
    files = ByteFiles(paths, sizes, stamps, storage=storage)
    found = _checked(files, found, index_paths)
    numbers = _numbers(files, found, index_paths, names)
    tables = [
        _columns(path, listed, values, names)
        for path, listed, values in zip(paths, found, numbers, strict=True)
    ]
    return concat_tables(tables, len(names))


def _columns(
    path: str, listed: Iterable[Member], values: Mapping[int, bytes], names: Collection[str]
) -> FileColumns:
    """Returns the columns of a tar, given its members.

    Args:
        path: The tar.
        listed: The members of the tar.
        values: Maps the offsets of members that contain numbers to their content.
        names: The wanted extensions.
    """
    samples = grouped(listed, printable(path))
    return columns_of_samples(samples, lambda at, count: values[at], names)


def members_of(content: bytes, index_path: str, end: int) -> list[Member]:
    """Returns the members that an index lists; each ``start`` is the end of the previous member.

    Args:
        content: The content of the index.
        index_path: The name of the index, for errors.
        end: The size of the tar in bytes.

    Raises:
        ValueError: If the index is damaged, or belongs to a smaller tar.
    """
    if fault := pointer_fault(content):
        raise ValueError(f"{printable(index_path)} is not an index of wds2idx: {fault}")
    lines = content.decode(errors="surrogateescape").splitlines()
    version, _, count = lines[0].partition(" ") if lines else ("", "", "")
    if version != _VERSION or count != str(len(lines) - 1):
        raise ValueError(
            f"{printable(index_path)} is not an index of wds2idx in version {_VERSION} with "
            f"{len(lines) - 1:,} samples. {_CURE}"
        )
    listed, at = [], 0
    for number, line in enumerate(lines[1:], 2):
        words = line.split(" ")
        for first in range(0, len(words), _WORDS):
            try:
                extension, offset, size, name = words[first : first + _WORDS]
                member = Member(os.fsencode(name), at, int(offset), int(size))
                if not name.endswith("." + extension) and name != extension:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"{printable(index_path)}: line {number} does not have an extension, an "
                    f"offset, a size and a name of each member. {_CURE}"
                ) from None
            if not at <= member.offset - BLOCK <= end - BLOCK - member.size or member.size < 0:
                raise ValueError(
                    f"{printable(index_path)} does not fit its tar: {printable(name)} would be at "
                    f"byte {member.offset:,}. {_CURE}"
                )
            listed.append(member)
            at = _end(member)
    return listed


def _checked(
    files: ByteFiles, found: Sequence[Sequence[Member]], index_paths: Sequence[str]
) -> list[list[Member]]:
    """Compares some members with their headers in the tars; returns all members.

    Args:
        files: The tars.
        found: The members that the index of each tar lists.
        index_paths: The indexes.

    Returns:
        All members of each tar. The ``start`` of compared members is the offset of their headers.

    Raises:
        ValueError: If a member and its header differ, or a tar has more members.
    """
    checked: list[tuple[int, int]] = []
    for number, listed in enumerate(found):
        gaps = [row for row, m in enumerate(listed) if m.offset - m.start != BLOCK]
        rows = {*spread(len(listed), _CHECKED).tolist(), *gaps, *(row - 1 for row in gaps if row)}
        checked += [(number, row) for row in sorted(rows)]
    numbers = np.array([number for number, _ in checked], np.int64)
    members_checked = [found[number][row] for number, row in checked]
    ends = np.array([member.offset for member in members_checked], np.int64)
    result = [list(listed) for listed in found]
    headers = _compare(files, numbers, members_checked, ends, index_paths)
    for (number, row), (header, _) in zip(checked, headers, strict=True):
        result[number][row] = header
    _check_ends(files, found, index_paths)
    return result


def _check_ends(
    files: ByteFiles, found: Sequence[Sequence[Member]], index_paths: Sequence[str]
) -> None:
    """Raises ValueError if the first MiB after the last member of a tar is not zeros."""
    ends = np.array([_end(listed[-1]) if listed else 0 for listed in found], np.int64)
    sizes = np.clip(np.array(files.sizes, np.int64) - ends, 0, _MOST_TAIL)
    numbers = np.arange(len(found), dtype=np.int64)
    tails = files.read(numbers, ends, sizes, lambda row: f"the end of {files.name(row)}")
    for number, tail in enumerate(tails):
        if tail.any():
            raise ValueError(
                f"{printable(index_paths[number])} does not fit {printable(files.paths[number])}: "
                f"it has more members after byte {ends[number]:,}. {_CURE}"
            )


def _end(member: Member) -> int:
    """Returns the end offset of a member, a multiple of 512 bytes."""
    return member.offset + -(-member.size // BLOCK) * BLOCK


def _compare(
    files: ByteFiles,
    numbers: Indices,
    checked: Sequence[Member],
    ends: Indices,
    index_paths: Sequence[str],
) -> list[tuple[Member, bytes]]:
    """Reads members with their headers, checks the headers, and returns members and contents.

    Args:
        files: The tars.
        numbers: The tar of each member.
        checked: The members.
        ends: The offset up to which each member is read, e.g. the end of its content.
        index_paths: The index of each tar, for errors.

    Returns:
        Each member as its header describes it, and its content up to the end offset.

    Raises:
        ValueError: If a header differs from its member.
    """
    if not len(numbers):
        return []
    starts = np.array([member.start for member in checked], np.int64)
    pieces = files.read(numbers, starts, ends - starts, lambda row: printable(checked[row].name))
    results = []
    for number, member, piece in zip(numbers.tolist(), checked, pieces, strict=True):
        data = piece.tobytes()
        header = _header(member, data, files.sizes[number], printable(files.paths[number]))
        if header is None:
            raise ValueError(
                f"{printable(index_paths[number])} does not fit {printable(files.paths[number])}: "
                f"{printable(member.name)}, {member.size:,} bytes, is not at byte "
                f"{member.offset:,}. {_CURE}"
            )
        results.append((header, data[member.offset - member.start :]))
    return results


def _header(member: Member, data: bytes, end: int, path: str) -> Member | None:
    """Returns the first member in some bytes that has content and an extension.

    Returns None if there is no such member, or it is not the expected member.

    Args:
        member: The expected member.
        data: The bytes of the tar from ``member.start`` on.
        end: The size of the tar in bytes.
        path: The name of the tar in errors.
    """

    def take(at: int, count: int) -> bytes:
        return data[at - member.start : at - member.start + count]

    try:
        for header in members(take, end, printable(path), member.start):
            if header.link or not split_name(header.name)[1]:
                continue
            # GNU tar, which wds2idx calls, escapes some characters by a backslash.
            is_named = header.name == member.name or b"\\" in member.name
            is_same = is_named and (header.offset, header.size) == (member.offset, member.size)
            return header if is_same else None
    except ValueError:  # no header, or it is after the bytes
        pass
    return None


def _numbers(
    files: ByteFiles,
    found: Sequence[Sequence[Member]],
    index_paths: Sequence[str],
    names: Collection[str],
) -> list[dict[int, bytes]]:
    """Reads the members of the wanted extensions that contain numbers.

    Args:
        files: The tars.
        found: The members of each tar.
        index_paths: The index of each tar, for errors.
        names: The wanted extensions.

    Returns:
        A dict for each tar, which maps the offsets of the read members to their content.

    Raises:
        ValueError: If the header of a member differs from the index.
    """
    wanted = {name.encode() for name in names if kind_of_extension(name) == "number"}
    chosen = [
        (number, member)
        for number, listed in enumerate(found)
        for member in listed
        if split_name(member.name)[1] in wanted
    ]
    numbers = np.array([number for number, _ in chosen], np.int64)
    checked = [member for _, member in chosen]
    ends = np.array([member.offset + member.size for member in checked], np.int64)
    contents = _compare(files, numbers, checked, ends, index_paths)
    values: list[dict[int, bytes]] = [{} for _ in found]
    for (number, member), (_, content) in zip(chosen, contents, strict=True):
        values[number][member.offset] = content
    return values
