"""Odd images in a new process: DALI crashes if its parser rejects an image in a batch of 32."""

import io
import json
import re

import grain
import numpy as np
import odd_image_worker
import pytest
from forks import run_fork
from nvidia.dali import fn, types
from odd_images import EXIF, MODES, RGB, exif, odd_images, saved, tiff
from PIL import Image, ImageOps

from dalijax import augment, data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.formats.image_size import ImageInput, Look, image_size, look_at
from dalijax.fn import read_file
from full import FULL

# Pillow decodes them differently: it converts colors in another way, clips 16 bits, ignores
# EXIF numbers of one byte, or the header of a file was changed without its pixels.
KEPT = ImageInput(any_on_cpu=True, any_turned=True)  # passed to a decoder with types.ANY_DATA
UNSURE = re.compile("YCbCr|LAB|Lab|YCC|16 orient|orient.* 16$|Adobe|BYTE|2000.* bits|without a pal")

# Pillow decodes alpha in TIFF, CMYK and more than four channels differently.
UNSURE_IF_KEPT = re.compile(f"{UNSURE.pattern}|TIFF.*(CMYK|RGBA|(five|seven) channels)|JPEG.*CMYK")


def decoded_in_a_process(mutations, output="RGB"):
    done = run_fork(odd_image_worker.__file__, mutations, output, timeout=600)
    decoded = json.loads(done.stdout)
    assert decoded["lost"] == 0
    numbers = {int(name.removeprefix("record ")) // 2 for name in decoded["bad"]}
    bad = {name for number, name in enumerate(decoded["names"]) if number in numbers}
    assert bad.isdisjoint(decoded["shapes"])
    assert bad | set(decoded["shapes"]) == set(decoded["names"])
    return decoded, bad


@pytest.mark.slow
def test_no_odd_image_ends_the_process_and_each_is_decoded_or_named():
    images = odd_images()
    decoded, bad = decoded_in_a_process(0)
    assert len(images) > 750 and len(decoded["shapes"]) > 350
    for name, data in images.items():
        size, fault, *_ = look_at(data)
        assert (size is None) == bool(fault), name
        assert not fault or name in bad
        if name in decoded["shapes"]:
            assert [*size] == decoded["shapes"][name][:2], name
    wrong = [name for name, right in decoded["right"].items() if not right]
    assert [name for name in wrong if not UNSURE.search(name)] == []


@pytest.mark.slow
def test_no_odd_image_ends_the_process_if_its_channels_are_kept():
    images = odd_images()
    decoded, _ = decoded_in_a_process(0, "ANY_DATA")
    assert len(decoded["shapes"]) > 300
    for name in decoded["shapes"]:
        size, fault, *_ = look_at(images[name], KEPT)
        assert not fault and [*size] == decoded["shapes"][name][:2], name
    wrong = [name for name, right in decoded["right"].items() if not right]
    assert [name for name in wrong if not UNSURE_IF_KEPT.search(name)] == []


@pytest.mark.slow
def test_no_damaged_image_ends_the_process():
    count = 600 if FULL else 300
    decoded, _ = decoded_in_a_process(count)
    names = list(odd_images())
    for number in range(count):
        name, data = odd_image_worker.mutation(names, odd_images(), number)
        if name in decoded["shapes"]:
            assert [*image_size(data)] == decoded["shapes"][name][:2], name


UNSUPPORTED = {
    "GIF P": "GIF",
    "AVIF RGB": "AVIF",
    "other: HEIC": "HEIC",
    "other: JPEG XL in a box": "JPEG XL",
    "PNM: P7": "PAM",
    "TIFF 1": "1-bit TIFF",
    "TIFF I": "int32 TIFF",
    "TIFF LA": "gray TIFF with alpha",
    "TIFF: RGB uint32": "uint32 TIFF",
    "TIFF: gray int64": "int64 TIFF",
    "TIFF: gray float16": "float16 TIFF",
    "TIFF: gray float64": "float64 TIFF",
    "TIFF: gray complex64": "64-bit complex TIFF",
    "TIFF: 24-bit gray": "uint32 TIFF",
    "TIFF: 128-bit gray": "128-bit TIFF",
    "TIFF: RGB without samples": "TIFF without SamplesPerPixel",
    "TIFF: orientation 6 as BYTE": "TIFF with tags of unusual types",
    "TIFF: planar 16": "planar 16-bit TIFF with 3 channels",
    "TIFF: palette 16": "16-bit palette TIFF with 1 channels",
    "TIFF: JPEG 2000 inside": "TIFF compressed with JPEG 2000",
    "TIFF: BigTIFF gray and alpha": "gray TIFF with alpha",
    "JPEG 2000: LA": "gray JPEG 2000 with alpha",
    "JPEG 2000: L 20 bits": "20-bit JPEG 2000",
    "JPEG 2000: RGB 24 bits": "24-bit JPEG 2000",
    "JPEG: two EXIF 1 6": "JPEG with two EXIF orientations",
    "JPEG: 2 components": "JPEG with 2 channels",
    "JPEG: JPEG-LS": "JPEG-LS",
    "PNG: CgBI": "PNG with Apple's CgBI chunk",
    "PNG: two eXIf 6 1": "PNG with damaged or several EXIF data",
    "WebP: odd lossless=True EXIF 1": "WebP with EXIF data after a chunk of odd length",
    "BMP: 16-bit": "16-bit BMP",
    "PNM: P3": "PNM with text (P3)",
    "PNM: P5 1023": "PNM with a maximum of 1023",
}


def test_valid_images_of_unsupported_kinds_are_refused():
    looks = {name: look_at(odd_images()[name]) for name in UNSUPPORTED}
    text = "not supported by DALI's decoders: "
    assert looks == {name: Look(None, text + kind) for name, kind in UNSUPPORTED.items()}


def with_orientation(mode, form, orientation):
    options = {"lossless": True} if form == "WEBP" else {}
    exif_data = (EXIF if form == "JPEG" else b"") + exif(orientation)
    return saved(MODES[mode], form, exif=exif_data, **options)


CHANNELS = [
    ("L", "JPEG", 1, {}, "gray JPEG on a CPU"),
    ("L", "JPEG", 6, {"adjust_orientation": False}, "gray JPEG on a CPU"),
    ("RGBA", "PNG", 2, {}, "PNG with alpha and an EXIF orientation"),
    ("RGBA", "PNG", 6, {}, "PNG with alpha and an EXIF orientation"),
    ("LA", "WEBP", 6, {}, "WebP with alpha and an EXIF orientation"),
    ("RGBA", "PNG", 6, {"adjust_orientation": False}, ""),
    ("RGBA", "PNG", 1, {}, ""),
    ("LA", "WEBP", 1, {}, ""),
    ("RGB", "JPEG", 6, {}, ""),
    ("RGB", "PNG", 6, {}, ""),
    ("L", "PNG", 6, {}, ""),
]


# The kinds are recognized by the same function in each case.
@pytest.mark.parametrize(
    ("how", "mode", "form", "orientation", "settings", "kind"),
    [
        *(("records", *case) for case in CHANNELS),
        *((how, *case) for how in ("paths", "Grain") for case in CHANNELS[1::3]),
    ],
)
def test_kept_channels_are_right_or_refused(how, mode, form, orientation, settings, kind, tmp_path):
    data = with_orientation(mode, form, orientation)
    (tmp_path / "image").write_bytes(data)
    value = bytes(tmp_path / "image") if how == "paths" else data

    def decode(value):
        data = read_file(value) if how == "paths" else value
        return fn.decoders.image(data, output_type=types.ANY_DATA, **settings)

    def first():
        if how == "Grain":
            transform = DALITransform(decode, output_map=["x"], batch_size=2, num_threads=1, seed=0)
            dataset = grain.MapDataset.source([{"value": value}] * 2).pipe(transform)
            return next(iter(dataset))["x"]
        source = sources.Records([{"value": value}] * 2)
        make = data_iterator(decode, ["x"], source=source, as_numpy=True)
        return next(make(batch_size=2, num_threads=1))["x"]

    if kind:
        with pytest.raises(Exception, match=kind) as raised:
            first()
        assert "types.ANY_DATA; use types.RGB" in str(raised.value)
        return
    image = Image.open(io.BytesIO(data))
    image = image if settings else ImageOps.exif_transpose(image)
    pixels = np.asarray(image).reshape(*image.size[::-1], -1)
    for row in np.asarray(first()):
        assert row.shape == pixels.shape and np.abs(row - pixels.astype(float)).mean() < 3


def test_images_are_checked_if_any_decoder_keeps_channels():
    data = saved(MODES["L"], "JPEG")

    def decode(data):
        kept = fn.decoders.image(data, output_type=types.ANY_DATA)
        return fn.decoders.image(data), kept, fn.decoders.image(data, output_type=types.GRAY)

    source = sources.Records([{"data": data}] * 2)
    make = data_iterator(decode, ["x", "y", "z"], source=source, as_numpy=True)
    with pytest.raises(Exception, match="gray JPEG on a CPU"):
        next(make(batch_size=2, num_threads=1))


@pytest.mark.parametrize(
    "name",
    [
        *("JPEG: no scan", "PNG: no end", "WebP: cut EXIF", "JPEG 2000: cut pixels"),
        *("JPEG: incomplete EXIF 6 and bad pixels", "JPEG 2000: FF52 as FF5A"),
        "TIFF: palette with a cut map",
    ],
)
def test_damaged_images_are_reported_as_damaged(name):
    data = odd_images()[name]
    said = f"its header is damaged or cut off, and it has {len(data)} bytes"
    assert look_at(data) == Look(None, said)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "JPEG2000", "BigTIFF"])
def test_a_truncated_header_is_reported_as_damaged(form):
    data = tiff(RGB, big=True) if form == "BigTIFF" else saved(MODES["RGB"], form)
    header = {"JPEG": data.find(b"\xff\xda"), "PNG": len(data), "BMP": 26}.get(form, 30)
    for end in range(14 if form != "JPEG2000" else 20, header, 7):
        if form in ("TIFF", "BigTIFF") and end < 16:
            continue
        assert look_at(data[:end])[1].startswith("its header is damaged or cut off"), end


LOSSLESS = {
    "PPM": saved(MODES["RGB"], "PPM"),
    "JPEG 2000": saved(MODES["RGB"], "JPEG2000"),
    "raw JPEG 2000": saved(MODES["RGB"], "JPEG2000", no_jp2=True),
    "BigTIFF": tiff(RGB, big=True),
    "turned BigTIFF": tiff(np.rot90(RGB), big=True, extra={274: (3, [6])}.items()),
}


def crop(data, number, draw):
    return augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw), number


@pytest.mark.parametrize("form", LOSSLESS)
@pytest.mark.parametrize("by_grain", [False, True])
def test_crops_of_other_formats_equal_those_of_a_png(form, by_grain):
    def crops(data):
        records = [{"data": data, "number": k} for k in range(12)]
        options = {"batch_size": 4, "num_threads": 2, "seed": 3}
        if by_grain:
            transform = DALITransform(crop, output_map=["x", "n"], **options)
            return [b["x"] for b in grain.MapDataset.source(records).seed(1).pipe(transform)]
        make = data_iterator(crop, ["x", "n"], source=sources.Records(records), as_numpy=True)
        return [batch["x"] for batch in make(**options)]

    for one, other in zip(crops(LOSSLESS[form]), crops(saved(MODES["RGB"], "PNG")), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
