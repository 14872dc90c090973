"""Groups the members of tars into samples, and describes samples that lack a member."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from ..messages.printable import printable
from .buffered_reader import SMALL_BUFFER, BufferedReader
from .byte_files import ByteFile
from .file_kinds import pointer_fault
from .tar_headers import Member, members

_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # decoded as in WebDataset
_TEXTS = ("txt", "text", "transcript")
_JSONS = ("json", "jsn")
NOT_NUMBER = -(1 << 63)  # the value of a member that does not contain an integer
NAMED = 3  # samples named in an error
_MOST_SHOWN = 40  # bytes of a member in an error


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


class Incomplete:
    """Describes the incomplete samples of a tar: samples that lack a field.

    This object does not keep the tar open, because there may be thousands of tars.

    Args:
        extensions: The field of each extension.
        shown: Name of the tar in errors.

    Attributes:
        shown: As above.
        fields: The fields that each sample has, by the name of the sample.
        reasons: Texts that describe the first three samples.
        extensions: Extensions of the samples in ``reasons``.
        has_links: Whether a sample has only links for a field.
        scattered: Names of samples whose members are not adjacent.
    """

    def __init__(self, extensions: Mapping[str, str], shown: str):
        self.shown = shown
        self._extensions: dict[str, list[bytes]] = {}  # by field
        for extension, name in extensions.items():
            self._extensions.setdefault(name, []).append(extension.encode())
        self.fields: dict[bytes, frozenset[str]] = {}
        self.reasons: list[str] = []
        self.extensions: set[str] = set()
        self.has_links = False
        self.scattered: list[str] = []

    def add(self, sample: Sample) -> None:
        """Describes a sample that lacks a field.

        Raises:
            ValueError: If the sample has a field twice instead.
        """
        lacking, members = [], sample.members
        found_fields = set()
        for name, extensions in self._extensions.items():
            matches = [members[e] for e in extensions if e in members]
            contents = [member for member in matches if not member.link]
            if len(contents) > 1:
                raise ValueError(
                    f"{self.shown}: {printable(sample.name)} has {name!r} twice: "
                    f"{[printable(member.name) for member in contents]}"
                )
            if matches:
                found_fields.add(name)
            if not matches:
                expected = " or ".join(f".{printable(extension)}" for extension in extensions)
                lacking.append(f"{expected} ({name!r})")
            elif not contents:
                self.has_links = True
                lacking.append(f"{printable(matches[0].name)}, which is a {matches[0].link} link")
        self.fields[sample.name] = frozenset(found_fields)
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
        samples: The samples of the tar with the given names, and possibly others.
    """
    extensions_of: dict[bytes, set[bytes]] = {}
    for _, name, extensions in samples:
        if name in names:
            if not extensions_of.setdefault(name, set()).isdisjoint(extensions):
                continue  # another sample of the same name
            if extensions_of[name]:
                yield printable(name)
            extensions_of[name].update(extensions)


def apart(tars: Sequence[Incomplete], fields: Set[str]) -> list[str]:
    """Returns descriptions of groups of incomplete samples that together have all fields.

    The samples of a group have the same name in different directories, such as ``images/1`` and
    ``labels/1``, or in different tars.

    Args:
        tars: The incomplete samples of each tar.
        fields: The names of all fields.

    Returns:
        At most three texts, such as "a.tar: images/1 and a.tar: labels/1".
    """
    groups: dict[bytes, dict[str, frozenset[str]]] = {}
    for tar in tars:
        for name, fields_found in tar.fields.items():
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
    take = BufferedReader(file, SMALL_BUFFER)
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
    """Returns the sample of a tar whose first header is at an offset.

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
