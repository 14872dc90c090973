"""The expected batches, computed sample by sample: no closed form, no DALI.

A simulation of the rules, slow and plain: every stream is a list of (sample, epoch, real), and an
epoch takes batches until each stream has delivered all its samples of that epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

POLICIES = ("FILL", "DROP", "PARTIAL")
Sample = tuple[int, int, bool]  # number, epoch, whether it is a real sample and not padding


def shard(n: int, shards: int, i: int) -> range:
    return range(n * i // shards, n * (i + 1) // shards)


def _stream(case: Case, stream: int) -> Iterator[Sample]:
    """Yields the samples that the pipeline of one shard reads, endlessly."""
    per_epoch = max(len(shard(case.n, case.shards, i)) for i in range(case.shards))
    while per_epoch % case.batch:
        per_epoch += 1
    epoch = 0
    while True:
        own = shard(case.n, case.shards, stream if case.stick else (stream + epoch) % case.shards)
        yield from ((i, epoch, True) for i in own)
        if case.padded:
            last = own[-1] if own else -1
            yield from ((last, epoch, False) for _ in range(per_epoch - len(own)))
        epoch += 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A reader and a policy ("FILL", "DROP" or "PARTIAL")."""

    n: int
    shards: int
    batch: int
    policy: str
    padded: bool
    stick: bool

    def readable(self) -> bool:
        """Whether every stream has samples; DALI rejects empty shards."""
        return self.n >= self.shards

    def epochs(self, count: int) -> list[tuple[int, list[list[list[Sample]]]]]:
        """Returns the first ``count`` epochs with a batch: (number, [stream][batch][sample]).

        PARTIAL batches are cut.
        """
        streams = [_stream(self, s) for s in range(self.shards)]
        ends = [0] * self.shards  # number of samples of each stream that belong to earlier epochs
        taken, epoch = 0, -1
        out: list[tuple[int, list[list[list[Sample]]]]] = []
        while len(out) < count:
            epoch += 1
            for s in range(self.shards):
                read = s if self.stick else (s + epoch) % self.shards
                ends[s] += len(shard(self.n, self.shards, read))
            batches = self._consumed(taken, ends)
            read_epoch = [
                [[next(stream) for _ in range(self.batch)] for _ in range(batches)]
                for stream in streams
            ]
            taken += batches * self.batch
            if batches == 0 and not (self.policy == "DROP" and not self.padded):
                continue  # all its samples were read ahead: skipped
            out.append((epoch, [self._kept(own, epoch) for own in read_epoch]))
        return out

    def _consumed(self, taken: int, ends: list[int]) -> int:
        sizes = [len(shard(self.n, self.shards, i)) for i in range(self.shards)]
        if self.padded:
            whole = max(sizes)
        elif self.policy == "DROP":
            whole = self.n // self.shards
        else:
            whole = max(ends) - taken
        batches = 0
        while batches * self.batch < whole:
            batches += 1
        return batches

    def _kept(self, own: list[list[Sample]], epoch: int) -> list[list[Sample]]:
        if self.policy == "DROP":
            smallest = self.n // self.shards
            return own[: smallest // self.batch]
        if self.policy == "PARTIAL":
            cut = [[s for s in batch if s[1] == epoch and s[2]] for batch in own]
            return [batch for batch in cut if batch]
        return own

    def mask(self, batch: list[Sample], epoch: int) -> list[bool]:
        """Returns the mask of a delivered batch; all True under DROP."""
        if self.policy == "DROP":
            return [True] * len(batch)
        return [s[1] == epoch and s[2] for s in batch]
