"""Encodes camera frames and stored images as JPEG or PNG."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from .dataset import Feature

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's modes, by number of channels
_FORMATS = {1: "gray", 3: "rgb24", 4: "rgba"}  # FFmpeg's pixel formats, by number of channels
CODES = "gray12le"  # FFmpeg's pixel format of depth in videos


@dataclasses.dataclass(frozen=True)
class ImageEncoding:
    """Encodes images: depth and images with alpha as PNG, others as JPEG.

    Args:
        quality: Quality of JPEGs, 1 to 100.
        subsampling: Chroma subsampling of JPEGs, ``"4:2:0"`` or ``"4:4:4"``.
    """

    quality: int
    subsampling: str

    def encode_frame(self, frame: Any, feature: Feature) -> bytes:
        """Returns a frame of a video as the bytes of a JPEG or PNG.

        Args:
            frame: An av.VideoFrame.
            feature: The feature that the video belongs to.

        Raises:
            ValueError: If the frame has another size than the feature.
        """
        _check_size((frame.height, frame.width), feature)
        if feature.depth is not None:
            return _png(feature.depth.decode(frame.to_ndarray(format=CODES)))
        return self._encoded(frame.to_ndarray(format=_FORMATS[feature.shape[2]]), feature)

    def encode_stored(self, data: bytes, feature: Feature) -> bytes:
        """Returns a stored image as the bytes of a JPEG or PNG.

        A JPEG with the feature's channels is returned unchanged, and so is a PNG of depth with 16
        bits in millimeters. Other images are decoded, and encoded again.

        Args:
            data: The bytes of the stored image.
            feature: The feature that the image belongs to.

        Raises:
            ValueError: If the image can't be decoded, or has another size than the feature.
        """
        with extra("lerobot", "Pillow"):
            from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                _check_size((image.height, image.width), feature)
                mode = _MODES[feature.shape[2]]
                if feature.depth is None and image.format == "JPEG" and image.mode == mode:
                    return data
                if feature.depth is None:
                    return self._encoded(np.asarray(image.convert(mode)), feature)
                is_uint16 = image.format == "PNG" and image.mode.startswith("I;16")
                if is_uint16 and not feature.depth.has_meters(np.dtype(np.uint16)):
                    return data
                return _png(feature.depth.convert(np.asarray(image)))
        except (OSError, SyntaxError) as error:
            raise ValueError(f"an image can't be decoded: {error}") from error

    def _encoded(self, pixels: NDArray[np.uint8], feature: Feature) -> bytes:
        if not is_jpeg(feature):
            return _png(pixels)
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(pixels).save(
            file, "JPEG", quality=self.quality, subsampling=self.subsampling
        )
        return file.getvalue()


def is_jpeg(feature: Feature) -> bool:
    """Returns whether the images of a feature are encoded as JPEGs rather than PNGs."""
    return feature.depth is None and feature.shape[2] in (1, 3)


def _check_size(size: tuple[int, int], feature: Feature) -> None:
    if size != feature.shape[:2]:
        raise ValueError(
            f"has {size[0]}x{size[1]} pixels (height x width), but meta/info.json has "
            f"{feature.shape[0]}x{feature.shape[1]}. Correct the shape of the feature"
        )


def _png(pixels: NDArray[Any]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
