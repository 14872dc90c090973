"""Whether AVI and WAV files are whole: DALI decodes what is there of one that was cut off.

Of a WAV that is a shorter recording. Of an AVI it may be memory that nothing was written to, which
is other pixels each time.
"""

from __future__ import annotations

import os
import struct
from typing import Any

_HEAD = 12  # bytes: "RIFF", the number of bytes behind these 8, the kind
_R = ord("R")  # of other files no more than one byte is looked at
_SUFFIXES = (b".avi", b".wav")
# Bytes that files of a kind may lack. Some programs count those 8 bytes, too, and the byte that
# fills up an odd size; some guess how long a recording will be before they write it.
_MAY_LACK = {b"AVI ": 9, b"WAVE": 4096}
# Programs that write into a pipe, and don't know the size, have 0 there, or a number from here on.
_UNKNOWN = 0x7FFFF000


def cut_off(data: Any) -> str:
    """What is wrong with an AVI or a WAV that has fewer bytes than its header says; else "".

    Args:
        data: The bytes of a file of any kind; anything with the buffer protocol. Other kinds pass,
            and so do files whose header says no size.
    """
    try:
        if len(data) < _HEAD or data[0] != _R:
            return ""
    except TypeError:  # no bytes: whoever takes them says so
        return ""
    return _lacking(bytes(data[:_HEAD]), len(data))


def file_cut_off(path: bytes) -> str:
    """`cut_off` of a file, if its name ends in .avi or .wav; one that can't be read passes."""
    if not path.lower().endswith(_SUFFIXES):
        return ""
    try:
        with open(path, "rb", buffering=0) as file:
            head, size = file.read(_HEAD), os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # of a path with a zero
        return ""  # who reads the whole file says why
    return _lacking(head, size) if len(head) == _HEAD else ""


def _lacking(head: bytes, count: int) -> str:
    begin, size, kind = struct.unpack("<4sI4s", head)
    if begin != b"RIFF" or kind not in _MAY_LACK or not 0 < size < _UNKNOWN:
        return ""
    whole = 8 + size
    if count >= whole - _MAY_LACK[kind]:
        return ""
    return f"it is cut off: by its header it has {whole} bytes, and not {count}"
