"""The files of an index: their paths, and a digest by which an index is kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from ..state.reader_files import described
from .byte_files import RemoteFile, is_remote


def content_key(kind: str, paths: Sequence[str], fields: Any) -> str:
    """A digest of files' names, sizes and parts of their content, and of what is wanted of them.

    Raises:
        OSError: If a file can't be read.
    """
    local = [path for path in paths if not is_remote(path)]
    for path in local:
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"{path} is {'no file' if os.path.exists(path) else 'not there'}"
            )
    parts = [kind, repr(fields), repr([path.rpartition("/")[2] for path in paths])]
    if local:
        parts.append(described("webdataset", {"paths": local})["paths"])
    for path in paths:
        if is_remote(path):
            file = RemoteFile(path)
            parts.append(f"{file.size} {file.version()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
