"""Sizes of encoded images, and the reasons why DALI can't decode some files.

nvImageCodec, DALI's decoding library, parses the headers. An image that it rejects must not reach
DALI: in a batch of 32 or more, DALI 2.4 raises its error while other threads still read their
images, which may crash the process. A decoder's window that exceeds its image may crash it, too.
"""

from __future__ import annotations

import functools
import os
import stat
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..environment.passing_errors import is_environment
from .decoder_windows import DecoderWindow
from .file_kinds import file_fault, may_be_pointer, pointer_fault
from .header_values import OutsideImage, Unsupported
from .image_headers import (
    TURNED,
    codec_of,
    foreign_kind,
    has_colored_palette,
    jpeg_orientation,
    kind_of,
    orientation_of,
)
from .media import UNSUPPORTED, MediaInput, media_fault
from .regular_file import regular_file
from .shared_headers import SharedHeaders

# Bytes of an image that are read first. The headers of 409 of 410 JPEGs on a machine were shorter.
HEAD = 1 << 14
_HEAD_FIRST = (b"\xff\xd8", b"BM", b"P", b"RIFF")  # formats whose headers are usually in the head
_LARGEST = 1 << 31  # pixels; height and width must be smaller
# Limit of libjpeg-turbo for RGB. The decoder that DALI tries next takes minutes and gigabytes.
_MOST_PIXELS = (1 << 31) // 3
_VERBOSITY = "PYNVIMGCODEC_VERBOSITY"
# Sample types that DALI's decoders decode, by trial. Others may crash them.
_SAMPLES = {
    "tiff": ("uint8", "uint16", "float32"),
    "jpeg2k": ("uint8", "uint16"),
    "bmp": ("uint8",),
}
_NAMES = {
    "tiff": "TIFF",
    "jpeg2k": "JPEG 2000",
    "bmp": "BMP",
    "png": "PNG",
    "webp": "WebP",
    "pnm": "PNM",
}
_ANY = "output_type=types.ANY_DATA"

Size = tuple[int, int]


class ImageInput(NamedTuple):
    """The use of a graph's input by operators that decode images.

    Attributes:
        is_path: Whether the input is the path of a file.
        any_on_cpu: Whether a decoder on the CPU keeps the image's channels (``types.ANY_DATA``).
        any_turned: Whether a decoder keeps the channels and applies the EXIF orientation.
        windows: Windows that decoders cut out, if they are constants.
        any_gray: Whether a decoder returns ``types.GRAY`` or ``types.ANY_DATA``, as for masks.
        any_8_bits: Whether a decoder returns 8 bits, as it does by default.
    """

    is_path: bool = False
    any_on_cpu: bool = False
    any_turned: bool = False
    windows: tuple[DecoderWindow, ...] = ()
    any_gray: bool = False
    any_8_bits: bool = False

    def union(self, other: ImageInput) -> ImageInput:
        """Returns the use of an input by the decoders of both uses."""
        return ImageInput(
            self.is_path,
            self.any_on_cpu or other.any_on_cpu,
            self.any_turned or other.any_turned,
            other.windows + self.windows,
            self.any_gray or other.any_gray,
            self.any_8_bits or other.any_8_bits,
        )


class Look(NamedTuple):
    """The result of looking at the header of a file.

    Attributes:
        size: Height and width of an image as DALI decodes it; None if they are unknown.
        fault: The reason not to feed the file to a graph, or "".
        lost: A description of the numbers of an image that its decoder loses, with the fix, or "".
        orientation: The EXIF orientation of an image, from 1 to 8; 0 if it has none.
    """

    size: Size | None
    fault: str = ""
    lost: str = ""
    orientation: int = 0


FileInput = ImageInput | MediaInput
_RGB = ImageInput()  # decoded to RGB
_jpegs = SharedHeaders[Look]()  # of JPEGs that DALI can decode


def image_size(data: Any) -> Size | None:
    """Returns the height and width of an image as DALI decodes it; None if DALI can't decode it.

    Some EXIF orientations swap height and width.

    Args:
        data: The encoded image, with the buffer protocol.
    """
    return look_at(data).size


def path_size(path: Any) -> Size | None:
    """Returns the height and width of the image in a file; see `image_size`.

    Returns None if the file can't be read or DALI can't decode the image.

    Args:
        path: The bytes of the path, up to the first zero, with the buffer protocol.
    """
    return look_at_file(path).size


def look_at_input(value: Any, file_input: FileInput) -> Look:
    """Looks at the header of a file, before it is fed to a graph.

    Args:
        value: The encoded file or the path, with the buffer protocol.
        file_input: The graph's use of the input that ``value`` is fed to.
    """
    fault = special_file(value) if file_input.is_path else ""
    if fault:
        return Look(None, fault)
    if isinstance(file_input, MediaInput):
        return Look(None, media_fault(value, file_input))
    return (look_at_file if file_input.is_path else look_at)(value, file_input)


def special_file(path: Any) -> str:
    """Returns the reason not to open a FIFO, a socket, a device or a git-lfs pointer, or "".

    Opening a FIFO may wait forever.

    Args:
        path: The bytes of the path, up to the first zero, with the buffer protocol.
    """
    name = bytes(path).partition(b"\0")[0]
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return ""  # reading the file raises the reason
    if stat.S_ISREG(status.st_mode):
        return file_fault(name) if may_be_pointer(status.st_size) else ""
    is_folder = stat.S_ISDIR(status.st_mode)
    return "" if is_folder else "it is a FIFO, a socket or a device, and not a file"


def look_at(data: Any, image_input: ImageInput = _RGB) -> Look:
    """Looks at the header of an image. The result has a size or a fault.

    Args:
        data: The encoded image, with the buffer protocol.
        image_input: The graph's use of the input that the image is fed to.
    """
    view = memoryview(data).cast("B")
    if not view:
        return Look(None, "it is empty")
    if (look := _jpegs.get(view, image_input)) is not None:
        return look
    codec = codec_of(view)
    if not codec:
        if fault := pointer_fault(view):
            return Look(None, fault)
        if kind := foreign_kind(view):
            return Look(None, f"{UNSUPPORTED}{kind}")
        start = bytes(view[:12])
        text = start.isascii() and start.decode().isprintable()
        cure = ". It is text: if it is a path, read the file by dalijax.fn.read_file(path)" * text
        fault = f"it isn't an image that DALI decodes: it begins with {start!r}{cure}"
        return Look(None, fault)
    try:
        return _decodable(view, codec, image_input)
    except Unsupported as error:
        return Look(None, f"{UNSUPPORTED}{error}")
    except OutsideImage as error:
        return Look(None, str(error))
    except (EOFError, IndexError, struct.error):
        return Look(None, f"its header is damaged or cut off, and it has {len(view)} bytes")


def look_at_head(head: Any, image_input: ImageInput = _RGB) -> Look | None:
    """Looks at the first `HEAD` bytes of an image, or at all bytes of a smaller image.

    Returns None if the result of `look_at` for the whole image may differ.

    Args:
        head: The bytes, with the buffer protocol.
        image_input: The graph's use of the input that the image is fed to.
    """
    view = memoryview(head).cast("B")
    if len(view) < HEAD:
        return look_at(view, image_input)
    if not bytes(view[:4]).startswith(_HEAD_FIRST):
        return None
    look = look_at(view, image_input)
    return None if look.fault else look


def look_at_file(path: Any, image_input: ImageInput = _RGB) -> Look:
    """Looks at the header of the image in a file; see `look_at`.

    The result is empty if the path is a URL, which DALI may be able to read, or if the file exists
    but can't be read, because DALI will report the error. Raises temporary errors, such as too many
    open files, because the result may be cached.

    Args:
        path: The bytes of the path, up to the first zero, with the buffer protocol.
        image_input: The graph's use of the input that the path is fed to.
    """
    try:
        with regular_file(path) as (file, size):
            look = look_at_head(os.pread(file, HEAD, 0), image_input)
            return look_at(os.pread(file, size, 0), image_input) if look is None else look
    except FileNotFoundError:
        is_url = b"://" in bytes(path)
        return Look(None) if is_url else Look(None, "there is no such file")
    except OSError as error:
        if is_environment(error):
            raise
        return Look(None)
    except ValueError as error:
        return Look(None, str(error))


def _decodable(view: memoryview, codec: str, image_input: ImageInput) -> Look:
    """Looks at an image that DALI decodes. Caches the results for JPEGs by their headers.

    Raises:
        OutsideImage: If a window of the decoders isn't inside the image.
        Unsupported, EOFError, IndexError, struct.error: As `orientation_of`.
    """
    end = 0
    if codec == "jpeg":
        orientation, end = jpeg_orientation(view)
    else:
        orientation = orientation_of(view, codec)
    stream = _code_stream()(np.frombuffer(view, np.uint8))
    try:
        height, width = stream.height, stream.width
        samples = str(stream.dtype) if codec != "jpeg" else ""
        channels = stream.num_channels if image_input.any_on_cpu or image_input.any_turned else 0
    except (RuntimeError, TypeError):  # the parser refuses it, or the samples have no NumPy type
        if kind := kind_of(view, codec):
            raise Unsupported(kind) from None
        raise EOFError from None
    if samples not in _SAMPLES.get(codec, (samples,)):
        raise Unsupported(f"{samples} {_NAMES[codec]}")
    if not (0 < height < _LARGEST and 0 < width < _LARGEST):
        raise EOFError
    if height * width > _MOST_PIXELS:
        raise Unsupported(f"image of {height} x {width} pixels")
    # DALI's decoder would write past the end of its memory.
    if channels == 1 and codec == "jpeg" and image_input.any_on_cpu:
        raise Unsupported(f"gray JPEG on a CPU with {_ANY}; use types.RGB or types.GRAY")
    if (
        channels == 4
        and codec in ("png", "webp")
        and image_input.any_turned
        and 1 < orientation < 9
    ):
        raise Unsupported(  # DALI's decoder doesn't apply the orientation
            f"{_NAMES[codec]} with alpha and an EXIF orientation, with {_ANY}; use types.RGB or "
            "adjust_orientation=False"
        )
    swaps = orientation in TURNED
    for window in image_input.windows:
        if fault := window.fault((height, width), swaps):
            raise OutsideImage(fault)
    size = (width, height) if swaps else (height, width)
    look = Look(size, "", _lost(view, codec, samples, image_input), orientation)
    if 0 < end <= len(view):
        _jpegs.put(view[:end], image_input, look)
    return look


def _lost(view: memoryview, codec: str, samples: str, image_input: ImageInput) -> str:
    """Describes the numbers of an image that its decoder loses; see `Look`.

    Args:
        view: The encoded image.
        codec: Its codec.
        samples: NumPy's name of its samples' type, or "" for a JPEG.
        image_input: The graph's use of the input that the image is fed to.
    """
    if not (image_input.any_gray or image_input.any_8_bits):
        return ""
    if has_colored_palette(view, codec):
        return image_input.any_gray * (
            f"is a {_NAMES[codec]} with a palette, and the decoder replaces indices by colors or "
            "their luminance. If the indices are class numbers, read them with Pillow, "
            "numpy.asarray(PIL.Image.open(file)), in the records of sources.Records"
        )
    if not image_input.any_8_bits or samples in ("", "uint8"):
        return ""
    kind, dtype = ("16-bit", "UINT16") if samples == "uint16" else (samples, "FLOAT")
    return (
        f"is a {kind} {_NAMES[codec]}, which the decoder converts to 8 bits, so that class numbers "
        f"and depths are lost. To keep them, pass dtype=types.{dtype} to the decoder"
    )


@functools.cache
def _code_stream() -> Callable[[Any], Any]:
    """Returns nvImageCodec's parser of images, which prints no messages about rejected images."""
    verbosity = os.environ.get(_VERBOSITY)
    os.environ.setdefault(_VERBOSITY, "0")  # only read when the module is imported
    try:
        from nvidia.nvimgcodec import CodeStream
    except ImportError as error:
        raise ImportError(
            "nvidia.nvimgcodec can't be imported, which DALI's wheels install and decode images "
            "with: pip install nvidia-nvimgcodec-cu12 for CUDA 12, nvidia-nvimgcodec-cu13 for "
            f"CUDA 13 ({error})"
        ) from error
    finally:
        if verbosity is None:
            os.environ.pop(_VERBOSITY, None)
    constructor: Callable[[Any], Any] = CodeStream
    return constructor
