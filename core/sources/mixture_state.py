"""`MixtureState`: what states contain about a mixture, to find the mixtures that continue it.

A mixture continues a state if both agree before the position of the state: on the proportions, and
on the sources up to the last that has been used. Later proportions and sources may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from fractions import Fraction

from ..order.proportions import MOST_EXACT, Stage
from ..state.envelope import brief, digest
from ..state.fingerprint import Fingerprint, split_line
from .identity import stated_identity
from .source import Source, groups_of

_SIZE = re.compile(r"[0-9]+(:[0-9a-f]+)?")  # the results of `_size`
DIGEST = 32  # characters of a mixture's identity, which those of its wrappers follow


@dataclasses.dataclass(frozen=True)
class MixtureState:
    """The stages and the sources of a mixture.

    Attributes:
        stages: The stages.
        sources: The number of records of each source, with a digest of its windows if it has any;
            and a digest of its identity.
    """

    stages: tuple[Stage, ...]
    sources: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, stages: Sequence[Stage], sources: Sequence[Source]) -> MixtureState:
        """Returns the state of a mixture.

        Raises:
            StateError: If the identity of a source can't be computed.
        """
        described = [
            (_size(source), digest(stated_identity(source).encode())) for source in sources
        ]
        return cls(tuple(stages), tuple(described))

    @functools.cached_property
    def lines(self) -> list[str]:
        """Lines for a state.

        The first contains the start of each stage. Then follows a line for each source: the number
        of records, the digest, and its number of samples in a period of each stage.
        """
        columns = zip(*(stage.counts for stage in self.stages))
        starts = " ".join(str(stage.start) for stage in self.stages)
        rows = [
            f"{records} {identity} {' '.join(map(str, counts))}"
            for (records, identity), counts in zip(self.sources, columns)
        ]
        return [starts, *rows]

    @classmethod
    def of_lines(cls, lines: Sequence[str]) -> MixtureState:
        """Returns the value whose `lines` are given.

        Raises:
            ValueError: If no mixture has these lines.
        """
        try:
            starts = [*map(int, lines[0].split(" "))]
            rows = [line.split(" ", 2) for line in lines[1:]]
            sources = tuple((records, identity) for records, identity, _ in rows)
            columns = [[*map(int, counts.split(" "))] for _, _, counts in rows]
            counts = zip(*columns, strict=True)
            stages = tuple(Stage(*pair) for pair in zip(starts, counts, strict=True))
        except ValueError:
            stages, sources = (), ()
        fits = all(
            min(stage.counts) >= 0 and 0 < sum(stage.counts) <= MOST_EXACT for stage in stages
        )
        fits = fits and all(_SIZE.fullmatch(records) for records, _ in sources)
        if not stages or not fits or starts[0] or sorted({*starts}) != starts:
            raise ValueError(f"data.mixture is {brief(lines)}, not the lines of a mixture")
        return cls(stages, sources)

    def before(self, position: int) -> MixtureState:
        """Returns the part of the mixture that the first records need.

        Args:
            position: The number of these records.
        """
        stages = [stage for stage in self.stages if stage.start < max(position, 1)]
        used = 1 + max(k for stage in stages for k, count in enumerate(stage.counts) if count)
        cut = [Stage(stage.start, stage.counts[:used]) for stage in stages]
        return MixtureState(tuple(cut), self.sources[:used])

    def shares(self, record: int, count: int) -> list[str]:
        """Returns the shares of ``count`` sources from a record on; "0" for missing sources."""
        counts = [stage.counts for stage in self.stages if stage.start <= record][-1]
        shares = [str(Fraction(number, sum(counts))) for number in counts]
        return (shares + ["0"] * count)[:count]

    def weights(self) -> str:
        """Returns the shares of the sources at the start, for errors."""
        return f"weights {', '.join(self.shares(0, len(self.sources)))}"


def _size(source: Source) -> str:
    """Returns what the order of a source depends on: its number of records, and its windows."""
    groups = groups_of(source)
    return f"{len(source)}" + (f":{digest(str(groups).encode())}" if groups else "")


def compare_mixtures(
    old: Fingerprint,
    new: Fingerprint,
    saved: MixtureState | None,
    current: MixtureState | None,
    position: int,
) -> str:
    """Adds the weights and sources that must be equal to two fingerprints.

    Args:
        old: The fingerprint of a state.
        new: The fingerprint of the iterator.
        saved: The mixture of the state; None: the state contains none.
        current: The mixture of the iterator; None: its source is not a mixture.
        position: The number of records before the position of the state.

    Returns:
        A sentence for an error about different mixtures; "" if they agree before the position.
    """
    # Its digest is that of the weights and sources at the start, which are compared by name.
    new["identity"] = old["identity"][:DIGEST] + new["identity"][DIGEST:]
    if saved is None or current is None:
        unknown = "another source, or other weights (an older state has only a digest of them)"
        old["mixture"] = unknown if saved is None else saved.weights()
        new["mixture"] = "(none)" if current is None else current.weights()
        return _hint(position) if current else ""
    parts = saved.before(position), current.before(position)
    count = max(len(part.sources) for part in parts)
    for record in sorted({stage.start for part in parts for stage in part.stages}):
        shares = [part.shares(record, count) for part in parts]
        if shares[0] != shares[1]:
            break
    pairs = [*zip(saved.sources[:count], current.sources[:count])]
    for k, (old_share, new_share) in enumerate(zip(*shares)):
        place = f" from record {record:,} on" if old_share != new_share else ""
        old[f"mixture.{k}.weight"], new[f"mixture.{k}.weight"] = old_share, new_share + place
    for k, ((old_count, old_digest), (new_count, new_digest)) in enumerate(pairs):
        old[f"mixture.{k}.records"], new[f"mixture.{k}.records"] = old_count, new_count
        old[f"identity.{k}"], new[f"identity.{k}"] = old_digest, new_digest
    for values in (old, new):
        values["operators"] = _without_maps(values["operators"], count)
    is_equal = shares[0] == shares[1] and all(before[0] == after[0] for before, after in pairs)
    return "" if is_equal else _hint(position)


def _hint(position: int) -> str:
    if not position:
        return ""
    return (
        f"To change a mixture from this state on, pass old_mixture.then({position}, "
        "[(source, weight), ...])"
    )


def _without_maps(lines: Sequence[str], count: int) -> list[str]:
    """Returns the lines of a graph without those of maps of other sources than the first."""
    first = {str(number) for number in range(count)}
    remaining = []
    for line in lines:
        kind, _, arguments = split_line(line)
        source, point, _ = arguments.get("position", "").partition(".")  # no point: of the mixture
        if not (kind in ("map", "random_map") and point and source not in first):
            remaining.append(line)
    return remaining


def changed_plan(saved: MixtureState, current: MixtureState, position: int) -> str:
    """Returns a description of the first later stage of a state that a mixture lacks, or ""."""
    count = max(len(saved.sources), len(current.sources))
    planned, present = (
        {s.start: mixture.shares(s.start, count) for s in mixture.stages if s.start >= position}
        for mixture in (saved, current)
    )
    for start, shares in planned.items():
        if present.get(start) != shares:
            return f"weights {', '.join(shares)} from record {start:,} on"
    return ""
