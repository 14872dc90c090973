"""What Python functions of a graph leave with its pipeline: notes of their state, live outputs."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

# Attributes of pipelines, since what they hold may refer to the pipeline: a table of ours would
# keep both for good.
_NOTES = "_dalijax_functions"
_OUTPUTS = "_dalijax_outputs"
_NAME = "_dalijax_name"  # of operators


@dataclasses.dataclass
class FunctionNote:
    """A function of a graph, as far as resuming is concerned.

    Attributes:
        name: Its name.
        before: What it could change, as it was when the graph was first defined.
        kept_state: What it keeps from one call to the next, by ``before``, as a phrase; "" where
            nothing is seen.
    """

    name: str
    before: Any
    kept_state: Callable[[Any], str]


def add(note: FunctionNote) -> None:
    """Leaves a note with the pipeline that is being defined, if there is one."""
    pipeline = Pipeline.current()
    if pipeline is not None:  # else DALI says that one is missing
        vars(pipeline).setdefault(_NOTES, []).append(note)


def set_name(node: DataNode, name: str) -> None:
    """Leaves the name of a Python function with the operator that calls it."""
    if node.source is not None:
        vars(node.source)[_NAME] = name


def name_of(operator: Any) -> str:
    """The name of the Python function that an operator calls; "" for any other operator."""
    name: str = vars(operator).get(_NAME, "")
    return name


class FunctionsOfPipelines:
    """The functions in the pipelines of one source, compared with their first build."""

    def __init__(self) -> None:
        self._before: list[list[Any]] = []
        # Weak: who runs the pipelines decides when they end.
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()

    def add(self, pipelines: Sequence[Pipeline]) -> None:
        """Adds pipelines that were just built, one of each shard."""
        notes = [vars(pipeline).get(_NOTES, []) for pipeline in pipelines]
        self._before = self._before or [[note.before for note in each] for each in notes]
        # What was changed between two builds is state, too.
        for each, known in zip(notes, self._before):
            for note, before in zip(each, known):
                note.before = before
        self._pipelines.update(pipelines)

    def kept_state(self) -> str:
        """Why the pipelines can't be resumed; "" where they can, as far as is seen."""
        for pipeline in list(self._pipelines):
            for note in vars(pipeline).get(_NOTES, ()):
                if why := note.kept_state(note.before):
                    return (
                        f"its function {note.name}() keeps state ({why}), which DALI's checkpoints "
                        "do not have. Let it depend on its arguments alone (a keyword-only `key`, "
                        "or `rng` of DLPack functions, has random numbers that resume), or pass "
                        "stateful=False where that is so"
                    )
        return ""


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
