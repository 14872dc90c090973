"""Hashes and orders of records in Python's integers, as references for NumPy's."""

import hashlib

MASK = (1 << 64) - 1


def splitmix(x):
    """Computes the step of splitmix64 in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def folded(*parts):
    """Computes `fold` in Python's integers."""
    state = 0
    for part in parts:
        state = splitmix(state ^ (part & MASK))
    return state


def uniform_number(seed, epoch, record, name, column=0):
    """Returns the number from 0 to 1 that a draw with a name has for a record."""
    name_key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = splitmix(folded(seed, epoch, record) ^ folded(name_key, column))
    return (bits >> 40) / 2**24


def listed_order(count, seed, epoch):
    """Returns the records of an epoch in shuffled order, sorted by hashes."""
    start = folded(seed, epoch, count)
    return sorted(range(count), key=lambda k: splitmix(start ^ splitmix(k)))


def by_feistel(position, count, seed, epoch):
    """Returns the record at a position: eight rounds over pairs, and cycle walking."""
    a = next(k for k in range(1, count + 1) if k * k >= count)
    b = -(-count // a)
    while True:
        left, right = divmod(position, b)
        for turn in range(8):
            key = folded(seed, epoch, count, turn)
            if turn % 2:
                right = (right + splitmix(left ^ key) % b) % b
            else:
                left = (left + splitmix(right ^ key) % a) % a
        position = left * b + right
        if position < count:
            return position
