"""Whether AVI and WAV files are whole: DALI decodes what is there of one that was cut off.

Of a WAV that is a shorter recording. Of an AVI it may be memory that nothing was written to, which
is other pixels each time.
"""

from __future__ import annotations

import os
import struct
from typing import Any

_HEAD = 12  # bytes: "RIFF", the number of bytes behind these 8, the kind
_KINDS = (b"AVI ", b"WAVE")
_R = ord("R")  # of other files no more than one byte is looked at
_SUFFIXES = (b".avi", b".wav")
# Programs that write into a pipe, and don't know the size, have 0 there, or a number from here on.
_UNKNOWN = 0x7FFFF000


def check_whole(data: Any) -> None:
    """Raises ValueError where an AVI or a WAV has fewer bytes than its header says.

    Args:
        data: The bytes of a file of any kind; anything with the buffer protocol. Other kinds pass,
            and so do files whose header says no size.
    """
    if len(data) >= _HEAD and data[0] == _R:
        _check(bytes(data[:_HEAD]), len(data))


def check_whole_file(path: bytes) -> None:
    """`check_whole` of a file, if its name ends in .avi or .wav; one that can't be read passes.

    Raises:
        ValueError: If it is cut off.
    """
    if not path.lower().endswith(_SUFFIXES):
        return
    try:
        with open(path, "rb", buffering=0) as file:
            head, size = file.read(_HEAD), os.fstat(file.fileno()).st_size
    except OSError:
        return  # who reads the whole file says why
    if len(head) == _HEAD:
        _check(head, size)


def _check(head: bytes, count: int) -> None:
    begin, size, kind = struct.unpack("<4sI4s", head)
    if begin != b"RIFF" or kind not in _KINDS or not 0 < size < _UNKNOWN:
        return
    whole = 8 + size
    if count < whole - size % 2:  # some programs leave out the byte that fills up an odd size
        raise ValueError(f"it is cut off: by its header it has {whole} bytes, and not {count}")
