"""A program that decodes odd images with dalijax; a crash of DALI would end it.

python odd_image_worker.py MUTATIONS [OUTPUT_TYPE]

Prints a JSON object. For each image of `odd_images` (or for mutations of them, if their number
isn't 0) it has the error of the record, or how the pixels differ from the expected pixels.
"""

import io
import json
import random
import sys

import numpy as np
from nvidia.dali import fn, types
from odd_images import GRAY, MODES, RGB, odd_images, saved
from PIL import Image, ImageOps

from dalijax import data_iterator, sources
from dalijax.core.formats.image_size import look_at

BATCH, SIDE = 40, 48
LARGEST = 1 << 21  # pixels of a mutation that is decoded
GOOD = [saved(MODES["RGB"], "PNG"), saved(MODES["L"], "PNG"), saved(MODES["RGB"], "BMP")]
PIXELS = {
    "RGB": [RGB, np.dstack([GRAY] * 3), RGB],
    "ANY_DATA": [RGB, GRAY[..., np.newaxis], RGB],
}


def canvas(pixels):
    """Places an image at the top left of a black square with four channels."""
    shown = np.zeros((SIDE, SIDE, 4), np.uint8)
    part = pixels[:SIDE, :SIDE, :4]
    shown[: part.shape[0], : part.shape[1], : part.shape[2]] = part
    return shown


def expected(data, channels):
    """Returns Pillow's pixels of an image, and the pixels that the image was made from."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            mode = {1: "L", 3: "RGB"}.get(channels, "RGBA")
            pixels = np.asarray(ImageOps.exif_transpose(image).convert(mode))
            yield pixels.reshape(*pixels.shape[:2], -1)
    except Exception:  # Pillow raises almost anything for damaged files
        pass
    yield from (RGB, np.dstack([GRAY] * channels))


def mutation(names, images, number):
    """Returns an image with its end cut off or some bytes changed, mostly near the start."""
    rng = random.Random(number)
    name = rng.choice(names)
    data = bytearray(images[name])
    if rng.randrange(4) == 0:
        return f"{number}: {name}", bytes(data[: rng.randrange(len(data) + 1)])
    for _ in range(rng.choice((1, 1, 2, 5)) if data else 0):
        at = rng.randrange(min(len(data), rng.choice((40, 120, 400, len(data)))))
        data[at] = rng.choice((data[at] ^ 1 << rng.randrange(8), 0, 1, 127, 255))
    return f"{number}: {name}", bytes(data)


def decode(data, number, output):
    images = fn.decoders.image(data, output_type=getattr(types, output))
    shape = images.shape()
    square = {"start": [0, 0, 0], "shape": [SIDE, SIDE, 4], "axes": [0, 1, 2]}
    return fn.slice(images, **square, out_of_bounds_policy="pad"), shape, number


def decoded(images, output="RGB"):
    """Decodes images among good records with an iterator.

    Returns:
        The shape of each delivered image, whether its pixels are as expected, the names of the
        failed records, and the number of good records that weren't delivered.
    """
    names = list(images)
    records = []
    for number, name in enumerate(names):
        records.append({"data": images[name], "number": number})
        records.append({"data": GOOD[number % 3], "number": -1 - number})
    make = data_iterator(decode, ["image", "shape", "number"], mask="mask", as_numpy=True)
    source = sources.Records(records)
    options = {"on_error": "mask", "output": output, "num_threads": 4, "shuffle": False}
    iterator = make(source=source, batch_size=BATCH, **options)
    shapes, right, lost = {}, {}, len(names)
    for batch in iterator:
        for row in np.flatnonzero(batch["mask"]):
            number, pixels = int(batch["number"][row]), batch["image"][row]
            if number < 0:
                lost -= bool(np.array_equal(pixels, canvas(PIXELS[output][(-1 - number) % 3])))
                continue
            name, shape = names[number], batch["shape"][row].tolist()
            shapes[name] = shape
            right[name] = any(
                [*other.shape] == shape and np.abs(canvas(other) - pixels.astype(float)).mean() < 3
                for other in expected(images[name], shape[2])
            )
    bad = [file for error in iterator.errors for file in error.files]
    return {"shapes": shapes, "right": right, "bad": bad, "lost": lost}


def main(mutations, output="RGB"):
    images = odd_images()
    if mutations:
        names = list(images)
        images = dict(mutation(names, images, number) for number in range(mutations))
        images = {name: data for name, data in images.items() if not is_large(data)}
    sys.stdout.write(json.dumps({**decoded(images, output), "names": list(images)}))


def is_large(data):
    size, *_ = look_at(data)
    return size is not None and size[0] * size[1] > LARGEST


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
