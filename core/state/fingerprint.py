"""Fingerprints: the epochs and the graph that a state belongs to, as plain JSON values.

DALI restores a checkpoint into a pipeline of another shuffle, padding, shard count, file list
or batch size without a warning, and goes on with wrong data. A fingerprint is saved with each
state, and a restore compares it field by field.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from nvidia.dali import Pipeline

from ..errors import Difference
from ..order.epochs import EpochPlan
from . import reader_files
from .operators import FIELD, graph_outputs, read_operators, serialized_operators

Fingerprint = dict[str, Any]

# Arguments that change the speed, not the data. (By `hw_decoder_load` pixels may differ in their
# rounding, as between a CPU and a GPU.)
_IGNORED = frozenset(
    {
        *("_display_name", "_module", "_origin_stack_filename", "_origin_stack_line"),
        *("_origin_stack_lineno", "_origin_stack_name", "bytes_per_sample_hint", "device"),
        *("dont_use_mmap", "function_id", "hw_decoder_load", "num_threads", "preserve"),
        *("prefetch_queue_depth", "preserve_name", "read_ahead", "tensor_init_bytes"),
        *("run_fn", "setup_fn", "use_o_direct"),  # Numba's functions are addresses
    }
)
# Characters of an argument that is not hashed; operators have many arguments, sources few.
_MOST_IN_SOURCE = 80
_MOST_IN_OPERATOR = 16
_CONNECTIONS = "connections"  # stands for an operator, behind the graph's own
_AUTOMATIC = re.compile(r"_+\w+_\d+$")  # names that DALI makes up: __Resize_3


def digest(*parts: bytes, length: int = 12) -> str:
    """The first hexadecimal digits of the SHA-256 hash of all parts."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:length]


def unknown() -> Fingerprint:
    """The fingerprint of pipelines that were not built yet, with all keys and their types."""
    return {
        "epoch_size": -1,
        "batch_size": -1,
        "num_shards": -1,
        "shard_ids": "",
        "policy": "",
        "padded": -1,
        "stick": -1,
        "seed": -1,
        "operators": [],
        "sources": [],
        "unchecked": [],
    }


class DescribedCalls(Protocol):
    """Calls of functions on the placed batch, as a fingerprint sees them."""

    @property
    def names(self) -> list[str]:
        """The functions' names."""
        ...

    def described(self) -> list[str]:
        """A line for each call, in order."""
        ...


def fingerprint(
    pipelines: Sequence[Pipeline],
    plan: EpochPlan | None,
    streams: Sequence[int],
    serialized: Sequence[bytes] = (),
    deferred: DescribedCalls | None = None,
    drawn: Mapping[str, str] = MappingProxyType({}),
) -> Fingerprint:
    """The fingerprint of built pipelines, without the names of their outputs.

    Args:
        pipelines: The pipelines, whose graphs are alike.
        plan: Their epochs; None if the source ends them.
        streams: The shard of each pipeline in epoch 0.
        serialized: The pipelines as DALI serialises them, if that was done already.
        deferred: Functions that are called on the placed batch.
        drawn: Labels of the external sources that random numbers come by, by their names. How many
            there are is not the user's to say, and no position is counted in them.

    Returns:
        A dict of str, int and list of str. ``operators`` has the kind, name and arguments of each
        operator in order, long arguments as a hash, and how they are connected; ``sources`` the
        arguments of readers and external sources, with the data behind paths; ``unchecked`` lists
        what can't be read.
    """
    first = pipelines[0]
    result = unknown()
    result["batch_size"] = first.max_batch_size
    result["seed"] = -1 if first.seed is None else first.seed
    result["shard_ids"] = " ".join(map(str, streams))
    if plan is not None:
        result |= {
            "epoch_size": plan.num_samples,
            "num_shards": plan.num_shards,
            "policy": plan.policy.name,
            "padded": int(plan.padded),
            "stick": int(plan.stick),
        }
    unchecked: list[str] = []
    if serialized:
        operators = list(serialized_operators(serialized[0]))
    else:
        operators, unchecked = read_operators(first)
    # Which field is used first changes nothing.
    operators.sort(key=lambda one: (0, one[1]) if one[1].startswith(FIELD) else (1, ""))
    outputs = graph_outputs(first, serialized[0] if serialized else b"")
    labels = _labels([(kind, drawn.get(name, name)) for kind, name, _ in operators])
    producers = {name: label for (_, name, _), label in zip(operators, labels)}
    connections = []
    for (kind, name, arguments), label in zip(operators, labels):
        compared = {k: v for k, v in arguments.items() if k not in _IGNORED}
        inputs = compared.pop("inputs", ())
        connections.append([label, *([_produced(of, producers), k] for of, k in inputs)])
        if name in drawn:
            result["operators"].append(f"drawn {drawn[name]}")
        elif _is_source(kind):
            compared.pop("shard_id", None)  # compared as shard_ids
            paths = reader_files.described(reader_files.reader_of(kind), compared)
            unchecked += [f"the files of {label}.{k}" for k, v in paths.items() if "not read" in v]
            texts = {k: _source_text(v) for k, v in compared.items()} | paths
            result["sources"] += [f"{label}.{k}: {v}" for k, v in sorted(texts.items()) if v]
            result["operators"].append(f"{kind} {name}")
            if kind == "external_source":
                unchecked.append(f"what the source of {name} gives")
        else:
            if "run_fn" in arguments:
                unchecked.append(f"the Numba function of {name}")
            values = [f"{k}={_operator_text(v)}" for k, v in sorted(compared.items())]
            result["operators"].append(" ".join([kind, name, *values]))
    if operators:
        connections.append([_CONNECTIONS, *(_produced(of, producers) for of in outputs)])
        result["operators"].append(f"{_CONNECTIONS} __graph_0 inputs={_operator_text(connections)}")
    if deferred is not None:
        result["operators"] += deferred.described()
        unchecked += [f"the function {name}() of global arrays" for name in deferred.names]
    result["unchecked"] = unchecked
    return result


def _is_source(kind: str) -> bool:
    return kind == "external_source" or bool(reader_files.reader_of(kind))


def _labels(operators: Sequence[tuple[str, str]]) -> list[str]:
    """Labels of operators, given kind and name of each: the user's name, or else the kind.

    Labels that come several times are numbered.
    """
    plain = [kind if _AUTOMATIC.match(name) else name for kind, name in operators]
    total, seen = Counter(plain), Counter[str]()
    labels = []
    for label in plain:
        labels.append(f"{label}[{seen[label]}]" if total[label] > 1 else label)
        seen[label] += 1
    return labels


def _produced(data: str, producers: Mapping[str, str]) -> str:
    """An output of an operator, "__Resize_3[0]", with the operator's label."""
    name, bracket, index = data.partition("[")
    return f"{producers.get(name, name)}{bracket}{index}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _source_text(value: Any) -> str:
    """A source's argument as text; a long one as a hash."""
    text = _plain(value)
    return text if len(text) <= _MOST_IN_SOURCE else f"#{digest(text.encode())}"


def _operator_text(value: Any) -> str:
    """An operator's argument as text; a long one, or one with spaces, as a hash."""
    text = _plain(value).replace(", ", ",")
    clear = len(text) <= _MOST_IN_OPERATOR and not re.search(r"\s", text)
    return text if clear else f"#{digest(text.encode(), length=6)}"


# Positions are counted in these: where one differs, no saved position exists now.
_FIXED = frozenset(
    {"epoch_size", "batch_size", "num_shards", "shard_ids", "policy", "padded", "stick"}
)
_FIXED_ARGUMENTS = frozenset({"num_shards", "pad_last_batch", "stick_to_shard"})
_LEFT_OUT = "(left out)"  # an argument


def differences(saved: Fingerprint, now: Fingerprint) -> list[Difference]:
    """The differences; pipelines that were not built yet, and no seed, agree with all."""
    result: list[Difference] = []
    if unknown() in (saved, now):
        return result
    for key, blank in unknown().items():
        before: Any = saved.get(key, blank)
        after: Any = now.get(key, blank)
        seedless = key == "seed" and blank in (before, after)
        if key == "unchecked" or before == after or seedless:
            continue
        if key == "sources":
            result += _sources_differ(before, after)
        elif key == "operators":
            result += _operators_differ(before, after)
        else:
            result.append(Difference(key, str(before), str(after), key in _FIXED))
    return result


def _sources_differ(before: Sequence[str], after: Sequence[str]) -> Iterator[Difference]:
    old, new = ({k: v for k, _, v in (text.partition(": ") for text in s)} for s in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            was, now = (arguments.get(name, _LEFT_OUT) for arguments in (old, new))
            yield Difference(name, was, now, name.rpartition(".")[2] in _FIXED_ARGUMENTS)


class _Operator(NamedTuple):
    kind: str
    name: str
    arguments: dict[str, str]
    label: str

    @property
    def key(self) -> str:
        """A text that identifies it in another graph."""
        return self.kind if _AUTOMATIC.match(self.name) else f"={self.name}"

    def __str__(self) -> str:
        return self.kind if _AUTOMATIC.match(self.name) else f"{self.kind} {self.name}"


def _read_operators(texts: Sequence[str]) -> list[_Operator]:
    parts = [[*text.split(" "), ""][:2] for text in texts]
    labels = _labels([(kind, name) for kind, name in parts])
    return [
        _Operator(kind, name, dict(a.partition("=")[::2] for a in text.split(" ")[2:]), label)
        for (kind, name), label, text in zip(parts, labels, texts)
    ]


def _paired(
    before: Sequence[str], after: Sequence[str]
) -> list[tuple[_Operator | None, _Operator | None]]:
    """The operators of two graphs in pairs: each with its counterpart, or None."""
    pairs: list[tuple[_Operator | None, _Operator | None]] = []

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
    pairs = _paired(before, after)
    alike = all(old is not None and new is not None and old.kind == new.kind for old, new in pairs)
    for old, new in pairs:
        if old is not None and new is not None and old.kind == new.kind:
            if new.kind == _CONNECTIONS and not alike:
                continue  # operators that came or went are named, and connected with others
            for argument in sorted(old.arguments.keys() | new.arguments.keys()):
                was, now = (o.arguments.get(argument, _LEFT_OUT) for o in (old, new))
                if was != now:
                    yield Difference(f"operators.{new.label}.{argument}", was, now)
        else:
            operators = [operator for operator in (new, old) if operator is not None]
            # A reader without its state would begin anew, beside others that go on.
            source = any(_is_source(o.kind) and not o.name.startswith(FIELD) for o in operators)
            was, now = ("(none)" if operator is None else str(operator) for operator in (old, new))
            yield Difference(f"operators.{operators[0].label}", was, now, source)


def renamed(saved: Fingerprint, now: Fingerprint) -> dict[str, str] | None:
    """Operators' names when a state was saved, by their names now.

    Returns:
        None if all names are the same, and no operator was added or left out.
    """
    if [] in (saved["operators"], now["operators"]):
        return None  # they could not be read
    pairs = _paired(saved["operators"], now["operators"])
    names = {
        new.name: old.name
        for old, new in pairs
        if old is not None and new is not None and old.kind == new.kind
    }
    alike = len(names) == len(pairs) and all(old == new for new, old in names.items())
    return None if alike else names


def not_allowed(different: Sequence[Difference], allow: Sequence[str]) -> list[Difference]:
    """The differences that no name waives; "operators.resize" waives all of that operator's."""
    return [
        difference
        for difference in different
        if difference.fixed or not any(_covers(name, difference.name) for name in allow)
    ]


def check_names(
    allow: Sequence[str], different: Sequence[Difference], *fingerprints: Fingerprint
) -> None:
    """Raises ValueError for a name that is in no fingerprint, and of no difference."""
    known = _names(fingerprints) | {difference.name for difference in different}
    for name in allow:
        if not any(_covers(name, other) for other in known):
            raise ValueError(
                f"allow has {name!r}, which is the name of nothing here: there are {sorted(known)}"
            )


def _covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith((f"{allowed}.", f"{allowed}["))


def _names(fingerprints: Iterable[Fingerprint]) -> set[str]:
    """The names that differences may have."""
    names = unknown().keys() - {"operators", "sources", "unchecked"} | {"outputs"}
    for fingerprint in fingerprints:
        names |= {line.partition(": ")[0] for line in fingerprint["sources"]}
        for operator in _read_operators(fingerprint["operators"]):
            names.add(f"operators.{operator.label}")
            names |= {f"operators.{operator.label}.{k}" for k in operator.arguments}
    return names
