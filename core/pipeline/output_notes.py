"""Notes about a graph's outputs that DALI does not keep, stored on its pipeline."""

from __future__ import annotations

import dataclasses

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

from ..state.operators import operator_inputs
from .dali_pipeline import operator_name, operators

# Attributes of the pipeline, because a global table would keep it alive forever.
_NOTES = "_dalijax_output_notes"
_BFLOAT16 = "_dalijax_bfloat16"  # names of nodes


@dataclasses.dataclass(frozen=True)
class OutputNotes:
    """Properties of a graph's outputs.

    Attributes:
        bfloat16: Indices of the float32 outputs that the batch contains as bfloat16, for which
            DALI has no type.
    """

    bfloat16: tuple[int, ...] = ()


def mark_bfloat16(node: DataNode) -> DataNode:
    """Marks an output of the graph that is being defined, which becomes bfloat16 in the batch."""
    pipeline = Pipeline.current()
    if pipeline is not None:  # otherwise DALI raises an error
        vars(pipeline).setdefault(_BFLOAT16, set()).add(node.name)
    return node


def note_outputs(pipeline: Pipeline, name: str) -> None:
    """Stores the notes about the outputs of a pipeline that was defined and is not built.

    Args:
        pipeline: The pipeline.
        name: Name of its graph function, for errors.

    Raises:
        TypeError: If an operator takes an output that becomes bfloat16.
    """
    marked = vars(pipeline).get(_BFLOAT16, set())
    if marked:
        _check_last(pipeline, marked, name)
    # Private in DALI; without it, no output is bfloat16.
    outputs = getattr(pipeline, "_graph_out", None) or ()
    bfloat16 = [k for k, node in enumerate(outputs) if getattr(node, "name", "") in marked]
    set_notes(pipeline, OutputNotes(bfloat16=tuple(bfloat16)))


def _check_last(pipeline: Pipeline, marked: set[str], name: str) -> None:
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
    """Stores notes on a pipeline."""
    vars(pipeline)[_NOTES] = notes


def notes_of(pipeline: Pipeline) -> OutputNotes:
    """Returns the notes about a pipeline's outputs."""
    notes: OutputNotes = vars(pipeline).get(_NOTES, OutputNotes())
    return notes
