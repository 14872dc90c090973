"""Kinds of files by their first bytes, for errors about a file of another kind."""

from __future__ import annotations

HEAD = 512  # bytes that `described` needs
_FILES, _RECORDS = "sources.Files reads it", "sources.Records reads its records by number"
_KINDS = (
    (b"\xff\xd8\xff", "a JPEG image", _FILES),
    (b"\x89PNG", "a PNG image", _FILES),
    (b"GIF8", "a GIF image", "DALI does not decode it"),
    (b"RIFF", "a WebP image, a WAV or an AVI", _FILES),
    (b"PAR1", "a Parquet file", _RECORDS),
    (b"\x89HDF", "an HDF5 file", _RECORDS),
    (b"\x93NUMPY", "a .npy file", "sources.Arrays reads numpy.load(path, mmap_mode='r')"),
    (b"PK\x03\x04", "a zip archive", "unpack it, and sources.Files reads its files"),
    (b"\x83\xaf\x70\xd1", "a Riegeli file (ArrayRecord)", _RECORDS),
    (b"\x1f\x8b", "compressed by gzip", "it has no records by number; unpack it"),
    (b"BZh", "compressed by bzip2", "it has no records by number; unpack it"),
    (b"\xfd7z", "compressed by xz", "it has no records by number; unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "it has no records by number; unpack it"),
    *((b"\x78" + level, "compressed by zlib", "unpack it") for level in (b"\1", b"^", b"\x9c")),
    (b"\x78\xda", "compressed by zlib", "it has no records by number; unpack it"),
)


def described(head: bytes) -> str:
    """The kind of a file and the source that reads it; "" if it is not recognized.

    Args:
        head: Its first `HEAD` bytes.
    """
    if is_tar(head):
        return "it is a tar; sources.Tar reads it"
    kinds = (f"it is {kind}; {cure}" for magic, kind, cure in _KINDS if head.startswith(magic))
    return next(kinds, "")


def is_tar(head: bytes) -> bool:
    """Whether a file begins as a tar, be it damaged or not."""
    return head[257:262] == b"ustar"
