"""Finds the windows that the image decoders of a graph cut out, if the windows are constants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..arguments import turns_images

# Matches the kinds of decoders without underscores, in lower case.
_CROPS = re.compile(r"image(?:decoder)?(crop|slice)$")
_HEIGHT_AND_WIDTH = "HW"

# The sum of two offsets: in pixels, and as a share of the image's height or width.
Edge = tuple[float, float]
_WHOLE = (0.0, 1.0)  # the edge at the end of an image


class DecoderWindow(NamedTuple):
    """The constant part of each image that an ``image_crop`` or ``image_slice`` decodes.

    Attributes:
        operator: The kind of the decoder, e.g. "decoders.image_crop".
        edges: Two pairs of a start and an end: along the height, and along the width.
        turns: Whether the decoder rotates images by their EXIF orientation first.
    """

    operator: str
    edges: tuple[tuple[Edge, Edge], ...]
    turns: bool

    def fault(self, size: tuple[int, int], swaps: bool) -> str:
        """Returns a description of how the window exceeds an image; "" if it is inside the image.

        Args:
            size: Height and width of the image.
            swaps: Whether the EXIF orientation of the image swaps height and width.
        """
        size = (size[1], size[0]) if swaps and self.turns else size
        spans = [
            tuple(math.floor(pixels + share * extent + 0.5) for pixels, share in edges)
            for edges, extent in zip(self.edges, size)
        ]
        if all(0 <= start < end <= extent for (start, end), extent in zip(spans, size)):
            return ""
        text = ", ".join(f"{start}..{end}" for start, end in spans)
        crop = "fn.slice" if "slice" in self.operator.lower() else "fn.crop"
        return (
            f"the window [{text}] of {self.operator} isn't inside the image of {size[0]} x "
            f"{size[1]} pixels: decode with fn.decoders.image, then call {crop} with "
            "out_of_bounds_policy='pad'"
        )


def window_of(kind: str, arguments: Mapping[str, Any]) -> DecoderWindow | None:
    """Returns the window that an operator decodes; None if it decodes no constant window.

    Args:
        kind: The kind of the operator, e.g. "decoders.image_crop".
        arguments: The arguments of the operator by name, and its inputs as "inputs".
    """
    match = _CROPS.search(kind.replace("_", "").lower())
    if match is None:
        return None
    edges = _cropped(arguments) if match[1] == "crop" else _sliced(arguments)
    return None if edges is None else DecoderWindow(kind, edges, turns_images(arguments))


def _cropped(arguments: Mapping[str, Any]) -> tuple[tuple[Edge, Edge], ...] | None:
    """Returns the edges of a crop; None if its size is not constant.

    The edges begin at 0, because only the size decides whether a crop fits into an image.
    """
    sizes = _numbers(arguments.get("crop"))[-2:] or [
        number for name in ("crop_h", "crop_w") for number in _numbers(arguments.get(name))
    ]
    if len(sizes) != 2:
        return None
    return tuple(((0, 0), (int(size), 0) if int(size) else _WHOLE) for size in sizes)


def _sliced(arguments: Mapping[str, Any]) -> tuple[tuple[Edge, Edge], ...] | None:
    """Returns the edges of a slice; None if they are an input of the operator, not arguments."""
    if len(arguments.get("inputs", ())) > 1:
        return None
    names = arguments.get("axis_names") or "WH"
    axes = [int(axis) for axis in _numbers(arguments.get("axes"))]
    if axes and not arguments.get("axis_names"):
        names = "".join(_HEIGHT_AND_WIDTH[axis] for axis in axes)
    edges = dict.fromkeys(_HEIGHT_AND_WIDTH, ((0.0, 0.0), _WHOLE))
    for number, name in enumerate(names):
        start = _edge(arguments, "start", number) or (0.0, 0.0)
        end = _edge(arguments, "end", number) or _WHOLE
        extent = _edge(arguments, "shape", number)
        if extent is not None:
            end = start[0] + extent[0], start[1] + extent[1]
        edges[name] = start, end
    return tuple(edges.values())


def _edge(arguments: Mapping[str, Any], name: str, number: int) -> Edge | None:
    """Returns the value of an argument for an axis; None if the argument isn't given.

    Args:
        arguments: The arguments of the operator.
        name: "start", "end" or "shape" for values in pixels. The arguments "rel_start", "rel_end"
            and "rel_shape", which contain shares of the extent, are looked up next.
        number: Index of the axis in the values of the argument.
    """
    if values := _numbers(arguments.get(name)):
        return values[number if len(values) > 1 else 0], 0.0
    if shares := _numbers(arguments.get(f"rel_{name}")):
        return 0.0, shares[number if len(shares) > 1 else 0]
    return None


def _numbers(value: Any) -> list[float]:
    """Returns the numbers in the value of an argument, as a list, which may be empty.

    The value may be a number, a list, or DALI's text of a list, such as "[16.000000, ]".
    """
    if isinstance(value, str):
        value = [part for part in re.split(r"[\[\], ]+", value) if part]
    elif not isinstance(value, list):
        value = [] if value is None else [value]
    return [float(number) for number in value]
