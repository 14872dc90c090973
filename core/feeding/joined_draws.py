"""Feeds several draws of a graph by one input, which the library in C takes apart.

Each input takes the thread of ``next()``, which holds the GIL, 0.06 ms per batch of 256, since DALI
creates a tensor for each sample. Taking an input apart takes a thread of DALI 0.02 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.tensors import TensorListCPU

from ..arrays.dtypes import dali_type
from ..native.operators import checked_library, split
from ..pipeline.alternatives import offer_inputs
from ..random.draw import Draw, DrawnOutput, DrawnRows

_FEWEST = 3  # draws of one shape and dtype; fewer gain too little


def offer_joined(draw: Draw, used: Iterable[Any]) -> None:
    """Offers to feed draws of the same shape and dtype together, if the graph is on the CPU.

    Args:
        draw: The draw of the graph.
        used: The outputs of the graph, and the inputs of its operators.
    """
    if Pipeline.current().device_id is not None:
        return
    nodes = {getattr(node, "name", ""): node for node in used}
    for name, alike in draw._alike.items():
        names = (f"{name}[{k}]" for k in range(len(alike)))
        found = [nodes[name] for name in names if name in nodes]
        if len(found) >= _FEWEST:
            offer_inputs(found, _joined(draw._rows, name, alike))


def _joined(
    rows_of: Callable[[int], DrawnRows], name: str, outputs: Sequence[DrawnOutput]
) -> Callable[[Mapping[str, int]], dict[str, DataNode]]:
    """Returns a function that replaces the inputs of some outputs by the parts of one input.

    Args:
        rows_of: Returns the rows of a run.
        name: The name of the operator that returns the parts.
        outputs: The outputs, all of one form.
    """

    def replacements(_: Mapping[str, int]) -> dict[str, DataNode]:
        library = checked_library()
        if isinstance(library, str):
            return {}
        shape, dtype = outputs[0].form
        kind, ndim = dali_type(dtype), len(shape)
        together = fn.external_source(
            source=_source(rows_of, outputs), batch=True, dtype=kind, ndim=ndim + 1
        )
        parts = split(library, together, (kind, ndim), len(outputs), name)
        return {part.name: part for part in parts}

    return replacements


def _source(
    rows_of: Callable[[int], DrawnRows], outputs: Sequence[DrawnOutput]
) -> Callable[[int], Any]:
    """Returns a callback of DALI that returns outputs of draws as an array [rows, outputs, ...]."""

    def source(run: int) -> Any:
        rows = rows_of(run)
        return TensorListCPU(np.stack([output.of(rows) for output in outputs], axis=1))

    return source
