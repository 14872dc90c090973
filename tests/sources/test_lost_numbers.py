"""Warnings of images whose class numbers or depths a decoder loses."""

import io
import re
import warnings

import grain
import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.fn import read_file

NUMBERS = np.random.default_rng(0).integers(1, 22, (24, 32), np.uint8)  # of classes
PALETTE = r"is a {} with a palette.*numpy\.asarray\(PIL\.Image\.open"
DEEP = r"is a {} {}, which the decoder converts to 8 bits.*dtype=types\.{}"


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def with_palette(numbers, colors):
    image = Image.fromarray(numbers)
    image.putpalette(colors)
    return image


COLORED = with_palette(NUMBERS, [37 * k % 256 for k in range(768)])
GRAY = with_palette(NUMBERS, [k for k in range(256) for _ in range(3)])
MANY = Image.fromarray(NUMBERS.astype(np.uint16))
IMAGES = {
    "PNG palette": saved(COLORED, "PNG"),
    "PNG palette of 4 bits": saved(with_palette(NUMBERS % 16, [9, 8, 7] * 16), "PNG"),
    "PNG palette and alpha": saved(COLORED, "PNG", transparency=0),
    "PNG palette of grays": saved(GRAY, "PNG"),
    "BMP palette": saved(COLORED, "BMP"),
    "TIFF palette": saved(COLORED, "TIFF"),
    "PNG uint16": saved(MANY, "PNG"),
    "TIFF uint16": saved(MANY, "TIFF"),
    "TIFF float32": saved(Image.fromarray(NUMBERS.astype(np.float32)), "TIFF"),
    "JPEG 2000 uint16": saved(MANY, "JPEG2000"),
    "PNM uint16": b"P5 32 24 65535\n" + NUMBERS.astype(">u2").tobytes(),
    "PNG uint8": saved(Image.fromarray(NUMBERS), "PNG"),
    "PNG 1 bit": saved(Image.fromarray(NUMBERS > 9), "PNG"),
    "BMP uint8": saved(Image.fromarray(NUMBERS), "BMP"),
    "JPEG": saved(Image.fromarray(NUMBERS), "JPEG"),
    "WebP": saved(COLORED.convert("RGB"), "WEBP", lossless=True),
}
KEPT = {
    types.UINT8: ("PNG uint8", "PNG palette of grays", "BMP uint8"),
    types.UINT16: [name for name in IMAGES if name.endswith("uint16")],
    types.FLOAT: ["TIFF float32"],
}


def wanted(name, output, dtype):
    """Returns the pattern of the warning about an image; None if its numbers are kept."""
    form, _, kind = name.partition(" palette")
    if kind or name.endswith("palette"):
        keeps = output == types.RGB or "gray" in kind
        return None if keeps else PALETTE.format(form)
    form, _, samples = name.rpartition(" ")
    if samples not in ("uint16", "float32") or dtype != types.UINT8:
        return None
    kept = ("16-bit", form, "UINT16") if samples == "uint16" else (samples, form, "FLOAT")
    return DEEP.format(*kept)


def decoded(data, decode=fn.decoders.image, **arguments):
    """Returns a decoded image, and the texts of warnings."""
    make = data_iterator(lambda data: decode(data, **arguments), ["x"], as_numpy=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make(source=sources.Records([{"data": data}] * 5), batch_size=2) as iterator:
            image = next(iterator)["x"][0]
            next(iterator)
    texts = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    return image, texts


@pytest.mark.parametrize("output", (types.GRAY, types.ANY_DATA, types.RGB))
@pytest.mark.parametrize("name", IMAGES)
def test_a_warning_tells_which_numbers_are_lost(name, output):
    for dtype in (types.UINT8, types.UINT16, types.FLOAT):
        if (name, output) == ("JPEG", types.ANY_DATA):  # DALI can't decode it
            continue
        image, texts = decoded(IMAGES[name], output_type=output, dtype=dtype)
        pattern = wanted(name, output, dtype)
        assert len(texts) == (pattern is not None), texts
        if pattern is not None:
            assert re.match(f"data of record [0-4] {pattern}", texts[0])
            assert not np.array_equal(image[..., 0], NUMBERS)
        elif name in KEPT[dtype]:
            np.testing.assert_array_equal(image[..., 0], NUMBERS)


def test_pillow_reads_the_numbers_of_a_palette():
    """As the warning advises."""
    images = [np.asarray(Image.open(io.BytesIO(IMAGES["PNG palette"])))[..., None]] * 2
    make = data_iterator(lambda x: fn.flip(x, horizontal=1), ["x"], as_numpy=True)
    with make(source=sources.Records([{"x": image} for image in images]), batch_size=2) as batches:
        np.testing.assert_array_equal(next(batches)["x"][0, ..., 0], NUMBERS[:, ::-1])


def crops(data, **arguments):
    return fn.decoders.image_crop(data, crop=(4, 4), **arguments)


def random_crops(data, **arguments):
    return fn.resize(fn.decoders.image_random_crop(data, **arguments), size=(4, 4))


def slices(data, **arguments):
    return fn.decoders.image_slice(data, start=[1, 1], end=[5, 5], axes=[0, 1], **arguments)


def python(data, **arguments):  # DALI doesn't serialize graphs with Python functions
    return fn.python_function(fn.decoders.image(data, **arguments), function=lambda image: image)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "decode", (crops, random_crops, slices, python, fn.experimental.decoders.image)
)
def test_every_decoder_of_images_is_known(decode):
    _, texts = decoded(IMAGES["PNG palette"], decode, output_type=types.GRAY)
    assert len([text for text in texts if "with a palette" in text]) == 1
    _, texts = decoded(IMAGES["PNG uint16"], decode)
    assert len([text for text in texts if "16-bit PNG" in text]) == 1
    _, texts = decoded(IMAGES["PNG uint16"], decode, dtype=types.UINT16)
    assert not [text for text in texts if "16-bit PNG" in text]


@pytest.mark.parametrize("how", ("Files", "records", "paths", "Grain"))
def test_the_warning_comes_once_with_the_first_such_record(how, tmp_path):
    def graph(data):
        data = read_file(data) if how == "paths" else data
        return fn.decoders.image(data, output_type=types.GRAY)

    files = [IMAGES["PNG palette" if k in (5, 7) else "PNG uint8"] for k in range(8)]
    paths = [tmp_path / f"{k}.png" for k in range(8)]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    records = [{"data": bytes(x)} for x in (paths if how == "paths" else files)]
    if how == "Grain":
        transform = DALITransform(graph, output_map=["x"], batch_size=2, num_threads=1)
        iterator = iter(grain.MapDataset.source(records).pipe(transform))
    else:
        source = sources.Files(paths=paths) if how == "Files" else sources.Records(records)
        make = data_iterator(graph, ["x"], source=source)
        iterator = make(batch_size=2, shuffle=False, prefetch_queue_depth=1)
    names = {"Files": paths[5], "Grain": "record 1 of the batch"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(iterator)) == 4
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"data of {names.get(how, 'record 5')} is a PNG with")
    assert caught[0].filename == __file__


def test_a_warning_raised_as_an_error_loses_no_batch():
    make = data_iterator(lambda data: fn.decoders.image(data), ["x"], as_numpy=True)
    source = sources.Records([{"data": IMAGES["PNG uint16"]}] * 3)
    with make(source=source, batch_size=1) as batches:
        with pytest.raises(RuntimeWarning, match="16-bit PNG"), warnings.catch_warnings():
            warnings.simplefilter("error")
            next(batches)
        assert len(list(batches)) == 3
