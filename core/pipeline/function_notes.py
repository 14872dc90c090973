"""Notes that a graph's Python functions leave with its pipeline: state, names, live outputs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

# Attributes of pipelines, since what they hold may refer to the pipeline: a table of ours would
# keep both for good.
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
    """Leaves the name of a Python function with the operator that calls it."""
    if node.source is not None:
        vars(node.source)[_NAME] = name


def name_of(operator: Any) -> str:
    """The name of the Python function that an operator calls; "" for any other operator."""
    name: str = vars(operator).get(_NAME, "")
    return name


def live_outputs(pipeline: Pipeline, most: int | None = None) -> deque[Any]:
    """A place that keeps a function's last outputs on a GPU alive until DALI has read them.

    DALI drops a DLPack tensor as soon as what reads it waits in its stream, and its library gives
    the memory to the next array that somebody makes.

    Args:
        pipeline: The pipeline that is being defined.
        most: Number of outputs that it keeps, the last ones; None: any number.
    """
    outputs: deque[Any] = deque(maxlen=most)
    vars(pipeline).setdefault(_OUTPUTS, []).append(outputs)
    return outputs


def release(pipeline: Pipeline) -> None:
    """Frees the outputs of a pipeline that delivers nothing more; it is in cycles itself."""
    for outputs in vars(pipeline).pop(_OUTPUTS, ()):
        outputs.clear()
