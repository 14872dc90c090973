"""Mistakes of new users: each raises an error with the passed value and the fix."""

import functools
import json
import pathlib
import pickle
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import run_fork
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types
from shared import shared

from conftest import NUM_FILES
from dalijax import DALIGenericIterator, data_iterator
from dalijax import fn as dalijax_fn
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from programs import run_python


def graph(paths, shard_id=0, num_shards=1):
    jpegs, labels = fn.readers.file(
        files=paths, name="reader", shard_id=shard_id, num_shards=num_shards
    )
    return fn.decoders.image(jpegs), labels


train = data_iterator(graph, ["images", "labels"], reader_name="reader")


def refused(call, error, *words):
    """Runs a mistake; the error message must match every pattern."""
    with pytest.raises(error) as caught:
        call()
    for pattern in words:
        assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


CALLS = [
    (dict(batch_size="8"), TypeError, "batch_size must be a whole number of samples", "not '8'"),
    (dict(batch_size=8.0), TypeError, "batch_size must be a whole number", r"not 8\.0"),
    (dict(batch_size=np.float32(8)), TypeError, "batch_size must be a whole number"),
    (dict(batch_size=True), TypeError, "batch_size must be a whole number", "not True"),
    (dict(batch_size=0), ValueError, "batch_size must be .* 1 or more, not 0"),
    (dict(batch_size=-1), ValueError, "batch_size must be .* 1 or more, not -1"),
    (dict(batch_size=None), ValueError, "batch_size is missing", r"graph\(\.\.\., batch_size=128"),
    (dict(), ValueError, "batch_size is missing", r"graph\(\.\.\., batch_size=128"),
    (
        dict(device_id="gpu"),
        TypeError,
        "device_id must be the number of a GPU",
        "None",
        "not 'gpu'",
    ),
    (dict(device_id=-1), ValueError, "device_id must be .* 0 or more, or None", "not -1"),
    (dict(seed="a"), TypeError, "seed must be a whole number", "not 'a'"),
    (dict(seed=1.5), TypeError, "seed must be a whole number", r"not 1\.5"),
    (dict(seed=2**70), ValueError, "seed must be .* 64 bits", "not 1180591620717411303424"),
    (dict(num_threads="4"), TypeError, "num_threads must be a whole number", "not '4'"),
    (dict(num_threads=0), ValueError, "num_threads must be .* 1 or more, not 0"),
    (dict(prefetch_queue_depth=0), ValueError, "prefetch_queue_depth must be .*, not 0"),
    (dict(prefetch_queue_depth={"cpu": 2}), ValueError, "cpu_size and gpu_size, not {'cpu': 2}"),
    (dict(prefetch_queue_depth="2"), TypeError, "prefetch_queue_depth must be .*, not '2'"),
    (
        dict(prefetch_queue_depth={"cpu_size": 0, "gpu_size": 1}),
        ValueError,
        "prefetch_queue_depth must be .*, not 0",
    ),
    (
        dict(batch_sise=4),
        TypeError,
        r"\['batch_sise'\]",
        "did you mean 'batch_size'",
        "num_threads",
    ),
    (dict(auto_rest=True), TypeError, r"\['auto_rest'\]", "did you mean 'auto_reset'", "on_error"),
    (dict(shards_id=1), TypeError, "did you mean 'shard_id'", "its own are .*'num_shards'"),
    (dict(xyzzy=1), TypeError, r"graph\(\) has no argument \['xyzzy'\]: its own are"),
]


def with_batch_size(call, words):
    return call if words[0] == "batch_size is missing" else {"batch_size": 4, **call}


@pytest.mark.parametrize("call,error,words", [(c, e, w) for c, e, *w in CALLS], ids=str)
def test_a_wrong_argument_of_the_call(jpegs, call, error, words):
    refused(lambda: train(jpegs, **with_batch_size(call, words)), error, *words)


@pytest.mark.parametrize("adapter", (DALIDatasetIterator, DALIDataset, DALIIterDataset))
def test_adapters_pass_the_arguments_of_the_call(jpegs, adapter):
    """The adapters call the iterator function, two of them when they are iterated."""
    for call, error, *words in CALLS:
        arguments = with_batch_size(call, words)
        refused(lambda: next(iter(adapter(train, paths=jpegs, **arguments))), error, *words)


def test_whole_numbers_of_numpy_and_jax_are_taken(jpegs):
    mesh = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    for number in (np.int64(4), np.uint8(4), jnp.int32(4)):
        batch = next(train(jpegs, batch_size=number, seed=number, num_threads=number))
        assert batch["labels"].shape == (4, 1)
        assert next(train(jpegs, batch_size=number, sharding=mesh))["labels"].shape == (4, 1)


def test_arguments_of_the_graph_are_not_the_iterators():
    def own(seed):
        assert seed == "a"
        return fn.random.uniform(shape=[2])

    assert next(data_iterator(own, ["x"])(batch_size=2, seed="a"))["x"].shape == (2, 2)


def test_a_misspelt_argument_of_the_iterator():
    close = (r"\['auto_rest'\]", "did you mean 'auto_reset'", "'last_batch_policy'")
    refused(lambda: data_iterator(output_map=["x"], auto_rest=True), TypeError, *close)
    refused(lambda: DALIGenericIterator([], ["x"], auto_rest=True), TypeError, *close)


@pytest.mark.parametrize("wrong", (None, 3))
def test_neither_pipeline_nor_function(wrong):
    refused(
        lambda: DALIGenericIterator(wrong, ["x"]),
        TypeError,
        f"pipelines must be a nvidia.dali.Pipeline or a list of them, not {wrong}",
    )


def test_arguments_of_the_call_and_of_wrong_types(jpegs):
    def make(**config):
        return lambda: data_iterator(graph, **{"output_map": ["images", "labels"], **config})

    order = ("output_map must be a list of names in the order",)
    for names in ({"images", "labels"}, frozenset("ab"), None, 2):  # dicts and generators have one
        refused(make(output_map=names), TypeError, *order)
    refused(make(batch_size=4), TypeError, r"\['batch_size'\]", r"train\(\.\.\., batch_size=128\)")
    for name in ("as_numpy", "pmap_compatible", "prepare_first_batch", "last_batch_padded"):
        refused(make(**{name: "no"}), TypeError, f"{name} must be True or False, not 'no'")
        assert make(**{name: np.bool_(False)})() and make(**{name: 0})()
    refused(make(size="300"), TypeError, "size must be a positive number", "not '300'")
    refused(make(size=300.5), TypeError, "size must be a positive number", r"not 300\.5")
    refused(make(size=-2), ValueError, "size must be a positive number", "not -2")
    refused(make(reader_name=3), TypeError, "reader_name must be the name of a reader", "not 3")
    for devices in ("cpu", [0, 1], 2, jax.devices()[0]):
        refused(
            lambda devices=devices: train(jpegs, batch_size=4, devices=devices),
            TypeError,
            "devices must be a list of JAX devices",
            r"jax\.devices\(\)",
            re.escape(repr(devices)),
        )
    refused(
        lambda: train(jpegs, batch_size=4, exec_dynamic="yes"),
        TypeError,
        "exec_dynamic must be True or False, not 'yes'",
    )


def test_an_iterator_function_is_not_an_iterator():
    cure = ("graph is an iterator function. Call it for an iterator",)
    for use in (iter, list, next):
        refused(lambda use=use: use(train), TypeError, *cure)
    for name in ("reset", "get_state", "set_state", "peek", "next", "size"):
        refused(lambda name=name: getattr(train, name), AttributeError, *cure, f"has '{name}'")
    with pytest.raises(
        AttributeError, match="^'IteratorFunction' object has no attribute 'resett'"
    ):
        train.resett
    assert train and not hasattr(train, "__len__")


def test_invalid_states_and_checkpoints(jpegs, tmp_path, monkeypatch):
    iterator = train(jpegs, batch_size=4)
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("input.json")
    path.write_text(json.dumps(iterator.get_state()))
    cure = r"json\.load\(open\(path\)\)"
    for given in (str(path), path):
        words = (re.escape(str(path)), cure)
        refused(lambda given=given: iterator.set_state(given), ValueError, *words)
    for other in (None, {}, 5):
        refused(lambda other=other: iterator.set_state(other), ValueError, r"of get_state\(\)")
    for pieces in (iterator.get_state(), iterator.checkpoints()[0], path.read_text()):
        refused(
            lambda pieces=pieces: train(jpegs, batch_size=4, checkpoints=pieces),
            TypeError,
            "checkpoints must be a list of bytes",
            r"set_state\(\)",
        )


def test_invalid_counts(jpegs):
    call = dict(paths=jpegs, batch_size=4)
    for given in ("2", 2.0):
        words = f"not {given!r}"
        refused(
            lambda given=given: DALIDatasetIterator(train, num_epochs=given, **call),
            TypeError,
            "num_epochs must be at least 1, a whole number",
            words,
        )
        refused(
            lambda given=given: DALIIterDataset(train, num_epochs=given, **call),
            TypeError,
            "num_epochs must be at least 1, a whole number",
            words,
        )
        for name in ("take", "skip", "repeat"):
            dataset = DALIDataset(train, **call)
            refused(
                lambda name=name, given=given: getattr(dataset, name)(given),
                TypeError,
                "count must be a whole number",
                words,
            )
        refused(
            lambda given=given: DALITransform(decode, batch_size=given, output_map=["x"]),
            TypeError,
            "batch_size must be a whole number of records",
            words,
        )
        refused(lambda given=given: train(jpegs, batch_size=4).skip(given), TypeError, words)


def forgotten():
    fn.random.uniform(shape=[2])


def as_list():
    return fn.readers.file(files=["a.jpg"])


def as_array():
    return np.asarray(fn.random.uniform(shape=[2]))


def with_none():
    return None, fn.random.uniform(shape=[2])


def graph_of(function):
    """Returns a graph that calls a function of JAX or NumPy on a DataNode."""

    @functools.wraps(forgotten)
    def called():
        return function(fn.random.uniform(shape=[2]))

    return called


def misspelt():
    return fn.random.uniform(shap=[2])


def encoded(paths=()):
    return fn.readers.file(files=list(paths))[0]


def bfloat16():
    return fn.cast(fn.random.uniform(shape=[2]), dtype=getattr(types, "BFLOAT16"))


def seven_inputs():
    many = [fn.random.uniform(shape=[2]) for _ in range(7)]
    example = [np.zeros(2, np.float32)] * 7
    return dalijax_fn.numba_function(
        *many, run_fn=lambda o, a, b, c, d, e, f, g: None, example=example
    )


def on_gpu():
    return fn.random.uniform(shape=[2]).gpu()


def gpu_operator():
    return fn.random.uniform(shape=[2], device="gpu")


JAX = ("DataNode", "dalijax.fn.jax_function", "batches that", "the iterator returns")
NUMPY = (*JAX, "dalijax.fn.numba_function")
GRAPHS = [
    (forgotten, TypeError, r"forgotten\(\) returns no outputs", "return images, labels"),
    (
        as_list,
        TypeError,
        r"as_list\(\)",
        "nested",
        "separately and not in a list, e.g. return images, labels",
    ),
    (as_array, TypeError, r"as_array\(\)", "ndarray", "return images, labels"),
    (with_none, TypeError, r"with_none\(\)", "NoneType", "return images, labels"),
    (graph_of(jnp.sqrt), TypeError, *JAX),
    (graph_of(jax.vmap(lambda x: x)), TypeError, *JAX),
    (graph_of(jax.jit(lambda x: x + 1)), TypeError, *JAX),
    (graph_of(lambda x: jax.image.resize(x, (2,), "linear")), TypeError, *JAX),
    (graph_of(lambda x: jnp.stack([x, x])), TypeError, *JAX),
    (graph_of(np.sqrt), TypeError, *NUMPY),
    (graph_of(np.mean), AttributeError, *NUMPY),
    (graph_of(float), TypeError, *NUMPY),
    (graph_of(lambda x: x.reshape(2, 1)), AttributeError, "'reshape'", *NUMPY),
    (
        graph_of(lambda x: x if x > 0 else -x),
        TypeError,
        "enable_conditionals=True",
        "when you create the iterator",
    ),
    (misspelt, TypeError, r'"shap" is not defined', "Did you mean 'shape'", "'range'"),
    (
        bfloat16,
        AttributeError,
        r"bfloat16\(\)",
        "not support bfloat16: cast to types.FLOAT",
        "in the training step",
    ),
    (seven_inputs, ValueError, "7 inputs", "1 to 6", "fn.cat or fn.stack"),
    (on_gpu, RuntimeError, "needs a GPU", r"finds none", r"remove \.gpu\(\)", "omit device_id"),
    (gpu_operator, RuntimeError, "needs a GPU", "device='cpu'"),
]


@pytest.mark.parametrize("graph,error,words", [(g, e, w) for g, e, *w in GRAPHS])
def test_a_mistake_in_the_graphs_function(graph, error, words):
    refused(lambda: data_iterator(graph, ["x"])(batch_size=2), error, *words)


def test_an_error_of_the_users_code_is_unchanged():
    class Mine(TypeError):
        pass

    def broken():
        raise Mine("of mine")

    with pytest.raises(Mine, match="^of mine$"):
        data_iterator(broken, ["x"])(batch_size=2)


def test_an_error_of_the_source_is_unchanged():
    def broken():
        raise ValueError("cannot include dtype 'E' in a buffer")

    def given():
        return fn.external_source(broken)

    iterator = data_iterator(given, ["x"], size=4)(batch_size=2)
    with pytest.raises(ValueError, match="^cannot include dtype 'E' in a buffer$"):
        next(iterator)
    iterator.close()


def test_files_that_are_not_decoded(jpegs):
    ragged = data_iterator(encoded, ["x"], size=12)(jpegs, batch_size=4)
    refused(
        lambda: next(ragged), ValueError, "'x' is ragged", "decode files, e.g. by fn.decoders.image"
    )


def test_the_cause_of_a_mistake_in_the_graph_is_kept():
    with pytest.raises(TypeError) as caught:
        data_iterator(graph_of(jnp.sqrt), ["x"])(batch_size=2)
    cause = caught.value.__cause__
    assert isinstance(cause, TypeError) and str(cause) in str(caught.value)


def test_a_folder_without_classes(tmp_path):
    @data_iterator(output_map=["x", "label"], reader_name="reader")
    def folder(root):
        return tuple(fn.readers.file(file_root=str(root), name="reader"))

    def read(root):
        return lambda: folder(root, batch_size=2)

    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    (tmp_path / "other" / "cat").mkdir(parents=True)
    for name in ("flat/1.jpg", "flat/2.jpg", "other/cat/1.txt"):
        (tmp_path / name).write_bytes(b"x")
    here = re.escape(str(tmp_path))
    for name in ("empty", "flat", "other"):
        refused(
            read(tmp_path / name),
            RuntimeError,
            f"{here}/{name} .file_root",
            "a subfolder for each class",
            "files=",
        )
    refused(read(tmp_path / "none"), RuntimeError, f"Failed to open {here}/none")


def test_invalid_pipelines(jpegs):
    cure = ("pipelines must be a nvidia.dali.Pipeline", "data_iterator", "pipe.batch_size")
    for given in (graph, train, pipeline_def(graph)):
        refused(lambda given=given: DALIGenericIterator(given, ["x"]), TypeError, *cure)


def test_an_iterator_is_not_pickled(jpegs):
    words = ("DALIGenericIterator of graph", "Pickle the iterator function", r"get_state\(\)")
    refused(lambda: pickle.dumps(train(jpegs, batch_size=2)), TypeError, *words)
    refused(
        lambda: pickle.dumps(DALIDatasetIterator(train, paths=jpegs, batch_size=2)),
        TypeError,
        *words[1:],
    )


@pytest.mark.parametrize("in_dict", (False, True))
def test_invalid_shardings(jpegs, in_dict):
    mesh = jax.make_mesh((2,), ("rows",))

    def with_sharding(given):
        given = {"images": given, "labels": given} if in_dict else given
        return lambda: train(jpegs, batch_size=4, sharding=given)

    words = ("no mesh is set", r"jax\.set_mesh\(mesh\)", r"NamedSharding\(mesh, P.*'rows'")
    refused(with_sharding(PartitionSpec("rows")), ValueError, *words)
    assert isinstance(mesh, Mesh)
    refused(
        with_sharding(mesh),
        TypeError,
        "not Mesh",
        r"NamedSharding\(mesh, jax.sharding.PartitionSpec\('rows'\)\)",
    )
    refused(with_sharding("rows"), TypeError, "not 'rows'", r"NamedSharding\(mesh")
    refused(with_sharding(jax.devices()[:2]), TypeError, r"devices=\[\.\.\.\]")


def decode(image):
    return fn.decoders.image(image)


def records():
    return grain.MapDataset.source([{"photo": b"x", "label": i} for i in range(4)])


def test_invalid_graphs_of_grains_records(jpegs):
    def transform(given, **more):
        ds = records().pipe(DALITransform(given, batch_size=2, output_map=["x"], **more))
        return next(iter(ds))

    refused(
        lambda: transform(decode),
        TypeError,
        r"The parameter \['image'\] .* is not one of the keys \['label', 'photo'\]",
        "Rename it to a key, or index the dict",
    )
    refused(
        lambda: transform(lambda image, label: image),
        TypeError,
        r"needs \['image'\] of the record's keys, which are \['label', 'photo'\]",
    )
    refused(
        lambda: transform(train),
        TypeError,
        "data_iterator of .*graph> is an iterator function",
        "undecorated function",
    )
    refused(lambda: transform(decode, batch_sise=3), TypeError, "did you mean")


@pytest.mark.parametrize("adapter", (DALIDatasetIterator, DALIDataset))
def test_invalid_iterator_functions(jpegs, adapter):
    refused(lambda: adapter(graph, batch_size=2), TypeError, "graph", "dalijax.data_iterator")
    iterator = train(jpegs, batch_size=2)
    refused(lambda: adapter(iterator), TypeError, "is an iterator", "that created it")


EXTRAS = [
    ("grain", "grain", "grain"),
    ("clu", "clu", "clu"),
    ("t5x", "clu", "clu"),
    ("grain.orbax", "orbax.checkpoint", "grain,examples"),
    ("pax", "praxis", "pax"),
]


IMPORT_ADAPTERS = """
import importlib, json, sys

errors = {}
for adapter, package in json.loads(sys.argv[1]):
    sys.modules[package] = None
    try:
        importlib.import_module(f"dalijax.adapters.{adapter}")
    except ImportError as error:
        errors[adapter] = str(error)
    del sys.modules[package]
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors_of_extras(tmp_path_factory):
    """Returns the errors of all adapters, each without its package."""
    packages = json.dumps([(adapter, package) for adapter, package, _ in EXTRAS])

    def run():
        return json.loads(run_python("-c", IMPORT_ADAPTERS, packages).stdout)

    return shared(tmp_path_factory, "extras", run)


@pytest.mark.parametrize("adapter,package,extra", EXTRAS)
def test_a_missing_extra(errors_of_extras, adapter, package, extra):
    error = errors_of_extras[adapter]
    assert f'pip install "dalijax[{extra}]"' in error.splitlines()[-1], error


NUMBA = """
import sys

sys.modules["numba"] = None
from nvidia.dali import fn
from dalijax import data_iterator, fn as own

def graph():
    x = fn.random.uniform(shape=[2])
    return own.numba_function(x, run_fn=lambda out, x: None, example=np.zeros(2, np.float32))

import numpy as np
data_iterator(graph, ["x"])(batch_size=2)
"""
TENSORFLOW = """
import sys

sys.modules["tensorflow"] = None
from nvidia.dali import fn
from dalijax import data_iterator
from dalijax.adapters.tfdata import DALIDataset

dataset = DALIDataset(data_iterator(lambda: fn.random.uniform(), ["x"], size=4), batch_size=2)
assert len(list(dataset)) == 2
dataset.to_tf_dataset()
"""


@pytest.mark.parametrize("code,extra", [(NUMBA, "numba"), (TENSORFLOW, "tf")])
def test_a_package_that_is_missing_when_it_is_used(code, extra):
    done = run_fork(code, code=1)
    assert f'pip install "dalijax[{extra}]"' in done.stderr.splitlines()[-1], done.stderr


def test_repr_shows_the_position(jpegs):
    stream = train.stream(None, jpegs, batch_size=5)
    assert repr(stream) == (
        "<BatchStream of no end over graph: epoch 0, step 0, not built yet, "
        "outputs ['images', 'labels']>"
    )
    iterator = train(jpegs, batch_size=5)
    told = "<DALIGenericIterator of graph: epoch {}, step {} of {}, batch 5, device cpu, outputs "
    told += "['images', 'labels']{}>"
    assert repr(iterator) == told.format(0, 0, 3, "")
    next(iterator)
    iterator.peek()
    assert repr(iterator) == told.format(0, 1, 3, "")
    assert len(list(iterator)) == 2
    iterator.reset()
    assert repr(iterator) == told.format(1, 0, len(iterator), "")
    last = len(iterator)
    iterator.close()
    assert repr(iterator) == told.format(1, 0, last, ", closed")
    pipelines = [
        pipeline_def(graph)(jpegs, s, 2, batch_size=3, num_threads=1, device_id=None)
        for s in (0, 1)
    ]
    assert NUM_FILES == 12
    made = DALIGenericIterator(pipelines, ["a", "b"], reader_name="reader")
    assert repr(made) == (
        "<DALIGenericIterator of 2 pipelines: epoch 0, step 0 of 2, batch 3 x 2 pipelines, device "
        "cpu, outputs ['a', 'b']>"
    )
    masked = train(jpegs, batch_size=5, mask="mask")
    assert repr(masked).endswith("outputs ['images', 'labels', 'mask']>")
    unknown = data_iterator(lambda: fn.random.uniform(), ["u"])(batch_size=2)
    assert "of <lambda>: epoch 0, step 0, batch 2, device cpu" in repr(unknown)
