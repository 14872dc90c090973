"""DALI's index files of tars, as ``wds2idx`` writes them."""

from __future__ import annotations

from collections.abc import Iterator

from .byte_files import open_stream

# Where a sample begins, and extension, offset and size of its members.
Sample = tuple[int, dict[bytes, tuple[int, int]]]

_BLOCK = 512
_VERSIONS = {b"v1.1": 3, b"v1.2": 4}  # words of each member: extension, offset, size, name
_LONGEST_NAME = 100  # bytes, of names that need no header of their own


def read_dali_index(path: str) -> Iterator[Sample]:
    """The samples of an index file.

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
        for number, line in enumerate(file, 2):
            parts = line.split()
            if not parts or len(parts) % words:
                raise ValueError(f"{path}: line {number} is not a whole number of members")
            escaped = not line.isascii() or b"\\" in line
            if words == 4 and (escaped or max(map(len, parts[3::4])) > _LONGEST_NAME):
                raise ValueError(f"{path}: line {number} has a name with headers of its own")
            try:
                names = parts[3::4] if words == 4 else parts[::words]
                sample = {
                    extension.lower(): (int(offset), int(size))
                    for extension, offset, size, name in zip(
                        parts[::words], parts[1::words], parts[2::words], names
                    )
                    # wds2idx makes samples of files without a dot, too.
                    if words == 3 or b"." in name[name.rfind(b"/") + 1 :]
                }
            except ValueError:
                raise ValueError(f"{path}: line {number} has no offsets") from None
            if sample:
                yield min(sample.values())[0] - _BLOCK, sample
    if number - 1 != int(count):
        raise ValueError(f"{path} has {number - 1} samples and says {int(count)}")
