"""Measures the cost of `dalijax.augment`, compared with DALI's random operators.

The pipelines process images of 500 x 375 pixels: arrays in memory on a CPU, JPEGs in memory on a
GPU. Both forms of an operation, and the pipeline without it, take turns in one process, in a
different order in each round. Values are medians over the rounds: the time of a batch, and its
ratio to DALI's time in the same round (with quartiles), for the whole pipeline and for the added
time.
"""

from __future__ import annotations

import functools
import io
import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.auto_augment import auto_augment
from nvidia.dali.auto_aug.rand_augment import rand_augment
from nvidia.dali.auto_aug.trivial_augment import trivial_augment_wide
from PIL import Image

import photos
import report
import turns
from dalijax import augment
from dalijax.core.random.draw import Draw, DrawRows
from dalijax.core.random.hashing import fold
from report import GPU

HEIGHT, WIDTH, CROP = 375, 500, 224
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
WARP = {"fill_value": 0, "interp_type": types.INTERP_NN}
Operation = Callable[[Any, Draw], Any]


def uniform(low: float, high: float, **options: Any) -> Any:
    return fn.random.uniform(range=[low, high], **options)


def dalis_jitter(images: Any, _: Draw) -> Any:
    factors = {name: uniform(0.6, 1.4) for name in ("brightness", "contrast", "saturation")}
    return fn.color_twist(images, hue=uniform(-36, 36), **factors)


def dalis_crop(images: Any, _: Draw) -> Any:
    position = {"crop_pos_x": uniform(0, 1), "crop_pos_y": uniform(0, 1)}
    return fn.crop(images, crop=[CROP, CROP], **position)


def dalis_erasing(images: Any, _: Draw) -> Any:
    area = {"anchor": uniform(0, 0.8, shape=2), "shape": uniform(0, 0.4, shape=2)}
    return fn.erase(images, axis_names="HW", normalized=True, **area)


# DALI's form and dalijax's form, for full images and for crops.
WHOLE: dict[str, tuple[Operation, Operation]] = {
    "random_resized_crop": (
        lambda x, _: fn.random_resized_crop(x, size=[CROP, CROP]),
        lambda x, draw: augment.random_resized_crop(x, CROP, draw=draw),
    ),
    "random_crop": (dalis_crop, lambda x, draw: augment.random_crop(x, CROP, draw=draw)),
}
CROPPED: dict[str, tuple[Operation, Operation]] = {
    "flip": (
        lambda x, _: fn.flip(x, horizontal=fn.random.coin_flip()),
        lambda x, draw: augment.flip(x, draw=draw),
    ),
    "color_jitter": (dalis_jitter, lambda x, draw: augment.color_jitter(x, draw=draw, **JITTER)),
    "random_erasing": (dalis_erasing, lambda x, draw: augment.random_erasing(x, draw=draw)),
    "rand_augment": (
        lambda x, _: rand_augment(x, n=2, m=9, shape=(CROP, CROP), **WARP),
        lambda x, draw: augment.rand_augment(x, draw=draw),
    ),
    "trivial_augment": (
        lambda x, _: trivial_augment_wide(x, **WARP),
        lambda x, draw: augment.trivial_augment(x, draw=draw),
    ),
    "auto_augment": (
        lambda x, _: auto_augment(x, "reduced_image_net", **WARP),
        lambda x, draw: augment.auto_augment(x, draw=draw),
    ),
}


def drawn_images(count: int, size: tuple[int, int]) -> list[np.ndarray[Any, Any]]:
    """Returns images of a height and width, as arrays or as bytes of JPEGs."""
    height, width = size
    sources, arrays = photos.photographs(), []
    for number in range(count):
        image = sources[number % len(sources)].resize((width, height))
        if GPU:
            buffer = io.BytesIO()
            image.save(buffer, "jpeg", quality=90)
            arrays.append(np.frombuffer(buffer.getvalue(), np.uint8))
        else:
            arrays.append(np.asarray(image.transpose(Image.Transpose(number % 2))))
    return arrays


def built(
    operation: Operation | None, samples: Any, size: tuple[int, int], threads: int, dalis: bool
) -> Any:
    """Returns a pipeline with an operation on images of one size."""

    @functools.lru_cache(maxsize=1)
    def rows(run: int) -> DrawRows:
        records = fold(0, 0, np.arange(run * len(samples), (run + 1) * len(samples)))
        return DrawRows(records, lambda field: np.full((len(samples), 2), size, np.int32))

    def graph() -> Any:
        if GPU:
            data = fn.external_source(source=lambda: samples, batch=True, no_copy=True)
            images = fn.decoders.image(data, device="mixed")
        else:
            images = fn.external_source(
                source=lambda: samples, batch=True, no_copy=True, layout="HWC"
            )
        draw = Draw(lambda run, name: rows(run), {})
        return images if operation is None else operation(draw.sized(images, size), draw)

    pipeline = pipeline_def(
        graph,
        batch_size=len(samples),
        num_threads=threads,
        device_id=0 if GPU else None,
        enable_conditionals=dalis,
        seed=0,
    )()
    pipeline.build()
    return pipeline


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--batch", type=int, default=256 if GPU else 64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=6, help="batches per round")
    parser.add_argument("--threads", type=int, default=8 if GPU else 2)
    parser.add_argument("--match", default="", help="pattern of names of operations")
    arguments = parser.parse_args()
    report.heading()
    results: dict[str, Any] = {}
    lines = []
    for size, operations in (((HEIGHT, WIDTH), WHOLE), ((CROP, CROP), CROPPED)):
        samples = drawn_images(arguments.batch, size)
        for name, (dalis, ours) in operations.items():
            if not re.search(arguments.match, name):
                continue
            pipelines = {
                "none": built(None, samples, size, arguments.threads, False),
                "DALI's": built(dalis, samples, size, arguments.threads, True),
                "dalijax's": built(ours, samples, size, arguments.threads, False),
            }
            micros = turns.time_pipelines(
                pipelines, arguments.rounds, arguments.batches, to_host=True
            ).micros
            times = {key: [us / 1e3 for us in values] for key, values in micros.items()}
            over = turns.over(times, "none")
            results[name] = times
            lines.append(
                (
                    name,
                    *(report.spread(times[key], 2) for key in pipelines),
                    turns.share(times["dalijax's"], times["DALI's"]),
                    turns.share(over["dalijax's"], over["DALI's"]),
                )
            )
            print(*lines[-1], sep=" | ", flush=True)
    heads = ("without", "DALI's", "dalijax's", "ratio to DALI's", "ratio of the added time")
    report.table((f"ms per batch of {arguments.batch}", *heads), lines)
    groups = {
        form: {name: statistics.median(times[form]) for name, times in results.items()}
        for form in ("DALI's", "dalijax's")
    }
    report.write(arguments.out, "augment", results, groups, "ms per batch")


if __name__ == "__main__":
    main()
