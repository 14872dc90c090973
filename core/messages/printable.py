"""Escaping of characters that control a terminal or hide text, in names and messages."""

from __future__ import annotations

import os
import re
import unicodedata

_LOWEST, _HIGHEST = 0xDC80, 0xDCFF  # code points to which Python decodes bytes that are not UTF-8

_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user and password in a URL
_SIGNATURE = re.compile(  # such as X-Amz-Signature, or Azure's sig
    r"([?&][^=&\s]*(?:sig|token|key|credential|secret|password)[^=&\s]*=)[^&\s'\"]+", re.IGNORECASE
)


def printable(name: str | bytes | os.PathLike[str]) -> str:
    """Returns a name on one line, with escapes, for errors, logs and pages.

    Control characters, line breaks, bidirectional control characters and bytes that are not UTF-8
    are escaped as in Python literals, because a file name may be untrusted. Users, passwords and
    signatures in URLs are replaced by dots.
    """
    text = os.fsdecode(name)
    if "://" in text:
        text = _SIGNATURE.sub(r"\1...", _USER.sub("...", text))
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    """Returns a message with all control characters escaped except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # spaces
        return character
    code = ord(character)
    if _LOWEST <= code <= _HIGHEST:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
