"""`Field`: the dtype, the number of dimensions and the use of a field of records."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..dtypes import as_dtype


@dataclasses.dataclass(frozen=True)
class Field:
    """The dtype, the number of dimensions and the use of a field of records.

    Attributes:
        dtype: Dtype of a record's array, in NumPy's, JAX's or DALI's form, or its name; None for
            text, dicts and other values that bypass the graph.
        ndim: Number of dimensions: 1 for encoded bytes, 0 for a label.
        is_path: Whether the value is the path of a file that DALI reads in the graph.
        bypass: Whether the batch contains the field, in its dtype, if the graph does not take it.
            With a sharding, the field is placed like an output, or stays on the host if a dict of
            shardings has None for it. Without ``bypass``, a field that the graph does not take is
            not read.
    """

    dtype: np.dtype[Any] | None
    ndim: int = 0
    is_path: bool = False
    bypass: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:  # users pass np.int32, which is a type
            object.__setattr__(self, "dtype", as_dtype(self.dtype, "dtype of Field"))
