"""The command ``python -m dalijax.sources index``, which writes shared indexes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..formats import file_kinds
from ..formats.buffered_reader import SMALL_BUFFER, BufferedReader
from ..formats.byte_files import is_remote, open_files
from ..formats.file_columns import FileColumns
from ..formats.paths import path_list
from ..formats.shared_index import write_shared
from ..formats.tar_columns import tar_columns
from ..formats.tfrecord_columns import tfrecord_columns
from ..formats.tfrecord_headers import is_intact, records
from ..formats.tfrecord_index import LocatedRecord, check_some_intact, features_of
from ..messages.printable import printable
from ..remote.storage import Storage
from ..robots.episode_columns import STEP_PREFIX
from ..robots.episode_ranges import episode_ranges
from .command_line import argument, write

_NOUNS = {"tar": "samples", "tfrecord": "records", "rlds": "episodes"}


def add_command(commands: Any) -> None:
    """Adds ``index`` to the commands of a parser."""
    parser = commands.add_parser(
        "index",
        help="write an index next to tars or TFRecords",
        description="Writes an index of tars or TFRecords into their folder. `Tar`, `TFRecord` and "
        "`RLDS` find it, so that they need not read the files to open them. Files that an existing "
        "index contains are read again only if they have changed.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, URLs or patterns")
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=argument,
        metavar="NAME=VALUE",
        help="an entry of storage_options=, such as endpoint_url=http://minio:9000; may be "
        "repeated",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the index to a local file, e.g. to upload it to an HTTP server",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        write_indexes(options.paths, dict(options.storage_option), options.output)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"the index can't be written: {error}") from error


def write_indexes(
    paths: Sequence[str], storage_options: dict[str, object], output: str | None = None
) -> None:
    """Writes shared indexes of tars or TFRecords, and prints the sizes of the indexes.

    Args:
        paths: Paths, URLs or patterns of the files.
        storage_options: Options of the remote storage, as for the sources.
        output: The local file to write; None: a file in the folder of the indexed files.

    Raises:
        OSError: If a file can't be read, or an index can't be written.
        ValueError: If a file is neither a tar nor a TFRecord, or is damaged. Also if the files are
            on an HTTP server, and ``output`` is None.
    """
    storage = Storage(storage_options)
    files = list(dict.fromkeys(path_list(paths, storage)))
    kind = _kind_of(files, storage)
    if output is None and is_remote(files[0]) and files[0].startswith(("http://", "https://")):
        raise ValueError(
            f"{printable(files[0])} is on an HTTP server, which takes no files. Pass --output "
            f".dalijax-{kind}.index, and upload this file into the folder of the URLs"
        )

    def scan(names: Sequence[str]) -> FileColumns:
        if kind == "tar":
            return tar_columns(names, storage)[1]
        if kind == "rlds":
            return episode_ranges(names, storage)
        return tfrecord_columns(names, storage)[1]

    for index, size in write_shared(kind, files, storage, scan, output):
        rows = len(index.table)
        write(
            f"{printable(index.path)}: {rows:,} {_NOUNS[kind]} of {len(index.names):,} files in "
            f"{size:,} bytes ({size / max(1, rows):.1f} per record)"
        )


def _kind_of(paths: Sequence[str], storage: Storage) -> str:
    """Returns the kind of files: "tar", "tfrecord" or "rlds".

    The first tar, or the first intact record, determines the kind; "tfrecord" if all are empty.

    Raises:
        ValueError: If all records are damaged.
    """
    damaged: list[bool] = []
    for path in paths:
        (file,) = open_files([path], storage)
        if not file.size:
            continue
        if file_kinds.is_tar(file.read(0, file_kinds.HEAD)):
            return "tar"
        take = BufferedReader(file, SMALL_BUFFER)
        for number, (at, size) in enumerate(records(take, file.size, file.shown)):
            if is_intact(take, at, size):
                label = f"{file.shown}: record {number}"
                names = features_of(LocatedRecord(label, take, at, size), None)
                is_rlds = any(name.startswith(STEP_PREFIX.encode()) for name in names)
                return "rlds" if is_rlds else "tfrecord"
            damaged.append(True)
    check_some_intact(paths, np.array(damaged, np.bool_))
    return "tfrecord"
