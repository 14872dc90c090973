"""States of indexed sources: a position that no machine has a part in, as a plain JSON value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Difference, StateError
from ..order.samples import MOST_SAMPLES, SamplePosition
from ..state.codec import brief, parsed
from ..state.fingerprint import (
    Fingerprint,
    check_names,
    differences,
    digest,
    not_allowed,
    unknown,
)

FORMAT = "dalijax.source"
VERSION = 1
_LONGEST = 1400  # characters of the operators' lines
# What differences are of, where the name does not say it.
_MEANINGS = {"identity": " (how many records there are, their names and their bytes)"}
_TYPES: Mapping[str, type] = {
    "format": str,
    "version": int,
    "epoch": int,
    "start": int,
    "sample": int,
    "seed": int,
    "identity": str,
    "order": str,
    "outputs": list,
    "operators": str,
}


@dataclasses.dataclass(frozen=True)
class Stream:
    """What a position belongs to.

    Attributes:
        seed: The seed of the order and of the draws.
        identity: What the source says of itself.
        order: Whether it shuffles, what becomes of an epoch's last batch, and the epoch's samples.
        outputs: Names of the outputs.
        operators: A line for each operator of the graph; none before it is known.
    """

    seed: int
    identity: str
    order: str
    outputs: tuple[str, ...]
    operators: tuple[str, ...] = ()

    def fingerprint(self) -> Fingerprint:
        """The graph as `dalijax.core.state.fingerprint` has it."""
        return unknown() | {"operators": list(self.operators)}


def operator_lines(operators: Sequence[str]) -> tuple[str, ...]:
    """The lines of operators, a short digest for the arguments of each; of many, one for the last.

    A graph with RandAugment has two hundred operators.

    Args:
        operators: Lines as those of a fingerprint, what is best named first.
    """
    lines: list[str] = []
    characters = 0
    for number, line in enumerate(operators):
        kind, name, *arguments = line.split(" ")
        text = digest(json.dumps(arguments).encode(), length=8)
        short = f"{kind} {name} arguments=#{text}"
        characters += len(short) + len('"", ')
        if characters > _LONGEST:
            rest = digest(json.dumps(operators[number:]).encode(), length=8)
            return (*lines, f"and further arguments=#{rest}")
        lines.append(short)
    return tuple(lines)


def encode(position: SamplePosition, stream: Stream) -> dict[str, Any]:
    """A state as a dict of str, int and list that JSON keeps."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "epoch": position.epoch,
        "start": position.start,
        "sample": position.sample,
        "seed": stream.seed,
        "identity": stream.identity,
        "order": stream.order,
        "outputs": list(stream.outputs),
        # Text, not a list: a fresh state has no operators, and all states have the same tree.
        "operators": "\n".join(stream.operators),
    }


def read(saved: Mapping[str, Any] | str | bytes) -> tuple[SamplePosition, Stream]:
    """What a state says.

    Raises:
        StateError: If it is no state of a source, of another version, or damaged.
    """
    state = parsed(saved)
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateError(
            f"no state of an iterator over a source: {brief(saved)}. Pass what get_state() of one "
            "gave; states of DALI's readers go on with a reader"
        )
    if type(state.get("version")) is not int or state["version"] != VERSION:
        raise StateError(
            f"the state has format version {brief(state.get('version'))}, this dalijax reads "
            f"version {VERSION}: use the dalijax that saved it"
        )
    wrong = sorted(map(str, {*state} ^ {*_TYPES}))
    wrong += [name for name, kind in _TYPES.items() if type(state.get(name)) is not kind]
    if "outputs" not in wrong and not all(type(name) is str for name in state["outputs"]):
        wrong.append("outputs")
    if not wrong:
        epoch, start, sample = state["epoch"], state["start"], state["sample"]
        if not (0 <= epoch < MOST_SAMPLES and 0 <= start <= sample < MOST_SAMPLES):
            wrong = [f"epoch {epoch}, start {start}, sample {sample}"]
        elif not -(1 << 63) <= state["seed"] < 1 << 63:
            wrong = [f"seed {state['seed']}"]
    if wrong:
        raise StateError(f"the state is damaged: {wrong} missing, unknown, or out of range")
    stream = Stream(
        seed=state["seed"],
        identity=state["identity"],
        order=state["order"],
        outputs=tuple(state["outputs"]),
        operators=tuple(filter(None, state["operators"].split("\n"))),
    )
    return SamplePosition(epoch, start, sample), stream


def check(
    saved: Stream, now: Stream, seeded: bool, allow: Sequence[str], named: Sequence[str] = ()
) -> None:
    """Raises StateError where a state is of another stream.

    Args:
        saved: The state's.
        now: The iterator's.
        seeded: Whether the caller gave the seed; else the state's is taken.
        allow: Names of differences to go on with.
        named: More of them, which must be names of something.

    Raises:
        StateError: With each difference, as saved -> now.
        ValueError: If ``named`` has a name of nothing.
    """
    lines: list[Difference] = []
    for name in ("seed", "identity", "order", "outputs"):
        before, after = getattr(saved, name), getattr(now, name)
        if before != after and (name != "seed" or seeded):
            shown = f"{after}{_MEANINGS.get(name, '')}"
            # Positions are counted in the order's samples.
            lines.append(Difference(name, str(before), shown, fixed=name == "order"))
    both = saved.fingerprint(), now.fingerprint()
    if saved.operators and now.operators:
        lines += differences(*both)
    if left := not_allowed(lines, (*allow, *named)):
        raise StateError.of_other_data(left, allowed=True)
    if named:
        check_names(named, lines, *both)
