"""Sizes of images against Pillow's sizes and the images that DALI decodes."""

import collections
import concurrent.futures
import functools
import io
import os
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from forks import run_fork
from nvidia.dali import fn, pipeline_def
from odd_images import odd_images
from PIL import Image

from dalijax.core.formats import image_size as image_size_module
from dalijax.core.formats.image_headers import jpeg_orientation
from dalijax.core.formats.image_size import (
    HEAD,
    ImageInput,
    Look,
    image_size,
    look_at,
    look_at_file,
    look_at_head,
    path_size,
)
from dalijax.core.formats.shared_headers import SharedHeaders
from dalijax.sources import Arrays, Files, Mixture, Records

PIXELS = np.random.default_rng(0).integers(0, 256, (37, 61, 3), np.uint8)
ORIENTATION = 0x0112


def encoded(form, orientation=None, mode="RGB", pixels=PIXELS, **options):
    buffer = io.BytesIO()
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    Image.fromarray(pixels).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def directory(order, orientation, kind=3):
    """Returns EXIF data with one entry."""
    value = struct.pack(order + {1: "Bxxx", 3: "Hxx", 4: "I"}[kind], orientation)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8)
    return head + struct.pack(order + "HHHI", 1, ORIENTATION, kind, 1) + value + bytes(4)


def jpeg_with(*segments):
    data = encoded("JPEG")
    parts = [b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments]
    return data[:2] + b"".join(parts) + data[2:]


def png_with(exif, before):
    data = encoded("PNG")
    at = data.index(before) - 4
    crc = struct.pack(">I", zlib.crc32(b"eXIf" + exif))
    return data[:at] + struct.pack(">I", len(exif)) + b"eXIf" + exif + crc + data[at:]


EXIF = b"Exif\0\0"
IMAGES = {
    **{
        f"{form} {orientation} {options}": encoded(form, orientation, **options)
        for form, several in {
            "JPEG": ({}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}),
            "PNG": ({}, {"mode": "P"}, {"mode": "RGBA"}),
            "WEBP": ({}, {"lossless": True}),
            "TIFF": ({},),
        }.items()
        for options in several
        for orientation in (None, 1, 3, 5, 6, 7, 8)
    },
    "BMP": encoded("BMP"),
    "JPEG, restarts": encoded("JPEG", restart_marker_rows=1),
    "JPEG, filled up": b"\xff\xd8" + b"\xff" * 5 + encoded("JPEG")[3:],
    "JPEG, comment": encoded("JPEG", comment=b"\xff\xc0" * 2000),
    "JPEG, thumbnail": jpeg_with(EXIF + directory("<", 6) + encoded("JPEG", pixels=PIXELS[:8, :8])),
    "JPEG, profile": encoded("JPEG", 8, icc_profile=bytes(200_000)),
    "JPEG, LONG": jpeg_with(EXIF + directory("<", 6, 4)),
    "JPEG, BYTE": jpeg_with(EXIF + directory("<", 6, 1)),
    "JPEG, big endian": jpeg_with(EXIF + directory(">", 8)),
    "JPEG, two alike": jpeg_with(EXIF + directory("<", 6), EXIF + directory(">", 6)),
    "JPEG, XMP before": jpeg_with(b"http://ns.adobe.com/xap/1.0/\0<x/>", EXIF + directory("<", 6)),
    "JPEG, cut EXIF": jpeg_with(EXIF + directory("<", 6)[:12]),
    "JPEG, odd magic": jpeg_with(EXIF + b"XX" + directory("<", 6)[2:]),
    "JPEG, far directory": jpeg_with(EXIF + b"II*\0" + b"\xff" * 20),
    "PNG, EXIF first": png_with(directory("<", 6), b"IDAT"),
    "PNG, EXIF last": png_with(directory(">", 5), b"IEND"),
}
# Other orientations change only a number in a header.
KINDS = [name for name in IMAGES if not re.match(r"\w+ [13578] ", name)]


def shape_by_dali(data):
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph():
        encoded = fn.external_source(source=lambda: [np.frombuffer(data, np.uint8)], batch=True)
        return fn.decoders.image(encoded), fn.peek_image_shape(encoded)

    pipeline = graph()
    pipeline.build()
    pixels, shape = pipeline.run()
    return tuple(pixels.shape()[0][:2]), tuple(np.array(shape[0])[:2].tolist())


@pytest.mark.parametrize("name", IMAGES)
def test_sizes_match_dali(name, tmp_path):
    size = image_size(IMAGES[name])
    assert (size, size) == shape_by_dali(IMAGES[name])
    (tmp_path / "image").write_bytes(IMAGES[name])
    assert path_size(os.fsencode(tmp_path / "image")) == size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (700, 5), (255, 256)])
def test_sizes_match_pillow(form, shape):
    data = encoded(form, pixels=np.zeros((*shape, 3), np.uint8))
    assert Image.open(io.BytesIO(data)).size[::-1] == shape
    assert image_size(data) == image_size(np.frombuffer(data, np.uint8)) == shape


def test_an_image_upside_down():
    data = bytearray(encoded("BMP"))
    data[22:26] = struct.pack("<i", -37)
    assert image_size(data) == (37, 61)


@pytest.mark.parametrize("name", ["JPEG None {}", "PNG 6 {}", "WEBP 6 {}", "TIFF None {}", "BMP"])
def test_truncated_or_damaged_headers_have_no_size(name, tmp_path):
    data = IMAGES[name]
    rng = np.random.default_rng(0)
    known = {image_size(data), None, (37, 61)}
    for end in [*range(40), len(data) // 2]:
        assert image_size(data[:end]) in known
    assert image_size(data[:10]) is None
    for _ in range(300):  # never another error, nor a size below 1
        damaged = bytearray(data)
        damaged[rng.integers(0, min(len(data), 700))] = rng.integers(0, 256)
        size = image_size(damaged)
        assert size is None or min(size) > 0


def test_invalid_images_have_no_size(tmp_path):
    two = jpeg_with(EXIF + directory("<", 6), EXIF + directory(">", 1))
    for data in (
        two,  # DALI's parser and its decoders disagree
        b"",
        b"\xff\xd8",
        b"some text",
        b"RIFF1234WAVEfmt ",
        bytes(1000),
        b"\xff\xd8\xff\xd9",
    ):
        assert image_size(data) is None
        (tmp_path / "x").write_bytes(data)
        assert path_size(os.fsencode(tmp_path / "x")) is None


def test_sources_have_the_sizes_of_their_images(tmp_path):
    names = ["JPEG 6 {}", "PNG None {}", "JPEG, profile", "BMP"]
    paths = [tmp_path / f"{i}.jpg" for i in range(5)]
    for path, name in zip(paths, names):
        path.write_bytes(IMAGES[name])
    paths[4].write_bytes(b"text")
    expected = [(61, 37), (37, 61), (61, 37), (37, 61), (-1, -1)]
    files = Files(paths=paths)
    records = Records([{"data": path.read_bytes()} for path in paths])
    for source in (files, records, Mixture([(records, 1)])):
        indices = np.array([4, 0, 2, 0, 1, 3])
        sizes = source.sizes(indices, "data", source.read(indices, ["data"])["data"])
        assert sizes.dtype == np.int32
        np.testing.assert_array_equal(sizes, [expected[i] for i in indices])
    for path in paths:
        path.unlink()  # their size is already known
    data = files.read(np.arange(5), ["data"])["data"]
    np.testing.assert_array_equal(files.sizes(np.arange(5), "data", data), expected)
    other = Arrays({"x": np.zeros((3, 4), np.uint8)})
    rows = other.read(np.arange(2), ["x"])["x"]
    np.testing.assert_array_equal(other.sizes(np.arange(2), "x", rows), [[-1, -1]] * 2)


WHOLE = encoded("JPEG")
PNG = encoded("PNG")
FRAME = WHOLE.index(b"\xff\xc0")
WEBP = encoded("WEBP")
DAMAGED = {
    "nothing": b"",
    "a text": b"<html>404</html>",
    "zeros": bytes(300),
    "a GIF": encoded("GIF"),
    "a marker of pixels": WHOLE[:FRAME] + b"\xff\xd0" + WHOLE[FRAME:],
    "two beginnings": WHOLE[:2] + WHOLE,
    "two components": WHOLE[: FRAME + 9] + b"\x02" + WHOLE[FRAME + 10 :],
    "no frame": WHOLE[:FRAME] + WHOLE[WHOLE.index(b"\xff\xda") :],
    "a chunk before": PNG[:8] + b"\0\0\0\x04CgBI" + bytes(8) + PNG[8:],
    "a color type": PNG[:25] + b"\x05" + PNG[26:],
    "a bit depth": PNG[:24] + b"\x03" + PNG[25:],
    "a sync code": WEBP[:23] + b"\0" + WEBP[24:],
    "a short header": encoded("BMP")[:14] + struct.pack("<I", 16) + encoded("BMP")[18:],
}


@functools.cache
def parser():
    """Returns a pipeline that parses images, and the queue of these images."""
    images = collections.deque()

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def peek():
        return fn.peek_image_shape(fn.external_source(lambda: [images.popleft()]))

    return peek(), images


def parsed_by_dali(data):
    """Whether DALI's parser accepts an image; its decoders could crash."""
    pipeline, images = parser()
    images.append(np.frombuffer(data, np.uint8))
    try:
        pipeline.run()
    except RuntimeError:
        parser.cache_clear()  # it can't run again
        return False
    finally:
        assert not images
    return True


@pytest.mark.parametrize("name", DAMAGED)
def test_an_image_that_dali_does_not_parse_is_invalid(name, tmp_path):
    data = DAMAGED[name]
    assert not parsed_by_dali(data)
    (tmp_path / "image").write_bytes(data)
    look = look_at(data)
    assert look_at_file(os.fsencode(tmp_path / "image")) == look
    assert look.fault != ""


@pytest.mark.parametrize("name", KINDS)
def test_images_are_valid_even_truncated_if_dali_parses_them(name, tmp_path):
    data = IMAGES[name]
    assert look_at(data)[:3] == Look(image_size(data))[:3] and parsed_by_dali(data)
    known = name.split()[0] in ("JPEG", "PNG", "WEBP", "BMP")
    cuts = {*range(5, min(len(data), 700), 60), len(data) // 2, len(data) - 20, len(data) - 1}
    for end in cuts if known else ():
        parsed = parsed_by_dali(data[:end])
        # DALI ignores bytes after JPEG's last marker; without its two bytes there are no pixels.
        assert bool(look_at(data[:end])[1]) != parsed or data[:end].endswith(b"\xff\xda"), end


def test_files_are_checked_like_bytes(tmp_path):
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, (600, 700, 3), np.uint8)
    exif = {"exif": Image.Exif()}
    exif["exif"][ORIENTATION] = 6
    cases = {name: encoded(form, pixels=large) for name, form in zip("abc", ("PNG", "TIFF", "BMP"))}
    cases["d"] = encoded("JPEG", 6, pixels=large, quality=98)
    cases["e"] = encoded("JPEG", 6, pixels=large, quality=98, icc_profile=bytes(500_000))
    cases["f"] = cases["d"][:100] + b"\xff\xd0" * (1 << 18)
    cases["g"] = cases["a"][:-20]
    cases["h"] = bytes(1 << 19)
    for name, data in cases.items():
        assert len(data) > 1 << 18
        (tmp_path / name).write_bytes(data)
        assert look_at_file(os.fsencode(tmp_path / name)) == look_at(data), name
    sizes = [look_at(cases[name])[0] for name in "abcde"]
    assert sizes == [(600, 700)] * 3 + [(700, 600)] * 2
    assert all(look_at(cases[name])[1] for name in "fgh")


@pytest.mark.parametrize("length", (16, 30, 100, 400, 1000, HEAD))
def test_a_head_has_the_size_of_the_image_or_none(length, monkeypatch, tmp_path):
    monkeypatch.setattr(image_size_module, "HEAD", length)
    images = {**odd_images(), **IMAGES, **DAMAGED}
    known = 0
    for name, data in images.items():
        monkeypatch.setattr(image_size_module, "_jpegs", SharedHeaders())
        look = look_at_head(data[:length])
        if look is not None:
            assert look == look_at(data), name
            known += len(data) > length
        (tmp_path / "image").write_bytes(data)
        assert look_at_file(os.fsencode(tmp_path / "image")) == look_at(data), name
    assert known > 10 or length not in (400, 1000)


def test_a_path_without_a_file_raises_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    said = Look(None, "it isn't a regular file")
    assert look_at_file(os.fsencode(tmp_path / "fifo")) == said
    assert look_at_file(os.fsencode(tmp_path)) == said
    assert look_at_file(os.fsencode(tmp_path / "none")) == Look(None, "there is no such file")
    (tmp_path / "itself").symlink_to("itself")
    assert look_at_file(os.fsencode(tmp_path / "itself")) == Look(None)  # reading it raises
    (tmp_path / "\udcff.png").write_bytes(encoded("PNG"))
    path = os.fsencode(tmp_path / "\udcff.png")
    assert look_at_file(np.frombuffer(path.ljust(200, b"\0"), np.uint8)) == Look((37, 61))


@pytest.fixture
def parsed(monkeypatch):
    """Returns `look_at` without results about other images."""

    def parsed(data, *image_input):
        with monkeypatch.context() as context:
            context.setattr(image_size_module, "_jpegs", SharedHeaders())
            return look_at(data, *image_input)

    return parsed


def test_a_cache_of_headers_is_small():
    headers = SharedHeaders()
    for number in range(1000):
        header = number.to_bytes(4, "big")
        assert headers.get(memoryview(header + b"pixels"), "use") is None
        headers.put(memoryview(header), "use", number)
        assert headers.get(memoryview(header + b"pixels"), "use") == number
        assert headers.get(memoryview(header + b"pixels"), "other use") is None
    assert len(headers._results) < 300


JPEGS = [name for name in KINDS if name.startswith("JPEG")]


@pytest.mark.parametrize("name", JPEGS)
def test_jpegs_with_the_same_header_have_the_same_size(name, parsed):
    data = IMAGES[name]
    _, end = jpeg_orientation(memoryview(data))
    pixels = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    exif = EXIF + directory("<", 6)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    assert look_at(data) == parsed(data) and look_at(data)[:3] == Look(image_size(data))[:3]
    others = [data[:end], data[:end] + pixels, data[:end] + segment + data[end:], data[:-1]]
    others += [data[:at] for at in range(end, min(len(data), end + 40))]
    for other in others:
        assert look_at(other) == parsed(other) == look_at(data)


@pytest.mark.parametrize("name", JPEGS)
def test_damaged_headers_are_not_taken_for_others(name, parsed):
    data, rng = IMAGES[name], np.random.default_rng(0)
    _, end = jpeg_orientation(memoryview(data))
    look_at(data)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(0, end)] = rng.integers(0, 256)
        assert look_at(damaged) == parsed(damaged)
    for cut in {*range(0, end, max(1, end // 300)), *range(max(0, end - 40), end)}:
        assert look_at(data[:cut]) == parsed(data[:cut])


@pytest.mark.parametrize("length", [0, 1])
def test_a_last_segment_of_no_bytes_is_part_of_the_header(length, parsed):
    data = bytearray(encoded("JPEG"))
    at = data.index(b"\xff\xda") + 2
    data[at : at + 2] = length.to_bytes(2, "big")
    look_at(data)
    _, end = jpeg_orientation(memoryview(data))
    for cut in range(at - 2, at + 4):
        assert look_at(data[:cut]) == parsed(data[:cut])
    assert end == at + 2


def test_results_depend_on_the_use_of_an_image(parsed):
    gray = encoded("JPEG", mode="L")
    uses = ImageInput(), ImageInput(any_on_cpu=True), ImageInput(any_turned=True)
    for use in (*uses, *uses[::-1]):
        assert look_at(gray, use) == parsed(gray, use)
    assert [bool(look_at(gray, use)[1]) for use in uses] == [False, True, False]


def test_the_cache_of_headers_is_bounded():
    headers = SharedHeaders()
    for number in range(1000):
        headers.put(memoryview(bytes([number % 256, number // 256, *range(number % 8)])), 0, number)
    headers.put(memoryview(bytes(1 << 20)), 0, -1)
    assert len(headers._results) <= 256 and len(headers._lengths) <= 4
    assert headers.get(memoryview(bytes(1 << 20)), 0) is None
    last = memoryview(bytes([999 % 256, 999 // 256, *range(999 % 8)]) + b"pixels")
    assert headers.get(last, 0) == 999 and headers.get(last, 1) is None


def test_the_parser_prints_nothing(capfd):
    for data in DAMAGED.values():
        look_at(data)
    assert capfd.readouterr() == ("", "")


def test_without_the_parser_the_error_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    monkeypatch.setattr(image_size_module, "_jpegs", SharedHeaders())
    image_size_module._code_stream.cache_clear()
    with pytest.raises(ImportError, match="pip install nvidia-nvimgcodec-cu12 for CUDA 12"):
        look_at(WHOLE)
    monkeypatch.undo()
    assert look_at(WHOLE) == Look((37, 61))
    assert "PYNVIMGCODEC_VERBOSITY" not in os.environ


def test_threads_and_forked_processes_may_check_concurrently(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(image_size, [WHOLE, WEBP, PNG, b"text"] * 500))
    assert sizes == [(37, 61), (37, 61), (37, 61), None] * 500
    code = (
        "import os, pathlib, sys, threading\n"
        "from dalijax.core.formats.image_size import look_at\n"
        "data = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "look_at(data)\n"  # a process that forks during an import may wait for it forever
        "threading.Thread(target=lambda: [look_at(data) for _ in range(99)]).start()\n"
        "if not (child := os.fork()):\n"
        "    os._exit(0 if look_at(data).size == (37, 61) else 1)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    (tmp_path / "whole.jpg").write_bytes(WHOLE)
    run_fork(code, tmp_path / "whole.jpg", timeout=100)


def test_exif_after_the_frame_header_rotates_an_image():
    exif = EXIF + directory("<", 6)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    at = WHOLE.index(b"\xff\xda")
    data = WHOLE[:at] + segment + WHOLE[at:]
    assert image_size(data) == (61, 37)
    assert shape_by_dali(data) == ((61, 37), (61, 37))


@pytest.mark.parametrize(("width", "height", "fits"), ((26754, 26754, True), (26755, 26755, False)))
def test_jpegs_of_more_than_2_gib_are_rejected(width, height, fits):
    data = bytearray(encoded("JPEG"))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    size, fault, *_ = look_at(np.frombuffer(data, np.uint8))
    assert (size == (height, width)) == fits
    assert fits or fault == "not supported by DALI's decoders: image of 26755 x 26755 pixels"
