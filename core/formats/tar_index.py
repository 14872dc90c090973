"""Builds indexes of tars: the byte ranges of each sample's members, or the numbers in them."""

from __future__ import annotations

import array
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import narrow
from ..messages.printable import printable
from ..remote.storage import Storage
from .buffered_reader import SMALL_WINDOW, BufferedReader
from .byte_files import ByteFile
from .each_file import each_file
from .file_kinds import pointer_fault
from .index import Index
from .index_checks import column_digest
from .paths import object_names
from .tar_headers import Member, members

# Types of the entries of ``about`` that only indexes of tars have; see `about_tars`.
ABOUT: Mapping[str, type] = {
    "incomplete": int,
    "reasons": list,
    "extensions": list,
    "scattered": list,
    "has_links": bool,
    "apart": list,
}
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # decoded as in WebDataset
_TEXTS = ("txt", "text", "transcript")
_JSONS = ("json", "jsn")
_PARTS = ("offset", "size"), ("value", "damaged")  # the arrays of a field, and of a number
NOT_NUMBER = -(1 << 63)  # stands for a member that does not contain an integer
NAMED = 3  # samples named in an error
_MOST_SHOWN = 40  # bytes of a member in an error
_REPORTED = 1000  # samples between two updates of the progress bar
_MOST_INCOMPLETE = 100_000  # incomplete samples of a tar whose other members are searched for


class Sample(NamedTuple):
    """Adjacent members of a tar with the same name up to the first dot.

    Attributes:
        start: Offset of the first header.
        name: Name of the members up to the first dot, with their directory.
        members: The members by extension, e.g. b"jpg".
    """

    start: int
    name: bytes
    members: Mapping[bytes, Member]


def kind_of_extension(extension: str) -> str:
    """Returns the kind of the members with an extension: "number", "text", "json" or "bytes".

    As in WebDataset, only the part of the extension after its last dot matters.
    """
    last = extension.rpartition(".")[2].lower()
    kinds = {"number": _NUMBERS, "text": _TEXTS, "json": _JSONS}
    return next((kind for kind, endings in kinds.items() if last in endings), "bytes")


def kinds_of(extensions: Mapping[str, str]) -> dict[str, str]:
    """Returns the kind of each field: "number", "text", "json" or "bytes".

    Args:
        extensions: Maps the extensions of members to names of fields.

    Raises:
        ValueError: If a field joins extensions of different kinds.
    """
    kinds: dict[str, dict[str, str]] = {}
    for extension, name in extensions.items():
        kinds.setdefault(name, {}).setdefault(kind_of_extension(extension), extension)
    for name, extension_of in kinds.items():
        if len(extension_of) > 1:
            members = " and ".join(f".{e} is {kind}" for kind, e in extension_of.items())
            raise ValueError(
                f"fields joins members of different kinds in {name!r}: {members}. Give each its "
                "own field"
            )
    return {name: next(iter(extension_of)) for name, extension_of in kinds.items()}


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Returns the name of a member's sample, and the member's extension in lower case.

    The extension is b"" for members that belong to no sample, as in WebDataset: hidden files, names
    without a dot, and metadata such as ``__index__/1.jpg``.
    """
    slash = name.rfind(b"/") + 1
    dot = name.find(b".", slash)
    if dot <= slash or (name.startswith(b"__") and name.partition(b"/")[0].endswith(b"__")):
        return name, b""
    return name[:dot], name[dot + 1 :].lower()


def grouped(walk: Iterable[Member], path: str) -> Iterator[Sample]:
    """Yields the samples of a tar in their order.

    Links never end a sample, because WebDataset skips them.

    Args:
        walk: The members of the tar in their order.
        path: The name of the tar in errors.

    Raises:
        ValueError: If a sample has two members with the same extension.
    """
    last = links_key = 0, b""
    start = links_start = 0
    sample: dict[bytes, Member] = {}
    links: dict[bytes, Member] = {}  # links after the members of another sample
    for member in walk:
        name, extension = split_name(member.name)
        if not extension:
            continue
        key = member.archive, name
        if member.link and key == last:
            sample.setdefault(extension, member)
        elif member.link:
            if links and key != links_key:
                yield Sample(links_start, links_key[1], links)
                links = {}
            if not links:
                links_key, links_start = key, member.start
            links[extension] = member
        else:
            if key != last:
                if sample:
                    yield Sample(start, last[1], sample)
                last, start, sample = key, member.start, {}
                if links and key == links_key:
                    start, sample, links = links_start, links, {}
            if extension in sample and not sample[extension].link:
                raise ValueError(f"{path} has the member '{printable(member.name)}' twice")
            sample[extension] = member
    if sample:
        yield Sample(start, last[1], sample)
    if links:
        yield Sample(links_start, links_key[1], links)


class Columns:
    """The arrays of the index of one tar, and descriptions of its incomplete samples.

    This object does not keep the tar open, because there may be thousands of tars.

    Args:
        extensions: The field of each extension.
        shown: Name of the tar in errors.

    Attributes:
        shown: As above.
        arrays: "start", and "NAME.value" and "NAME.damaged", or "NAME.offset" and "NAME.size", of
            each field, with a row for each complete sample; see
            `dalijax.core.formats.index_checks`.
        num_incomplete: Number of samples that lack a field.
        incomplete: Fields of the first 100,000 incomplete samples, by the name of the sample.
        reasons: Texts that describe the first three incomplete samples.
        extensions: Extensions of the samples in ``reasons``.
        has_links: Whether a sample has only links for a field.
        scattered: Names of samples whose members are not adjacent.
    """

    def __init__(self, extensions: Mapping[str, str], shown: str):
        self.shown = shown
        # For each field its extensions, whether it is a number, and its two columns.
        self._fields: list[tuple[str, list[bytes], bool, array.array[int], array.array[int]]] = []
        self.arrays: dict[str, array.array[int]] = {}
        for name, kind in kinds_of(extensions).items():
            keys = [e.encode() for e, field in extensions.items() if field == name]
            first, second = (
                self.arrays.setdefault(f"{name}.{part}", array.array("q"))
                for part in _PARTS[kind == "number"]
            )
            self._fields.append((name, keys, kind == "number", first, second))
        self.start = self.arrays["start"] = array.array("q")
        self.num_incomplete = 0
        self.incomplete: dict[bytes, frozenset[str]] = {}
        self.reasons: list[str] = []
        self.extensions: set[str] = set()
        self.has_links = False
        self.scattered: list[str] = []

    def add(self, samples: Iterable[Sample], take: BufferedReader) -> None:
        """Adds rows for the complete samples of a tar, and describes the incomplete samples.

        Args:
            samples: The samples.
            take: Reads the tar.

        Raises:
            ValueError: If a sample has a field twice.
        """
        for sample in samples:
            row = []
            for name, extensions, *_ in self._fields:
                candidates = [sample.members[e] for e in extensions if e in sample.members]
                matches = [member for member in candidates if not member.link]
                if len(matches) > 1:
                    raise ValueError(
                        f"{take.file.shown}: {printable(sample.name)} has {name!r} twice: "
                        f"{[printable(member.name) for member in matches]}"
                    )
                row += matches
            if len(row) < len(self._fields):
                self._add_incomplete(sample)
                continue
            for (_, _, is_number, first, second), member in zip(self._fields, row):
                if is_number:
                    value = number_of(take(member.offset, member.size))
                    first.append(value or 0)
                    second.append(value is None)
                else:
                    first.append(member.offset)
                    second.append(member.size)
            self.start.append(sample.start)

    def _add_incomplete(self, sample: Sample) -> None:
        """Counts and describes a sample that lacks a field."""
        self.num_incomplete += 1
        lacking, members = [], sample.members
        found_fields = set()
        for name, extensions, *_ in self._fields:
            matches = [members[e] for e in extensions if e in members]
            if matches:
                found_fields.add(name)
            if not matches:
                expected = " or ".join(f".{printable(extension)}" for extension in extensions)
                lacking.append(f"{expected} ({name!r})")
            elif all(member.link for member in matches):
                self.has_links = True
                lacking.append(f"{printable(matches[0].name)}, which is a {matches[0].link} link")
        if len(self.incomplete) < _MOST_INCOMPLETE:
            self.incomplete[sample.name] = frozenset(found_fields)
        if len(self.reasons) < NAMED:
            has = [printable(extension) for extension, member in members.items() if not member.link]
            self.extensions.update(has)
            only = ", ".join(f".{extension}" for extension in has) or "no other member"
            name = f"{self.shown}: {printable(sample.name)}"
            self.reasons.append(f"{name} lacks {' and '.join(lacking)}, and has {only}")


def scattered(names: Collection[bytes], samples: Iterable[Sample]) -> Iterator[str]:
    """Yields names of samples whose members are not adjacent in a tar.

    Args:
        names: Names of incomplete samples.
        samples: The samples of the tar, which may be only the samples with the given names.
    """
    extensions_of: dict[bytes, set[bytes]] = {}
    for _, name, extensions in samples:
        if name in names:
            if not extensions_of.setdefault(name, set()).isdisjoint(extensions):
                continue  # another sample of the same name
            if extensions_of[name]:
                yield printable(name)
            extensions_of[name].update(extensions)


def _apart(tars: Sequence[Columns], fields: Set[str]) -> list[str]:
    """Returns descriptions of groups of incomplete samples that together have all fields.

    The samples of a group have the same name in different directories, as ``images/1`` and
    ``labels/1``, or in different tars.

    Args:
        tars: The columns of the tars.
        fields: The names of all fields.

    Returns:
        At most three texts, such as "a.tar: images/1 and a.tar: labels/1".
    """
    groups: dict[bytes, dict[str, frozenset[str]]] = {}
    for tar in tars:
        for name, fields_found in itertools.islice(
            tar.incomplete.items(), _MOST_INCOMPLETE // len(tars)
        ):
            label = f"{tar.shown}: {printable(name)}"
            groups.setdefault(name.rpartition(b"/")[2], {})[label] = fields_found
    return [
        " and ".join(list(group)[:NAMED])
        for group in groups.values()
        if len(group) > 1 and frozenset().union(*group.values()) == fields
    ][:NAMED]


def number_of(text: bytes) -> int | None:
    """Returns the integer in the content of a member; None if it is not an integer of 64 bits."""
    try:
        value = int(text)
    except ValueError:
        return None
    return value if NOT_NUMBER < value < 1 << 63 else None


def bad_number(name: str, extensions: Collection[str], file: ByteFile, start: int) -> ValueError:
    """Returns the error about a member that does not contain an integer.

    Args:
        name: The field of the member.
        extensions: The extensions of the field.
        file: The tar.
        start: Offset of the first header of the sample.

    Raises:
        OSError, ValueError: If the sample can't be read.
    """
    take = BufferedReader(file, SMALL_WINDOW)
    found = sample_at(take, start).members
    keys = map(str.encode, extensions)
    member = next(found[key] for key in keys if key in found and not found[key].link)
    label = f"{name!r} of {file.shown}: {printable(member.name)}"
    text = take(member.offset, member.size)
    if fault := pointer_fault(text):
        return ValueError(f"{label} can't be read: {fault}")
    return ValueError(
        f"{label} must be an integer of 64 bits, not {text[:_MOST_SHOWN]!r}. Store names of "
        "classes in .txt members, which are read as text"
    )


def sample_at(take: BufferedReader, start: int) -> Sample:
    """Returns the sample of a tar whose first header has an offset.

    Raises:
        OSError, ValueError: If the sample can't be read.
    """
    file = take.file
    # Links may be before the end of another sample, which is yielded first.
    for sample in grouped(members(take, file.size, file.shown, start), file.shown):
        if sample.start == start:
            return sample
    raise ValueError(f"{file.shown} has no sample at byte {start:,}")


def sample_key(file: ByteFile, start: int, head: bytes = b"") -> str:
    """Returns the name of a sample: the name of its members up to the first dot.

    Bytes that are not UTF-8 become surrogates, as with tarfile and WebDataset, so that names stay
    distinct.

    Args:
        file: The tar.
        start: Offset of the sample's first header.
        head: The first bytes of the sample, if already read.

    Raises:
        OSError, ValueError: If the header can't be read.
    """

    def take(at: int, count: int) -> bytes:
        begin = at - start
        data = head[begin : begin + count]
        return data if len(data) == count else file.read(at, count)

    for member in members(take, file.size, file.shown, start):
        return os.fsdecode(split_name(member.name)[0])
    raise ValueError(f"{file.shown} has no sample at byte {start:,}")


def columns_of(extensions: Mapping[str, str]) -> set[str]:
    """Returns the names of the arrays in an index of tars, given the field of each extension."""
    columns = {"start"}
    for name, kind in kinds_of(extensions).items():
        columns |= {f"{name}.{part}" for part in _PARTS[kind == "number"]}
    return columns


def index_tars(
    paths: Sequence[str], extensions: Mapping[str, str], storage: Storage | None = None
) -> Index:
    """Reads tars, and returns their index; see `dalijax.core.formats.index_checks`.

    Args:
        paths: The tars.
        extensions: The field of each extension.
        storage: Access to remote files.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged, or a sample has a field twice.
    """
    sizes, tars = each_file(
        paths,
        "tars",
        storage or Storage(),
        lambda take, advance: _indexed(take, extensions, advance),
    )
    arrays = {
        name: np.concatenate([np.frombuffer(tar.arrays[name], np.int64) for tar in tars])
        for name in tars[0].arrays
    }
    arrays |= {name: narrow(arrays[name]) for name in arrays if name.endswith(".value")}
    arrays |= {name: arrays[name] > 0 for name in arrays if name.endswith(".damaged")}
    first = [0, *np.cumsum([len(tar.arrays["start"]) for tar in tars]).tolist()]
    fields = kinds_of(extensions).keys()
    return Index(about_tars(paths, sizes, first, arrays, tars, fields), arrays)


def about_tars(
    paths: Sequence[str],
    sizes: Sequence[int],
    first: Sequence[int],
    arrays: Mapping[str, Any],
    tars: Sequence[Columns],
    fields: Set[str],
) -> dict[str, Any]:
    """Returns the ``about`` of an index of tars, which also describes incomplete samples.

    Args:
        paths: The tars.
        sizes: The sizes of the tars in bytes.
        first: Number of complete samples before each tar, and in total.
        arrays: The arrays of the index.
        tars: Columns with the incomplete samples of each tar, or of some tars.
        fields: Names of the fields.
    """
    return {
        "names": object_names(paths),
        "sizes": list(sizes),
        "first": list(first),
        "columns": column_digest(arrays),
        "incomplete": sum(tar.num_incomplete for tar in tars),
        "reasons": [reason for tar in tars for reason in tar.reasons][:NAMED],
        "extensions": sorted({extension for tar in tars for extension in tar.extensions}),
        "scattered": [name for tar in tars for name in tar.scattered][:NAMED],
        "has_links": any(tar.has_links for tar in tars),
        "apart": [] if first[-1] else _apart(tars, fields),
    }


def _indexed(take: BufferedReader, extensions: Mapping[str, str], advance: Any) -> Columns:
    """Returns the index columns of one tar, after reading its headers."""
    file = take.file
    columns = Columns(extensions, file.shown)

    def samples() -> Iterator[Sample]:
        return grouped(members(take, file.size, file.shown), file.shown)

    columns.add(counted(samples(), file.size, advance), take)
    if columns.incomplete:
        names = itertools.islice(scattered(columns.incomplete, samples()), NAMED)
        columns.scattered = [f"{file.shown}: {name}" for name in names]
    return columns


def counted(samples: Iterable[Sample], size: int, advance: Any) -> Iterator[Sample]:
    """Yields the same samples, and reports their bytes to the progress bar.

    Args:
        samples: The samples of a tar.
        size: The size of the tar in bytes.
        advance: Is called with the number of bytes processed since the last call.
    """
    at = 0
    for count, sample in enumerate(samples):
        if count % _REPORTED == 0:
            advance(sample.start - at)
            at = sample.start
        yield sample
    advance(size - at)
