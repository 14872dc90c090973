"""Seeds of shards: each shard draws its own numbers, which no other seed draws."""

from __future__ import annotations

import operator

import numpy as np

from .hashing import fold

# Two iterators with the same arguments deliver the same; DALI would draw a seed for each build.
DEFAULT_SEED = 0
_PASS = 0x70617373  # tells hashes of passes from those of shards
_MOST_PASSES = 100_000  # that a seed is looked for in


def shard_seed(seed: int, shard: int) -> int:
    """The seed of one shard, given the seed of all shards.

    Shard 0 keeps the seed, as in DALI's plugin. The others get a hash of seed and shard: with
    seed + shard, shard 1 would draw the numbers of shard 0 of the next seed. The hash is from
    2 ** 31 to 2 ** 32 - 1, where people choose no seeds; DALI uses 32 bits of a seed.
    """
    if shard == 0:
        return seed
    return 1 << 31 | int(fold(seed, shard)) >> 33


def pass_seed(seed: int, number: int) -> int:
    """The seed of one pass over a data set that draws other numbers in each; pass 0 keeps the seed.

    The hash is in the range of `shard_seed`, and belongs to no shard of a seed that people choose.
    """
    return seed if number == 0 else 1 << 31 | int(fold(seed, _PASS, number)) >> 33


def pass_of(seed: int, of_pass: int) -> int | None:
    """The number of the pass with a seed, given the seed of pass 0; None if it is none."""
    if of_pass == seed:
        return 0
    seeds = fold(seed, _PASS, np.arange(1, _MOST_PASSES)) >> np.uint64(33) | np.uint64(1 << 31)
    found = np.flatnonzero(seeds == np.uint64(of_pass & (1 << 64) - 1))
    return int(found[0]) + 1 if len(found) else None


class ShardSeed(int):
    """The seed of one shard, with the seed of all shards that it was made of.

    Args:
        seed: The seed of all shards.
        shard: The shard.
        is_default: Whether the caller passed no seed (it may have been drawn): a state's seed then
            replaces it.

    Raises:
        TypeError: If the seed is no whole number.
        ValueError: If it has more than 64 bits.
    """

    seed: int
    shard: int
    is_default: bool

    def __new__(cls, seed: int, shard: int, is_default: bool = False) -> ShardSeed:  # noqa: D102
        try:
            seed = operator.index(seed)
        except TypeError:
            raise TypeError(f"seed must be a whole number, not {seed!r}") from None
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed must be a whole number of at most 64 bits, not {seed}")
        self = super().__new__(cls, shard_seed(seed, shard))
        self.seed, self.shard, self.is_default = seed, shard, is_default
        return self

    @classmethod
    def of(cls, seed: int | None, shard: int) -> ShardSeed:
        """The seed of a shard, given the seed of all shards, or None for the default."""
        if isinstance(seed, ShardSeed):
            return cls(seed.seed, shard, seed.is_default)
        return cls(DEFAULT_SEED if seed is None else seed, shard, seed is None)

    def __getnewargs__(self) -> tuple[int, int, bool]:  # type: ignore[override]
        return self.seed, self.shard, self.is_default
