"""Mistakes of newcomers: each raises an error that names the value and the fix."""

import pathlib
import random
import types as python_types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

import dalijax
from conftest import write_jpegs
from dalijax import augment, data_iterator, sources
from dalijax import fn as own_fn
from dalijax import profile as profile_module
from dalijax import show as show_module
from dalijax import tune as tune_module
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIBatch, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from tars import FIELDS, samples, write_tar

COUNT, BATCH = 8, 4
NUMBERS = sources.Arrays({"x": np.arange(COUNT, dtype=np.int32)})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of class folders, its files, and a tar."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = write_jpegs(folder / "images" / "class", COUNT)
    return python_types.SimpleNamespace(
        folder=str(folder / "images"),
        files=files,
        tar=write_tar(folder / "a.tar", samples(0, COUNT)),
        missing=str(folder / "missing"),
    )


def same(x):
    return x + 0


take = data_iterator(same, ["x"])


def open_numbers(**call):
    """An iterator over the numbers 0 to 7."""
    return take(**{"source": NUMBERS, "batch_size": BATCH, **call})


def decoded(data, **arguments):
    """An iterator of decoded images."""
    graph = data_iterator(lambda data: fn.decoders.image(data, **arguments), ["images"])
    return lambda files: graph(source=sources.Files(files.folder), batch_size=BATCH)


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


def lowered(x):
    while x > 3:
        x = x - 1
    return x


@own_fn.jax_function
def plus_one(x):
    return x + 1


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


class NoFields(sources.Source):
    def __len__(self):
        return COUNT

    def read(self, indices, names):
        return {name: indices.astype(np.int32) for name in names}

    def identity(self):
        return "numbers"


class TextFields(NoFields):
    fields = {"x": "float32"}


class ListOfFields(NoFields):
    fields = ["x"]


class NoIdentity(NoFields):
    fields = {"x": sources.Field(np.int32)}
    identity = sources.Source.identity


class NoLength(NoFields):
    fields = {"x": sources.Field(np.int32)}
    __len__ = sources.Source.__len__


class NoRead(NoFields):
    fields = {"x": sources.Field(np.int32)}
    read = sources.Source.read


class Unrelated:
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": index}


# Names of arguments of other libraries: the argument, its value and the replacement.
ARGUMENTS = [
    ("drop_last", True, "drop_remainder=True"),
    ("num_epochs", 3, "stream(num_epochs"),
    ("epochs", 3, "stream(num_epochs"),
    ("repeat", True, "stream("),
    ("prefetch", 4, "prefetch_queue_depth"),
    ("prefetch_factor", 4, "prefetch_queue_depth"),
    ("prefetch_size", 4, "prefetch_queue_depth"),
    ("shuffle_buffer_size", 1000, "shuffle=True"),
    ("shuffle_buffer", 1000, "shuffle=True"),
    ("num_workers", 4, "num_threads"),
    ("workers", 4, "num_threads"),
    ("num_parallel_calls", 4, "num_threads"),
    ("pin_memory", True, "omit it"),
    ("persistent_workers", True, "omit it"),
    ("cache", True, "omit it"),
    ("collate_fn", print, "in the graph function"),
    ("transform", print, "in the graph function"),
    ("batch", 4, "batch_size"),
    ("bs", 4, "batch_size"),
    ("mesh", None, "sharding"),
    ("device", "cpu", "device_id"),
    ("dataset", None, "source"),
    ("path", "x", "source"),
    ("root", "x", "source"),
    ("start_step", 5, "seek_step(n)"),
    ("num_steps", 5, "itertools.islice("),
    ("rng", 0, "seed"),
    ("key", 0, "seed"),
    ("num_thread", 2, "num_threads"),
    ("num_treads", 2, "num_threads"),
    ("threads", 2, "num_threads"),
    ("bach_size", 2, "batch_size"),
    ("shufle", 2, "shuffle"),
    ("outputs", ["x"], "output_map"),
    ("output_names", ["x"], "output_map"),
]
# Attributes of other libraries: the owner, its attribute, and the replacement.
ATTRIBUTES = [
    ("iterator", "stream", "use stream(...) of the iterator function"),
    ("stream", "epochs", "num_epochs= of stream(...)"),
    ("augment", "Normalize", "normalize"),
    ("augment", "mixup", "jax_function"),
    ("augment", "MixUp", "jax_function"),
    ("augment", "cutmix", "jax_function"),
    ("augment", "RandomResizedCrop", "random_resized_crop"),
    ("augment", "ColorJitter", "color_jitter"),
    ("augment", "RandAugment", "rand_augment"),
    ("augment", "randaugment", "rand_augment"),
    ("augment", "AutoAugment", "auto_augment"),
    ("augment", "TrivialAugmentWide", "trivial_augment"),
    ("augment", "CenterCrop", "center_crop"),
    ("augment", "RandomErasing", "random_erasing"),
    ("augment", "ToTensor", "jax.Array"),
    ("augment", "Resize", "fn.resize"),
    ("augment", "RandomHorizontalFlip", "flip"),
    ("augment", "horizontal_flip", "flip"),
    ("augment", "RandomRotation", "fn.rotate"),
    ("augment", "GaussianBlur", "fn.gaussian_blur"),
    ("augment", "Compose", "one after another"),
    ("augment", "color_jiter", "color_jitter"),
    ("sources", "ImageFolder", "Files"),
    ("sources", "DatasetFolder", "Files"),
    ("sources", "WebDataset", "Tar"),
    ("sources", "TarDataset", "Tar"),
    ("sources", "TFRecordDataset", "TFRecord"),
    ("sources", "TFRecords", "TFRecord"),
    ("sources", "RLDSDataset", "RLDS"),
    ("sources", "HuggingFace", "Records"),
    ("sources", "ArrayRecord", "Records"),
    ("sources", "TFDS", "Records"),
    ("sources", "Parquet", "Records"),
    ("sources", "Numpy", "Arrays"),
    ("sources", "TensorDataset", "Arrays"),
    ("sources", "ConcatDataset", "Mixture"),
    ("sources", "files", "Files"),
    ("sources", "tar", "Tar"),
    ("iterator", "take", "itertools.islice"),
    ("iterator", "map", "in the graph function"),
    ("iterator", "filter", "sources.Selection"),
    ("iterator", "shuffle", "shuffle=True"),
    ("iterator", "state_dict", "get_state()"),
    ("iterator", "load_state_dict", "set_state(state)"),
    ("iterator", "save", "get_state()"),
    ("iterator", "restore", "set_state(state)"),
    ("iterator", "load", "set_state(state)"),
    ("iterator", "repeat", "stream("),
    ("iterator", "batch", "batch_size="),
    ("iterator", "prefetch", "prefetch_queue_depth="),
    ("iterator", "cache", "operating system"),
    ("iterator", "shard", "sharding="),
    ("iterator", "enumerate", "enumerate(iterator)"),
    ("iterator", "as_numpy_iterator", "as_numpy=True"),
    ("iterator", "cardinality", "len(iterator)"),
    ("iterator", "num_batches", "len(iterator)"),
    ("iterator", "get_next", "next(iterator)"),
    ("iterator", "spec", "element_spec"),
    ("iterator", "set_epoch", "seek(epoch)"),
    ("stream", "take", "itertools.islice"),
    ("stream", "state_dict", "get_state()"),
    ("stream", "seek", "seek_step(step)"),
    ("source", "map", "in the graph function"),
    ("source", "shuffle", "shuffle=True"),
    ("source", "take", "Selection"),
    ("batches", "shuffle", "MapDataset before the transform"),
    ("batches", "repeat", "MapDataset before the transform"),
    ("clu", "state_dict", "save(file)"),
    ("clu", "take", "itertools.islice"),
    ("dalijax", "Files", "dalijax.sources.Files"),
    ("dalijax", "DALITransform", "dalijax.adapters.grain"),
    ("dalijax", "DALIDataset", "dalijax.adapters.tfdata"),
    ("dalijax", "random_resized_crop", "dalijax.augment.random_resized_crop"),
    ("dalijax", "jax_function", "dalijax.fn.jax_function"),
    ("dalijax", "DataLoader", "data_iterator"),
]
OWNERS = {
    "augment": augment,
    "sources": sources,
    "dalijax": dalijax,
    "source": NUMBERS,
    "batches": grain_records().pipe(DALITransform(same, batch_size=2, output_map=["x"])),
    "clu": DALIDatasetIterator(take, source=NUMBERS, batch_size=BATCH),
}

PROGRAMS = {
    # Values of arguments
    "batch size 0": (lambda d: open_numbers(batch_size=0), ValueError, "batch_size 0 1 or more"),
    "a float": (lambda d: open_numbers(batch_size=4.0), TypeError, "batch_size 4.0 whole number"),
    "a text": (lambda d: open_numbers(batch_size="4"), TypeError, "batch_size '4' whole number"),
    "shuffle=None": (lambda d: open_numbers(shuffle=None), TypeError, "shuffle None True False"),
    "shuffle='yes'": (lambda d: open_numbers(shuffle="yes"), TypeError, "shuffle 'yes' True False"),
    "seed='abc'": (lambda d: open_numbers(seed="abc"), TypeError, "seed 'abc' whole number"),
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
    # Sources
    "a list": (
        lambda d: open_numbers(source=[1, 2, 3]),
        TypeError,
        "source [1, 2, 3] dalijax.sources.Records(",
    ),
    "a dict": (
        lambda d: open_numbers(source={"x": np.arange(3)}),
        TypeError,
        "source dalijax.sources.Arrays(",
    ),
    "an array": (
        lambda d: open_numbers(source=np.arange(3)),
        TypeError,
        "source dalijax.sources.Arrays(",
    ),
    "a directory": (
        lambda d: open_numbers(source=d.folder),
        TypeError,
        "source images dalijax.sources.Files(",
    ),
    "a path of a tar": (
        lambda d: open_numbers(source=pathlib.Path(d.tar)),
        TypeError,
        "source a.tar dalijax.sources.Tar(",
    ),
    "a path of a TFRecord": (
        lambda d: open_numbers(source="train.tfrecord-00000-of-00008"),
        TypeError,
        "source dalijax.sources.TFRecord(",
    ),
    "a class": (lambda d: open_numbers(source=sources.Files), TypeError, "source Files("),
    "a Grain dataset": (
        lambda d: open_numbers(source=grain_records()),
        TypeError,
        "source dalijax.sources.Records( DALITransform",
    ),
    "an object with records": (
        lambda d: open_numbers(source=Unrelated()),
        TypeError,
        "Unrelated dalijax.sources.Records(",
    ),
    "an iterator": (lambda d: open_numbers(source=open_numbers()), TypeError, "source iterator"),
    "a positional source": (
        lambda d: take(NUMBERS, batch_size=BATCH),
        TypeError,
        "Arrays source=",
    ),
    "a positional source of a stream": (
        lambda d: take.stream(NUMBERS, batch_size=BATCH),
        TypeError,
        "stream() Arrays source=",
    ),
    "an array as an argument": (
        lambda d: next(take(np.arange(4), batch_size=BATCH)),
        TypeError,
        "same() (4,) source=dalijax.sources.Arrays(",
    ),
    "a pipeline_def over a source": (
        lambda d: data_iterator(pipeline_def(same), ["x"])(source=NUMBERS, batch_size=BATCH),
        TypeError,
        "same() pipeline_def plain graph function",
    ),
    "data_iterator twice": (lambda d: data_iterator(take), TypeError, "same already plain"),
    "a decorated class": (lambda d: data_iterator(Unrelated), TypeError, "Unrelated class plain"),
    "a method without its object": (
        lambda d: data_iterator(lambda self, x: x, ["x"])(source=NUMBERS, batch_size=BATCH),
        TypeError,
        "'self' bound method data_iterator(object.method)",
    ),
    "a positional path": (
        lambda d: take(d.folder, batch_size=BATCH),
        TypeError,
        "images source=dalijax.sources.Files(",
    ),
    "a positional path beside a source": (
        lambda d: take(d.folder, source=NUMBERS, batch_size=BATCH),
        TypeError,
        "images by keyword",
    ),
    "a positional batch size": (lambda d: take(BATCH, source=NUMBERS), TypeError, "4 by keyword"),
    "a decorator's source": (
        lambda d: data_iterator(NUMBERS, ["x"]),
        TypeError,
        "Arrays source= function",
    ),
    "no source": (lambda d: take(batch_size=BATCH), TypeError, "'x' source="),
    "a path on a draw": (
        lambda d: data_iterator(lambda data, *, draw: data, ["x"])(d.folder, batch_size=BATCH),
        TypeError,
        "'draw' images source=dalijax.sources.Files(",
    ),
    "draw with a reader": (
        with_reader(lambda files, *, draw: label_reader(files)),
        TypeError,
        "'draw' source= fn.random",
    ),
    "shuffle with a reader": (
        with_reader(label_reader, shuffle=False),
        ValueError,
        "shuffle=False random_shuffle",
    ),
    "another field": (
        lambda d: data_iterator(lambda image: image, ["x"])(source=NUMBERS, batch_size=BATCH),
        TypeError,
        "'image' 'x'",
    ),
    "a close field": (
        lambda d: data_iterator(lambda label, datas: datas, ["x"])(
            source=sources.Files(d.folder), batch_size=BATCH
        ),
        TypeError,
        "'datas' did you mean 'data'",
    ),
    "a parameter batch_size": (
        lambda d: data_iterator(lambda x, batch_size: x, ["x"])(source=NUMBERS, batch_size=BATCH),
        ValueError,
        "batch_size parameter Rename",
    ),
    "a parameter batch_size of a reader": (
        lambda d: data_iterator(lambda files, batch_size: label_reader(files), ["x"])(
            d.files, batch_size=BATCH
        ),
        ValueError,
        "batch_size parameter Rename",
    ),
    "an undecorated function": (
        lambda d: next(iter(tune_module.tune(same, batch_size=2))),
        TypeError,
        "same dalijax.data_iterator",
    ),
    "text fields": (
        lambda d: open_numbers(source=TextFields()),
        TypeError,
        "TextFields 'x' 'float32' Field(np.float32",
    ),
    "a list of fields": (
        lambda d: open_numbers(source=ListOfFields()),
        TypeError,
        "ListOfFields ['x'] dict Field(",
    ),
    "no fields": (lambda d: open_numbers(source=NoFields()), TypeError, "NoFields fields Field("),
    "no length": (lambda d: open_numbers(source=NoLength()), TypeError, "NoLength __len__"),
    "no read": (lambda d: open_numbers(source=NoRead()), TypeError, "NoRead read("),
    "no identity": (lambda d: open_numbers(source=NoIdentity()), TypeError, "NoIdentity identity("),
    "a missing folder": (lambda d: sources.Files(d.missing), FileNotFoundError, "missing"),
    "a file": (
        lambda d: sources.Files(d.files[0]),
        NotADirectoryError,
        "00000.jpg paths=",
    ),
    "an empty path": (lambda d: sources.Files(""), ValueError, "'' '.' directory"),
    "an empty path of a list": (lambda d: sources.Files(paths=[""]), ValueError, "'' '.'"),
    "an empty path of a tar": (lambda d: sources.Tar("", FIELDS), ValueError, "'' '.'"),
    "root of a folder": (lambda d: sources.Files(root=d.folder), TypeError, "'root' folder="),
    "file_root": (lambda d: sources.Files(file_root=d.folder), TypeError, "'file_root' folder="),
    "files of a list": (lambda d: sources.Files(files=d.files), TypeError, "'files' paths="),
    "transform of a folder": (
        lambda d: sources.Files(d.folder, transform=print),
        TypeError,
        "Files() 'transform' in the graph function",
    ),
    "positional labels": (
        lambda d: sources.Files(d.files, [0] * COUNT),
        TypeError,
        "Files() [0, by keyword 'paths' 'labels'",
    ),
    "shuffle of a tar": (
        lambda d: sources.Tar(d.tar, FIELDS, shuffle=True),
        TypeError,
        "Tar() 'shuffle' shuffle= of the iterator function",
    ),
    "batch_size of a tar": (
        lambda d: sources.Tar(d.tar, FIELDS, batch_size=2),
        TypeError,
        "'batch_size' to the iterator function",
    ),
    "a tar's fields": (lambda d: sources.Tar(d.tar), TypeError, "Tar() fields extension"),
    "a shape as ndim": (lambda d: sources.Field(np.float32, (3,)), TypeError, "ndim (3,) 1 vector"),
    "a share as a selection": (
        lambda d: sources.Selection(NUMBERS, 0.8),
        TypeError,
        "0.8 boolean np.arange(len(source))",
    ),
    "exts of a tar": (lambda d: sources.Tar(d.tar, exts=["jpg"]), TypeError, "'exts' fields="),
    "arrays by keyword": (lambda d: sources.Arrays(x=np.arange(3)), TypeError, "'x' 'arrays'"),
    "positional arrays": (
        lambda d: sources.Arrays(np.arange(3), np.arange(3)),
        TypeError,
        "Arrays() array([0, 1, 2]) by keyword",
    ),
    "weights by keyword": (
        lambda d: sources.Mixture([NUMBERS], weights=[1]),
        TypeError,
        "Mixture() 'weights' 'sources'",
    ),
    "a tar as a folder": (lambda d: sources.Files(d.tar), NotADirectoryError, "a.tar Tar"),
    "a list of paths": (lambda d: sources.Files(d.files), TypeError, "paths="),
    "labels of text": (
        lambda d: sources.Files(paths=d.files[:1], labels=["cat"]),
        ValueError,
        "labels 'cat' classes=sorted(set(labels))",
    ),
    "labels of several classes": (
        lambda d: sources.Files(paths=d.files[:2], labels=[[1], [0, 1]]),
        ValueError,
        "labels [1] array (paths, classes)",
    ),
    "labels of a folder": (lambda d: sources.Files(d.folder, labels=[0]), TypeError, "paths="),
    "a TFRecord of a JPEG": (
        lambda d: sources.TFRecord(d.files[0], {"data": "image"}),
        ValueError,
        "00000.jpg JPEG not a TFRecord sources.Files",
    ),
    "a TFRecord of a tar": (
        lambda d: sources.TFRecord(d.tar, {"data": "image"}),
        ValueError,
        "a.tar not a TFRecord sources.Tar",
    ),
    "a TFRecord's folder": (
        lambda d: sources.TFRecord(d.folder, {"data": "image"}),
        OSError,
        "images directory /*",
    ),
    "a tar's folder": (lambda d: sources.Tar(d.folder, FIELDS), OSError, "directory images/*"),
    "fields of a TFRecord as a list": (
        lambda d: sources.TFRecord(d.files[0], ["image"]),
        ValueError,
        "['image'] {'data': 'image/encoded'",
    ),
    "a tar of a JPEG": (lambda d: sources.Tar(d.files[0], FIELDS), ValueError, "00000.jpg tar"),
    "a tar without fields": (
        lambda d: sources.Tar(d.tar, ["jpg"]),
        ValueError,
        "['jpg'] {'data': 'jpg;png'",
    ),
    "swapped pairs": (
        lambda d: sources.Mixture([(0.5, NUMBERS), (0.5, NUMBERS)]),
        TypeError,
        "(source, weight) 0.5",
    ),
    "a dict of weights": (lambda d: sources.Mixture({NUMBERS: 1}), TypeError, "(source, weight)"),
    "weights apart": (
        lambda d: sources.Mixture([NUMBERS, NUMBERS], [1, 1]),
        TypeError,
        "(source, weight)",
    ),
    "arrays in a list": (lambda d: sources.Arrays([np.arange(3)]), TypeError, "dict {"),
    "a generator": (lambda d: sources.Records(iter(range(3))), TypeError, "__len__ list("),
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


def check(program, kind, words, data=None):
    with pytest.raises(kind) as raised:
        program(data)
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize("name, value, cure", ARGUMENTS, ids=[row[0] for row in ARGUMENTS])
def test_arguments_of_other_libraries(name, value, cure):
    check(lambda _: open_numbers(**{name: value}), TypeError, [name, cure])


@pytest.mark.parametrize(
    "owner, name, cure", ATTRIBUTES, ids=[f"{o}.{n}" for o, n, _ in ATTRIBUTES]
)
def test_attributes_of_other_libraries(owner, name, cure):
    if owner in OWNERS:
        check(lambda _: getattr(OWNERS[owner], name), AttributeError, [name, cure])
        return
    with open_numbers() as iterator:
        of = iterator if owner == "iterator" else take.stream(source=NUMBERS, batch_size=2)
        check(lambda _: getattr(of, name), AttributeError, [name, cure])


@pytest.mark.parametrize("mistake", PROGRAMS)
def test_mistakes_name_the_value_and_the_fix(mistake, data):
    program, kind, words = PROGRAMS[mistake]
    check(program, kind, words.split(" "), data)
