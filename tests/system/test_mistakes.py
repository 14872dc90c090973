"""Mistakes of newcomers in calls: each raises an error that names the value and the fix."""

import pathlib

import jax
import pytest
from jax.sharding import PartitionSpec
from mistakes import (
    BATCH,
    NUMBERS,
    check,
    grain_records,
    open_numbers,
    rows,
    same,
    take,
    transformed,
)
from nvidia.dali import fn, pipeline_def, types

import dalijax
from dalijax import data_iterator
from dalijax import profile as profile_module
from dalijax import show as show_module
from dalijax import tune as tune_module
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIBatch, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset

PROGRAMS = {
    # Values of arguments
    "batch size 0": (lambda d: open_numbers(batch_size=0), ValueError, "batch_size 0 1 or more"),
    "shuffle=None": (lambda d: open_numbers(shuffle=None), TypeError, "shuffle None True False"),
    "shuffle='yes'": (lambda d: open_numbers(shuffle="yes"), TypeError, "shuffle 'yes' True False"),
    "seed=key": (
        lambda d: open_numbers(seed=jax.random.key(0)),
        TypeError,
        "seed whole number",
    ),
    "sharding=mesh": (
        lambda d: open_numbers(sharding=jax.make_mesh((2,), ("data",))),
        TypeError,
        "sharding Mesh NamedSharding(mesh, PartitionSpec(",
    ),
    "a spec of two dimensions": (
        lambda d: next(open_numbers(sharding=rows(PartitionSpec(None, "data")))),
        ValueError,
        "'x' (4,) 2 dimensions sharding={'x': NamedSharding(mesh,",
    ),
    "a spec of images for labels": (
        lambda d: open_numbers(sharding=rows(PartitionSpec("data", None, None))).element_spec,
        ValueError,
        "'x' (4,) 3 dimensions sharding={'x': NamedSharding(mesh,",
    ),
    "an entry of two dimensions": (
        lambda d: next(open_numbers(sharding={"x": rows(PartitionSpec("data", "model"))})),
        ValueError,
        "'x' (4,) 2 dimensions",
    ),
    "a mask of two dimensions": (
        lambda d: next(
            open_numbers(
                mask=True,
                sharding={
                    "x": rows(PartitionSpec("data")),
                    "mask": rows(PartitionSpec("data", "model")),
                },
            )
        ),
        ValueError,
        "'mask' (4,) 2 dimensions sharding={'mask': NamedSharding(mesh,",
    ),
    "a spec of two dimensions in Grain": (
        lambda d: transformed(
            lambda label: fn.cast(label, dtype=types.INT32),
            sharding=rows(PartitionSpec("data", "model")),
            drop_remainder=True,
        ),
        ValueError,
        "'x' (4,) 2 dimensions",
    ),
    "sharding='data'": (lambda d: open_numbers(sharding="data"), TypeError, "sharding 'data'"),
    "devices=1": (lambda d: open_numbers(devices=1), TypeError, "devices 1 jax.devices()[:2]"),
    "devices=device": (
        lambda d: open_numbers(devices=jax.devices()[0]),
        TypeError,
        "devices list [",
    ),
    "devices=['gpu']": (lambda d: open_numbers(devices=["gpu"]), TypeError, "'gpu' jax.devices()"),
    "one name": (lambda d: data_iterator(same, "x"), TypeError, "output_map ['x']"),
    "names of numbers": (lambda d: data_iterator(same, [1]), TypeError, "output_map 1"),
    "output_map=1": (lambda d: data_iterator(same, 1), TypeError, "output_map 1 list of names"),
    "mask=1": (lambda d: open_numbers(mask=1), TypeError, "mask must be True not 1"),
    "a policy as text": (
        lambda d: open_numbers(last_batch_policy="keep"),
        ValueError,
        "'fill', 'drop' 'partial' 'keep'",
    ),
    "on_error='ignore'": (lambda d: open_numbers(on_error="ignore"), ValueError, "'ignore' 'skip'"),
    "epochs as a number": (lambda d: take.stream("3"), TypeError, "num_epochs '3'"),
    # Iterators
    "set_state(path)": (
        lambda d: open_numbers().set_state("run/state.json"),
        ValueError,
        "'run/state.json' json.load",
    ),
    "set_state(Path)": (
        lambda d: open_numbers().set_state(pathlib.Path("state.json")),
        ValueError,
        "state.json json.load",
    ),
    "set_state(step)": (lambda d: open_numbers().set_state(3), ValueError, "3 get_state()"),
    "allow=True": (
        lambda d: open_numbers().set_state(open_numbers().get_state(), allow=True),
        TypeError,
        "allow True list of names",
    ),
    "save('.')": (
        lambda d: DALIDatasetIterator(take, source=NUMBERS, batch_size=BATCH).save("."),
        ValueError,
        "'.' file",
    ),
    "next() within jit": (
        lambda d: jax.jit(lambda: next(open_numbers())["x"])(),
        RuntimeError,
        "jax.jit next() argument",
    ),
    "an iterator function": (lambda d: next(take), TypeError, "same batch_size="),
    "an iterator function in a loop": (lambda d: list(take), TypeError, "same batch_size="),
    "a key of a batch": (lambda d: next(open_numbers())["y"], KeyError, "y"),
    # show and tune
    "show(batch)": (lambda d: show_module(1), TypeError, "module from dalijax.show import show"),
    "tune(function)": (lambda d: tune_module(1), TypeError, "module from dalijax.tune import tune"),
    "with profile(iterator)": (
        lambda d: profile_module(1),
        TypeError,
        "module from dalijax.profile import profile",
    ),
    "dalijax.StateError": (
        lambda d: dalijax.StateError,
        AttributeError,
        "dalijax.errors.StateError",
    ),
    "dalijax.Report": (lambda d: dalijax.Report, AttributeError, "dalijax.profile.Report"),
    "show(folder)": (
        lambda d: show_module.show(d.folder),
        TypeError,
        "images dalijax.sources.Files(",
    ),
    "show(Path)": (
        lambda d: show_module.show(pathlib.Path(d.files[0])),
        TypeError,
        "00000.jpg dalijax.sources.Files(",
    ),
    "show(function)": (lambda d: show_module.show(same), TypeError, "same dalijax.data_iterator"),
    "tune(iterator)": (
        lambda d: tune_module.tune(open_numbers(), batch_size=BATCH),
        TypeError,
        "iterator function",
    ),
    "tune(dataset)": (
        lambda d: tune_module.tune(DALIDataset(take, source=NUMBERS, batch_size=2), batch_size=2),
        TypeError,
        "DALIDataset iterator function dalijax.data_iterator",
    ),
    # Adapters
    "a Grain parameter": (
        lambda d: transformed(lambda img: img),
        TypeError,
        "'img' ['image', 'label']",
    ),
    "a close Grain parameter": (
        lambda d: transformed(lambda images: images),
        TypeError,
        "'images' ['image', 'label'] did you mean 'image'",
    ),
    "batch() before the transform": (
        lambda d: transformed(lambda image: image, grain_records().batch(2)),
        ValueError,
        "batch() before batch_size",
    ),
    "batch() of an iter dataset": (
        lambda d: transformed(lambda image: image, grain_records().to_iter_dataset().batch(2)),
        ValueError,
        "batch() before batch_size",
    ),
    "a decorated function in Grain": (
        lambda d: DALITransform(take, batch_size=2, output_map=["x"]),
        TypeError,
        "undecorated",
    ),
    "a pipeline_def in Grain": (
        lambda d: DALITransform(pipeline_def(same), batch_size=2, output_map=["x"]),
        TypeError,
        "undecorated function",
    ),
    "an undecorated function in Grain": (
        lambda d: DALIIterDataset(same, batch_size=2),
        ValueError,
        "same dalijax.data_iterator output_map",
    ),
    "an undecorated function in tf.data": (
        lambda d: DALIDataset(same, batch_size=2),
        TypeError,
        "same dalijax.data_iterator",
    ),
    "an iterator in tf.data": (
        lambda d: DALIDataset(open_numbers(), batch_size=2),
        TypeError,
        "iterator function",
    ),
    "an undecorated function in CLU": (
        lambda d: DALIDatasetIterator(same, batch_size=2),
        TypeError,
        "same dalijax.data_iterator",
    ),
    "num_epochs of a transform": (
        lambda d: DALITransform(same, batch_size=2, output_map=["x"], num_epochs=2),
        TypeError,
        "num_epochs repeat(",
    ),
    "a mask of a transform": (
        lambda d: DALITransform(same, batch_size=2, output_map=["x"], mask=True),
        TypeError,
        "mask pad='mask'",
    ),
    "a transform without a batch size": (
        lambda d: DALITransform(same, output_map=["x"]),
        TypeError,
        "DALITransform() batch_size Number of records",
    ),
    "DALIBatch of a dataset": (
        lambda d: grain_records().pipe(DALIBatch(same, batch_size=2)),
        TypeError,
        "DataLoader ds.pipe(DALITransform(",
    ),
    "num_workers of a transform": (
        lambda d: DALITransform(same, batch_size=2, output_map=["x"], num_workers=2),
        TypeError,
        "num_workers num_threads",
    ),
    "drop_last of a transform": (
        lambda d: DALITransform(same, batch_size=2, output_map=["x"], drop_last=True),
        TypeError,
        "drop_last drop_remainder",
    ),
    "drop_last of a DALIDataset": (
        lambda d: DALIDataset(take, source=NUMBERS, batch_size=2, drop_last=True),
        TypeError,
        "drop_last drop_remainder=True",
    ),
    "num_epochs of data_iterator": (
        lambda d: data_iterator(same, ["x"], num_epochs=2),
        TypeError,
        "num_epochs stream(num_epochs",
    ),
}


@pytest.mark.parametrize("mistake", PROGRAMS)
def test_mistakes_name_the_value_and_the_fix(mistake, eight_images):
    program, kind, words = PROGRAMS[mistake]
    check(program, kind, words.split(" "), eight_images)
