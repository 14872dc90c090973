"""Mistakes of newcomers in graphs: each raises an error that names the value and the fix."""

import random

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import (
    BATCH,
    NUMBERS,
    check,
    define,
    images,
    label_reader,
    numbers,
    open_numbers,
    same,
    transformed,
    with_reader,
)
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax import fn as own_fn


def lowered(x):
    while x > 3:
        x = x - 1
    return x


@own_fn.jax_function
def plus_one(x):
    return x + 1


PROGRAMS = {
    # The graph
    "a missing folder of a reader": (
        lambda d: data_iterator(lambda folder: fn.readers.file(file_root=folder)[1], ["x"])(
            d.missing, batch_size=BATCH
        ),
        RuntimeError,
        "missing file_root exist",
    ),
    "np.float32": (
        numbers(lambda x: fn.cast(x, dtype=np.float32)),
        TypeError,
        "types.FLOAT",
    ),
    "'float32'": (
        numbers(lambda x: fn.cast(x, dtype="float32")),
        TypeError,
        "'float32' types.FLOAT",
    ),
    "np.dtype": (
        numbers(lambda x: fn.cast(x, dtype=np.dtype("uint8"))),
        TypeError,
        "types.UINT8",
    ),
    "float": (numbers(lambda x: fn.cast(x, dtype=float)), TypeError, "float types.FLOAT"),
    "jnp.int32": (numbers(lambda x: fn.cast(x, dtype=jnp.int32)), TypeError, "types.INT32"),
    "jnp.bfloat16": (
        numbers(lambda x: fn.cast(x, dtype=jnp.bfloat16)),
        TypeError,
        "bfloat16 types.FLOAT in the step",
    ),
    "'bfloat16'": (
        numbers(lambda x: fn.cast(x, dtype="bfloat16")),
        TypeError,
        "bfloat16 types.FLOAT in the step",
    ),
    "torch.float32": (
        numbers(lambda x: fn.cast(x, dtype="torch.float32")),
        TypeError,
        "torch.float32 types.FLOAT",
    ),
    "a misspelt dtype": (
        numbers(lambda x: fn.cast(x, dtype="flot32")),
        TypeError,
        "'flot32' nvidia.dali.types",
    ),
    "mean='imagenet'": (
        define(lambda data: fn.crop_mirror_normalize(images(data), mean="imagenet")),
        TypeError,
        "'imagenet' numbers mean=",
    ),
    "shape[0]": (numbers(lambda x: x * x.shape[0]), TypeError, "shape is a method x.shape()"),
    "len(shape)": (numbers(lambda x: x * len(x.shape)), TypeError, "shape is a method"),
    "encoded bytes": (
        define(lambda data, *, draw: augment.flip(data, draw=draw)),
        ValueError,
        "one dimension fn.decoders.image(data)",
    ),
    "decode_image": (
        define(lambda data: fn.decode_image(data)),
        AttributeError,
        "decode_image fn.decoders.image",
    ),
    "a positional draw": (
        define(lambda data, *, draw: augment.random_resized_crop(images(data), 8, draw)),
        TypeError,
        "random_resized_crop() by keyword 'draw'",
    ),
    "positional jitter": (
        define(lambda data, *, draw: augment.color_jitter(images(data), 0.4, 0.3, draw=draw)),
        TypeError,
        "color_jitter() 0.4, 0.3 by keyword 'brightness'",
    ),
    "hue=0.7": (
        define(lambda data, *, draw: augment.color_jitter(images(data), hue=0.7, draw=draw)),
        ValueError,
        "hue 0 to 0.5 0.7",
    ),
    "n of rand_augment": (
        define(lambda data, *, draw: augment.rand_augment(images(data), n=2, m=9, draw=draw)),
        TypeError,
        "rand_augment() 'n' num_ops= magnitude=",
    ),
    "p of random_erasing": (
        define(lambda data, *, draw: augment.random_erasing(images(data), p=0.5, draw=draw)),
        TypeError,
        "random_erasing() 'p' probability=",
    ),
    "a dtype of normalize": (
        define(lambda data: fn.crop_mirror_normalize(images(data), dtype=np.float16)),
        TypeError,
        "types.FLOAT16",
    ),
    "a dtype of resize": (
        define(lambda data: fn.resize(images(data), size=(8, 8), dtype=jnp.float32)),
        TypeError,
        "types.FLOAT",
    ),
    "a dtype of a constant": (
        numbers(lambda x: x + types.Constant(1.0, dtype=np.float32)),
        TypeError,
        "types.FLOAT",
    ),
    "device='gpu' of a decoder": (
        define(lambda data: fn.decoders.image(data, device="gpu")),
        Exception,
        "'gpu' 'mixed'",
    ),
    "device='gpu' of a crop": (
        define(lambda data: fn.decoders.image_random_crop(data, device="gpu")),
        Exception,
        "'gpu' 'mixed'",
    ),
    "device='cuda'": (
        define(lambda data: fn.decoders.image(data, device="cuda")),
        Exception,
        "'cuda' 'mixed'",
    ),
    "a path for a decoder": (
        lambda d: next(
            data_iterator(lambda path: fn.decoders.image(path), ["x"])(
                source=sources.Records([{"path": file.encode()} for file in d.files]),
                batch_size=BATCH,
            )
        ),
        ValueError,
        "text path read_file",
    ),
    "a path for Grain's decoder": (
        lambda d: transformed(
            lambda path: fn.decoders.image(path),
            grain.MapDataset.source([{"path": file} for file in d.files]),
        ),
        RuntimeError,
        "00000.jpg read_file",
    ),
    "scale=0.5": (
        define(
            lambda data, *, draw: augment.random_resized_crop(images(data), 8, scale=0.5, draw=draw)
        ),
        TypeError,
        "scale 0.5 (0.08, 1.0)",
    ),
    "ratio=1": (
        define(
            lambda data, *, draw: augment.random_resized_crop(images(data), 8, ratio=1, draw=draw)
        ),
        TypeError,
        "ratio 1 (",
    ),
    "uniform((-10, 10))": (
        numbers(lambda x, *, draw: x * draw.uniform((-10, 10))),
        TypeError,
        "(-10, 10) uniform(-10, 10)",
    ),
    "uniform(range=...)": (
        numbers(lambda x, *, draw: x * draw.uniform(range=(-10, 10))),
        TypeError,
        "range low high",
    ),
    "normal((0, 1))": (
        numbers(lambda x, *, draw: x * draw.normal((0, 1))),
        TypeError,
        "(0, 1) normal(0, 1)",
    ),
    "coin_flip('0.5')": (
        numbers(lambda x, *, draw: x * draw.coin_flip("0.5")),
        TypeError,
        "probability '0.5'",
    ),
    "another draw": (
        numbers(lambda x, *, draw: x * draw.unifrom(0, 1)),
        AttributeError,
        "unifrom uniform",
    ),
    "no draw": (
        define(lambda data: augment.flip(images(data))),
        TypeError,
        "flip() draw parameter draw=draw",
    ),
    "a draw as a number": (numbers(lambda x, *, draw: x * draw), TypeError, "draw.uniform(0, 1)"),
    "a method of draw as a number": (
        numbers(lambda x, *, draw: x * draw.uniform),
        TypeError,
        "draw.uniform(0, 1)",
    ),
    "a method of draw as an angle": (
        define(lambda data, *, draw: fn.rotate(images(data), angle=draw.uniform)),
        TypeError,
        "uniform method draw.uniform(0, 1)",
    ),
    "a draw as a key": (
        numbers(lambda x, *, draw: jax.random.uniform(draw)),
        TypeError,
        "draw key draw.uniform(0, 1)",
    ),
    "a number as a draw": (
        define(lambda data, *, draw: augment.flip(images(data), draw=draw.uniform())),
        TypeError,
        "draw DataNode parameter named draw",
    ),
    "two numbers of jitter": (
        define(
            lambda data, *, draw: augment.color_jitter(images(data), hue=(0, 0.1, 0.2), draw=draw)
        ),
        TypeError,
        "hue (low, high) (0, 0.1, 0.2)",
    ),
    "num_ops=2.0": (
        define(lambda data, *, draw: augment.rand_augment(images(data), num_ops=2.0, draw=draw)),
        TypeError,
        "num_ops 2.0",
    ),
    "resize of two sides": (
        define(lambda data: augment.center_crop(images(data), 8, resize=(9, 9))),
        TypeError,
        "resize (9, 9) pixels",
    ),
    "shape=5": (
        numbers(lambda x, *, draw: x * draw.uniform(0, 1, shape=5)),
        TypeError,
        "shape 5 (5,)",
    ),
    "jnp in the graph": (numbers(lambda x: jnp.sin(x)), TypeError, "jax_function"),
    "jnp.asarray": (numbers(lambda x: jnp.asarray(x)), TypeError, "JAX DataNode jax_function"),
    "one_hot": (numbers(lambda x: jax.nn.one_hot(x, 9)), TypeError, "JAX DataNode jax_function"),
    "jnp times x": (numbers(lambda x: jnp.ones(3) * x), TypeError, "jax.Array np.asarray("),
    "an index of NumPy": (numbers(lambda x: np.arange(9)[x]), TypeError, "NumPy DataNode numba"),
    "a matrix of NumPy": (numbers(lambda x: x @ np.eye(3)), TypeError, "NumPy DataNode numba"),
    "np.where": (numbers(lambda x: np.where(x > 3, x, 0)), TypeError, "NumPy DataNode numba"),
    "a tuple for fn.stack": (numbers(lambda x: fn.stack((x, x))), TypeError, "fn.stack(a, b)"),
    "np.stack": (numbers(lambda x: np.stack([x, x])), TypeError, "NumPy's DataNode DALI's"),
    "np times x in fn": (
        define(lambda data: fn.resize(np.ones(3) * images(data), size=(8, 8))),
        TypeError,
        "NumPy's DataNode first images * array",
    ),
    "Image.fromarray": (
        define(lambda data: Image.fromarray(images(data))),
        AttributeError,
        "Pillow DataNode DALI's operators",
    ),
    "x.astype": (numbers(lambda x: x.astype("float32")), AttributeError, "astype fn.cast"),
    "x.mean": (numbers(lambda x: x - x.mean()), AttributeError, "mean fn.reductions.mean"),
    "x.dtype": (numbers(lambda x: fn.cast(x, dtype=x.dtype)), RuntimeError, "dtype= fn.cast_like"),
    "x + text": (numbers(lambda x: x == "cat"), TypeError, "'cat' numbers"),
    "...": (define(lambda data: images(data)[..., 0]), RuntimeError, "images[:, :, ::-1]"),
    "a positional size": (
        define(lambda data: fn.resize(images(data), 8, 8)),
        TypeError,
        "keyword fn.resize(images, size=",
    ),
    "interp_type='bilinear'": (
        define(lambda data: fn.resize(images(data), size=(8, 8), interp_type="bilinear")),
        TypeError,
        "'bilinear' interp_type= types.INTERP_LINEAR",
    ),
    "another decoder": (
        define(lambda data: fn.decoders.jpeg(data)),
        AttributeError,
        "jpeg ['audio', 'image',",
    ),
    "a Python if": (
        numbers(lambda x: x if x > 3 else -x),
        TypeError,
        "if statements enable_conditionals arithmetic",
    ),
    "while": (
        numbers(lowered, enable_conditionals=True),
        TypeError,
        "while if statements arithmetic",
    ),
    # Runs of DALI
    "ragged images for JAX": (
        define(lambda data, *, draw: plus_one(fn.resize(images(data), size=draw.uniform(4, 8)))),
        RuntimeError,
        "fn.resize ragged='pad'",
    ),
    "two means": (
        define(lambda data: augment.normalize(images(data), (1, 2), (1, 2))),
        RuntimeError,
        "number for each channel mean=",
    ),
    "bytes for normalize": (
        define(lambda data: augment.normalize(data, 127, 127)),
        RuntimeError,
        "one dimension fn.decoders.image(data)",
    ),
    # Functions
    "run_fn by position": (
        numbers(lambda x: own_fn.numba_function(same, x)),
        TypeError,
        "numba_function() run_fn writes into the outputs",
    ),
    "a Numba function that returns": (
        numbers(lambda x: own_fn.numba_function(x, run_fn=same, example=np.int32([1]))),
        ValueError,
        "run_fn run_fn(output, input) output[:]",
    ),
    "a key of batch_map": (
        lambda d: next(open_numbers(batch_map=lambda batch, key: {"x": batch["y"]})),
        RuntimeError,
        "'y' ['x'] text bypass",
    ),
    "NumPy in batch_map": (
        lambda d: next(open_numbers(batch_map=lambda batch, key: {"x": np.sin(batch["x"])})),
        RuntimeError,
        "jax.numpy jnp.where",
    ),
    "no return": (numbers(lambda x: None), TypeError, "returns no outputs return"),
    "no output": (
        lambda d: data_iterator(same)(source=NUMBERS, batch_size=BATCH),
        ValueError,
        "output_map",
    ),
    "another operator": (
        numbers(lambda x: fn.normalise(x)),
        AttributeError,
        "normalise normalize",
    ),
    "DALI's operator in our fn": (
        numbers(lambda x: own_fn.resize(x)),
        AttributeError,
        "nvidia",
    ),
    # Random numbers of other libraries
    "np.random": (
        numbers(lambda x: x + np.int32(np.random.randint(9))),
        RuntimeError,
        "numpy.random draw.uniform fn.random",
    ),
    "random": (
        numbers(lambda x: x + random.randint(0, 9)),
        RuntimeError,
        "random draw.uniform fn.random",
    ),
    "np.random over a reader": (
        with_reader(lambda files: label_reader(files) + np.int32(np.random.randint(9))),
        RuntimeError,
        "numpy.random fn.random",
    ),
    "np.random in Grain": (
        lambda d: transformed(lambda label: label + np.int32(np.random.randint(9))),
        RuntimeError,
        "numpy.random draw.uniform fn.random",
    ),
}


@pytest.mark.parametrize("mistake", PROGRAMS)
def test_mistakes_name_the_value_and_the_fix(mistake, eight_images):
    program, kind, words = PROGRAMS[mistake]
    check(program, kind, words.split(" "), eight_images)
