"""`read_file`: reads files by their paths, in the graph."""

from __future__ import annotations

from typing import Any

from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert


@do_not_convert
def read_file(path: DataNode, **arguments: Any) -> DataNode:
    """Reads a file for each sample, given its path.

    DALI's own threads read the files, several times faster than Python does.

    Args:
        path: Paths as UTF-8, uint8 of shape [length] for each sample. In records of Grain the path
            is a str; in records of `dalijax.sources.Records` it is ``path.encode()``.
        **arguments: Arguments of ``nvidia.dali.fn.io.file.read``.

    Returns:
        The contents, uint8 of shape [size of the file in bytes] for each sample.
    """
    contents: DataNode = fn.io.file.read(path, **arguments)  # type: ignore[attr-defined]
    return contents
