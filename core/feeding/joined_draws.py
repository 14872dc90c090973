"""Feeds several draws of a graph by one input, which the library in C splits.

Each input costs the thread of ``next()`` 0.06 ms per batch of 256, during which it holds the GIL:
DALI creates a tensor for each sample. Splitting an input costs a thread of DALI 0.02 ms. DALI pins
the memory of the parts that are copied to a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.tensors import TensorListCPU

from ..arrays.dtypes import dali_type
from ..native.operators import checked_library, split
from ..pipeline.alternatives import offer_inputs
from ..random.draw import Draw, DrawnOutput, DrawnRows

_LARGEST = 256  # bytes per sample; copying more costs more than another input


def offer_joined(draw: Draw, used: Iterable[Any]) -> None:
    """Offers to feed draws of the same shape and dtype together.

    Args:
        draw: The draw of the graph.
        used: The outputs of the graph, and the inputs of its operators.
    """
    nodes = {getattr(node, "name", ""): node for node in used}
    for name, inputs in itertools.groupby(sorted(draw._outputs), lambda n: n.partition("[")[0]):
        alike = {key: draw._outputs[key] for key in inputs}
        shape, dtype = next(iter(alike.values())).form
        found = [nodes[key] for key in alike if key in nodes]
        if len(found) > 1 and math.prod(shape) * dtype.itemsize <= _LARGEST:
            offer_inputs(found, _joined(draw._rows, name, alike))


def _joined(
    rows_of: Callable[[int], DrawnRows], name: str, outputs: Mapping[str, DrawnOutput]
) -> Callable[[Mapping[str, int]], dict[str, DataNode]]:
    """Returns a function that replaces the inputs of some outputs by the parts of one input.

    Args:
        rows_of: Returns the rows of a run.
        name: The name of the operator that returns the parts.
        outputs: The outputs in order, all of one form, by the names of the inputs.
    """

    def replacements(users: Mapping[str, int]) -> dict[str, DataNode]:
        library = checked_library()
        live = [output if users[key] else None for key, output in outputs.items()]
        if isinstance(library, str) or len(live) - live.count(None) < 2:
            return {}
        shape, dtype = next(iter(outputs.values())).form
        kind, ndim = dali_type(dtype), len(shape)
        together = fn.external_source(
            source=_source(rows_of, live), batch=True, dtype=kind, ndim=ndim + 1
        )
        parts = split(library, together, (kind, ndim), len(live), name)
        return {part.name: part for part in parts}

    return replacements


def _source(
    rows_of: Callable[[int], DrawnRows], outputs: Sequence[DrawnOutput | None]
) -> Callable[[int], Any]:
    """Returns a callback of DALI that returns outputs of draws as an array [rows, outputs, ...].

    Outputs that the graph does not use are None: they are not computed, and 0 in the array.
    """

    def source(run: int) -> Any:
        rows = rows_of(run)
        arrays = [None if output is None else output.of(rows) for output in outputs]
        unused = np.zeros_like(next(array for array in arrays if array is not None))
        return TensorListCPU(np.stack([unused if a is None else a for a in arrays], axis=1))

    return source
