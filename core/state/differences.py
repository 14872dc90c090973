"""Compares the fingerprint of a state with the fingerprint of the iterator that restores it.

A fingerprint is a dict of the values that a restore depends on; its keys depend on the kind of the
state. ``operators`` is a list of lines from `dalijax.core.state.fingerprint.operator_line`, and
``sources`` a list of "name: value" lines. ``unchecked`` is not compared. All other values are
texts, numbers, or lists of texts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import Difference, StateError
from ..native.library import VARIABLE
from .fingerprint import (
    AUTOMATIC,
    CONNECTIONS,
    IGNORED,
    RESIZED,
    Fingerprint,
    is_source,
    labels_of,
    matches,
    split_line,
    unknown,
)
from .operators import FIELD

# Positions depend on these values: if any of the values differs, a saved position has no meaning.
_FIXED = frozenset(
    {
        *("epoch_size", "batch_size", "num_shards", "shard_ids", "policy", "padded", "stick"),
        *("order", "rows", "last_batch", "steps", "mixture"),
    }
)
_FIXED_ARGUMENTS = frozenset({"num_shards", "pad_last_batch", "stick_to_shard"})
_MOST_LINES = 10  # of an error
_LEFT_OUT = "(left out)"  # the text that replaces the value of a missing argument
# Explanations of values with unclear names.
_MEANINGS = {
    "identity": " (how many records there are, their names and their bytes)",
    "rows": " (a source resumes with another batch size, a DALITransform does not)",
}


def check(
    saved: Fingerprint,
    current: Fingerprint,
    allow: Sequence[str] = (),
    named: Sequence[str] = (),
    hint: str = "",
) -> None:
    """Raises StateError if a state belongs to different data.

    Args:
        saved: The fingerprint of the state.
        current: The fingerprint of the iterator, with the same keys.
        allow: Names of differences to ignore. Names that do not exist are accepted.
        named: Further names of differences to ignore. Each must be the name of a value in a
            fingerprint, or of a difference.
        hint: A further sentence for the message of the error.

    Raises:
        StateError: If the fingerprints differ. The message lists each difference as saved -> now,
            and explains how to ignore it.
        ValueError: If ``named`` has an unknown name.
    """
    all_differences = differences(saved, current)
    if refused := _not_allowed(all_differences, (*allow, *named)):
        raise different_data_error(refused, explain_allow=True, hint=hint)
    if named:
        _check_names(named, all_differences, saved, current)


def shortened(lines: Sequence[str]) -> list[str]:
    """Returns the first ten lines, and the number of the others as a last line."""
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {more} more"] if more > 0 else [*lines]


def different_data_error(
    changes: Sequence[Difference | str], explain_allow: bool = False, hint: str = ""
) -> StateError:
    """Returns the error for a state of different data.

    Args:
        changes: The differences.
        explain_allow: Whether the message explains how to ignore differences.
        hint: A further sentence for the end of the message.
    """
    cure = "Recreate the iterator with its original arguments, or start without the state"
    named = [item for item in changes if isinstance(item, Difference)]
    fixed = sorted({item.name for item in named if item.fixed})
    names = sorted({item.name for item in named} - {*fixed})
    resized = [item.before for item in named if item.name == f"operators.{RESIZED}.by"]
    if resized == ["dali"]:
        cure += f". To resize images by DALI, set the environment variable {VARIABLE}=dali"
    elif resized:
        cure += (
            f". To resize images by dalijax, unset the environment variable {VARIABLE}, and "
            "install dalijax on x86-64 where there is a C compiler"
        )
    if explain_allow and fixed:
        cure += (
            f". allow= can't ignore {', '.join(shortened(fixed))}, because positions depend on them"
        )
    elif explain_allow and names:
        if len(names) > _MOST_LINES:  # "operators" stands for all differences of operators
            names = sorted({name.partition(".")[0] for name in names})
        cure += (
            f". To ignore the differences, pass allow={names} to set_state(), or "
            f"allow_changes={names} to data_iterator or to the transform"
        )
    if hint:
        cure += f". {hint}"
    lines = "\n  ".join(shortened([*map(str, changes)]))
    return StateError(
        f"the state was saved by an iterator of different data (saved -> now):\n  {lines}\n{cure}"
    )


def differences(saved: Fingerprint, current: Fingerprint) -> list[Difference]:
    """Returns the differences between two fingerprints, except in ``unchecked``.

    Values that are unknown before the pipelines were first built match any value.
    """
    result: list[Difference] = []
    not_built = _is_unknown(saved) or _is_unknown(current)
    for name, before in saved.items():
        after = current[name]
        if name == "unchecked" or matches(name, before, after):
            continue
        if not_built and name != "outputs":
            continue
        if name == "sources":
            result += _sources_differ(before, after)
        elif name == "operators":
            result += _operators_differ(before, after)
        else:
            shown = f"{after}{_MEANINGS.get(name, '')}"
            is_fixed = name.partition(".")[0] in _FIXED
            result.append(Difference(name, str(before), shown, is_fixed))
    return result


def _is_unknown(fingerprint: Fingerprint) -> bool:
    """Returns whether a fingerprint is that of pipelines that were not built; see `unknown`.

    Only the names of its outputs are then known.
    """
    blanks = unknown().items()
    return all(fingerprint.get(name) == blank for name, blank in blanks if name != "outputs")


def _sources_differ(before: Sequence[str], after: Sequence[str]) -> Iterator[Difference]:
    """Yields the differences between two lists of "name: value" lines."""
    old, new = ({k: v for k, _, v in (text.partition(": ") for text in s)} for s in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            old_text, new_text = (arguments.get(name, _LEFT_OUT) for arguments in (old, new))
            yield Difference(name, old_text, new_text, name.rpartition(".")[2] in _FIXED_ARGUMENTS)


class _Operator(NamedTuple):
    """An operator of a fingerprint.

    Attributes:
        kind: The kind of the operator, such as "readers.file".
        name: The name of the operator in its graph.
        arguments: The arguments, by name.
        label: The name of the operator in differences, from `labels_of`.
    """

    kind: str
    name: str
    arguments: dict[str, str]
    label: str

    @property
    def key(self) -> str:
        """A text that is equal for operators of two graphs that may correspond to each other."""
        return self.kind if AUTOMATIC.match(self.name) else f"={self.name}"

    def __str__(self) -> str:
        return self.kind if AUTOMATIC.match(self.name) else f"{self.kind} {self.name}"


def _read_operators(texts: Sequence[str]) -> list[_Operator]:
    parts = [split_line(text) for text in texts]
    labels = labels_of([(kind, name) for kind, name, _ in parts])
    return [
        # Older states contain arguments that are now ignored.
        _Operator(kind, name, {k: v for k, v in arguments.items() if k not in IGNORED}, label)
        for (kind, name, arguments), label in zip(parts, labels)
    ]


def _paired(
    before: Sequence[str], after: Sequence[str]
) -> list[tuple[_Operator | None, _Operator | None]]:
    """Returns pairs of corresponding operators of two graphs, given as lines.

    An operator without a counterpart is paired with None.
    """
    pairs: list[tuple[_Operator | None, _Operator | None]] = []

    # Pairs operators with equal arguments first, and then the remaining operators by kind or name.
    def pair(left: Sequence[_Operator], right: Sequence[_Operator], exact: bool) -> None:
        def keys(operators: Sequence[_Operator]) -> list[str]:
            return [f"{o.key} {sorted(o.arguments.items()) if exact else ''}" for o in operators]

        matcher = difflib.SequenceMatcher(None, keys(left), keys(right), autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                pairs.extend(zip(left[a:b], right[c:d]))
            elif exact:
                pair(left[a:b], right[c:d], False)
            else:
                pairs.extend((operator, None) for operator in left[a:b])
                pairs.extend((None, operator) for operator in right[c:d])

    pair(_read_operators(before), _read_operators(after), True)
    return pairs


def _operators_differ(before: Sequence[str], after: Sequence[str]) -> Iterator[Difference]:
    """Yields the differences between the operators of two graphs, given as lines."""
    if not all(any(_is_resized(line) for line in lines) for lines in (before, after)):
        # A state of a GPU does not say what resizes images on the CPU.
        before, after = ([x for x in lines if not _is_resized(x)] for lines in (before, after))
    pairs = _paired(before, after)
    alike = all(old is not None and new is not None and old.kind == new.kind for old, new in pairs)
    for old, new in pairs:
        if old is not None and new is not None and old.kind == new.kind:
            if new.kind == CONNECTIONS and not alike:
                continue  # because of added or removed operators, which are reported
            for argument in sorted(old.arguments.keys() | new.arguments.keys()):
                old_text, new_text = (o.arguments.get(argument, _LEFT_OUT) for o in (old, new))
                if old_text != new_text:
                    yield Difference(f"operators.{new.label}.{argument}", old_text, new_text)
        else:
            operators = [operator for operator in (new, old) if operator is not None]
            # A reader without its state would start again, while the other readers resume.
            source = any(is_source(o.kind) and not o.name.startswith(FIELD) for o in operators)
            old_text, new_text = (
                "(none)" if operator is None else str(operator) for operator in (old, new)
            )
            yield Difference(f"operators.{operators[0].label}", old_text, new_text, source)


def _is_resized(line: str) -> bool:
    return split_line(line)[0] == RESIZED


def renamed(saved: Fingerprint, current: Fingerprint) -> dict[str, str] | None:
    """Returns the names that operators have in a state, by their current names.

    Returns:
        None if no operator was renamed, added or removed, or if the operators are unknown.
    """
    if [] in (saved["operators"], current["operators"]):
        return None  # the operators could not be read
    pairs = _paired(saved["operators"], current["operators"])
    names = {
        new.name: old.name
        for old, new in pairs
        if old is not None and new is not None and old.kind == new.kind
    }
    alike = len(names) == len(pairs) and all(old == new for new, old in names.items())
    return None if alike else names


def _not_allowed(different: Sequence[Difference], allow: Sequence[str]) -> list[Difference]:
    """Returns the differences that ``allow`` does not name, or that can't be ignored.

    "operators.resize" allows all differences of the operator ``resize``.
    """
    return [
        difference
        for difference in different
        if difference.fixed or not any(_covers(name, difference.name) for name in allow)
    ]


def _check_names(
    allow: Sequence[str], different: Sequence[Difference], *fingerprints: Fingerprint
) -> None:
    """Raises ValueError for names that neither the fingerprints nor the differences contain."""
    names = _names(fingerprints) | {difference.name for difference in different}
    for name in allow:
        if not any(_covers(name, known_name) for known_name in names):
            raise ValueError(
                f"allow contains {name!r}, which is not a name of a difference. The names are "
                f"{sorted(names)}"
            )


def _covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith((f"{allowed}.", f"{allowed}["))


def _names(fingerprints: Iterable[Fingerprint]) -> set[str]:
    """Returns the names that differences between these fingerprints may have."""
    names = set[str]()
    for fingerprint in fingerprints:
        names |= fingerprint.keys() - {"operators", "sources", "unchecked"}
        names |= {line.partition(": ")[0] for line in fingerprint.get("sources", ())}
        for operator in _read_operators(fingerprint["operators"]):
            names.add(f"operators.{operator.label}")
            names |= {f"operators.{operator.label}.{k}" for k in operator.arguments}
    return names
