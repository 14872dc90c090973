"""Reads numbers of image headers; exceptions about images that DALI can't decode."""

import struct


class Unsupported(ValueError):
    """An image type that DALI's decoders can't decode; the message names the type."""


class OutsideImage(ValueError):
    """A decoder's window that exceeds its image."""


def unpack(form: str, data: memoryview, at: int) -> int:
    """Reads a number of a header.

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
