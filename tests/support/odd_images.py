"""Odd images: every kind that Pillow writes, and kinds that are assembled from bytes."""

import base64
import functools
import io
import struct
import zlib

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 24, 40
ORIENTATION = 0x0112
EXIF = b"Exif\0\0"
_COLUMNS, _ROWS = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
# Smooth, so that lossy codecs change little, and different in every channel and corner.
GRAY = (5 * _COLUMNS + 2 * _ROWS).astype(np.uint8)
RGB = np.dstack([GRAY, (10 * _ROWS).astype(np.uint8), (6 * (WIDTH - _COLUMNS)).astype(np.uint8)])
ALPHA = (255 - 4 * _COLUMNS).astype(np.uint8)
MODES = {
    "1": Image.fromarray(GRAY).convert("1"),
    "L": Image.fromarray(GRAY),
    "LA": Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)]),
    "P": Image.fromarray(RGB).convert("P"),
    "PA": Image.fromarray(RGB).convert("P").convert("PA"),
    "RGB": Image.fromarray(RGB),
    "RGBA": Image.fromarray(np.dstack([RGB, ALPHA])),
    "CMYK": Image.fromarray(RGB).convert("CMYK"),
    "YCbCr": Image.fromarray(RGB).convert("YCbCr"),
    "LAB": Image.fromarray(RGB).convert("LAB"),
    "HSV": Image.fromarray(RGB).convert("HSV"),
    "I": Image.fromarray(GRAY.astype(np.int32) * 257),
    "I;16": Image.fromarray(GRAY.astype(np.uint16) * 257),
    "F": Image.fromarray(GRAY.astype(np.float32) / 255),
}
FORMATS = ("BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP", "AVIF")
FORMATS += ("DDS", "EPS", "ICNS", "MPO", "PCX", "SGI", "QOI")


def saved(image, form, **options):
    """Saves an image to bytes; None if Pillow can't write it."""
    file = io.BytesIO()
    try:
        image.save(file, form, **options)
    except (OSError, ValueError, KeyError, TypeError, SystemError, AttributeError):
        return None
    return file.getvalue()


def exif(orientation, order="<", kind=3):
    """Returns EXIF data with one entry."""
    value = struct.pack(order + {1: "Bxxx", 3: "Hxx", 4: "I"}[kind], orientation)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8)
    return head + struct.pack(order + "HHHI", 1, ORIENTATION, kind, 1) + value + bytes(4)


# TIFF

_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 11: 4, 12: 8, 16: 8}
_CODES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 16: "Q"}


def tiff_file(tags, blocks, order="<", big=False, pages=1):
    """Assembles a TIFF of strips (or tiles) with some tags, (kind, values) by tag number.

    Adds the offsets of the blocks, unless tag 273 or 324 is given.
    """
    tags = dict(tags)
    offset_tag = 324 if 322 in tags else 273
    head = 16 if big else 8
    body = b"".join(blocks)
    offsets = head + np.cumsum([0, *map(len, blocks)])[:-1]
    tags.setdefault(offset_tag, (4, [int(offset) for offset in offsets]))
    tags.setdefault(offset_tag + (1 if offset_tag == 324 else 6), (4, [len(b) for b in blocks]))
    count_code, entry_code, inline = ("Q", "HHQ", 8) if big else ("H", "HHI", 4)
    offset_code = "Q" if big else "I"
    start = head + len(body)
    tables = b""
    for page in range(pages):
        entries, extra = [], b""
        begin = start + len(tables)
        size = struct.calcsize(order + count_code) + len(tags) * (12 + 8 * big) + inline
        for tag, (kind, values) in sorted(tags.items()):
            if isinstance(values, bytes):
                data, number = values, len(values) // _SIZES[kind]
            else:
                data, number = (
                    struct.pack(f"{order}{len(values)}{_CODES[kind]}", *values),
                    len(values),
                )
            if len(data) > inline:
                place = struct.pack(order + offset_code, begin + size + len(extra))
                extra += data + bytes(len(data) % 2)
            else:
                place = data.ljust(inline, b"\0")
            entries.append(struct.pack(order + entry_code, tag, kind, number) + place)
        following = begin + size + len(extra) if page + 1 < pages else 0
        tables += struct.pack(order + count_code, len(tags)) + b"".join(entries)
        tables += struct.pack(order + offset_code, following) + extra
    mark = {"<": b"II", ">": b"MM"}[order]
    if big:
        first = mark + struct.pack(order + "HHHQ", 43, 8, 0, start)
    else:
        first = mark + struct.pack(order + "HI", 42, start)
    return first + body + tables


def tiff(
    pixels,
    *,
    order="<",
    big=False,
    photometric=None,
    compression=1,
    encode=bytes,
    bits=None,
    kind=None,
    planar=1,
    rows=None,
    tile=None,
    omit=(),
    extra=(),
    pages=1,
    packed=None,
):
    """Assembles a TIFF of an array [height, width] or [height, width, channels]."""
    pixels = np.asarray(pixels)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    height, width, channels = pixels.shape
    bits = bits or pixels.dtype.itemsize * 8
    kinds = {"u": 1, "i": 2, "f": 3, "c": 6, "b": 1}
    if photometric is None:
        photometric = 2 if channels >= 3 else 1
    tags = {
        256: (3, [width]),
        257: (3, [height]),
        258: (3, [bits] * channels),
        259: (3, [compression]),
        262: (3, [photometric]),
        277: (3, [channels]),
        284: (3, [planar]),
        339: (3, [kind or kinds[pixels.dtype.kind]] * channels),
    }
    colors = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}.get(photometric, 1)
    if channels > colors:
        tags[338] = (3, [2] * (channels - colors))
    data = pixels.astype(pixels.dtype.newbyteorder(order))
    planes = [data[..., channel] for channel in range(channels)] if planar == 2 else [data]
    if packed is not None:
        blocks = [packed]
        tags[278] = (3, [height])
    elif tile:
        tags[322] = tags[323] = (3, [tile])
        blocks = []
        for plane in planes:
            for top in range(0, height, tile):
                for left in range(0, width, tile):
                    block = np.zeros((tile, tile, *plane.shape[2:]), data.dtype)
                    part = plane[top : top + tile, left : left + tile]
                    block[: part.shape[0], : part.shape[1]] = part
                    blocks.append(encode(block.tobytes()))
    else:
        rows = rows or height
        tags[278] = (3, [rows])
        blocks = [
            encode(np.ascontiguousarray(plane[top : top + rows]).tobytes())
            for plane in planes
            for top in range(0, height, rows)
        ]
    tags.update(dict(extra))
    for tag in omit:
        tags.pop(tag)
    return tiff_file(tags, blocks, order, big, pages)


def _predicted(data, channels=3):
    """Returns rows as differences (TIFF's predictor 2)."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, WIDTH, channels)
    rows = np.diff(rows, axis=1, prepend=np.zeros_like(rows[:, :1]))
    return zlib.compress(rows.tobytes())


def _tiffs():
    gray, rgb = GRAY, RGB
    yield "gray", tiff(gray)
    yield "gray, white is zero", tiff(gray, photometric=0)
    yield "RGB", tiff(rgb)
    for dtype in ("int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"):
        scale = np.iinfo(dtype).max // 255
        yield f"gray {dtype}", tiff(gray.astype(dtype) * np.dtype(dtype).type(max(scale, 1)))
        yield f"RGB {dtype}", tiff(rgb.astype(dtype) * np.dtype(dtype).type(max(scale, 1)))
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        yield f"gray {dtype}", tiff((gray / 255).astype(dtype))
    for dtype in ("float16", "float32", "float64"):
        yield f"RGB {dtype}", tiff((rgb / 255).astype(dtype))
    yield "complex int16", tiff(np.dstack([gray, gray]).view(np.uint16), kind=5)
    yield "undefined samples", tiff(gray, kind=4)
    yield "unknown samples", tiff(gray, kind=9)
    for bits in (1, 2, 4):
        packed = np.packbits(
            (gray[..., None] >> 8 - bits >> np.arange(bits - 1, -1, -1)) & 1
        ).tobytes()
        yield f"{bits}-bit gray", tiff(gray, bits=bits, packed=packed)
    for bits in (3, 5, 6, 7, 9, 24, 31, 40, 128):
        yield f"{bits}-bit gray", tiff(gray, bits=bits, packed=bytes(WIDTH * HEIGHT * bits // 8))
    for bits in (2, 4, 24):
        yield f"{bits}-bit RGB", tiff(rgb, bits=bits, packed=bytes(WIDTH * HEIGHT * bits // 8 * 3))
    yield "24-bit float", tiff(gray, bits=24, kind=3, packed=bytes(WIDTH * HEIGHT * 3))
    yield "0-bit gray", tiff(gray, extra={258: (3, [0])}.items())
    yield "unequal bits", tiff(rgb, extra={258: (3, [5, 6, 5])}.items())
    yield "unequal bits 8 16 8", tiff(rgb, extra={258: (3, [8, 16, 8])}.items())
    map_ = (3, [*range(0, 65536, 257)] * 3)
    palette = tiff(gray, photometric=3, extra={320: map_}.items())
    yield "palette", palette
    yield "palette with a cut map", palette[:-300]
    yield "palette without a map", tiff(gray, photometric=3)
    yield "palette 16", tiff(gray.astype(np.uint16), photometric=3, extra={320: map_}.items())
    small = (3, [*range(0, 65536, 4369)] * 3)
    packed = (gray[:, ::2] & 0xF0 | gray[:, 1::2] >> 4).tobytes()
    yield (
        "4-bit palette",
        tiff(gray, bits=4, photometric=3, packed=packed, extra={320: small}.items()),
    )
    for photometric, name in {4: "mask", 9: "ICC Lab", 10: "ITU Lab", 32803: "CFA"}.items():
        yield name, tiff(gray, photometric=photometric)
    yield "linear raw", tiff(rgb, photometric=34892)
    yield "CMYK", tiff(np.dstack([rgb, gray]), photometric=5)
    yield "CMYK 16", tiff(np.dstack([rgb, gray]).astype(np.uint16) * 257, photometric=5)
    yield "CMYK and alpha", tiff(np.dstack([rgb, gray, gray]), photometric=5)
    yield "YCbCr", tiff(rgb, photometric=6, extra={530: (3, [1, 1])}.items())
    yield "YCbCr 2x2", tiff(rgb, photometric=6)
    yield "Lab", tiff(rgb, photometric=8)
    yield "Lab 16", tiff(rgb.astype(np.uint16) * 257, photometric=8)
    yield "gray and alpha", tiff(np.dstack([gray, ALPHA]))
    yield "gray and alpha 16", tiff(np.dstack([gray, ALPHA]).astype(np.uint16) * 257)
    yield "gray and alpha, planar", tiff(np.dstack([gray, ALPHA]), planar=2)
    yield "RGBA", tiff(np.dstack([rgb, ALPHA]))
    yield "RGBA, associated", tiff(np.dstack([rgb, ALPHA]), extra={338: (3, [1])}.items())
    yield "RGBA, unspecified", tiff(np.dstack([rgb, ALPHA]), extra={338: (3, [0])}.items())
    yield "RGBA 16", tiff(np.dstack([rgb, ALPHA]).astype(np.uint16) * 257)
    yield "five channels", tiff(np.dstack([rgb, gray, ALPHA]))
    yield "seven channels", tiff(np.dstack([rgb, rgb, gray]))
    yield "gray, three channels", tiff(rgb, photometric=1)
    yield "RGB, one channel", tiff(gray, photometric=2)
    yield "RGB, two channels", tiff(np.dstack([gray, gray]), photometric=2)
    yield "planar", tiff(rgb, planar=2)
    yield "planar 16", tiff(rgb.astype(np.uint16) * 257, planar=2)
    yield "strips", tiff(rgb, rows=5)
    yield "big endian", tiff(rgb, order=">")
    yield "big endian 16", tiff(rgb.astype(np.uint16) * 257, order=">")
    yield "big endian gray float32", tiff((gray / 255).astype(np.float32), order=">")
    yield "tiled", tiff(rgb, tile=16)
    yield "tiled gray 16", tiff(gray.astype(np.uint16) * 257, tile=16)
    yield "tiled gray float32", tiff((gray / 255).astype(np.float32), tile=16)
    yield "tiled, planar", tiff(rgb, tile=16, planar=2)
    yield "three pages", tiff(rgb, pages=3)
    yield "BigTIFF", tiff(rgb, big=True)
    yield "BigTIFF gray", tiff(gray, big=True)
    yield "BigTIFF gray uint16", tiff(gray.astype(np.uint16) * 257, big=True)
    yield "BigTIFF gray int32", tiff(gray.astype(np.int32), big=True)
    yield "BigTIFF gray and alpha", tiff(np.dstack([gray, ALPHA]), big=True)
    yield "BigTIFF big endian", tiff(rgb, big=True, order=">")
    yield "BigTIFF tiled", tiff(rgb, big=True, tile=16)
    yield "BigTIFF 1-bit", tiff(gray, bits=1, packed=np.packbits(gray > 127).tobytes(), big=True)
    yield "BigTIFF orientation 6", tiff(rgb, big=True, extra={274: (3, [6])}.items())
    yield "deflate", tiff(rgb, compression=8, encode=zlib.compress)
    yield "Adobe deflate", tiff(rgb, compression=32946, encode=zlib.compress)
    yield "predictor", tiff(rgb, compression=8, encode=_predicted, extra={317: (3, [2])}.items())
    yield "predictor 3", tiff(rgb, compression=8, encode=_predicted, extra={317: (3, [3])}.items())
    for name, number in {"JPEG 2000": 34712, "JPEG 2000 RGB": 33005, "YCbCr": 33003}.items():
        stream = saved(MODES["RGB"], "JPEG2000", no_jp2=True)
        yield f"{name} inside", tiff(rgb, compression=number, packed=stream)
    for name, number in {"old JPEG": 6, "JPEG": 7}.items():
        stream = saved(MODES["RGB"], "JPEG", quality=95, subsampling=0)
        yield (
            f"{name} inside",
            tiff(
                rgb,
                compression=number,
                photometric=6,
                packed=stream,
                extra={530: (3, [1, 1])}.items(),
            ),
        )
        stream = saved(MODES["L"], "JPEG", quality=95)
        yield f"{name} gray inside", tiff(gray, compression=number, packed=stream)
    stream = saved(MODES["RGB"], "WEBP", lossless=True)
    yield "WebP inside", tiff(rgb, compression=50001, packed=stream)
    for number in (0, 9, 34676, 34887, 34925, 50002, 65000):
        yield f"compression {number}", tiff(rgb, compression=number)
    for tag, name in {
        256: "width",
        257: "height",
        258: "bits",
        259: "compression",
        262: "photometric",
        277: "samples",
        278: "rows",
        339: "sample format",
        273: "offsets",
        279: "counts",
    }.items():
        tags = {273: (4, [8]), 279: (4, [rgb.size])}
        yield f"RGB without {name}", tiff(rgb, omit=[tag], extra=tags.items())
        tags = {273: (4, [8]), 279: (4, [gray.size])}
        yield f"gray without {name}", tiff(gray, omit=[tag], extra=tags.items())
    yield "width as LONG", tiff(rgb, extra={256: (4, [WIDTH])}.items())
    yield "width as BYTE", tiff(rgb, extra={256: (1, [WIDTH])}.items())
    yield "width as LONG8", tiff(rgb, extra={256: (16, [WIDTH])}.items(), big=True)
    yield "width as SLONG", tiff(rgb, extra={256: (9, [WIDTH])}.items())
    yield "width as FLOAT", tiff(rgb, extra={256: (11, [WIDTH])}.items())
    yield "bits as LONG", tiff(gray, extra={258: (4, [8])}.items())
    yield "bits as BYTE", tiff(gray, extra={258: (1, [8])}.items())
    yield "one bits for RGB", tiff(rgb, extra={258: (3, [8])}.items())
    yield "samples as LONG", tiff(rgb, extra={277: (4, [3])}.items())
    yield "no samples", tiff(rgb, extra={277: (3, [0])}.items())
    yield "unknown tags", tiff(rgb, extra={65001: (7, b"x" * 99), 65002: (12, [1.5])}.items())
    yield "a GPS directory", tiff(rgb, extra={34853: (4, [99999])}.items())
    yield "width 0", tiff(rgb, extra={256: (3, [0])}.items())
    yield "height 0", tiff(rgb, extra={257: (3, [0])}.items())
    yield "width 2^31", tiff(rgb, extra={256: (4, [1 << 31])}.items())
    yield "fill order", tiff(gray, extra={266: (3, [2])}.items())
    yield "a sub-directory", tiff(rgb, extra={330: (4, [8])}.items())
    yield "two bits", tiff(rgb, extra={258: (3, [8, 8])}.items())
    for orientation in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
        yield f"orientation {orientation}", tiff(rgb, extra={274: (3, [orientation])}.items())
    yield "orientation 6 big endian", tiff(rgb, order=">", extra={274: (3, [6])}.items())
    yield "orientation 6 as LONG", tiff(rgb, extra={274: (4, [6])}.items())
    yield "orientation 6 as BYTE", tiff(rgb, extra={274: (1, [6])}.items())
    yield "orientation 6 gray 16", tiff(gray.astype(np.uint16) * 257, extra={274: (3, [6])}.items())
    yield "orientation 6 tiled", tiff(rgb, tile=16, extra={274: (3, [6])}.items())
    for name in ("tiff_lzw", "packbits", "tiff_adobe_deflate", "jpeg", "zstd", "lzma"):
        yield f"{name} by Pillow", saved(MODES["RGB"], "TIFF", compression=name)
        yield f"{name} gray by Pillow", saved(MODES["L"], "TIFF", compression=name)
    for name in ("group3", "group4", "tiff_ccitt"):
        yield f"{name} by Pillow", saved(MODES["1"], "TIFF", compression=name)
    for mode in ("RGBA", "CMYK", "LAB", "YCbCr", "P", "I;16", "I", "F", "1", "LA"):
        yield f"LZW {mode}", saved(MODES[mode], "TIFF", compression="tiff_lzw")


# JPEG


def jpeg(mode="RGB", **options):
    return saved(MODES[mode], "JPEG", **{"quality": 95, "subsampling": 0, **options})


def segment(marker, data):
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def jpeg_with(*segments, mode="RGB", marker=0xE1, before=0):
    """Inserts segments into a JPEG after its start, or before a marker."""
    data = jpeg(mode)
    at = data.index(bytes([0xFF, before])) if before else 2
    return data[:at] + b"".join(segment(marker, part) for part in segments) + data[at:]


def _replaced(data, old, new):
    at = data.index(old)
    return data[:at] + new + data[at + len(new) :]


def _jpegs():
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0"):
        yield sampling, jpeg(subsampling=sampling)
    for mode in ("L", "CMYK"):
        yield mode, jpeg(mode)
        yield f"{mode} progressive", jpeg(mode, progressive=True)
        for orientation in (3, 6):
            exif_ = {"exif": EXIF + exif(orientation)}
            yield f"{mode} orientation {orientation}", jpeg(mode, **exif_)
    yield "YCCK", _replaced(jpeg("CMYK"), b"Adobe", b"Adobe\0\x64\0\0\0\0\x02")
    yield "CMYK without Adobe", _replaced(jpeg("CMYK"), b"Adobe", b"Adobf")
    yield "RGB by Adobe", jpeg_with(b"Adobe\0\x64\0\0\0\0\0", marker=0xEE)
    yield "RGB kept", jpeg(keep_rgb=True)
    yield "odd Adobe", jpeg_with(b"Adobe\0\x64\0\0\0\0\7", marker=0xEE)
    yield "short Adobe", jpeg_with(b"Adobe", marker=0xEE)
    yield "progressive", jpeg(progressive=True)
    yield "optimized", jpeg(optimize=True)
    yield "restarts", jpeg(restart_marker_blocks=1)
    yield "restart rows", jpeg(restart_marker_rows=1)
    yield "comment", jpeg(comment=b"\xff\xc0" * 2000)
    yield "profile", jpeg(icc_profile=bytes(200_000))
    yield "fill bytes", b"\xff\xd8" + b"\xff" * 5 + jpeg()[3:]
    yield "bytes after the end", jpeg() + b"garbage" * 50
    yield "bytes before", b"\0\0" + jpeg()
    yield "two in one", jpeg() + jpeg()
    yield "one by one", saved(Image.new("RGB", (1, 1)), "JPEG")
    yield "no Huffman tables", jpeg().replace(b"\xff\xc4", b"\xff\xfe")
    yield "no quantization tables", jpeg().replace(b"\xff\xdb", b"\xff\xfe")
    data = jpeg()
    at = data.index(b"\xff\xc0")
    for marker, name in {
        0xC1: "extended",
        0xC3: "lossless",
        0xC5: "differential",
        0xC9: "arithmetic",
        0xCA: "arithmetic progressive",
        0xCB: "arithmetic lossless",
        0xF7: "JPEG-LS",
    }.items():
        yield name, data[: at + 1] + bytes([marker]) + data[at + 2 :]
    for precision in (2, 12, 16, 0):
        yield f"precision {precision}", data[: at + 4] + bytes([precision]) + data[at + 5 :]
    for components in (0, 1, 2, 4, 5, 255):
        yield f"{components} components", data[: at + 9] + bytes([components]) + data[at + 10 :]
    yield "height 0", data[: at + 5] + b"\0\0" + data[at + 7 :]
    yield "width 0", data[: at + 7] + b"\0\0" + data[at + 9 :]
    yield "height 65535", data[: at + 5] + b"\xff\xff" + data[at + 7 :]
    yield "sampling 0", data[: at + 11] + b"\0" + data[at + 12 :]
    yield "sampling 0x55", data[: at + 11] + b"\x55" + data[at + 12 :]
    yield "sampling 3x1", data[: at + 11] + b"\x31" + data[at + 12 :]
    yield "two frame headers", data[:at] + data[at : data.index(b"\xff\xc4")] + data[at:]
    yield "a marker of pixels", data[:at] + b"\xff\xd0" + data[at:]
    yield "two starts", data[:2] + data
    yield "no frame", data[:at] + data[data.index(b"\xff\xda") :]
    yield "no scan", data[: data.index(b"\xff\xda")]
    yield "no scan, an end", data[: data.index(b"\xff\xda")] + b"\xff\xd9"
    yield "cut pixels", data[: len(data) * 3 // 4]
    yield "start and end", b"\xff\xd8\xff\xd9"
    yield "start", b"\xff\xd8"
    yield "frame of length 2", data[: at + 2] + b"\0\x02" + data[at + 4 :]
    yield "segment of length 0", data[:2] + b"\xff\xe5\0\0" + data[2:]
    for orientation in range(10):
        yield f"orientation {orientation}", jpeg_with(EXIF + exif(orientation))
    zero = exif(0).replace(b"\x08\0\0\0\x01", b"\x08\0\0\0\x02")  # two entries
    yield "orientations 0 and 6", jpeg_with(EXIF + zero[:-4] + exif(6)[10:])
    yield "orientation 6 big endian", jpeg_with(EXIF + exif(6, ">"))
    yield "orientation 6 as LONG", jpeg_with(EXIF + exif(6, kind=4))
    yield "orientation 6 as BYTE", jpeg_with(EXIF + exif(6, kind=1))
    yield "orientation 6 as BYTE, big endian", jpeg_with(EXIF + exif(6, ">", kind=1))
    yield "orientation 6 as LONG, big endian", jpeg_with(EXIF + exif(6, ">", kind=4))
    yield "orientation 262", jpeg_with(EXIF + exif(262))
    yield "orientation 6 after the frame", jpeg_with(EXIF + exif(6), before=0xC4)
    yield "orientation 6 before the scan", jpeg_with(EXIF + exif(6), before=0xDA)
    yield "orientation 6, thumbnail", jpeg_with(EXIF + exif(6) + jpeg("L"))
    yield "orientation 6 of a 4:2:0", saved(MODES["RGB"], "JPEG", quality=95, exif=EXIF + exif(6))
    for first, second in ((6, 1), (1, 6), (6, 8), (3, 3), (6, 6), (1, 1), (0, 6), (6, 0)):
        segments = (EXIF + exif(first), EXIF + exif(second, ">"))
        yield f"two EXIF {first} {second}", jpeg_with(*segments)
    yield (
        "EXIF without orientation, EXIF 6",
        jpeg_with(EXIF + exif(6).replace(b"\x12\x01", b"\x1a\x01"), EXIF + exif(6)),
    )
    yield (
        "EXIF 6, EXIF without orientation",
        jpeg_with(EXIF + exif(6), EXIF + exif(6).replace(b"\x12\x01", b"\x10\x03")),
    )
    yield "EXIF 6 around the frame", _replaced_exif(jpeg_with(EXIF + exif(6)), 8)
    yield "XMP before EXIF", jpeg_with(b"http://ns.adobe.com/xap/1.0/\0<x/>", EXIF + exif(6))
    yield "XMP after EXIF", jpeg_with(EXIF + exif(6), b"http://ns.adobe.com/xap/1.0/\0<x/>")
    yield "cut EXIF", jpeg_with(EXIF + exif(6)[:12])
    yield "EXIF cut within its entry", jpeg_with(EXIF + exif(6)[:18])
    yield "EXIF of six bytes", jpeg_with(EXIF)
    yield "EXIF of two bytes", jpeg_with(b"Ex")
    yield "EXIF longer than its segment", data[:2] + b"\xff\xe1\0\x02" + EXIF + data[2:]
    yield "EXIF of length 7", data[:2] + b"\xff\xe1\0\x07" + EXIF + exif(6) + data[2:]
    yield "odd EXIF magic", jpeg_with(EXIF + b"XX" + exif(6)[2:])
    yield "EXIF magic XX", jpeg_with(EXIF + b"MM" + exif(6)[2:])
    yield "EXIF magic 43", jpeg_with(EXIF + b"II+\0" + exif(6)[4:])
    yield "far EXIF directory", jpeg_with(EXIF + b"II*\0" + b"\xff" * 20)
    yield "EXIF of two orientations", jpeg_with(EXIF + _two_entries(6, 8))
    yield "EXIF with a bad entry after", jpeg_with(EXIF + _two_entries(6, 8)[:-12])
    yield "EXIF with a bad text before", jpeg_with(EXIF + _bad_text(6, True))
    yield "EXIF with a bad text after", jpeg_with(EXIF + _bad_text(6, False))
    none = EXIF + exif(6).replace(b"\x12\x01", b"\x10\x03")
    incomplete = EXIF + exif(6)[:8] + b"\2\0" + exif(6)[10:22]  # OpenCV's reader uses it
    for name, segments in {
        "incomplete EXIF 6": (incomplete,),
        "bad EXIF, incomplete EXIF 6": (EXIF + b"\0\1" + exif(6)[2:], incomplete),
        "EXIF without orientation, incomplete EXIF 6": (none, incomplete),
    }.items():
        yield name, (data := jpeg_with(*segments))
        at = data.index(b"\xff\xda") + 134
        yield f"{name} and bad pixels", data[:at] + b"\xff" + data[at + 1 :]
    yield "EXIF in lower case", jpeg_with(b"exif\0\0" + exif(6))
    yield "EXIF with 0xff", jpeg_with(b"Exif\0\xff" + exif(6))
    yield "EXIF in APP2", jpeg_with(EXIF + exif(6), marker=0xE2)
    yield "twelve bits", base64.b85decode(_TWELVE_BITS)


def _replaced_exif(data, orientation):
    at = data.index(b"\xff\xda")
    return data[:at] + segment(0xE1, EXIF + exif(orientation)) + data[at:]


def _two_entries(first, second):
    entries = [struct.pack("<HHIHxx", ORIENTATION, 3, 1, value) for value in (first, second)]
    return b"II*\0\x08\0\0\0\x02\0" + b"".join(entries) + bytes(4)


def _bad_text(orientation, before):
    text = struct.pack("<HHII", 0x010F, 2, 1 << 20, 1 << 20)
    entry = struct.pack("<HHIHxx", ORIENTATION, 3, 1, orientation)
    entries = text + entry if before else entry + text
    return b"II*\0\x08\0\0\0\x02\0" + entries + bytes(4)


# An 8 x 8 gray JPEG of 12 bits, written by libjpeg.
_TWELVE_BITS = (
    "|JeWF01!$>Nk#wx0RR9200961|JwjV01yid4h#wq4h;?x5fBp?C>j_R78o%jB^@X_Gd(;xGdMRuNL)@pL{~*OI8bd-"
    "S6^ahXlFi6ad~iLcwA*?WB<Vb3k(1V00;pA5di<h02BZL00000000000000000009|HJ?r5C8xN0RR910000000000"
    "000IGBQ`-(asS!?2mt{A06zd3)7nmqx0P^z|Je"
)


# PNG


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(color, bits, rows, *chunks, after=(), interlace=0, width=WIDTH, height=HEIGHT):
    """Assembles a PNG of packed rows."""
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlace)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", pixels), *after, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _packed(bits):
    shown = (GRAY[..., None] >> 8 - bits >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(shown.reshape(HEIGHT, -1), axis=1)


def _pngs():
    palette = chunk(b"PLTE", bytes(RGB.reshape(-1, 3)[:256].tobytes()))
    for bits in (1, 2, 4, 8):
        yield f"gray {bits}", png(0, bits, _packed(bits))
        colors = chunk(b"PLTE", RGB.reshape(-1, 3)[: 1 << bits].tobytes())
        yield f"palette {bits}", png(3, bits, _packed(bits), colors)
        alphas = chunk(b"tRNS", bytes(range(1 << bits)))
        yield f"palette {bits}, transparent", png(3, bits, _packed(bits), colors, alphas)
    wide = (GRAY.astype(np.uint16) * 257).astype(">u2")
    deep = (RGB.astype(np.uint16) * 257).astype(">u2")
    yield "gray 16", png(0, 16, [row.tobytes() for row in wide])
    yield "RGB 8", png(2, 8, RGB.reshape(HEIGHT, -1))
    yield "RGB 16", png(2, 16, [row.tobytes() for row in deep])
    yield "gray alpha 8", png(4, 8, np.dstack([GRAY, ALPHA]).reshape(HEIGHT, -1))
    yield (
        "gray alpha 16",
        png(4, 16, [row.tobytes() for row in np.dstack([wide, wide]).reshape(HEIGHT, -1)]),
    )
    yield "RGBA 8", png(6, 8, np.dstack([RGB, ALPHA]).reshape(HEIGHT, -1))
    yield (
        "RGBA 16",
        png(6, 16, [row.tobytes() for row in np.dstack([deep, wide]).reshape(HEIGHT, -1)]),
    )
    yield "gray 8, transparent", png(0, 8, GRAY, chunk(b"tRNS", b"\0\x0a"))
    yield "RGB 8, transparent", png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"tRNS", bytes(6)))
    yield "palette missing", png(3, 8, GRAY)
    yield "palette short", png(3, 8, GRAY, chunk(b"PLTE", bytes(9)))
    yield "palette of RGB", png(2, 8, RGB.reshape(HEIGHT, -1), palette)
    yield "interlaced", _interlaced()
    frame = struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 10, 0, 0)
    animation = chunk(b"acTL", struct.pack(">II", 1, 0)), chunk(b"fcTL", frame)
    yield "animated", png(2, 8, RGB.reshape(HEIGHT, -1), *animation)
    yield (
        "animated by Pillow",
        saved(MODES["RGB"], "PNG", save_all=True, append_images=[MODES["RGBA"].convert("RGB")]),
    )
    good = png(2, 8, RGB.reshape(HEIGHT, -1))
    yield "CgBI", good[:8] + chunk(b"CgBI", bytes(4)) + good[8:]
    for color, bits in ((0, 3), (2, 4), (3, 16), (4, 4), (5, 8), (1, 8), (6, 2), (0, 32), (7, 8)):
        yield f"color {color} bits {bits}", png(color, bits, GRAY)
    yield "width 0", png(0, 8, GRAY, width=0)
    yield "width 2^31", png(0, 8, GRAY, width=1 << 31)
    yield "width 2^20", png(0, 8, GRAY, width=1 << 20)
    yield "height 0", png(0, 8, GRAY, height=0)
    yield "no end", good[:-12]
    yield "no pixels", good[:33] + good[-12:]
    yield "a wrong checksum", good[:29] + bytes(4) + good[33:]
    yield "wrong compression", good[:26] + b"\1" + good[27:]
    yield "wrong interlacing", good[:28] + b"\7" + good[29:]
    yield "bytes after", good + b"garbage" * 9
    yield (
        "many chunks",
        png(
            2,
            8,
            RGB.reshape(HEIGHT, -1),
            *[chunk(b"tEXt", b"a\0b")] * 400,
            after=[chunk(b"tIME", bytes(7))],
        ),
    )
    for orientation in range(10):
        yield (
            f"orientation {orientation}",
            png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", exif(orientation))),
        )
    yield (
        "orientation 6 after",
        png(2, 8, RGB.reshape(HEIGHT, -1), after=[chunk(b"eXIf", exif(6, ">"))]),
    )
    yield (
        "two eXIf 6 1",
        png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", exif(6)), chunk(b"eXIf", exif(1))),
    )
    yield (
        "two eXIf 6 and damaged",
        png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", exif(6)), chunk(b"eXIf", b"II*\0")),
    )
    yield "empty eXIf", png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", b""))
    yield "short eXIf", png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", b"II"))
    yield "eXIf with Exif", png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", EXIF + exif(6)))
    yield (
        "eXIf with a bad text after",
        png(2, 8, RGB.reshape(HEIGHT, -1), chunk(b"eXIf", _bad_text(6, False))),
    )
    yield "gray orientation 6", png(0, 8, GRAY, chunk(b"eXIf", exif(6)))
    yield (
        "gray 16 orientation 6",
        png(0, 16, [row.tobytes() for row in wide], chunk(b"eXIf", exif(6))),
    )
    yield (
        "RGBA orientation 6",
        png(6, 8, np.dstack([RGB, ALPHA]).reshape(HEIGHT, -1), chunk(b"eXIf", exif(6))),
    )
    text = good[:33] + struct.pack(">I", 0xFFFFFF00) + b"tEXt" + good[33:]
    yield "a huge chunk", text
    yield "a huge eXIf", good[:33] + struct.pack(">I", 0x7FFFFFFF) + b"eXIf" + good[33:]


def _interlaced():
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4))
    passes += ((2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [
        row.reshape(-1) for top, left, down, right in passes for row in RGB[top::down, left::right]
    ]
    return png(2, 8, rows, interlace=1)


# WebP


def webp_chunk(kind, data):
    return kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def webp_chunks(data):
    """Splits a WebP into its chunks, (kind, data)."""
    at, chunks = 12, []
    while at + 8 <= len(data):
        kind, length = struct.unpack("<4sI", data[at : at + 8])
        chunks.append((kind, data[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return chunks


def webp_file(*chunks):
    body = b"WEBP" + b"".join(webp_chunk(kind, data) for kind, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_extended(flags, *chunks, width=WIDTH, height=HEIGHT):
    """Adds the header that announces further chunks to a WebP."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp_file((b"VP8X", bytes([flags, 0, 0, 0]) + sizes), *chunks)


def _of_parity(odd, lossless):
    """Returns the pixel chunk of a WebP with an odd or even length."""
    ((kind, data),) = webp_chunks(saved(MODES["RGB"], "WEBP", lossless=lossless, quality=95))
    return kind, data + bytes(len(data) % 2 != odd)


def _webps():
    for mode in ("RGB", "RGBA", "L", "P"):
        for lossless in (False, True):
            yield (
                f"{mode} lossless={lossless}",
                saved(MODES[mode], "WEBP", lossless=lossless, quality=95),
            )
    yield (
        "animated",
        saved(MODES["RGB"], "WEBP", save_all=True, append_images=[MODES["L"].convert("RGB")]),
    )
    yield (
        "animated with alpha",
        saved(MODES["RGBA"], "WEBP", save_all=True, append_images=[MODES["RGBA"].rotate(180)]),
    )
    yield "profile", saved(MODES["RGB"], "WEBP", icc_profile=b"x" * 333)
    for odd in (0, 1):
        for lossless in (False, True):
            pixels = _of_parity(odd, lossless)
            name = f"{'odd' if odd else 'even'} lossless={lossless}"
            yield f"{name} plain", webp_file(pixels)
            yield f"{name} extended", webp_extended(0, pixels)
            yield f"{name} EXIF 1", webp_extended(8, pixels, (b"EXIF", exif(1)))
            yield f"{name} EXIF 6", webp_extended(8, pixels, (b"EXIF", exif(6)))
            yield f"{name} Exif 6", webp_extended(8, pixels, (b"EXIF", EXIF + exif(6)))
            yield f"{name} EXIF first", webp_extended(8, (b"EXIF", exif(6)), pixels)
    pixels = _of_parity(0, False)
    odd = _of_parity(1, False)
    for orientation in range(10):
        yield f"orientation {orientation}", webp_extended(8, pixels, (b"EXIF", exif(orientation)))
    yield (
        "EXIF after XMP of odd length",
        webp_extended(12, pixels, (b"XMP ", b"<x/>!"), (b"EXIF", exif(6))),
    )
    yield (
        "EXIF after a profile of odd length",
        webp_extended(40, (b"ICCP", bytes(7)), pixels, (b"EXIF", exif(6))),
    )
    yield "EXIF of odd length", webp_extended(8, pixels, (b"EXIF", exif(6) + b"\0"))
    yield "EXIF without a flag", webp_extended(0, pixels, (b"EXIF", exif(6)))
    yield "a flag without EXIF", webp_extended(8, pixels)
    yield "a flag without EXIF, odd", webp_extended(8, odd)
    yield "empty EXIF", webp_extended(8, pixels, (b"EXIF", b""))
    yield "short EXIF", webp_extended(8, pixels, (b"EXIF", b"II"))
    yield "EXIF with a bad text after", webp_extended(8, pixels, (b"EXIF", _bad_text(6, False)))
    yield "EXIF with a bad text before", webp_extended(8, pixels, (b"EXIF", _bad_text(6, True)))
    yield "two EXIF", webp_extended(8, pixels, (b"EXIF", exif(6)), (b"EXIF", exif(1)))
    yield "another canvas", webp_extended(0, pixels, width=WIDTH + 9, height=HEIGHT + 9)
    yield "no pixels", webp_extended(8, (b"EXIF", exif(6)))
    good = webp_file(pixels)
    yield "a wrong length", good[:4] + b"\xff\xff\xff\xff" + good[8:]
    yield "bytes after", good + b"garbage!"
    yield "a wrong sync code", good[:23] + b"\0" + good[24:]
    yield "an unknown chunk", webp_file((b"ABCD", bytes(8)), pixels)
    cut = webp_extended(8, pixels, (b"EXIF", exif(6)))
    yield "cut EXIF", cut[:-12]
    yield (
        "a huge EXIF",
        cut.replace(b"EXIF" + struct.pack("<I", len(exif(6))), b"EXIF\xff\xff\xff\x7f"),
    )
    yield "alpha without a flag", _webp_alpha(0)
    yield "alpha with a flag", _webp_alpha(16)


def _webp_alpha(flags):
    chunks = [c for c in webp_chunks(saved(MODES["RGBA"], "WEBP")) if c[0] != b"VP8X"]
    return webp_extended(flags, *chunks)


# JPEG 2000


def jpeg2000(mode="RGB", **options):
    return saved(MODES[mode], "JPEG2000", **options)


def _precision(data, value, channel=None):
    """Changes the precision in a JPEG 2000's size marker; add 128 for signed samples."""
    data = bytearray(data)
    at = data.index(b"\xff\x51") + 38
    (channels,) = struct.unpack(">H", data[at : at + 2])
    for number in range(channels) if channel is None else [channel]:
        data[at + 2 + 3 * number] = value
    header = data.find(b"ihdr")
    if header >= 0 and channel is None:
        data[header + 14] = value
    return bytes(data)


def _subsampled(data, across, down, channels=(1, 2)):
    data = bytearray(data)
    at = data.index(b"\xff\x51") + 40
    for channel in channels:
        data[at + 3 * channel + 1 : at + 3 * channel + 3] = bytes([across, down])
    return bytes(data)


def _jpeg2000s():
    for raw in (False, True):
        kind = "raw " if raw else ""
        for mode in ("L", "LA", "RGB", "RGBA", "I;16", "YCbCr"):
            yield f"{kind}{mode}", jpeg2000(mode, no_jp2=raw)
        for mode in ("L", "RGB", "I;16"):
            for bits in (1, 4, 7, 9, 10, 12, 14, 16, 17, 20, 24, 31, 32, 38):
                yield (
                    f"{kind}{mode} {bits} bits",
                    _precision(jpeg2000(mode, no_jp2=raw), bits - 1),
                )
            yield f"{kind}{mode} signed 8", _precision(jpeg2000(mode, no_jp2=raw), 128 + 7)
            yield f"{kind}{mode} signed 16", _precision(jpeg2000(mode, no_jp2=raw), 128 + 15)
        yield f"{kind}unequal bits", _precision(jpeg2000(no_jp2=raw), 11, channel=1)
        yield f"{kind}4:2:0", _subsampled(jpeg2000(no_jp2=raw), 2, 2)
        yield f"{kind}all 2x2", _subsampled(jpeg2000(no_jp2=raw), 2, 2, (0, 1, 2))
        yield f"{kind}4:2:2", _subsampled(jpeg2000(no_jp2=raw), 2, 1)
        yield f"{kind}RGBA 16 bits", _precision(jpeg2000("RGBA", no_jp2=raw), 15)
        yield f"{kind}LA 16 bits", _precision(jpeg2000("LA", no_jp2=raw), 15)
        yield (
            f"{kind}lossy",
            jpeg2000(no_jp2=raw, irreversible=True, quality_mode="rates", quality_layers=[2]),
        )
        yield f"{kind}tiled", jpeg2000(no_jp2=raw, tile_size=(16, 16))
        yield f"{kind}offset", jpeg2000(no_jp2=raw, offset=(3, 5))
        yield (
            f"{kind}tile offset",
            jpeg2000(no_jp2=raw, tile_size=(16, 16), tile_offset=(2, 2), offset=(3, 5)),
        )
        yield f"{kind}no MCT", jpeg2000(no_jp2=raw, mct=0)
        yield f"{kind}comment", jpeg2000(no_jp2=raw, comment="hello")
    yield "signed by Pillow", jpeg2000("L", signed=True)
    yield "palette", jpeg2000("P")
    yield "no header box", jpeg2000().replace(b"ihdr", b"xxxx")
    yield "no color box", jpeg2000().replace(b"colr", b"xxxx")
    yield "gray color space", _color_space(17)
    yield "sYCC color space", _color_space(18)
    yield "unknown color space", _color_space(99)
    yield "cut pixels", jpeg2000()[:-200]
    yield "HTJ2K flag", _replaced(jpeg2000(no_jp2=True), b"\xff\x51", b"\xff\x51\0\x2f\x40\0")
    whole = jpeg2000("L")
    for marker, name in {b"\xff\x52": "FF52", b"\xff\x5c": "FF5C", b"\xff\x64": "FF64"}.items():
        for other in (0x30, 0x50, 0x53, 0x55, 0x57, 0x5A, 0x5D, 0x5E, 0x5F, 0x60, 0x63, 0x74, 0x91):
            yield f"{name} as FF{other:02X}", _replaced(whole, marker, bytes([255, other]))
    for place, value in ((2, 255), (2, 1), (5, 255), (7, 40), (8, 9), (10, 255), (11, 7)):
        yield f"FF52 with {value} at {place}", _changed(whole, b"\xff\x52", 2 + place, value)
    for value in (0x43, 0x5F, 0x41):
        yield f"FF5C of style {value}", _changed(whole, b"\xff\x5c", 4, value)
    size = jpeg2000(no_jp2=True)
    at = size.index(b"\xff\x51")
    yield "width 0", size[: at + 6] + bytes(4) + size[at + 10 :]
    yield "no channels", size[: at + 38] + bytes(2) + size[at + 40 :]
    yield "five channels", size[: at + 38] + b"\0\x05" + size[at + 40 :]
    yield "width 2^31", size[: at + 6] + b"\x80\0\0\0" + size[at + 10 :]


def _changed(data, marker, place, value):
    at = data.index(marker) + place
    return data[:at] + bytes([value]) + data[at + 1 :]


def _color_space(number):
    data = jpeg2000()
    at = data.index(b"colr") + 7
    return data[:at] + struct.pack(">I", number) + data[at + 4 :]


# BMP


def bmp(
    bits, pixels, *, height=HEIGHT, width=WIDTH, compression=0, palette=b"", old=False, size=40
):
    if old:
        head = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        fields = (size, width, height, 1, bits, compression, len(pixels), 2835, 2835)
        head = struct.pack("<IiiHHIIiiII", *fields, len(palette) // 4, 0)
        head += bytes(max(0, size - 40))
    start = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + head + palette + pixels


def _bmp_rows(bits):
    rows = _packed(bits)[::-1]
    return np.pad(rows, [(0, 0), (0, -rows.shape[1] % 4)]).tobytes()


def _bmps():
    for bits in (1, 4, 8):
        shades = np.linspace(0, 255, 1 << bits).astype(np.uint8)
        palette = np.repeat(shades[:, None], 4, axis=1).copy()
        palette[:, 3] = 0
        yield f"{bits}-bit", bmp(bits, _bmp_rows(bits), palette=palette.tobytes())
        colored = palette.copy()
        colored[:, 0] = 255 - colored[:, 0]
        yield f"{bits}-bit colored", bmp(bits, _bmp_rows(bits), palette=colored.tobytes())
        yield (
            f"{bits}-bit OS/2",
            bmp(bits, _bmp_rows(bits), palette=palette[:, :3].tobytes(), old=True),
        )
        yield f"{bits}-bit without a palette", bmp(bits, _bmp_rows(bits))
    blue = np.ascontiguousarray(RGB[::-1, :, ::-1])
    yield "24-bit", bmp(24, blue.tobytes())
    yield "24-bit OS/2", bmp(24, blue.tobytes(), old=True)
    yield "24-bit top down", bmp(24, blue[::-1].tobytes(), height=-HEIGHT)
    yield "32-bit", bmp(32, np.dstack([blue, ALPHA]).tobytes())
    yield "32-bit top down", bmp(32, np.dstack([blue, ALPHA])[::-1].tobytes(), height=-HEIGHT)
    fields = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)
    yield (
        "32-bit fields",
        bmp(32, np.dstack([blue, ALPHA]).tobytes(), compression=3, palette=fields),
    )
    fields = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    deep = GRAY[::-1].astype("<u2") * 257
    yield "16-bit", bmp(16, deep.tobytes())
    yield "16-bit fields", bmp(16, deep.tobytes(), compression=3, palette=fields)
    line = b"".join(bytes([WIDTH, 3 * row, 0, 0]) for row in range(HEIGHT)) + b"\0\1"
    shades = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1).tobytes()
    yield "8-bit runs", bmp(8, line, compression=1, palette=shades)
    yield "4-bit runs", bmp(4, line, compression=2, palette=shades[:64])
    yield "JPEG inside", bmp(0, jpeg(), compression=4)
    for size in (16, 52, 56, 64, 108, 124, 1000):
        yield f"header of {size}", bmp(24, blue.tobytes(), size=size)
    yield "2-bit", bmp(2, _bmp_rows(2))
    yield "64-bit", bmp(64, bytes(WIDTH * HEIGHT * 8))
    yield "0-bit", bmp(0, b"")
    yield "width 0", bmp(24, b"", width=0)
    yield "height 0", bmp(24, b"", height=0)
    yield "negative width", bmp(24, blue.tobytes(), width=-WIDTH)
    yield "lowest height", bmp(24, blue.tobytes(), height=-(1 << 31))
    yield "huge", bmp(24, blue.tobytes(), width=1 << 20, height=1 << 20)
    yield "cut pixels", bmp(24, blue.tobytes())[:-500]


# PNM and others


def _pnms():
    head = b"%d %d\n" % (WIDTH, HEIGHT)
    text = b" ".join(b"%d" % value for value in GRAY.reshape(-1))
    bits = np.packbits(GRAY < 128, axis=1).tobytes()
    yield "P1", b"P1\n" + head + b" ".join(b"%d" % value for value in (GRAY < 128).reshape(-1))
    yield (
        "P1 without spaces",
        b"P1\n" + head + b"\n".join(b"".join(b"%d" % value for value in row) for row in GRAY < 128),
    )
    yield "P2", b"P2\n" + head + b"255\n" + text
    yield "P3", b"P3\n" + head + b"255\n" + b" ".join(b"%d" % v for v in RGB.reshape(-1))
    yield "P4", b"P4\n" + head + bits
    yield "P5", b"P5\n" + head + b"255\n" + GRAY.tobytes()
    yield "P6", b"P6\n" + head + b"255\n" + RGB.tobytes()
    yield "P5 15", b"P5\n" + head + b"15\n" + (GRAY >> 4).tobytes()
    yield "P5 1", b"P5\n" + head + b"1\n" + (GRAY >> 7).tobytes()
    yield "P6 15", b"P6\n" + head + b"15\n" + (RGB >> 4).tobytes()
    yield "P5 65535", b"P5\n" + head + b"65535\n" + (GRAY.astype(">u2") * 257).tobytes()
    yield "P6 65535", b"P6\n" + head + b"65535\n" + (RGB.astype(">u2") * 257).tobytes()
    yield "P5 1023", b"P5\n" + head + b"1023\n" + (GRAY.astype(">u2") * 4).tobytes()
    yield "P2 65535", b"P2\n" + head + b"65535\n" + text
    yield "P5 0", b"P5\n" + head + b"0\n" + GRAY.tobytes()
    yield "P5 99999", b"P5\n" + head + b"99999\n" + GRAY.tobytes()
    yield "P5 comment", b"P5\n# a comment\n" + head + b"# another\n255\n" + GRAY.tobytes()
    yield "P6 comment at the end", b"P6 " + head + b"255 # x\n" + RGB.tobytes()
    yield "P6 with CR LF", b"P6\r\n" + head.replace(b"\n", b"\r\n") + b"255\n" + RGB.tobytes()
    yield "P6 cut", b"P6\n" + head + b"255\n" + RGB.tobytes()[:-99]
    yield "P5 negative", b"P5\n-40 24\n255\n" + GRAY.tobytes()
    yield "P5 width 0", b"P5\n0 24\n255\n"
    yield "P5 huge", b"P5\n99999999999 24\n255\n" + GRAY.tobytes()
    yield "P6 two images", (b"P6\n" + head + b"255\n" + RGB.tobytes()) * 2
    pam = b"P7\nWIDTH %d\nHEIGHT %d\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n"
    yield "P7", pam % (WIDTH, HEIGHT) + RGB.tobytes()
    yield "PFM", b"PF\n" + head + b"-1.0\n" + (RGB / 255).astype("<f4").tobytes()
    yield "PFM gray", b"Pf\n" + head + b"-1.0\n" + (GRAY / 255).astype("<f4").tobytes()
    yield "P8", b"P8\n" + head + b"255\n" + RGB.tobytes()
    yield "P0", b"P0\n" + head + b"255\n" + RGB.tobytes()
    yield "P5 without a size", b"P5\n"


def _others():
    yield "empty", b""
    yield "a byte", b"\0"
    yield "a text", b"<html>404 Not Found</html>"
    yield "long text", b"All work and no play makes Jack a dull boy.\n" * 100
    yield "JSON", b'{"image": null}'
    yield "zeros", bytes(3000)
    yield "ones", b"\xff" * 3000
    yield "noise", np.random.default_rng(0).bytes(3000)
    yield "a tar", b"a.jpg".ljust(100, b"\0") + b"0000644\0" * 3 + bytes(2000)
    yield "a zip", b"PK\3\4" + bytes(200)
    yield "a gzip", b"\x1f\x8b\x08\0" + bytes(200)
    yield "a PDF", b"%PDF-1.4\n" + bytes(200)
    yield "an SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "HEIC", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)
    yield "an MP4", b"\0\0\0\x18ftypisom\0\0\0\0isomiso2" + bytes(200)
    yield "JPEG XL", b"\xff\x0a" + bytes(200)
    yield "JPEG XL in a box", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(200)
    yield "a WAV", b"RIFF\x24\0\0\0WAVEfmt " + bytes(40)
    yield "an AVI", b"RIFF\x24\0\0\0AVI LIST" + bytes(40)
    yield "EXR", b"\x76\x2f\x31\x01" + bytes(200)
    yield "HDR", b"#?RADIANCE\n" + bytes(200)
    yield "numpy", b"\x93NUMPY\x01\0" + bytes(200)
    yield "DICOM", bytes(128) + b"DICM" + bytes(200)


def _by_pillow():
    for form in FORMATS:
        for mode, image in MODES.items():
            yield f"{form} {mode}", saved(image, form)


@functools.cache
def odd_images():
    """Returns all images by name."""
    images = dict(_by_pillow())
    for kind, make in {
        "TIFF": _tiffs,
        "JPEG": _jpegs,
        "PNG": _pngs,
        "WebP": _webps,
        "JPEG 2000": _jpeg2000s,
        "BMP": _bmps,
        "PNM": _pnms,
        "other": _others,
    }.items():
        for name, data in make():
            images[f"{kind}: {name}"] = data
    return {name: data for name, data in images.items() if data is not None}
