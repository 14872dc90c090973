"""Detects truncated AVI and WAV files, which DALI would decode up to the cut, and pointers.

A truncated WAV would become a shorter recording. A truncated AVI may become uninitialized memory,
which differs in each run.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from .file_kinds import pointer_fault

_HEAD = 12  # bytes: "RIFF", the number of bytes after these 8, the type
_FIRST = b"Rv"  # of RIFF and of git-lfs pointers; only the first byte of other files is read
_SUFFIXES = (b".avi", b".wav")
# Bytes that files of a type may lack. Some programs include the first 8 bytes, or the padding of an
# odd size, in the size; some estimate the length of a recording before they write it.
_MAY_LACK = {b"AVI ": 9, b"WAVE": 4096}
# Programs that write to a pipe don't know the size, and write 0, or this number or a larger one.
_UNKNOWN = 0x7FFFF000


def cut_off(data: Any) -> str:
    """Returns a description of how an AVI or WAV is cut off; "" if it is complete.

    Returns the fix for a git-lfs pointer, and "" for files of other types, and for files whose
    header declares no size.

    Args:
        data: The bytes of any file, in any type with the buffer protocol.
    """
    try:
        if len(data) < _HEAD or data[0] not in _FIRST:
            return ""
    except TypeError:  # not bytes, which the consumer reports
        return ""
    return pointer_fault(data) or _lacking(bytes(data[:_HEAD]), len(data))


def file_cut_off(path: bytes) -> str:
    """Returns a description of how a local file named .avi or .wav is cut off; see `cut_off`.

    Returns "" if the file is complete, has another name, or can't be read.
    """
    if not path.lower().endswith(_SUFFIXES):
        return ""
    try:
        with open(path, "rb", buffering=0) as file:
            head, size = file.read(_HEAD), os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        return ""  # reading the whole file reports the error
    return _lacking(head, size) if len(head) == _HEAD else ""


def _lacking(head: bytes, count: int) -> str:
    begin, size, kind = struct.unpack("<4sI4s", head)
    if begin != b"RIFF" or kind not in _MAY_LACK or not 0 < size < _UNKNOWN:
        return ""
    expected = 8 + size
    if count >= expected - _MAY_LACK[kind]:
        return ""
    return f"it is cut off: its header declares {expected} bytes, but it has {count}"
