"""A program that crops windows while it decodes images, some of which are too small.

python window_worker.py BATCH

Prints a JSON object. For each decoder and window it has the names of the images whose records
failed, and the number of good records that were not delivered. DALI crashes if a window isn't
inside an image.
"""

import json
import sys

import numpy as np
from nvidia.dali import fn
from odd_images import MODES, odd_images, saved
from PIL import Image

from dalijax import data_iterator, sources

FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM")
SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 40), (40, 1), (17, 5))
GOOD = saved(MODES["RGB"].resize((100, 90)), "JPEG")
WINDOWS = {
    "crop": lambda data: fn.decoders.image_crop(data, crop=(16, 30)),
    "crop at the end": lambda data: fn.decoders.image_crop(
        data, crop_h=25, crop_w=41, crop_pos_x=1.0, crop_pos_y=1.0
    ),
    "crop of an image's size": lambda data: fn.decoders.image_crop(data, crop=(24, 40)),
    "slice": lambda data: fn.decoders.image_slice(data, start=3, shape=20),
    "slice outside": lambda data: fn.decoders.image_slice(data, start=(50, 60), end=(70, 80)),
    "random crop": lambda data: fn.decoders.image_random_crop(data, seed=3),
}


def tiny_images():
    """Returns images of a few pixels in each format."""
    for height, width in SIZES:
        pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
        for form in FORMATS:
            for mode in ("RGB", "L"):
                yield (
                    f"{form} {mode} {height} x {width}",
                    saved(Image.fromarray(pixels).convert(mode), form),
                )


def images():
    """Returns tiny images and every fourth odd image: all of them would take half a minute."""
    return {**dict(list(odd_images().items())[::4]), **dict(tiny_images())}


def failed(images, window, batch):
    """Returns the names of images whose records failed, and the number of lost good records."""
    records = [{"data": data} for image in images.values() for data in (image, GOOD)]

    def decode(data):
        return fn.resize(WINDOWS[window](data), size=[2, 2])

    make = data_iterator(decode, ["x"], mask="mask", on_error="mask", as_numpy=True)
    options = {"num_threads": 4, "shuffle": False, "batch_size": batch}
    masks = [np.asarray(b["mask"]) for b in make(source=sources.Records(records), **options)]
    delivered = np.concatenate(masks)[: len(records)].reshape(-1, 2)
    bad = [name for name, good in zip(images, delivered[:, 0]) if not good]
    return bad, int((~delivered[:, 1]).sum())


if __name__ == "__main__":
    found = {window: failed(images(), window, int(sys.argv[1])) for window in WINDOWS}
    sys.stdout.write(json.dumps(found))
