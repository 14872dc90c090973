"""Reads numbers of image headers, and defines the errors of images that DALI can't decode."""

import struct


class Unsupported(ValueError):
    """An image of a kind that DALI's decoders can't decode; the message names the kind."""


class OutsideImage(ValueError):
    """A decoder's window that isn't inside an image."""


def unpack(form: str, data: memoryview, at: int) -> int:
    """Returns a number of a header.

    Args:
        form: The number's format, as in `struct`.
        data: The header.
        at: The place of the number, which may be anywhere.

    Raises:
        EOFError, struct.error: If the header ends before it.
    """
    if at > len(data):  # which may be too large for an index
        raise EOFError
    value: int = struct.unpack_from(form, data, at)[0]
    return value
