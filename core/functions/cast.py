"""`cast`: conversion to any dtype of a batch, including bfloat16."""

from __future__ import annotations

from typing import Any

from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..arrays.dtypes import BFLOAT16, as_dtype, dali_type
from ..pipeline.output_notes import mark_bfloat16


@do_not_convert
@knows_its_names
def cast(data: DataNode, dtype: Any) -> DataNode:
    """Converts numbers to a dtype, like ``nvidia.dali.fn.cast``, and outputs also to bfloat16.

    DALI has no bfloat16: the output stays float32 in the graph, and each batch is rounded to
    bfloat16 on the output's device, with ties to even. Operators can't take the rounded result.

    Args:
        data: The numbers.
        dtype: The dtype, in NumPy's, JAX's or DALI's form, or its name, such as "bfloat16".

    Returns:
        Numbers of the same shape.

    Raises:
        TypeError: If ``dtype`` is not a dtype, or is neither bfloat16 nor supported by DALI.
    """
    dtype = as_dtype(dtype)
    if dtype != BFLOAT16:
        result: DataNode = fn.cast(data, dtype=dali_type(dtype))
        return result
    return mark_bfloat16(fn.cast(data, dtype=types.FLOAT))
