"""Reads numbers of image headers, and defines errors about images that DALI can't decode."""

import struct


class Unsupported(ValueError):
    """Error about an image that DALI's decoders can't decode; the message is the image's type."""


class OutsideImage(ValueError):
    """Error about a decoder's window that isn't inside the image."""


def unpack(form: str, data: memoryview, at: int) -> int:
    """Returns a number of a header.

    Args:
        form: Format of the number, as in `struct`.
        data: The header.
        at: Offset of the number; may be after the end of the header.

    Raises:
        EOFError, struct.error: If the header ends before the number.
    """
    if at > len(data):  # struct would overflow for huge offsets
        raise EOFError
    value: int = struct.unpack_from(form, data, at)[0]
    return value
