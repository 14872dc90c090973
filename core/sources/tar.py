"""`Tar`: samples of tars (WebDataset) with random access."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import knows_its_names
from ..formats.byte_files import Stamp, is_remote
from ..formats.cached_index import cached_index
from ..formats.field import Field
from ..formats.file_columns import FileColumns
from ..formats.index import Index
from ..formats.paths import Path, Paths, path_list
from ..formats.shared_index import shared_columns
from ..formats.tar_columns import has_columns, index_tars, is_valid, select_tars, tar_columns
from ..formats.tar_samples import bad_number, kinds_of, sample_key
from ..formats.wds_index import columns_of_wds
from ..messages.printable import printable, printable_repr
from ..messages.user_warnings import warn_user
from ..order.shuffle import Indices
from ..remote.storage import Storage, open_storage
from .byte_records import ByteRecords, Decode, as_json, as_text
from .field_names import are_swapped, check_fields, suggest_swapped
from .source import Values

_log = logging.getLogger("dalijax")

_HEAD = 1536  # bytes read to find the name of a sample, enough for an extended header
_DECODERS: Mapping[str, Decode] = {"text": as_text, "json": as_json}
_EXAMPLE = "{'data': 'jpg;png', 'label': 'cls'}"


class Tar(ByteRecords):
    """Samples of tars in WebDataset's format with random access: no shuffle buffer is needed.

    Members that follow one another and have the same name up to the first dot are a sample; the
    text after that dot is the extension. The headers are read once, and the index is stored;
    ``python -m dalijax.sources index`` stores it next to the tars, for all users. Concatenated tars
    (``cat a.tar b.tar``) are read to the end.

    The last part of an extension determines the kind of a field, as in WebDataset: ``cls``,
    ``cls2``, ``class``, ``count``, ``index``, ``inx`` and ``id`` are int32 scalars, which the
    index contains; a member that is not an integer is a bad record. ``txt``, ``text``,
    ``transcript``, ``json`` and ``jsn`` bypass the graph. All others are bytes, as uint8 arrays. So
    ``label.cls`` is a number, and ``x.npy`` is bytes.

    Args:
        paths: A path or several, or URLs. Patterns such as ``*.tar`` and ``{000..127}.tar`` are
            expanded.
        fields: Maps the name of each field to an extension, in lower case; ``"jpg;png"`` is either
            of them. As in WebDataset, ``__key__`` is the sample's name and ``__url__`` its tar; a
            URL has neither a password nor values of a query.
        missing: "raise": a sample that lacks a member raises an error. "skip": such samples are
            skipped.
        index_paths: Index files of DALI's ``wds2idx`` for remote tars, which replace a shared
            index. Only numbers and some headers of the tars are then read. Local tars do not need
            index files.
        cache_dir: Directory of stored indexes; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        identity: A string that replaces the digest of names, sizes and 64 samples in states.
        storage_options: Credentials and settings of remote files; see docs/sources.md.
        read_ahead: Number of bytes of remote files that are requested before they are needed.
        cache: A folder on a local disk that stores the bytes that were read from remote files, for
            later epochs and runs; see docs/sources.md.
        cache_bytes: Largest size of this folder, such as ``"200GB"``; None: all but a tenth of the
            disk.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged or cut off, or has no samples, samples lack a field, or no
            sample has an integer in a field of integers.
    """

    @knows_its_names
    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, str],
        *,
        missing: str = "raise",
        index_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        cache_dir: Path | None = None,
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_ahead: int | str = "128MB",
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
    ):
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing must be 'raise' or 'skip', not {missing!r}")
        storage = open_storage(storage_options, read_ahead, cache, cache_bytes)
        tars = path_list(paths, storage)
        wds_indexes: list[str] | None = None
        if index_paths is not None and any(map(is_remote, tars)):
            wds_indexes = path_list(index_paths, storage)
            if len(wds_indexes) != len(tars):
                raise ValueError(
                    f"index_paths has {len(wds_indexes):,} files for {len(tars):,} tars. Pass the "
                    "index of each tar, in the same order"
                )
        elif index_paths is not None:
            warn_user(
                "Tar does not read index_paths of local tars. Omit them: it reads the headers of "
                "the tars once, and stores its own index (cache_dir=)",
                UserWarning,
            )
        extensions = _extensions(fields)
        members = kinds_of(extensions)
        self._described = {
            name: _DESCRIPTIONS[part] for name, part in fields.items() if part in _DESCRIPTIONS
        }
        index = cached_index(
            cache_dir,
            "tar 5",
            tars,
            extensions,
            lambda: index_tars(tars, extensions, storage),
            lambda index: is_valid(index, extensions),
            storage,
            functools.partial(_without_scan, tars, extensions, storage, wds_indexes),
        )
        _check_complete(tars, fields, index.about, missing)
        kinds: dict[str, Field] = {}
        decoders: dict[str, Decode] = {}
        for name, kind in members.items():
            if kind == "number":
                kinds[name] = Field(index.arrays[f"{name}.value"].dtype)
            elif kind in _DECODERS:
                kinds[name], decoders[name] = Field(None), _DECODERS[kind]
            else:
                kinds[name] = Field(np.dtype(np.uint8), 1)
        kinds |= dict.fromkeys(self._described, Field(None))
        self._extensions = extensions
        index_again = functools.partial(index_tars, extensions=extensions, storage=storage)
        super().__init__(
            index,
            tars,
            kinds,
            decoders,
            identity,
            index_again=index_again,
            storage=storage,
        )
        for name in kinds:
            damaged = index.arrays.get(f"{name}.damaged")
            if damaged is not None and damaged.all():
                raise self._bad_number(name, 0)

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        columns = super().read(indices, [name for name in names if name not in self._described])
        for name in names:
            if name in self._described:
                columns[name] = self._described[name](self, indices)
        return columns

    def _check_intact(self, indices: Indices, names: Sequence[str]) -> None:
        for name in names:
            damaged = self._index.arrays.get(f"{name}.damaged")
            if damaged is not None and damaged[indices].any():
                raise self._bad_number(name, int(indices[np.argmax(damaged[indices])]))

    def _bad_number(self, name: str, index: int) -> ValueError:
        """Returns the error about a record whose field ``name`` is not an integer."""
        number, start = self._file_and_offset(index)
        extensions = [e for e, field in self._extensions.items() if field == name]
        return bad_number(name, extensions, self._files.file(number), start)

    def _keys(self, indices: Indices) -> list[str]:
        """Returns the name of each sample, i.e. the field ``__key__``."""
        # Reads all headers in one call: a request for each would be slow over a network.
        numbers, starts = self._files_and_offsets(indices)
        sizes = np.minimum(_HEAD, np.array(self._files.sizes, np.int64)[numbers] - starts)
        heads = self._files.read(
            numbers, starts, sizes, lambda row: f"the header of sample {indices[row]}"
        )
        return [
            sample_key(self._files.file(number), start, head.tobytes())
            for number, start, head in zip(numbers.tolist(), starts.tolist(), heads, strict=True)
        ]

    def _urls(self, indices: Indices) -> list[str]:
        """Returns the path or URL of each sample's tar, i.e. the field ``__url__``."""
        numbers = self._files_and_offsets(indices)[0].tolist()
        names = {number: self._files.name(number) for number in set(numbers)}
        return [names[number] for number in numbers]

    def name(self, index: int) -> str:
        """Returns the tar and the sample's name in it; see `dalijax.sources.Source`."""
        number, start = self._file_and_offset(index)
        url = self._files.name(number)
        try:
            return f"{url}: {sample_key(self._files.file(number), start)}"
        except (OSError, ValueError):
            return f"{url}: the sample at byte {start:,}"

    def _record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records, whose headers are read together."""
        try:
            keys = self._keys(indices)
        except (OSError, ValueError):  # a bad header must not hide the names of other samples
            return [self.name(index) for index in indices.tolist()]
        return [f"{url}: {key}" for url, key in zip(self._urls(indices), keys, strict=True)]


def _without_scan(
    tars: Sequence[str],
    extensions: Mapping[str, str],
    storage: Storage,
    wds_indexes: Sequence[str] | None,
    stamps: Sequence[Stamp],
) -> Index | None:
    """Returns the index of tars without a scan: from indexes of wds2idx, or shared indexes.

    Returns None if there are neither.

    Args:
        tars: The tars.
        extensions: The field of each extension.
        storage: Access to remote files.
        wds_indexes: The index of wds2idx of each tar, if the user passed ``index_paths=``.
        stamps: The stamps of the tars.
    """
    table: FileColumns | None
    if wds_indexes is not None:
        table = columns_of_wds(tars, wds_indexes, stamps, extensions, storage)
    else:
        table = shared_columns(
            "tar", tars, stamps, extensions, storage, lambda few: tar_columns(few, storage)[1]
        )
    if table is None or not has_columns(table, extensions):
        return None
    sizes = [stamp[0] for stamp in stamps]
    return select_tars(table, tars, sizes, extensions, storage)


_DESCRIPTIONS: Mapping[str, Callable[[Tar, Indices], list[str]]] = {
    "__key__": Tar._keys,
    "__url__": Tar._urls,
}


def _alternatives(text: str) -> list[str]:
    """Returns the extensions, in lower case, that a text such as "jpg;png" contains."""
    return [part.strip().removeprefix(".") for part in text.lower().split(";")]


def _extensions(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the field of each extension, in lower case, from the user's ``fields=``.

    Raises:
        TypeError: If an extension or the name of a field is not a string.
        ValueError: If there is no extension, an extension is repeated, or keys and values are
            swapped.
    """
    check_fields(fields, "extensions", _EXAMPLE)
    for name, text in fields.items():
        if not isinstance(text, str):
            raise TypeError(
                f"fields[{name!r}] must be an extension, or alternatives such as 'jpg;png', as in "
                f"{_EXAMPLE}, not {printable_repr(text)}"
            )
    if any(";" in name for name in fields):
        raise ValueError(suggest_swapped(fields, "extensions"))
    extensions: dict[str, str] = {}
    for name, text in fields.items():
        for extension in _alternatives(text) if text not in _DESCRIPTIONS else ():
            if not extension:
                raise ValueError(f"fields[{name!r}] has an empty extension: {text!r}")
            other = extensions.setdefault(extension, name)
            if other != name:
                raise ValueError(
                    f"fields has the extension {extension!r} for two fields, {other!r} and "
                    f"{name!r}. Omit one of them. Alternatives of a field are joined, as in "
                    f"{_EXAMPLE}"
                )
    if not extensions:
        raise ValueError(
            f"fields has only {sorted(fields.values())}. Add a member of the samples, as in "
            f"{_EXAMPLE}"
        )
    return extensions


def _check_complete(
    tars: Sequence[str], fields: Mapping[str, str], about: Mapping[str, Any], missing: str
) -> None:
    """Raises ValueError with the fix if samples lack a field, unless they may be skipped.

    Args:
        tars: The tars.
        fields: The user's ``fields=``.
        about: The ``about`` of the index.
        missing: The user's ``missing=``.
    """
    count, num_complete = about["incomplete"], about["first"][-1]
    reasons, cure = "; ".join(about["reasons"]), _cure(fields, about)
    named = ", ".join(map(printable, tars[:3]))
    if not count and not num_complete:
        raise ValueError(
            f"{named} has no samples. The members of a sample are files "
            "with names such as 0001.jpg and 0001.cls"
        )
    if count and missing == "raise":
        lack = "1 sample lacks" if count == 1 else f"{count:,} samples lack"
        raise ValueError(f"{lack} a member that fields= names: {reasons}. {cure}")
    if not num_complete:
        members = sorted(part for part in fields.values() if part not in _DESCRIPTIONS)
        raise ValueError(f"no sample of {named} has all of {members}: {reasons}. {cure}")
    if about["scattered"] or about["has_links"]:
        _log.warning("missing='skip' skips %s samples: %s. %s", f"{count:,}", reasons, cure)


def _cure(fields: Mapping[str, str], about: Mapping[str, Any]) -> str:
    """Returns a text that explains how to repair tars with incomplete samples."""
    if about["scattered"]:
        return (
            f"The members of {', '.join(about['scattered'])} are not adjacent. Pack the "
            "tar again, sorted by name: tar --sort=name -cf NEW.tar -C FOLDER ."
        )
    if about["has_links"]:
        return (
            "A link has no content. Pack the tar again: tar --dereference "
            "--hard-dereference --sort=name -cf NEW.tar -C FOLDER ."
        )
    if _are_swapped(fields, about):
        return suggest_swapped(fields, "extensions")
    if about["apart"]:
        return (
            f"These are different samples: {'; '.join(about['apart'])}. The members of a sample "
            "must have the same directory and the same name up to the first dot, and be adjacent "
            "in one tar. Pack them again"
        )
    if not about["first"][-1]:  # missing='skip' would skip everything
        members = ", ".join(f".{extension}" for extension in about["extensions"]) or "only links"
        return f"Name extensions in fields= that the samples have: {members}"
    return "Skip them by missing='skip'"


def _are_swapped(fields: Mapping[str, str], about: Mapping[str, Any]) -> bool:
    """Returns whether no sample is complete because names and extensions are swapped."""
    existing = {*about["extensions"], *_DESCRIPTIONS}
    return not about["first"][-1] and are_swapped(
        fields, lambda text: not existing.isdisjoint(_alternatives(text))
    )
