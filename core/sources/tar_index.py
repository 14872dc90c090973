"""Indexes of tars: which bytes of which members each sample has."""

from __future__ import annotations

import array
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..state.reader_files import below_common_root
from .byte_files import ByteFile, Window, is_remote, open_file
from .dali_index import AlikeSamples, Sample, read_dali_index
from .identity import spread
from .index import Index
from .progress import progress
from .tar_headers import Member, members
from .values import narrow

_log = logging.getLogger("dalijax")

NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # as WebDataset reads them
_NAMED = 3  # samples that an error names
_REPORTED = 1000  # samples between two steps of the progress
_THREADS = 8  # tars that are walked at once: what takes the time is the disk
_MOST_MEMBERS = 100  # of a sample that is looked at


def extensions_of(fields: Mapping[str, str]) -> dict[str, str]:
    """The field of each single extension."""
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError(
            f"fields must say which members are wanted, like {{'jpg': 'data'}}, not {fields!r}"
        )
    extensions: dict[str, str] = {}
    for wanted, name in fields.items():
        for extension in wanted.lower().split(";"):  # of members, too: upper case is no other
            extension = extension.removeprefix(".")
            if not extension or extensions.setdefault(extension, name) != name:
                raise ValueError(
                    f"fields has the extension {extension!r} for two fields, or an empty one"
                )
    if len(set(fields.values())) < len(fields):
        raise ValueError(
            f"fields has a name twice: {list(fields.values())}; join 'jpg;png' instead"
        )
    return extensions


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """A member's sample and extension; b"" for hidden files and those without a dot."""
    slash = name.rfind(b"/") + 1
    dot = name.find(b".", slash)
    if dot <= slash:
        return name, b""
    return name[:dot], name[dot + 1 :].lower()


def grouped(walk: Iterable[Member], path: str) -> Iterator[Sample]:
    """Samples of members that follow one another."""
    last: bytes | None = None
    start = 0
    sample: dict[bytes, tuple[int, int]] = {}
    for name, begin, offset, size in walk:
        stem, extension = split_name(name)
        if not extension:
            continue
        if stem != last:
            if sample:
                yield start, sample
            last, start, sample = stem, begin, {}
        elif extension in sample:
            raise ValueError(f"{path} has the member {name.decode(errors='replace')!r} twice")
        sample[extension] = offset, size
    if sample:
        yield start, sample


class _Columns:
    """The rows of one tar as they come.

    It does not keep the tar open, of which there may be thousands.

    Args:
        extensions: The field of each extension.
    """

    def __init__(self, extensions: Mapping[str, str]):
        names = dict.fromkeys(extensions.values())
        # Of each field its extensions, and two columns: offset and size, or the value alone.
        self._fields: list[tuple[str, list[bytes], array.array[int], array.array[int] | None]] = []
        self.arrays: dict[str, array.array[int]] = {}
        for name in names:
            keys = [e.encode() for e, field in extensions.items() if field == name]
            number = any(e.decode() in NUMBERS for e in keys)
            first = self.arrays[f"{name}.{'value' if number else 'offset'}"] = array.array("q")
            second = None if number else self.arrays.setdefault(f"{name}.size", array.array("q"))
            self._fields.append((name, keys, first, second))
        self.start = self.arrays["start"] = array.array("q")
        self.incomplete = 0
        self.first_incomplete: list[str] = []

    def add(self, samples: Iterable[Sample], take: Window) -> None:
        """Adds samples of a tar; those that lack a field are counted."""
        for start, sample in samples:
            row = []
            for name, extensions, _, _ in self._fields:
                places = [sample[e] for e in extensions if e in sample]
                if len(places) > 1:
                    raise ValueError(f"{sample_name(take.file, start)} has {name!r} twice")
                row += places
            if len(row) < len(self._fields):
                self._lacks(start, sample, take)
                continue
            for (name, _, first, second), (offset, size) in zip(self._fields, row):
                if second is None:
                    first.append(_number(name, start, take(offset, size), take))
                else:
                    first.append(offset)
                    second.append(size)
            self.start.append(start)

    def add_alike(self, samples: AlikeSamples, take: Window) -> None:
        """Adds samples of a tar that have the same extensions."""
        columns = [
            [samples.members[e] for e in extensions if e in samples.members]
            for _, extensions, _, _ in self._fields
        ]
        if any(len(places) != 1 for places in columns):  # some is lacking, or there twice
            self.add(samples.single(range(len(samples.start))), take)
            return
        for (name, _, first, second), ((offset, size),) in zip(self._fields, columns):
            if second is None:
                first.extend(_numbers(name, samples.start, offset, size, take))
            else:
                first.frombytes(offset.tobytes())
                second.frombytes(size.tobytes())
        self.start.frombytes(samples.start.tobytes())

    def _lacks(self, start: int, sample: Mapping[bytes, Any], take: Window) -> None:
        self.incomplete += 1
        if len(self.first_incomplete) < _NAMED:
            lacking = [name for name, keys, _, _ in self._fields if not sample.keys() & set(keys)]
            has = [extension.decode(errors="replace") for extension in sample]
            name = sample_name(take.file, start)
            self.first_incomplete.append(f"{name} lacks {lacking}, and has {has}")


def _numbers(
    name: str,
    starts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    take: Window,
) -> array.array[int]:
    """The numbers of many samples, of a local file in half the time that `take` needs."""
    read = take if is_remote(take.file.path) else take.file.read
    places = offsets.tolist(), sizes.tolist()
    try:
        return array.array("q", map(int, map(read, *places)))
    except (ValueError, OverflowError):  # one of them is none, and is named
        rows = zip(starts.tolist(), *places)
        return array.array("q", [_number(name, at, take(*place), take) for at, *place in rows])


def _number(name: str, start: int, text: bytes, take: Window) -> int:
    try:
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    except ValueError:
        pass
    raise ValueError(
        f"{name!r} of {sample_name(take.file, start)} must be a whole number of 64 bits, not "
        f"{text[:40]!r}"
    )


def sample_name(file: ByteFile, start: int) -> str:
    """The tar, and the name of the sample that begins at an offset."""
    try:
        name, *_ = next(members(Window(file), file.size, file.path, start))
    except (OSError, ValueError, StopIteration):
        return f"{file.path}: the sample at byte {start:,}"
    return f"{file.path}: {split_name(name)[0].decode(errors='replace')}"


def index_tars(
    paths: Sequence[str], dali_indexes: Sequence[str] | None, extensions: Mapping[str, str]
) -> Index:
    """The index of some tars; see `dalijax.core.sources.byte_records` for what it has.

    Args:
        paths: The tars.
        dali_indexes: DALI's indexes of them; None: those that lie beside, if they fit.
        extensions: The field of each extension.
    """
    sizes = [open_file(path).size for path in paths]
    indexes: Sequence[str | None] = dali_indexes or [None] * len(paths)
    with progress(f"Indexing {len(paths)} tars", sum(sizes)) as done:
        pool = ThreadPoolExecutor(_THREADS)
        try:
            tars = list(
                pool.map(
                    lambda path, dali: _indexed(open_file(path), dali, extensions, done),
                    paths,
                    indexes,
                )
            )
        finally:
            pool.shutdown(cancel_futures=True)
    arrays = {
        name: np.concatenate([np.frombuffer(tar.arrays[name], np.int64) for tar in tars])
        for name in tars[0].arrays
    }
    arrays |= {name: narrow(arrays[name]) for name in arrays if name.endswith(".value")}
    reasons = [reason for tar in tars for reason in tar.first_incomplete]
    about = {
        "names": below_common_root(paths),
        "sizes": sizes,
        "first": [0, *np.cumsum([len(tar.arrays["start"]) for tar in tars]).tolist()],
        "incomplete": sum(tar.incomplete for tar in tars),
        "reasons": reasons[:_NAMED],
    }
    return Index(about, arrays)


def _indexed(
    file: ByteFile, dali_index: str | None, extensions: Mapping[str, str], done: Any
) -> _Columns:
    path = dali_index or os.path.splitext(file.path)[0] + ".idx"
    if dali_index is not None or not (is_remote(path) or not os.path.isfile(path)):
        columns = _Columns(extensions)
        try:
            take = Window(file)
            for samples in _checked(read_dali_index(path), file):
                columns.add_alike(samples, take)
            done(file.size)
            return columns
        except (ValueError, OSError) as error:
            if dali_index is not None:
                raise ValueError(f"{path} is no index of {file.path}: {error}") from error
            _log.warning("%s is not used, since it does not fit: %s", path, error)
    columns, take = _Columns(extensions), Window(file)
    walk = grouped(members(take, file.size, file.path), file.path)
    columns.add(_counted(walk, file.size, done), take)
    return columns


def _counted(samples: Iterable[Sample], size: int, done: Any) -> Iterator[Sample]:
    """Samples, whose bytes the progress is told."""
    at = 0
    for count, sample in enumerate(samples):
        if count % _REPORTED == 0:
            done(sample[0] - at)
            at = sample[0]
        yield sample
    done(size - at)


def _checked(samples: Iterable[AlikeSamples], file: ByteFile) -> Iterator[AlikeSamples]:
    """Samples of an index, of which the first thousand and every thousandth are looked up."""
    count = 0
    for some in samples:
        numbers = range(count, count + len(some.start))
        places = [k for k, number in enumerate(numbers) if number < 1000 or number % 1000 == 0]
        for start, sample in some.single(places):
            if not _is_there(file, start, sample.values()):
                raise ValueError(f"{file.path} has other members at byte {start:,}")
        count = numbers.stop
        yield some


def _is_there(file: ByteFile, start: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether members with such contents begin at an offset."""
    rest = set(ranges)
    try:
        for _, member in zip(
            range(_MOST_MEMBERS), members(Window(file), file.size, file.path, start)
        ):
            rest.discard(member[2:])
            if not rest:
                return True
    except ValueError:
        pass
    return not rest


def fits(paths: Sequence[str], index: Index) -> bool:
    """Whether evenly spread samples of an index lie where it says."""
    about, arrays = index.about, index.arrays
    names = [name.removesuffix(".size") for name in arrays if name.endswith(".size")]
    if len(about["sizes"]) != len(paths):
        return False
    for place in spread(int(about["first"][-1]), 4 if is_remote(paths[0]) else 64).tolist():
        number = int(np.searchsorted(about["first"], place, side="right")) - 1
        file = open_file(paths[number])
        ranges = [
            (int(arrays[f"{n}.offset"][place]), int(arrays[f"{n}.size"][place])) for n in names
        ]
        start = int(arrays["start"][place])
        if file.size != about["sizes"][number] or not _is_there(file, start, ranges):
            return False
    return True
