"""States of iterators over record sources: positions that do not depend on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.user_warnings import warn_user
from ..order.samples import MOST_SAMPLES, SamplePosition
from ..state import differences
from ..state.envelope import Form, damaged
from ..state.fingerprint import Fingerprint, matches
from .mixture_state import MixtureState, changed_plan, compare_mixtures

FORM = Form(
    kind="source",
    owner="an iterator over a source",
    shown={
        "epoch": range(MOST_SAMPLES),
        "start": range(MOST_SAMPLES),
        "sample": range(MOST_SAMPLES),
        "seed": range(-(1 << 63), 1 << 63),
        "identity": str,
        "order": str,
    },
    packed={"outputs": [str], "operators": [str], "mixture": [str]},
    optional=frozenset({"mixture"}),
)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The data, the order and the graph that a position belongs to.

    Attributes:
        seed: The seed of the order and of the random numbers of ``draw``.
        identity: The identity of the source.
        order: Whether the iterator shuffles, its policy for the last batch of an epoch, and the
            number of samples of an epoch, e.g. "shuffled PARTIAL padded 1000"; and the batch size
            if the batches of positions depend on it.
        outputs: Names of the outputs; empty if they are not known before the first batch.
        operators: A line for each operator of the graph; empty before the first build.
        mixture: The proportions and the sources, if the source is or contains a mixture.
    """

    seed: int
    identity: str
    order: str
    outputs: tuple[str, ...]
    operators: tuple[str, ...] = ()
    mixture: MixtureState | None = None

    def fingerprint(self) -> Fingerprint:
        """Returns the values that must be equal to the values of a state to restore the state."""
        return {
            "seed": str(self.seed),
            "identity": self.identity,
            "order": self.order,
            "outputs": list(self.outputs),
            "operators": list(self.operators),
        }


def encode(position: SamplePosition, stream: Stream) -> dict[str, Any]:
    """Returns a state that contains a position and its stream."""
    return FORM.encode(
        epoch=position.epoch,
        start=position.start,
        sample=position.sample,
        seed=stream.seed,
        identity=stream.identity,
        order=stream.order,
        outputs=list(stream.outputs),
        operators=list(stream.operators),
        mixture=[] if stream.mixture is None else stream.mixture.lines,
    )


def read(saved: Mapping[str, Any] | str | bytes) -> tuple[SamplePosition, Stream]:
    """Returns the position and the stream that a state contains.

    Args:
        saved: The state, or its JSON as text or bytes.

    Raises:
        StateError: If the state belongs to another kind of iterator, or is damaged.
    """
    state = FORM.decode(saved)
    position = SamplePosition(state["epoch"], state["start"], state["sample"])
    if position.start > position.sample:
        raise damaged(f"start is {position.start}, after sample {position.sample}")
    try:
        mixture = MixtureState.of_lines(state["mixture"]) if state["mixture"] else None
    except ValueError as error:
        raise damaged(str(error)) from None
    stream = Stream(
        seed=state["seed"],
        identity=state["identity"],
        order=state["order"],
        outputs=tuple(state["outputs"]),
        operators=tuple(state["operators"]),
        mixture=mixture,
    )
    return position, stream


def check(
    saved: Stream,
    current: Stream,
    seeded: bool,
    allow: Sequence[str],
    named: Sequence[str] = (),
    records: int = 0,
) -> None:
    """Raises StateError if a state belongs to another stream.

    Warns if a mixture lacks later weights that the state contains.

    Args:
        saved: The stream of the state.
        current: The stream of the iterator.
        seeded: Whether the caller gave the seed of the iterator; otherwise, the state's seed is
            used.
        allow: Names of differences that are ignored.
        named: Further names of ignored differences; each must be a key of a fingerprint.
        records: The number of records before the position, up to which mixtures are compared.

    Raises:
        StateError: If the streams differ; the message lists each difference as saved -> now.
        ValueError: If ``named`` has an unknown name.
    """
    if not seeded:
        current = dataclasses.replace(current, seed=saved.seed)
    old, new = saved.fingerprint(), current.fingerprint()
    before, after, hint = saved.mixture, current.mixture, ""
    if after and not before and saved.identity == current.identity:
        before = after.before(0)  # an older state, whose mixture did not change its weights
    if before or after:
        hint = compare_mixtures(old, new, before, after, records)
    if named or not all(matches(name, value, new[name]) for name, value in old.items()):
        differences.check(old, new, allow, named, hint)
    if before and after and (lacking := changed_plan(before, after, records)):
        warn_user(
            f"the mixture of the state has the {lacking}, but this mixture does not. Correct its "
            "weights, unless you meant to change them"
        )
