"""Checksums of ranges, computed in C and in Python, compared with sums of integers."""

import errno
import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalijax.core.formats import checksums as module
from dalijax.core.formats.checksums import checksums, read_with_checksums
from local_reads import Kernel

pytestmark = pytest.mark.usefixtures("language")
WORD = 1 << 64


def expected(data):
    """Computes a checksum by integers of Python."""
    total = len(data)
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096].ljust(4096, b"\0")
        words = [int.from_bytes(block[k : k + 8], "little") for k in range(0, 4096, 8)]
        mixed = [word ^ int(key) for word, key in zip(words, module._KEYS)]
        products = [(word % (1 << 32)) * (word >> 32) for word in mixed]
        total = (total * 0x9E3779B97F4A7C15 + sum(words) + sum(products)) % WORD
    return total


def checksum(data):
    return int(checksums([np.frombuffer(data, np.uint8)])[0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 9000), st.integers(0, 20), st.randoms(use_true_random=False))
def test_checksums_of_ranges(size, start, draw):
    data = draw.randbytes(size)
    buffer = np.frombuffer(draw.randbytes(start) + data + draw.randbytes(3), np.uint8)
    arrays = [buffer[start : start + size], buffer[:start], buffer[:0]]
    assert checksums(arrays).tolist() == [expected(data), expected(buffer[:start].tobytes()), 0]
    assert not len(checksums([]))


def test_values_are_part_of_the_format_of_caches():
    assert checksum(b"abc") == 0x6E5C6FD1090D2D9E
    assert checksum(bytes(range(256)) * 40) == 0xF14D10EB5847B19


def test_damage_has_another_checksum():
    draw = random.Random(0)
    for data in (draw.randbytes(10_000), bytes(10_000), b"\xff" * 10_000):
        sums = {checksum(data)}
        damaged = [data[:-1], data + b"\0", data[8:] + data[:8], data[4096:] + data[:4096]]
        damaged += [
            data[:k] + bytes([data[k] ^ 1 << b]) + data[k + 1 :]
            for k in range(0, 10_000, 97)
            for b in range(8)
        ]
        for _ in range(200):  # two flipped bits
            copy = bytearray(data)
            for k in draw.sample(range(10_000), 2):
                copy[k] ^= 1 << draw.randrange(8)
            damaged.append(bytes(copy))
        if any(data):  # zeros, as of a block that was not written
            damaged += [data[:k] + bytes(512) + data[k + 512 :] for k in range(0, 9000, 512)]
        different = set(damaged) - {data}
        sums |= {checksum(other) for other in different}
        assert len(sums) == len(different) + 1


@pytest.mark.parametrize("cached", (lambda size: size, lambda size: size // 2, lambda size: 0))
def test_ranges_are_read_with_checksums(cached, monkeypatch, language, tmp_path):
    Kernel(cached, most=3000).use(monkeypatch, language, tmp_path)
    content = random.Random(0).randbytes(100_000)
    (tmp_path / "file").write_bytes(content)
    offsets = np.arange(0, 100_000, 1000)
    sizes = np.arange(100) * 97
    starts = np.cumsum(sizes) - sizes
    buffer = np.zeros(int(sizes.sum()), np.uint8)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        files = np.where(np.arange(100) == 7, -1, file)
        counts, sums = read_with_checksums(files, offsets, sizes, starts, buffer)
    finally:
        os.close(file)
    assert counts[7] == -errno.EBADF
    for row, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist())):
        data = content[offset : offset + size]
        assert counts[row] == len(data) or row == 7
        if len(data) == size and row != 7:
            assert sums[row] == expected(data)
