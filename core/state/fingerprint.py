"""Fingerprints: descriptions of an iterator's epochs and graph, as plain JSON values.

DALI restores a checkpoint into a pipeline with a different shuffle, padding, shard count, file list
or batch size without a warning, and continues with wrong data. Each state therefore contains a
fingerprint, which a restore compares field by field; see `dalijax.core.state.differences`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from nvidia.dali import Pipeline

from ..order.epochs import EpochPlan
from . import reader_files
from .envelope import digest
from .operators import (
    FIELD,
    Operator,
    graph_outputs,
    read_operators,
    serialized_operators,
    without_choices,
)

Fingerprint = dict[str, Any]

# Arguments that change the speed, not the data. (`hw_decoder_load` may change the rounding of
# pixels, as a change from a CPU to a GPU does.)
IGNORED = frozenset(
    {
        *("_display_name", "_module", "_origin_stack_filename", "_origin_stack_line"),
        *("_origin_stack_lineno", "_origin_stack_name", "bytes_per_sample_hint", "device"),
        *("dont_use_mmap", "function_id", "hw_decoder_load", "minibatch_size", "num_threads"),
        *("prefetch_queue_depth", "preserve", "preserve_name", "read_ahead", "tensor_init_bytes"),
        *("run_fn", "setup_fn", "use_o_direct"),  # Numba's functions are addresses
    }
)
_LONGEST = 64  # characters; longer values are stored as digests
RESIZED = "resized"  # kind of the line that names what resizes images on the CPU
CONNECTIONS = "connections"  # kind of the line that describes how the operators are connected
AUTOMATIC = re.compile(r"_+\w+_\d+$")  # names that DALI generates: __Resize_3
# Values that stand for an unknown graph or a missing seed, and match any value.
_BLANKS = {"operators": [], "outputs": [], "seed": -1}


def matches(name: str, before: Any, after: Any) -> bool:
    """Returns whether two values of a fingerprint are equal, or one of them is unknown.

    Args:
        name: Name of the value.
        before, after: The values.
    """
    return before == after or _BLANKS.get(name, ()) in (before, after)


def unknown() -> Fingerprint:
    """Returns a fingerprint with empty values, but all keys, for pipelines that were not built."""
    return {
        "epoch_size": -1,
        "batch_size": -1,
        "num_shards": -1,
        "shard_ids": "",
        "policy": "",
        "padded": -1,
        "stick": -1,
        "seed": -1,
        "outputs": [],
        "operators": [],
        "sources": [],
        "unchecked": [],
    }


def fingerprint(
    pipelines: Sequence[Pipeline],
    plan: EpochPlan | None,
    streams: Sequence[int],
    serialized: Sequence[bytes] = (),
    batch_map: Sequence[str] = (),
    bfloat16: Sequence[int] = (),
) -> Fingerprint:
    """Returns the fingerprint of built pipelines, without the names of their outputs.

    Args:
        pipelines: The pipelines, whose graphs are equal.
        plan: The epochs of the pipelines; None if an ``external_source`` ends the epochs.
        streams: The shard of each pipeline in epoch 0.
        serialized: The serialized pipelines, if the pipelines were created from them.
        batch_map: Names of the functions of ``batch_map``.
        bfloat16: Indices of the outputs that the batch contains as bfloat16.

    Returns:
        A dict of str, int and list of str, with the lists of `GraphLines`.
    """
    first = pipelines[0]
    result = unknown()
    del result["outputs"]
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
    outputs = graph_outputs(first, serialized[0] if serialized else b"")
    graph = graph_lines(operators, outputs, batch_map=batch_map, bfloat16=bfloat16)
    graph.unchecked[:0] = unchecked
    return result | graph._asdict()


class GraphLines(NamedTuple):
    """The description of a graph in a state.

    Attributes:
        operators: A line with the kind, name and arguments of each operator, in order. Long
            arguments are replaced by digests. Further lines describe the connections of the
            operators, bfloat16 outputs and functions of ``batch_map``.
        sources: A line for each argument of a reader or external source. Paths are replaced by
            descriptions of their files.
        unchecked: The parts of the graph that can't be compared, such as Python functions.
    """

    operators: list[str]
    sources: list[str]
    unchecked: list[str]


def graph_lines(
    operators: Sequence[Operator],
    outputs: Sequence[str],
    drawn: Mapping[str, str] = MappingProxyType({}),
    batch_map: Sequence[str] = (),
    bfloat16: Sequence[int] = (),
    resized_by: str = "",
) -> GraphLines:
    """Returns the description of a graph.

    Args:
        operators: The operators, in order.
        outputs: The outputs of the graph, as `graph_outputs` returns them.
        drawn: Labels of the external sources that supply random numbers, by the names of the
            sources. Positions do not depend on these sources, whose number users do not choose.
        batch_map: Names of the functions of ``batch_map``.
        bfloat16: Indices of the outputs that the batch contains as bfloat16.
        resized_by: The implementation that resizes images on the CPU; "" without one.
    """
    lines = GraphLines([], [], [])
    operators, outputs = without_choices(operators, outputs)
    # Sources of record fields are sorted by name, because their order in the graph has no effect.
    operators = sorted(
        operators, key=lambda item: (0, item[1]) if item[1].startswith(FIELD) else (1, "")
    )
    labels = labels_of([(kind, drawn.get(name, name)) for kind, name, _ in operators])
    producers = {name: label for (_, name, _), label in zip(operators, labels)}
    connections = []
    for (kind, name, arguments), label in zip(operators, labels):
        compared = {k: v for k, v in arguments.items() if k not in IGNORED}
        inputs = compared.pop("inputs", ())
        connections.append([label, *([_produced(of, producers), k] for of, k in inputs)])
        if name in drawn:
            lines.operators.append(operator_line("drawn", drawn[name], {}))
        elif is_source(kind):
            compared.pop("shard_id", None)  # compared as shard_ids
            paths = reader_files.described(reader_files.reader_of(kind), compared)
            lines.unchecked.extend(
                f"the files of {label}.{k}" for k, v in paths.items() if "not read" in v
            )
            texts = {k: _short(v) for k, v in compared.items()} | paths
            lines.sources.extend(f"{label}.{k}: {v}" for k, v in sorted(texts.items()) if v)
            # The results of operators such as gaussian_blur depend on the layout of a field.
            has_layout = name.startswith(FIELD) and "layout" in compared
            layout = {"layout": compared["layout"]} if has_layout else {}
            lines.operators.append(operator_line(kind, name, layout))
            if kind == "external_source":
                lines.unchecked.append(f"the data of the source {name}")
        else:
            if "run_fn" in arguments:
                lines.unchecked.append(f"the Numba function of {name}")
            lines.operators.append(operator_line(kind, name, dict(sorted(compared.items()))))
    if operators:
        connections.append([CONNECTIONS, *(_produced(of, producers) for of in outputs)])
        line = operator_line(CONNECTIONS, "__graph_0", {"inputs": connections})
        lines.operators.append(line)
    if bfloat16:
        line = operator_line("bfloat16", "__bfloat16_0", {"outputs": list(bfloat16)})
        lines.operators.append(line)
    if resized_by:
        lines.operators.append(operator_line(RESIZED, "__resized_0", {"by": resized_by}))
    for number, name in enumerate(batch_map):
        line = operator_line("batch_map", f"__batch_map_{number}", {"function": name})
        lines.operators.append(line)
        lines.unchecked.append(f"the code of {name}() of batch_map")
    return lines


def is_source(kind: str) -> bool:
    """Returns whether operators of a kind supply data: readers and external sources."""
    return kind == "external_source" or bool(reader_files.reader_of(kind))


def labels_of(operators: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a label for each operator: the name that the user chose, otherwise the kind.

    Labels that occur more than once are numbered, as in "resize[0]".

    Args:
        operators: Kinds and names of the operators.
    """
    plain = [kind if AUTOMATIC.match(name) else name for kind, name in operators]
    total, count = Counter(plain), Counter[str]()
    labels = []
    for label in plain:
        labels.append(f"{label}[{count[label]}]" if total[label] > 1 else label)
        count[label] += 1
    return labels


def _produced(data: str, producers: Mapping[str, str]) -> str:
    """Returns an operator's output, such as "__Resize_3[0]", with the operator's label as name."""
    if data in producers:  # the name of an operator may contain brackets
        return producers[data]
    name, bracket, index = data.partition("[")
    return f"{producers.get(name, name)}{bracket}{index}"


def _short(value: Any) -> str:
    """Returns a value as text of a single line, or its digest if the text is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    text = text.replace(", ", ",")
    return text if len(text) <= _LONGEST and text.isprintable() else f"#{digest(text.encode())}"


def operator_line(kind: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the line of an operator in a fingerprint, which `split_line` parses."""
    return "\t".join(
        [kind, name.replace("\t", " "), *(f"{k}={_short(v)}" for k, v in arguments.items())]
    )


def split_line(line: str) -> tuple[str, str, dict[str, str]]:
    """Returns the kind, the name and the arguments of an operator from its `operator_line`."""
    kind, name, *arguments = line.split("\t") if "\t" in line else [line, ""]
    pairs = (argument.partition("=") for argument in arguments)
    return kind, name, {key: value for key, _, value in pairs}
