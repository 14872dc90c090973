"""`pad_rows`: arrays with a constant number of rows, in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvidia.dali import fn, math, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..messages.printable import printable_repr
from ..random.draw import on_device

_MOST_ROWS = 1 << 31  # shapes are int32 in the graph


@do_not_convert
@knows_its_names
def pad_rows(x: DataNode, n: int, fill: float = 0) -> tuple[DataNode, DataNode]:
    """Returns the first ``n`` rows of each sample, padded to ``n`` rows, and their number.

    Batches then have a constant shape, so that a jitted step compiles once. ``nvidia.dali.fn.pad``
    does not cut samples with more than ``n`` rows.

    ```python
    boxes, count = pad_rows(boxes, 100)                # [100, 4], and the number of boxes
    labels, _ = pad_rows(labels, 100, fill=-1)
    ```

    Args:
        x: Rows of shape [k, ...] for each sample, of any dtype, on the CPU or GPU. k may be 0.
        n: The number of rows.
        fill: The value of the added rows, converted to the dtype of ``x`` as by
            ``nvidia.dali.fn.cast``. A number outside of the range of an integer dtype becomes its
            nearest end, so -1 becomes 0 in uint8. Floats have the precision of float32.

    Returns:
        The rows [n, ...], with the dtype of ``x``; and min(k, n), an int32 scalar on the CPU.

    Raises:
        TypeError: If ``fill`` is not a number.
        ValueError: If ``n`` is not a positive integer, or ``fill`` is an integer that does not fit
            into int64.
    """
    n = whole_number("n of pad_rows", n, "a number of rows, 1 or more", 1, _MOST_ROWS)
    shape = x.shape(dtype=types.INT32)
    count = math.min(shape[0], n)
    # fn.slice and fn.pad can pad, too, but fn.slice takes no booleans, and fn.pad no float64.
    added = fn.cat(fn.reshape(n - count, shape=[1]), shape[1:], axis=0)
    rows = on_device(fn.full(_constant(fill), shape=added), x.device)
    return fn.cat(x[:n], fn.cast_like(rows, x), axis=0), count


def _constant(fill: Any) -> DataNode:
    """Returns ``fill`` as a constant of int64 or float32; DALI has no constants of float64."""
    if isinstance(fill, (float, np.floating)):
        return types.Constant(float(fill), dtype=types.FLOAT, device="cpu")
    if not isinstance(fill, (bool, int, np.bool_, np.integer)):
        raise TypeError(f"fill of pad_rows must be a number, not {printable_repr(fill)}")
    if not -(1 << 63) <= int(fill) < 1 << 63:
        raise ValueError(f"fill of pad_rows must fit into int64, not {fill}")
    return types.Constant(int(fill), dtype=types.INT64, device="cpu")
