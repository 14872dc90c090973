"""Detects types of files by their first bytes, for errors about files of the wrong type."""

from __future__ import annotations

import os
from typing import Any

from .regular_file import regular_file

_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER = 1024  # bytes; git-lfs does not write larger pointers
_LFS_FAULT = "it is a git-lfs pointer; run git lfs pull"
HEAD = 512  # bytes needed by `described`
_FILES, _RECORDS = "use sources.Files", "use sources.Records over a library that reads it"
_KINDS = (
    (b"\xff\xd8\xff", "a JPEG image", _FILES),
    (b"\x89PNG", "a PNG image", _FILES),
    (b"GIF8", "a GIF image", "DALI does not decode GIF"),
    (b"RIFF", "a WebP image, a WAV or an AVI", _FILES),
    (b"PAR1", "a Parquet file", "use sources.Parquet"),
    (b"\x89HDF", "an HDF5 file", _RECORDS),
    (b"\x93NUMPY", "a .npy file", "use sources.Arrays over numpy.load(path, mmap_mode='r')"),
    (b"PK\x03\x04", "a zip archive", "unpack it and use sources.Files"),
    (b"\x83\xaf\x70\xd1", "a Riegeli file (ArrayRecord)", _RECORDS),
    (b"\x1f\x8b", "compressed by gzip", "it has no random access. Unpack it"),
    (b"BZh", "compressed by bzip2", "it has no random access. Unpack it"),
    (b"\xfd7z", "compressed by xz", "it has no random access. Unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "it has no random access. Unpack it"),
    *((b"\x78" + level, "compressed by zlib", "unpack it") for level in (b"\1", b"^", b"\x9c")),
    (b"\x78\xda", "compressed by zlib", "it has no random access. Unpack it"),
)
_TEXT = b"\t\n\r" + bytes(range(32, 127)) + bytes(range(128, 256))  # UTF-8
# First bytes of short texts. A truncated tar may be text, too: it begins with a member's name.
_BEGINS = (b"{", b"[", b"<", b"#")


def described(head: bytes) -> str:
    """Returns the type of a file and a remedy, e.g. "it is a tar; use sources.Tar"; "" if unknown.

    Args:
        head: The first `HEAD` bytes of the file.
    """
    if fault := pointer_fault(head):
        return fault
    if is_tar(head):
        return "it is a tar; use sources.Tar"
    kinds = (f"it is {kind}; {cure}" for magic, kind, cure in _KINDS if head.startswith(magic))
    may_be_text = len(head) >= HEAD or head.lstrip().startswith(_BEGINS)
    if may_be_text and not head.translate(None, _TEXT):
        return "it is text, such as JSON; omit it, e.g. by a narrower pattern"
    return next(kinds, "")


def is_tar(head: bytes) -> bool:
    """Returns whether a file's first bytes are those of a tar, which may be damaged."""
    return head[257:262] == b"ustar"


def may_be_pointer(size: int) -> bool:
    """Returns whether a file of some size, in bytes, is small enough for a git-lfs pointer."""
    return size < _MOST_POINTER


def pointer_fault(data: Any) -> str:
    """Returns the fix if a file's content is a git-lfs pointer to the content; otherwise "".

    A clone without git-lfs has a pointer, a short text, in place of each large file.

    Args:
        data: The content, with the buffer protocol.
    """
    is_pointer = may_be_pointer(len(data)) and bytes(data[: len(_POINTER)]) == _POINTER
    return _LFS_FAULT if is_pointer else ""


def file_fault(path: str | bytes) -> str:
    """Returns the result of `pointer_fault` for a local file; "" if the file can't be read."""
    try:
        with regular_file(os.fsencode(path)) as (file, size):
            return pointer_fault(os.pread(file, size, 0)) if may_be_pointer(size) else ""
    except (OSError, ValueError):  # ValueError: not a regular file
        return ""
