"""Seeds of shards and of passes, which are derived from a common seed and rarely coincide."""

from __future__ import annotations

import operator

import numpy as np

from .hashing import fold

# Fixed, so that iterators with equal arguments deliver equal batches; DALI would draw a seed.
DEFAULT_SEED = 0
_PASS = 0x70617373  # separates hashes of passes from hashes of shards
_MOST_PASSES = 100_000  # passes searched for a seed


def shard_seed(seed: int, shard: int) -> int:
    """Returns the seed of one shard, derived from the common seed.

    Shard 0 keeps the seed, as in DALI's JAX plugin. Other shards use a hash of seed and shard: with
    seed + shard, shard 1 would draw the numbers of shard 0 of the next seed. The hash is from
    2 ** 31 to 2 ** 32 - 1, where users rarely choose seeds. DALI uses 32 bits of a seed.
    """
    if shard == 0:
        return seed
    return 1 << 31 | int(fold(seed, shard)) >> 33


def pass_seed(seed: int, number: int) -> int:
    """Returns the seed of one pass over a data set, derived from the seed of pass 0.

    Other passes use a hash in the range of `shard_seed`. A constant is mixed in, so that passes and
    shards rarely have the same seed.
    """
    return seed if number == 0 else 1 << 31 | int(fold(seed, _PASS, number)) >> 33


def pass_of(seed: int, seed_of_pass: int) -> int | None:
    """Returns the number of the pass, below 100,000, that has a seed; None if no pass has it.

    Args:
        seed: The seed of pass 0.
        seed_of_pass: The seed of the pass.
    """
    if seed_of_pass == seed:
        return 0
    seeds = fold(seed, _PASS, np.arange(1, _MOST_PASSES)) >> np.uint64(33) | np.uint64(1 << 31)
    passes = np.flatnonzero(seeds == np.uint64(seed_of_pass & (1 << 64) - 1))
    return int(passes[0]) + 1 if len(passes) else None


class ShardSeed(int):
    """The seed of one shard, which remembers the common seed from which it was derived.

    Args:
        seed: The common seed of all shards.
        shard: The index of the shard.
        is_default: Whether the caller passed no seed, so that ``seed`` is a default or was drawn.
            Restoring a state then replaces the seed by the seed of the state.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If the seed has more than 64 bits.
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
        """Returns the seed of a shard, derived from the common seed; None: from `DEFAULT_SEED`."""
        if isinstance(seed, ShardSeed):
            return cls(seed.seed, shard, seed.is_default)
        return cls(DEFAULT_SEED if seed is None else seed, shard, seed is None)

    def __getnewargs__(self) -> tuple[int, int, bool]:  # type: ignore[override]
        return self.seed, self.shard, self.is_default
