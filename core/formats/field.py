"""`Field`: the dtype, the dimensions and the use of a field of records."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import whole_number
from ..arrays.dtypes import as_dtype

# The layouts of arrays of pixels, by the number of dimensions.
_PIXELS = {2: "HW", 3: "HWC", 4: "FHWC"}
_MOST_CHANNELS = 4  # of images and videos


@dataclasses.dataclass(frozen=True)
class Field:
    """The dtype, the dimensions and the use of a field of records.

    Attributes:
        dtype: Dtype of a record's array, in NumPy's, JAX's or DALI's form, or its name; None for
            text, dicts and other values that bypass the graph.
        ndim: Number of dimensions: 1 for encoded bytes, 0 for a label.
        is_path: Whether the value is the path of a file that DALI reads in the graph.
        bypass: Whether the batch contains the field, in its dtype, if the graph does not take it.
            With a sharding, the field is placed like an output, or stays on the host if a dict of
            shardings has None for it. Without ``bypass``, a field that the graph does not take is
            not read.
        layout: DALI's layout of the array, with a letter for each dimension; "" for no layout. By
            default, uint8 arrays of three dimensions are images (HWC) and uint8 arrays of four
            dimensions are videos (FHWC), with 1 to 4 channels. Other arrays have no layout.

    Raises:
        TypeError: If the dtype is unknown.
        ValueError: If the layout does not fit the number of dimensions.
    """

    dtype: np.dtype[Any] | None
    ndim: int = 0
    is_path: bool = False
    bypass: bool = False
    layout: str | None = None

    # Derived from the other attributes: the layout of the graph's input, which may be "", and the
    # layout of the arrays as images, which is "" if they have no height and width.
    dali_layout: str = dataclasses.field(init=False, repr=False, compare=False)
    image_layout: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expected = "a number of dimensions: 0 for a number, 1 for a vector or encoded bytes"
        object.__setattr__(self, "ndim", whole_number("ndim of Field", self.ndim, expected, 0))
        if self.dtype is not None:  # users pass np.int32, which is a type
            object.__setattr__(self, "dtype", as_dtype(self.dtype, "dtype of Field"))
        if self.layout is not None:
            _check_layout(self.layout, self.ndim)
        pixels = _PIXELS.get(self.ndim, "")
        layout = pixels if self.has_default_layout else self.layout or ""
        as_image = layout or pixels
        object.__setattr__(self, "dali_layout", layout)
        object.__setattr__(self, "image_layout", as_image if {*"HW"} <= {*as_image} else "")

    @property
    def has_default_layout(self) -> bool:
        """Returns whether the arrays are images or videos because the field states no layout."""
        return self.layout is None and may_be_images(self.dtype, self.ndim)

    def image_sizes(self, arrays: Sequence[Any] | NDArray[Any]) -> NDArray[np.int32]:
        """Returns heights and widths of arrays that are images, int32 [records, 2]."""
        height, width = map(self.image_layout.index, "HW")
        if isinstance(arrays, np.ndarray):
            shape = arrays.shape[1:]
            return np.full((len(arrays), 2), (shape[height], shape[width]), np.int32)
        shapes = map(np.shape, arrays)
        return np.array([(shape[height], shape[width]) for shape in shapes], np.int32)

    def misfit(self, shape: Sequence[int]) -> str:
        """Returns why a shape does not fit the layout, if this is the default layout; else ""."""
        if not self.has_default_layout or len(shape) != self.ndim or has_channels(shape):
            return ""
        return (
            f"has the shape {(*shape,)}, but uint8 arrays of {self.ndim} dimensions are images or "
            f"videos, {self.dali_layout}, with 1 to {_MOST_CHANNELS} channels. For other arrays, "
            f"declare the layout of the field: Field(np.uint8, {self.ndim}, layout='')"
        )


def array_field(dtype: Any, shape: Sequence[Any], **options: Any) -> Field:
    """Returns the field of arrays that are like an array of some dtype and shape.

    Args:
        dtype: The dtype.
        shape: The shape.
        **options: Further attributes of the field.
    """
    if may_be_images(dtype, len(shape)) and not has_channels(shape):
        options["layout"] = ""
    return Field(dtype, len(shape), **options)


def may_be_images(dtype: Any, ndim: int) -> bool:
    """Returns whether arrays are taken for images or videos if they have 1 to 4 channels."""
    return bool(dtype == np.uint8) and ndim in (3, 4)


def has_channels(shape: Sequence[Any]) -> bool:
    """Returns whether the last dimension has 1 to 4 elements, like channels; None is unknown."""
    return shape[-1] is None or 1 <= shape[-1] <= _MOST_CHANNELS


def _check_layout(layout: Any, ndim: int) -> None:
    """Raises ValueError unless a layout is "", or has a different letter for each dimension."""
    is_text = isinstance(layout, str) and re.fullmatch("[A-Z]*", layout) is not None
    if not is_text or (layout and not len({*layout}) == len(layout) == ndim):
        raise ValueError(
            f"layout={layout!r} of Field does not fit ndim={ndim}: it must have a different "
            "uppercase letter for each dimension, such as 'HWC' for ndim=3, or be '' for no layout"
        )
