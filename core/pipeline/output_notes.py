"""Notes about a graph's outputs that DALI does not keep, stored on its pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

from ..state.operators import operator_inputs, operators
from .dali_pipeline import operator_name

# Attributes of the pipeline, because a global table would keep it alive forever.
_NOTES = "_dalijax_output_notes"
_BFLOAT16 = "_dalijax_bfloat16"  # names of nodes


@dataclasses.dataclass(frozen=True)
class OutputNotes:
    """Properties of a graph's outputs.

    Attributes:
        names: Names of the outputs in order, if the graph function returned a dict; otherwise
            empty.
        bfloat16: Indices of the float32 outputs that the batch contains as bfloat16, for which
            DALI has no type.
    """

    names: tuple[str, ...] = ()
    bfloat16: tuple[int, ...] = ()


def mark_bfloat16(node: DataNode) -> DataNode:
    """Marks an output of the graph as bfloat16 in the batch, during its definition; returns it."""
    pipeline = Pipeline.current()
    if pipeline is not None:  # otherwise DALI raises an error
        vars(pipeline).setdefault(_BFLOAT16, set()).add(node.name)
    return node


def note_outputs(pipeline: Pipeline, name: str) -> None:
    """Stores notes about the outputs of a pipeline that is defined and not yet built.

    A dict of outputs is replaced by a sequence, in the alphabetical order of their names: states do
    not depend on the order in which a function adds outputs, and JAX sorts dicts in the same way.

    Args:
        pipeline: The pipeline.
        name: Name of its graph function, for errors.

    Raises:
        TypeError: If a name is not a string, a named output is a list or a dict of outputs, or an
            operator takes an output that becomes bfloat16.
    """
    # Private in DALI; without it, outputs can be neither a dict nor bfloat16.
    outputs: Sequence[Any] = getattr(pipeline, "_graph_out", None) or ()
    names: tuple[str, ...] = ()
    if len(outputs) == 1 and isinstance(outputs[0], Mapping):
        named = outputs[0]
        for key in named:
            if not isinstance(key, str):
                raise TypeError(f"{name} returns a dict with the key {key!r}. Use names as keys")
            _check_not_nested(key, named[key], name)
        names = tuple(sorted(named))
        outputs = [named[key] for key in names]
        pipeline.set_outputs(*outputs)
    marked = vars(pipeline).get(_BFLOAT16, set())
    if marked:
        _check_last(pipeline, marked, name)
    bfloat16 = [k for k, node in enumerate(outputs) if getattr(node, "name", "") in marked]
    set_notes(pipeline, OutputNotes(names, tuple(bfloat16)))


def _check_not_nested(key: str, value: Any, name: str) -> None:
    """Raises TypeError if an output is a dict, or a list of anything but numbers.

    Args:
        key: The output's name.
        value: The output.
        name: Name of the graph function.
    """
    if isinstance(value, Mapping):
        keys = [f"{key}/{inner}" for inner in value]
        join = ""
    elif isinstance(value, (tuple, list)) and not all(map(np.isscalar, value)):
        keys = [f"{key}_{k}" for k in range(len(value))]
        join = f", or join arrays of one shape: {{{key!r}: fn.stack(*{key})}}"
    else:
        return  # DALI accepts lists of numbers as constants
    items = ", ".join([f"{inner!r}: ..." for inner in keys[:2]] + ["..."] * (len(keys) > 2))
    raise TypeError(
        f"{name} returns a {type(value).__name__} as {key!r}, but an output is a single array. "
        f"Return each under a key of its own, as in {{{items}}}{join}"
    )


def check_outputs(pipeline: Pipeline, output_map: Sequence[str], name: str) -> tuple[str, ...]:
    """Returns the names of a built pipeline's outputs, in order.

    Args:
        pipeline: The pipeline.
        output_map: The names that were passed to the iterator; empty if there are none.
        name: Name of its graph function, for errors.

    Raises:
        ValueError: If an output has no name, or ``output_map`` and the graph disagree.
    """
    names, count = notes_of(pipeline).names, pipeline.num_outputs
    if not output_map and not names:
        raise ValueError(
            f"output_map is empty. Name each output of {name}: return a dict, as in "
            "return {'images': images, 'labels': labels}, or pass "
            "output_map=['images', 'labels']"
        )
    if names and output_map and sorted(output_map) != list(names):
        raise ValueError(
            f"output_map is {list(output_map)}, but {name} returns a dict with the keys "
            f"{list(names)}. Omit output_map, or name the same outputs"
        )
    if not names and count != len(output_map):
        raise ValueError(
            f"output_map names {len(output_map)} outputs, {list(output_map)}, "
            f"but the pipeline has {count}. Pass one name for each output"
        )
    return names or tuple(output_map)


def _check_last(pipeline: Pipeline, marked: set[str], name: str) -> None:
    """Raises TypeError if an operator takes an output that becomes bfloat16.

    Args:
        pipeline: A pipeline that was defined and is not built.
        marked: The names of the nodes that become bfloat16.
        name: The name of its graph function, for errors.
    """
    for operator in operators(pipeline):
        if any(getattr(node, "name", "") in marked for node in operator_inputs(operator)):
            user = operator_name(operator)
            user = "an if statement" if "_conditional" in user else user
            raise TypeError(
                f"{name}: {user} takes a result of dtype bfloat16, for which DALI has no type. "
                "Only outputs of the graph can be bfloat16: convert to it at the end of the graph, "
                "by dalijax.fn.cast or augment.normalize"
            )


def set_notes(pipeline: Pipeline, notes: OutputNotes) -> None:
    """Stores notes about the outputs of a pipeline on the pipeline."""
    vars(pipeline)[_NOTES] = notes


def notes_of(pipeline: Pipeline) -> OutputNotes:
    """Returns the notes about a pipeline's outputs; empty notes if none were stored."""
    notes: OutputNotes = vars(pipeline).get(_NOTES, OutputNotes())
    return notes
