"""Windows of decoders that aren't inside an image, which can crash DALI."""

import itertools
import json
import random

import grain
import numpy as np
import pytest
import window_worker
from forks import run_fork
from nvidia.dali import Pipeline, fn
from odd_images import MODES, exif, saved
from PIL import Image

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.formats.image_size import image_size, look_at
from dalijax.core.state.operators import file_inputs, operators_of
from dalijax.fn import read_file

pytestmark = pytest.mark.slow


def test_no_window_ends_the_process():
    done = run_fork(window_worker.__file__, 64)
    images = window_worker.images()
    found = json.loads(done.stdout)
    sizes = {name: image_size(data) for name, data in images.items()}
    undecoded = set(found["random crop"][0])
    smallest = {"crop": (16, 30), "crop at the end": (25, 41), "crop of an image's size": (24, 40)}
    smallest |= {"slice": (23, 23), "slice outside": (80, 70), "random crop": (0, 0)}
    for window, (bad, lost) in found.items():
        assert lost == 0, window
        height, width = smallest[window]
        outside = {
            name for name, size in sizes.items() if size and (size[0] < height or size[1] < width)
        }
        assert set(bad) == outside | undecoded, window


def crop_arguments(rng):
    sizes = rng.choices([0, 0.5, 3, 5, 5.5, 7.9, 8], k=2)
    crop = {"crop": sizes} if rng.random() < 0.5 else dict(zip(("crop_h", "crop_w"), sizes))
    return {**crop, **rng.choice([{}, {"crop_pos_x": 0.3}, {"crop_pos_y": 1.0}])}


def slice_arguments(rng):
    axes = rng.choice(
        [
            *({}, {"axes": [0, 1]}, {"axes": [1, 0]}, {"axis_names": "HW"}, {"axis_names": "WH"}),
            *({"axes": [1]}, {"axis_names": "H"}),
        ]
    )
    count = len(next(iter(axes.values()), "HW"))

    def values(low, high, draw):
        return rng.choice([[draw(low, high) for _ in range(count)], draw(low, high)])

    start = rng.choice(
        [
            {},
            {"start": values(-1, 3, rng.randint)},
            {"rel_start": values(-0.1, 0.5, rng.uniform)},
        ]
    )
    end = rng.choice(
        [
            {"end": values(3, 9, rng.randint)},
            {"rel_end": values(0.4, 1.15, rng.uniform)},
            {"shape": values(2, 7, rng.randint)},
            {"rel_shape": values(0.3, 0.8, rng.uniform)},
        ]
    )
    return {**axes, **start, **end}


@pytest.mark.parametrize("prints_arguments", [False, True])
@pytest.mark.parametrize("operator", ["image_crop", "image_slice"])
def test_windows_are_refused_if_dali_refuses_them(operator, prints_arguments):
    rng = random.Random(3)
    outcomes = []
    for _ in range(100):
        arguments = (crop_arguments if operator == "image_crop" else slice_arguments)(rng)
        orientation, turns = rng.choice([1, 6]), rng.random() < 0.7
        size = rng.choice([5, 6, 8]), rng.choice([5, 6, 7])
        data = saved(MODES["RGB"].resize(size), "PNG", exif=exif(orientation))
        pipeline = Pipeline(1, 1, None)
        with pipeline:
            array = np.frombuffer(data, np.uint8)
            given = fn.external_source(itertools.repeat([array]), name="in")
            decode = getattr(fn.decoders, operator)
            output = decode(given, adjust_orientation=turns, **arguments)
            if prints_arguments:  # DALI doesn't serialize graphs with Python functions
                output = fn.python_function(output, function=lambda pixels: pixels)
            pipeline.set_outputs(output)
        pipeline.build()
        fault = look_at(data, file_inputs(operators_of(pipeline))["in"])[1]
        try:
            pipeline.run()
            refused = False
        except RuntimeError:
            refused = True
        case = (arguments, size, orientation, turns, fault)
        assert refused == bool(fault), case
        assert not fault or f"of decoders.{operator} isn't inside the image of " in fault, case
        outcomes.append(refused)
    assert 20 < sum(outcomes) < 80


@pytest.mark.parametrize("how", ["records", "paths", "Grain"])
def test_records_smaller_than_a_window_are_named(how, tmp_path):
    def decode(value):
        data = read_file(value) if how == "paths" else value
        return fn.decoders.image_crop(data, crop=(20, 30))

    records = []
    for number, size in enumerate([(40, 24), (29, 24), (30, 20), (30, 19)]):
        data = saved(Image.new("RGB", size), "JPEG")
        (path := tmp_path / str(number)).write_bytes(data)
        records.append({"value": bytes(path) if how == "paths" else data})
    options = {"batch_size": 4, "num_threads": 1, "on_error": "mask"}
    if how == "Grain":
        transform = DALITransform(decode, output_map=["x"], seed=0, pad="mask", **options)
        iterator = iter(grain.MapDataset.source(records).pipe(transform))
    else:
        make = data_iterator(decode, ["x"], source=sources.Records(records), as_numpy=True)
        iterator = make(shuffle=False, mask="mask", **options)
    assert np.asarray(next(iterator)["mask"]).tolist() == [True, False, True, False]
    assert "[0..20, 0..30] of decoders.image_crop isn't inside the image of 24 x 29 pixels" in str(
        iterator.errors[0]
    )
