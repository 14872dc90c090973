"""Checksums of ranges, computed in C and in Python, compared with sums of integers."""

import errno
import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalijax.core.formats.checksums import KEYS
from dalijax.core.formats.read_ranges import checksums, read_ranges
from local_reads import Kernel

pytestmark = pytest.mark.usefixtures("language")
MASK = (1 << 64) - 1


def mix(x):
    """Computes the last step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def expected(data):
    """Computes a checksum by integers of Python."""
    total = len(data)
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096].ljust(4096, b"\0")
        words = [int.from_bytes(block[k : k + 8], "little") for k in range(0, 4096, 8)]
        mixed = [word ^ int(key) for word, key in zip(words, KEYS)]
        products = sum((word % (1 << 32)) * (word >> 32) for word in mixed) & MASK
        block = mix(products ^ mix(sum(words) & MASK))
        total = (total * 0x9E3779B97F4A7C15 + block) & MASK
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
    assert checksum(b"abc") == 0x60DAB1D8045121B1
    assert checksum(bytes(range(256)) * 40) == 0xD16FDE52FB556FF0


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


def test_each_bit_counts_whatever_the_words_and_keys_are():
    """Flips each bit of words for which a product of halves, or a sum with it, stays equal."""
    masks = [0, 1, 1 << 32, MASK, (1 << 32) - 1, MASK ^ (1 << 32) - 1, 1 ^ MASK, 1 << 32 ^ MASK]
    draw = random.Random(0)
    words = [int(KEYS[0]) ^ mask for mask in masks]
    words += [int(KEYS[0]) ^ high << 32 ^ draw.getrandbits(32) for high in (0, 1, 2, (1 << 32) - 1)]
    words += [int(KEYS[0]) ^ draw.getrandbits(32) << 32 ^ low for low in (0, 1, 2, (1 << 32) - 1)]
    words += [draw.getrandbits(64) for _ in range(32)] + [0, MASK]
    flipped = [[word ^ 1 << bit for bit in range(64)] for word in words]
    numbers = np.array([[word, *others] for word, others in zip(words, flipped)], np.uint64)
    sums = checksums(list(numbers.reshape(-1, 1).view(np.uint8))).reshape(numbers.shape)
    assert (sums[:, 1:] != sums[:, :1]).all()


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
        sums = np.zeros(len(files), np.uint64)
        counts = read_ranges(files, offsets, sizes, starts, buffer, sums)
    finally:
        os.close(file)
    assert counts[7] == -errno.EBADF
    for row, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist())):
        data = content[offset : offset + size]
        assert counts[row] == len(data) or row == 7
        if len(data) == size and row != 7:
            assert sums[row] == expected(data)
