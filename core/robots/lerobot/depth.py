"""Converts the images of LeRobot's depth cameras to millimeters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGEST_CODE = 4095  # of 12 bits


@dataclasses.dataclass(frozen=True)
class DepthCodes:
    """Parameters that map the values of depth images to depths; the defaults are LeRobot's.

    Attributes:
        depth_min: The depth of the code 0 of a video, in meters.
        depth_max: The depth of the largest code, in meters.
        shift: Length that is added to depths before the logarithm, in meters.
        use_log: Whether codes are proportional to the logarithm of the depth.
        unit: Unit of images that are not videos: ``"mm"``, ``"m"``, or empty if unknown.
    """

    depth_min: float = 0.01
    depth_max: float = 10.0
    shift: float = 3.5
    use_log: bool = True
    unit: str = ""

    @classmethod
    def parse(cls, feature: Mapping[str, Any]) -> DepthCodes | None:
        """Returns the parameters of a feature; None if the feature is not depth.

        Args:
            feature: The description of the feature in info.json.

        Raises:
            ValueError: If the range of depths is empty, infinite or has no logarithm, or the unit
                of stored images is unknown.
        """
        info = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
        if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
            return None
        stored = {key: info.get(f"video.{key}") for key in ("depth_min", "depth_max", "shift")}
        use_log = info.get("video.use_log")
        codes = cls(
            **{key: float(value) for key, value in stored.items() if value is not None},
            use_log=True if use_log is None else bool(use_log),
            unit=info.get("depth_unit") or "",
        )
        if codes.unit not in ("", "m", "mm") and feature.get("dtype") != "video":
            raise ValueError(f"depth_unit={codes.unit!r} is neither 'm' nor 'mm'")
        lowest = codes.depth_min + codes.shift if codes.use_log else 1.0
        if not (codes.depth_min < codes.depth_max < math.inf and lowest > 0):
            raise ValueError(f"depth from {codes.depth_min} to {codes.depth_max} m has no codes")
        return codes

    def decode(self, codes: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Returns the depths, in millimeters, of a video frame of 12-bit codes, [height, width]."""
        low, high = self.depth_min, self.depth_max
        if self.use_log:
            low, high = math.log(low + self.shift), math.log(high + self.shift)
        depth = (codes * ((high - low) / _LARGEST_CODE)).astype(np.float32)
        depth += np.float32(low)
        if self.use_log:
            depth = np.exp(depth) - np.float32(self.shift)
        return _rounded(np.clip(depth, self.depth_min, self.depth_max) * np.float32(1000))

    def has_meters(self, dtype: np.dtype[Any]) -> bool:
        """Returns whether stored images of a dtype contain meters instead of millimeters.

        Without `unit`, floats are meters and integers are millimeters, as LeRobot infers when it
        writes images.
        """
        return self.unit == "m" if self.unit else dtype.kind == "f"

    def convert(self, pixels: NDArray[Any]) -> NDArray[np.uint16]:
        """Returns the depths of a stored image, in millimeters, uint16 [height, width].

        Depths outside of uint16 are clipped. NaN becomes 0.

        Raises:
            ValueError: If the image has several channels.
        """
        if pixels.ndim != 2:
            raise ValueError(f"a depth image has {pixels.shape[-1]} channels instead of 1")
        depth = pixels * np.float32(1000) if self.has_meters(pixels.dtype) else pixels
        return _rounded(np.nan_to_num(depth))


def _rounded(depth: NDArray[Any]) -> NDArray[np.uint16]:
    return np.rint(np.clip(depth, 0, 65535)).astype(np.uint16)
