"""DALI's index files of tars, as ``wds2idx`` writes them."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from .byte_files import open_stream

# Where a sample begins, and extension, offset and size of its members.
Sample = tuple[int, dict[bytes, tuple[int, int]]]

_BLOCK = 512
_VERSIONS = {b"v1.1": 3, b"v1.2": 4}  # words of each member: extension, offset, size, name
_LONGEST_NAME = 100  # bytes, of names that need no header of their own
_BYTES = 1 << 19  # of lines that are looked at together


@dataclasses.dataclass(frozen=True)
class AlikeSamples:
    """Samples that have the same extensions.

    Attributes:
        start: Where each begins, int64 [samples].
        members: Of each extension the offsets and the sizes, int64 [2, samples].
    """

    start: NDArray[np.int64]
    members: Mapping[bytes, NDArray[np.int64]]

    def single(self, places: Iterable[int]) -> Iterator[Sample]:
        """Some of them, one by one."""
        for k in places:
            sample = {e: (int(at[k]), int(size[k])) for e, (at, size) in self.members.items()}
            yield int(self.start[k]), sample


def read_dali_index(path: str) -> Iterator[AlikeSamples]:
    """The samples of an index file, together where neighbours have the same extensions.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is damaged, or has names of which ``wds2idx`` does not know the offset:
            those above 100 bytes, which have headers of their own, and others that it escapes.
    """
    with open_stream(path) as file:
        version, _, count = file.readline().strip().partition(b" ")
        if version not in _VERSIONS or not count.isdigit():
            raise ValueError(f"{path} does not begin with 'v1.1' or 'v1.2' and a number of samples")
        words = _VERSIONS[version]
        number = 1
        while text := file.read(_BYTES):
            text += file.readline()  # the rest of the last line
            lines = text.count(b"\n") + (not text.endswith(b"\n"))
            alike = _alike(text, lines, words)
            if alike is not None:
                yield alike
            else:
                for place, line in enumerate(text.removesuffix(b"\n").split(b"\n"), number + 1):
                    sample = _sample(line, words, f"{path}: line {place}")
                    if sample:
                        yield _alike_samples({e: np.array([v]).T for e, v in sample.items()})
            number += lines
    if number - 1 != int(count):
        raise ValueError(f"{path} has {number - 1} samples and says {int(count)}")


def _sample(line: bytes, words: int, place: str) -> dict[bytes, tuple[int, int]]:
    """Extension, offset and size of the members of a line, at a place of a file."""
    parts = line.split()
    if not parts or len(parts) % words:
        raise ValueError(f"{place} is not a whole number of members")
    escaped = not line.isascii() or b"\\" in line
    if words == 4 and (escaped or max(map(len, parts[3::4])) > _LONGEST_NAME):
        raise ValueError(f"{place} has a name with headers of its own")
    names = parts[3::4] if words == 4 else parts[::words]
    try:
        return {
            extension.lower(): (int(offset), int(size))
            for extension, offset, size, name in zip(
                parts[::words], parts[1::words], parts[2::words], names
            )
            # wds2idx makes samples of files without a dot, too.
            if words == 3 or b"." in name[name.rfind(b"/") + 1 :]
        }
    except ValueError:
        raise ValueError(f"{place} has no offsets") from None


def _alike(text: bytes, lines: int, words: int) -> AlikeSamples | None:
    """The samples of lines that differ in nothing but names and numbers; None for others.

    A million lines take a second in this way, and four one by one.
    """
    first = text.partition(b"\n")[0].split()
    tokens, each = text.split(), len(first)
    if not each or each % words or len(tokens) != each * lines:
        return None
    if not text.isascii() or b"\\" in text:
        return None
    # Each line begins with the first extension, which no other member has: so all are as long.
    if (b"\n" + text).count(b"\n" + first[0] + b" ") != lines:
        return None
    members: dict[bytes, NDArray[np.int64]] = {}
    for k in range(0, each, words):
        extension, end = first[k].lower(), b"." + first[k]
        if extension in members or b"/" in extension or tokens[k::each].count(first[k]) != lines:
            return None
        names = tokens[k + 3 :: each] if words == 4 else [end]
        if max(map(len, names)) > _LONGEST_NAME:
            return None
        if b"\n".join([*names, b""]).count(end + b"\n") < len(names):
            return None
        try:
            numbers = array.array("q", map(int, tokens[k + 1 :: each] + tokens[k + 2 :: each]))
        except (ValueError, OverflowError):
            return None
        members[extension] = np.frombuffer(numbers, np.int64).reshape(2, -1)
    return _alike_samples(members)


def _alike_samples(members: Mapping[bytes, NDArray[np.int64]]) -> AlikeSamples:
    start = np.min([offset for offset, _ in members.values()], axis=0) - _BLOCK
    return AlikeSamples(start, members)
