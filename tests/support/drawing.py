"""Runs augmentation graphs on images of a few records, and computes the numbers that they draw."""

import io

import numpy as np
from nvidia.dali import fn, pipeline_def
from nvidia.dali.pipeline import do_not_convert
from PIL import Image

from dalijax import augment
from dalijax.core.random.draw import Draw, DrawRows
from dalijax.core.random.hashing import column_keys, fold, uniform

SEED, EPOCH = 3, 1
FUNCTIONS = {
    "random_resized_crop": lambda x, d: augment.random_resized_crop(x, (20, 24), draw=d),
    "random_resized_crop flip": lambda x, d: augment.random_resized_crop(
        x, (20, 24), draw=d, flip=0.5
    ),
    "random_crop": lambda x, d: augment.random_crop(x, 24, draw=d, padding=3),
    "flip": lambda x, d: augment.flip(x, draw=d),
    "color_jitter": lambda x, d: augment.color_jitter(
        x, draw=d, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1
    ),
    "color_jitter probability": lambda x, d: augment.color_jitter(
        x, draw=d, brightness=0.8, hue=0.2, probability=0.5
    ),
    "grayscale": lambda x, d: augment.grayscale(x, draw=d, probability=0.5),
    "solarize": lambda x, d: augment.solarize(x, 100, draw=d),
    "gaussian_blur": lambda x, d: augment.gaussian_blur(x, 9, draw=d),
    "gaussian_blur probability": lambda x, d: augment.gaussian_blur(x, 9, draw=d, probability=0.5),
    "random_erasing": lambda x, d: augment.random_erasing(x, draw=d),
    "rand_augment": lambda x, d: augment.rand_augment(x, draw=d),
    "trivial_augment": lambda x, d: augment.trivial_augment(x, draw=d),
    "auto_augment": lambda x, d: augment.auto_augment(x, draw=d),
}


def four_views(images, draw):
    """Returns four crops of each image with random colors and blur, stacked."""
    found = []
    for _ in range(4):
        view = augment.random_resized_crop(images, 32, flip=0.5, draw=draw)
        view = augment.color_jitter(view, brightness=0.4, contrast=0.4, draw=draw, probability=0.5)
        view = augment.grayscale(view, probability=0.5, draw=draw)
        found.append(augment.gaussian_blur(view, 5, probability=0.5, draw=draw))
    return fn.stack(*found)


def drawn_image(record, height=40, width=60):
    """Returns a smooth colorful image with a few lines, of the given size."""
    rng = np.random.default_rng(record)
    coarse = rng.integers(0, 256, (5, 6, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    lines = smooth.copy()
    lines[rng.integers(height), :] = rng.integers(0, 256, 3)
    return lines


def png(pixels):
    """Encodes an image as a PNG, which is lossless."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def record_hashes(records, seed=SEED, epoch=EPOCH):
    return fold(seed, epoch, np.asarray(records))


def numbers(records, name, count, seed=SEED, epoch=EPOCH):
    """Returns the random numbers of some records, float64 [records, count]."""
    return uniform(record_hashes(records, seed, epoch), column_keys(name, count)).astype(float)


class RecordingDraw(Draw):
    """A draw that stores the nodes of everything that it draws."""

    def __init__(self, rows, fields):
        super().__init__(rows, fields)
        self.drawn = []

    @do_not_convert
    def _compute_from_rows(self, *args, **options):
        nodes = super()._compute_from_rows(*args, **options)
        self.drawn += nodes
        return nodes


def run(graph, originals, records=None, *, gpu=False, conditionals=False, epoch=EPOCH, **more):
    """Runs a graph of (images, draw) on images, and returns a list of arrays for each output.

    Args:
        graph: Called with decoded images and a `RecordingDraw` with their sizes.
        originals: Arrays of pixels.
        records: The record number of each image; None for 0, 1, 2, ...
        gpu: Whether to decode on the GPU.
        conditionals: The pipeline's enable_conditionals.
        epoch: The epoch in which to draw.
        more: Additional attributes of `DrawRows`.
    """
    records = np.arange(len(originals)) if records is None else np.asarray(records)
    sizes = np.array([one.shape[:2] for one in originals], np.int32)
    files = [png(one) for one in originals]
    rows = DrawRows(record_hashes(records, epoch=epoch), lambda field: sizes, **more)

    def define():
        data = fn.external_source(source=lambda: files, batch=True)
        draw = RecordingDraw(lambda *_: rows, {data.name: "data"})
        return graph(fn.decoders.image(data, device="mixed" if gpu else "cpu"), draw)

    pipeline = pipeline_def(
        define,
        batch_size=len(originals),
        num_threads=2,
        device_id=0 if gpu else None,
        enable_conditionals=conditionals,
    )()
    pipeline.build()
    return [[np.array(one) for one in output.as_cpu()] for output in pipeline.run()]
