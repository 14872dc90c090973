"""Compares the iterators of several processes, which must be equal to form global batches.

An *offer* is the description that a process gives of its iterator. The functions are pure;
`dalijax.core.pipeline.processes` exchanges the offers between the processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .differences import differences, shortened
from .envelope import digest
from .fingerprint import operator_line, split_line

# Values that must be equal in all processes, by their names in errors: str, int, or a list of
# lines of a fingerprint ("operators", "sources").
Values = Mapping[str, Any]

_LINES = ("operators", "sources")  # fields of a fingerprint, compared line by line
_POSITION = "position"


def without_seeds(line: str) -> str:
    """Returns an operator's line without the seed, which differs between shards."""
    kind, name, arguments = split_line(line)
    return operator_line(kind, name, {k: v for k, v in arguments.items() if k != "seed"})


class Batches(NamedTuple):
    """The number of batches of one process, as far as the process knows it.

    Attributes:
        certain: Number of batches that the process certainly has, counted from the first batch.
        ended: Whether the process has no batches after these.
    """

    certain: int
    ended: bool


@dataclasses.dataclass(frozen=True)
class Offer:
    """The description of an iterator that waits until the other processes describe theirs.

    Attributes:
        process: Index of the process that made the offer.
        number: Index of the offer among the offers of the process, in the order of creation.
        values: The values that must be equal in all processes.
        batches: How many batches the process has; None if this is not compared.
        host: The index of the host whose rows the process delivers; -1 if there are no hosts.
    """

    process: int
    number: int
    values: Values
    batches: Batches | None = None
    host: int = -1

    def to_json(self) -> str:
        """Returns ``values``, ``batches`` and ``host`` as JSON text."""
        return json.dumps([self.values, self.batches, self.host])

    @classmethod
    def from_json(cls, process: int, number: int, text: str) -> Offer:
        """Returns the offer whose content `to_json` has returned as ``text``."""
        values, batches, host = json.loads(text)
        return cls(process, number, values, batches and Batches(*batches), host)

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the values. Offers with equal values have equal digests."""
        return digest(json.dumps(self.values, sort_keys=True).encode(), length=64)


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of comparing an offer of this process with those of all processes.

    Attributes:
        equal: The offer with equal values of each process that has one, by process. Includes the
            offer of this process.
        different: The most similar offer of each process that has no offer with equal values, by
            process.
        absent: Processes that have no offer to compare.
    """

    equal: Mapping[int, Offer]
    different: Mapping[int, Offer]
    absent: tuple[int, ...]

    @property
    def offers(self) -> dict[int, Offer]:
        """The offers in ``equal`` and ``different``, by process."""
        return dict(sorted({**self.equal, **self.different}.items()))


def counterparts(local: Offer, offers: Iterable[Offer], processes: Sequence[int]) -> Round:
    """Returns the offers of other processes that must be compared with an offer of this process.

    Offers with equal values are compared, even if the processes created their iterators in
    different orders. An offer of another process is left out if it equals an offer of this process
    other than ``local``.

    Args:
        local: The offer of this process.
        offers: The pending offers of all processes.
        processes: The processes that must agree.
    """
    waiting: dict[int, list[Offer]] = {process: [] for process in processes}
    for offer in sorted(offers, key=lambda offer: offer.number):
        waiting[offer.process].append(offer)
    own_digests = {local.digest, *(offer.digest for offer in waiting[local.process])}
    equal, different, absent = {local.process: local}, dict[int, Offer](), list[int]()
    for process, theirs in waiting.items():
        matching = [offer for offer in theirs if offer.digest == local.digest]
        unmatched = [offer for offer in theirs if offer.digest not in own_digests]
        if process == local.process:
            continue
        if matching:
            equal[process] = matching[0]
        elif unmatched:
            different[process] = max(
                unmatched, key=lambda offer: similarity(local.values, offer.values)
            )
        else:
            absent.append(process)
    return Round(equal, different, tuple(absent))


def similarity(first_values: Values, second_values: Values) -> int:
    """Returns how many of the first values are equal to the second values of the same name."""
    return sum(value == second_values.get(name) for name, value in first_values.items())


def described(offers: Mapping[int, Offer]) -> list[str]:
    """Returns a line for each value that differs between offers, with the value of each process.

    Differences after the first ten are only counted, in a last line.
    """
    lines = []
    first, *remaining = offers.values()
    names = dict.fromkeys(name for offer in offers.values() for name in offer.values)
    for name in names:
        if name not in _LINES:
            having = {p: offer.values.get(name, "none") for p, offer in offers.items()}
            if len({json.dumps(value) for value in having.values()}) > 1:
                lines.append(f"{name}: {_shares(having)}")
    # Differences of operators, with the values of the first process and of the processes that
    # differ from it.
    arguments: dict[str, dict[int, Any]] = {}
    for offer in remaining:
        before, after = (
            {k: list(compared.values.get(k, ())) for k in _LINES} for compared in (first, offer)
        )
        for difference in differences(before, after):
            having = arguments.setdefault(difference.name, {first.process: difference.before})
            having[offer.process] = difference.after
    lines += [f"{name}: {_shares(having)}" for name, having in arguments.items()]
    return shortened(lines)


def _shares(having: Mapping[int, Any]) -> str:
    """Formats the values of processes: "processes 0, 2 have 21, process 1 has 20"."""
    groups: dict[str, list[int]] = {}
    for process, value in having.items():
        groups.setdefault(str(value), []).append(process)
    return ", ".join(
        f"{_processes(group)} {'has' if len(group) == 1 else 'have'} {value}"
        for value, group in groups.items()
    )


def _processes(numbers: Sequence[int]) -> str:
    """Formats the indices of processes, at most 8 of them: "process 1" or "processes 0, 2"."""
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def difference_text(name: str, offers: Mapping[int, Offer], cure: str = "") -> str:
    """Returns the error message about an iterator that differs between processes.

    Args:
        name: Name of the iterator.
        offers: The offers, by process.
        cure: The advice at the end; by default it depends on the values that differ.
    """
    lines = described(offers)
    if cure:
        pass
    elif all(line.startswith(f"{_POSITION}: ") for line in lines):
        cure = (
            "Restore the same state, or seek to the same batch, in every process before the next "
            "batch"
        )
    else:
        cure = (
            "Give every process the same records in the same order, and the same arguments: "
            "dalijax selects the rows of each process from the global batch. If each process has "
            "different records, it must have as many as the others, or use Grain's DALITransform "
            "with own_records=True"
        )
    return (
        f"the iterators of {name} differ between the processes, so that records would be repeated "
        "or lost, and the processes would wait for each other:\n  "
        + "\n  ".join(lines)
        + f"\n{cure}. check_processes=False disables this check"
    )


def departure_text(name: str, goal: str, errors: Mapping[int, str]) -> str:
    """Returns the error message about processes that have raised an error or ended.

    Args:
        name: Name of the iterator.
        goal: The point that the processes must reach.
        errors: The error that each process raised, by process; "" if its program has ended.
    """
    lines = [
        f"process {process} raised {error}" if error else f"the program of process {process} ended"
        for process, error in sorted(errors.items())
    ]
    return (
        f"{_processes(sorted(errors))} did not reach {goal} of {name}, which every process of "
        "the sharding must reach:\n  " + "\n  ".join(lines)
    )


def repeated_host(offers: Mapping[int, Offer]) -> dict[int, int]:
    """Returns the hosts whose rows several processes deliver, by process."""
    hosts = {process: offer.host for process, offer in offers.items() if offer.host >= 0}
    counts = Counter(hosts.values())
    return {process: host for process, host in hosts.items() if counts[host] > 1}


def repeated_host_text(name: str, hosts: Mapping[int, int]) -> str:
    """Returns the error message about processes that deliver the same rows.

    Args:
        name: Name of the iterator.
        hosts: The index of the part of each process, by process; see `repeated_host`.
    """
    parts = ", ".join(f"process {process} part {host}" for process, host in hosts.items())
    return (
        f"the iterators of {name} deliver the same rows in several processes ({parts}), so that "
        "other rows would be lost. Pass a different index in each process, e.g. "
        "jax.process_index(). check_processes=False disables this check"
    )


def move_text(name: str, moved: int, process: int, batches: int, position: str) -> str:
    """Returns the error message about a process that has moved, unlike this process.

    Args:
        name: Name of the iterator.
        moved: The process that has moved.
        process: This process.
        batches: The number of batches, since both processes were at one position, after which the
            process moved.
        position: The position to which the process moved.
    """
    count = "1 batch" if batches == 1 else f"{batches} batches"
    return (
        f"process {moved} moved the iterator {name} to {position}, by seek(), skip(), reset() or "
        f"set_state(), {count} after the processes were compared, but process {process} did not. "
        "Call it in every process, after the same batch and with the same position"
    )


def absence_text(
    name: str,
    goal: str,
    absent: Sequence[int],
    offers: Iterable[Offer],
    seconds: float,
    cure: str = "",
) -> str:
    """Returns the error message about processes that did not reach a point in time.

    Args:
        name: Name of the iterator.
        goal: The point that the processes must reach.
        absent: The processes that did not reach the point.
        offers: The pending offers of all processes.
        seconds: The timeout, in seconds.
        cure: The advice; by default, to take the batches in every process.
    """
    elsewhere = [
        f"process {offer.process} waits for {offer.values.get('function')}"
        for offer in offers
        if offer.process in absent
    ]
    has = "has" if len(absent) == 1 else "have"
    return (
        f"{_processes(list(absent))} {has} not reached {goal} of {name} within {seconds:g} s"
        + (f" ({'; '.join(elsewhere[:4])})" if elsewhere else "")
        + f". {cure or 'Every process of the sharding must take its batches'}. If a process needs "
        "more time, pass check_processes=SECONDS; if only some processes use this iterator on "
        "purpose, pass check_processes=False"
    )
