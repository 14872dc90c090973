"""Programs with mistakes of newcomers, whose errors name the value and the fix."""

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform

COUNT, BATCH = 8, 4
NUMBERS = sources.Arrays({"x": np.arange(COUNT, dtype=np.int32)})


def same(x):
    return x + 0


take = data_iterator(same, ["x"])


def open_numbers(**call):
    """An iterator over the numbers 0 to 7."""
    return take(**{"source": NUMBERS, "batch_size": BATCH, **call})


def define(function, **call):
    """Defines a graph of images and labels, and takes a batch."""

    def program(data):
        graph = data_iterator(function, ["images"])
        with graph(source=sources.Files(data.folder), batch_size=BATCH, **call) as iterator:
            next(iterator)

    return program


def numbers(function, **call):
    """Defines a graph of numbers, and takes a batch."""

    def program(data):
        with data_iterator(function, ["x"])(source=NUMBERS, batch_size=BATCH, **call) as iterator:
            next(iterator)

    return program


def images(data):
    return fn.decoders.image(data)


def rows(spec):
    """A sharding over a mesh of two axes."""
    return NamedSharding(jax.make_mesh((2, 2), ("data", "model")), spec)


def grain_records():
    return grain.MapDataset.source([{"image": np.uint8([k]), "label": k} for k in range(COUNT)])


def transformed(function, dataset=None, **call):
    """The first batch of a `DALITransform`."""
    arguments = {"batch_size": BATCH, "output_map": ["x"], **call}
    dataset = grain_records() if dataset is None else dataset
    return next(iter(dataset.pipe(DALITransform(function, **arguments))))


def label_reader(files):
    return fn.readers.file(files=files, name="reader")[1]


def with_reader(function, **options):
    return lambda data: data_iterator(function, ["x"], reader_name="reader", **options)(
        data.files, batch_size=BATCH
    )


def check(program, kind, words, data=None):
    """Runs a program; its error must have a kind, and a message that contains all words."""
    with pytest.raises(kind) as raised:
        program(data)
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text
