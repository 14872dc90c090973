"""Notes about a graph's Python functions, stored on its pipeline: state, names, live outputs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

# The notes are attributes of the pipeline, because they may refer to the pipeline: a global table
# would keep both alive forever.
NOTES = "_dalijax_functions"
LIVE_OUTPUTS = "_dalijax_outputs"
_NAME = "_dalijax_name"  # an attribute of operators


@dataclasses.dataclass
class FunctionNote:
    """Detects whether a graph's function keeps state between calls, which a resumed run would lose.

    Attributes:
        name: Name of the function.
        before: The values that the function could change, as they were when the graph was first
            defined.
        kept_state: A function that is called with ``before``, and returns a description of the
            state that the graph's function keeps between calls; "" for a pure function.
    """

    name: str
    before: Any
    kept_state: Callable[[Any], str]


def add(note: FunctionNote) -> None:
    """Adds a note to the pipeline that is being defined, if there is one."""
    pipeline = Pipeline.current()
    if pipeline is not None:  # otherwise DALI raises an error
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
    """Returns a new queue for a function's outputs on a GPU, which keeps them alive for DALI.

    DALI drops a DLPack tensor as soon as the operator that reads it is enqueued on its stream, and
    the tensor's library reuses the memory for the next array.

    Args:
        pipeline: The pipeline that is being defined.
        most: The number of most recent outputs to keep; None to keep all.
    """
    outputs: deque[Any] = deque(maxlen=most)
    vars(pipeline).setdefault(LIVE_OUTPUTS, []).append(outputs)
    return outputs
