"""Seeds of shards: each shard draws other numbers, and no other seed draws them."""

from __future__ import annotations

import operator

from .hashing import fold

# Two iterators that are built alike deliver alike; DALI would draw a seed for each build.
DEFAULT_SEED = 0


def shard_seed(seed: int, shard: int) -> int:
    """The seed of one shard.

    Shard 0 keeps the seed, as DALI's plugin has it. The others get a hash of seed and shard: with
    seed + shard, shard 1 of a run would draw what shard 0 of the next seed's run draws. It is from
    2 ** 31 to 2 ** 32 - 1, where people choose no seeds; DALI heeds 32 bits of one.

    Args:
        seed: The seed of all shards.
        shard: The shard, from 0.
    """
    if shard == 0:
        return seed
    return 1 << 31 | int(fold(seed, shard)) >> 33


class ShardSeed(int):
    """The seed of one shard, and what it follows from.

    Args:
        seed: The seed of all shards.
        shard: The shard.
        is_default: Whether the caller left it out (it may have been drawn): it gives way to the
            seed of a state.

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
        """The seed of a shard, by the seed of all shards; None: the default."""
        if isinstance(seed, ShardSeed):
            return cls(seed.seed, shard, seed.is_default)
        return cls(DEFAULT_SEED if seed is None else seed, shard, seed is None)

    def __getnewargs__(self) -> tuple[int, int, bool]:  # type: ignore[override]
        return self.seed, self.shard, self.is_default
