"""Data of a graph's Python functions that is stored on its pipeline: state, names, outputs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

# These are attributes of pipelines, since the data may refer to the pipeline: a global table would
# keep both alive forever.
NOTES = "_dalijax_functions"
_OUTPUTS = "_dalijax_outputs"
_NAME = "_dalijax_name"  # of operators


@dataclasses.dataclass
class FunctionNote:
    """A function of a graph, as far as resuming is concerned.

    Attributes:
        name: Its name.
        before: The values that it could change, as they were when the graph was first defined.
        kept_state: Called with ``before``, gives a phrase on the state that it keeps between
            calls; "" if none is seen.
    """

    name: str
    before: Any
    kept_state: Callable[[Any], str]


def add(note: FunctionNote) -> None:
    """Leaves a note with the pipeline that is being defined, if there is one."""
    pipeline = Pipeline.current()
    if pipeline is not None:  # else DALI says that one is missing
        vars(pipeline).setdefault(NOTES, []).append(note)


def set_name(node: DataNode, name: str) -> None:
    """Stores the name of a Python function on the operator that calls it."""
    if node.source is not None:
        vars(node.source)[_NAME] = name


def name_of(operator: Any) -> str:
    """Returns the name of the Python function that an operator calls; "" for other operators."""
    name: str = vars(operator).get(_NAME, "")
    return name


def live_outputs(pipeline: Pipeline, most: int | None = None) -> deque[Any]:
    """Returns a queue that keeps a function's outputs on a GPU alive until DALI has read them.

    DALI drops a DLPack tensor as soon as the operator that reads it is enqueued on its stream, and
    the tensor's library reuses the memory for the next array.

    Args:
        pipeline: The pipeline that is being defined.
        most: The number of most recent outputs to keep; None to keep all.
    """
    outputs: deque[Any] = deque(maxlen=most)
    vars(pipeline).setdefault(_OUTPUTS, []).append(outputs)
    return outputs


def release(pipeline: Pipeline) -> None:
    """Frees the stored outputs of a pipeline that is done; it is part of reference cycles."""
    for outputs in vars(pipeline).pop(_OUTPUTS, ()):
        outputs.clear()
