"""The sizes of the images of a source, which are read once and stored."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from ..formats.index import Index, load_or_build
from ..formats.paths import Path, home_expanded, path_text
from ..formats.progress import progress
from ..formats.spread import spread
from ..messages.printable import printable_text
from ..order.shuffle import Indices
from ..random.hashing import fold
from ..state.envelope import digest
from ..threads.workers import call_each
from .identity import identity_lines
from .source import (
    Source,
    Values,
    is_of_record,
    mapped_fields,
    maps_of,
    names_of,
    read_records,
    record_count,
    sizes_in_heads,
    version_of,
)

_log = logging.getLogger("dalijax")

_CHUNK = 1024  # records whose sizes are read together
_MOST_TRIED = 64  # images whose first bytes are tried


def read_lengths(
    source: Source, field: str | None, text: str | None, cache_dir: Path | None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Returns the sizes of the images of a source, and the lengths of its texts.

    They are stored if the source detects changes of its files, and no map returns the fields. A
    warning names records whose sizes can't be read.

    Args:
        source: The source.
        field: The field of the images: encoded, paths or arrays. None: no images.
        text: A field of arrays or lists, or None.
        cache_dir: Directory for the stored sizes; None: the default.

    Returns:
        Heights and widths, int32 [records, 2], 0 without images; the lengths of the texts, int32
        [records]; and whether the lengths of each record are known, bool [records].

    Raises:
        ValueError: If the source lacks a field, random maps may change the lengths, or the size of
            no image can be read.
        Exception: An error of the machine, the network or a remote file, and not of a record.
    """
    fields = [name for name in (field, text) if name is not None]
    for name in fields:
        if name not in source.fields:
            raise ValueError(f"the source has no field {name!r}, but {sorted(source.fields)}")
    is_random = any(function.is_random for _, function in maps_of(source))
    if is_random and not mapped_fields(source).isdisjoint(fields):
        raise ValueError(
            f"random maps may give {' or '.join(map(repr, fields))} other lengths in each epoch, "
            "but batches are planned with one length per record. Use map() for these fields"
        )
    folder = None if cache_dir is None else home_expanded(path_text(cache_dir))
    count = record_count(source)
    key = None
    version = version_of(source)
    if version is not None and mapped_fields(source).isdisjoint(fields):
        with contextlib.suppress(StateError):  # a bad record may have no identity
            # The sizes of a field depend on its kind, too: its layout, and whether it has paths.
            roles = [f"{name!r}: {source.fields.get(name or '')}" for name in (field, text)]
            parts = ["sizes 3", *identity_lines(source), version, *roles]
            key = digest(*(part.encode() for part in parts), length=32)

    def build() -> Index:
        sizes, texts = _read_all(source, count, field, text)
        return Index({"fields": fields}, {"sizes": sizes, "texts": texts})

    index = load_or_build(
        folder, key, build, lambda index: index.arrays["sizes"].shape == (count, 2)
    )
    sizes = index.arrays["sizes"]
    is_known = (sizes > (-1 if field is None else 0)).all(axis=1)
    if not is_known.any():
        raise ValueError(
            f"the size of none of the {count:,} images in {field!r} can be read. Pass the field of "
            f"the images. If it contains paths, pass kinds={{{field!r}: sources.Field(np.uint8, 1, "
            "is_path=True)} to the source, and decode it without read_file"
        )
    if not is_known.all():
        (unknown,) = np.nonzero(~is_known)
        _log.warning(
            "no batch contains %s of %s records, because their sizes or lengths can't be read, "
            "such as %s",
            f"{len(unknown):,}",
            f"{count:,}",
            printable_text(", ".join(names_of(source, unknown[:3]))),
        )
    return sizes, index.arrays["texts"], is_known


def _read_all(
    source: Source, count: int, field: str | None, text: str | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Reads the sizes of images, and the lengths of texts.

    A record that can't be read has the size -1.

    Raises:
        Exception: An error of the machine, the network or a remote file, and not of a record.
    """
    sizes = np.full((count, 2), -1, np.int32)
    texts = np.zeros(count, np.int32)
    texts_only = [] if text is None else [text]
    reads_heads = field is not None and _heads_suffice(source, count, field)

    def read(records: Indices) -> None:
        """Reads the lengths of some records; of ever fewer, if there are bad records."""
        try:
            sizes[records] = 0
            is_found = np.full(len(records), field is None)
            if field is not None and reads_heads:
                found = sizes_in_heads(source, records, field)
                is_found = found[:, 0] != 0
                sizes[records[is_found]] = found[is_found]
            if field is not None:
                read_whole(records[~is_found], [field, *texts_only])
            read_whole(records[is_found], texts_only)
        except Exception as error:
            if not is_of_record(error):
                raise
            sizes[records] = -1
            if len(records) > 1:
                for part in np.array_split(records, min(4, len(records))):
                    read(part)

    def read_whole(records: Indices, names: list[str]) -> None:
        """Reads the lengths of the named fields."""
        if not names or not len(records):
            return
        columns, errors = read_records(source, records, names, fold(0, 0, records))
        sizes[records[list(errors)]] = -1
        good = np.array([row for row in range(len(records)) if row not in errors], np.int64)
        if text is not None:
            texts[records[good]] = [len(columns[text][row]) for row in good.tolist()]
        if field is not None and field in names:
            images = [columns[field][row] for row in good.tolist()]
            sizes[records[good]] = _image_sizes(source, records[good], field, images)

    with progress("Reading the sizes of images", count, "records") as advance:

        def read_chunk(records: Indices) -> None:
            read(records)
            advance(len(records))

        chunks = np.array_split(np.arange(count), -(-count // _CHUNK))
        call_each(read_chunk, chunks, source.read_threads, "dalijax-sizes")
    return sizes, texts


def _heads_suffice(source: Source, count: int, field: str) -> bool:
    """Returns whether the first bytes of most images contain their size, as of 64 images.

    Otherwise, as for PNGs, reading these bytes doubles the number of requests.
    """
    try:
        sizes = sizes_in_heads(source, spread(count, _MOST_TRIED), field)
    except Exception as error:
        if not is_of_record(error):
            raise
        return True
    return bool(2 * (sizes[:, 0] != 0).sum() >= len(sizes))


def _image_sizes(source: Source, records: Indices, field: str, images: Values) -> NDArray[np.int32]:
    """Returns heights and widths of encoded images or of arrays, int32 [records, 2]."""
    kind = source.fields[field]
    return kind.image_sizes(images) if kind.image_layout else source.sizes(records, field, images)
