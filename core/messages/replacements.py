"""Suggested replacements for names of other libraries, for errors about unknown names."""

from __future__ import annotations

import difflib
import os
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

from .printable import printable

_EPOCHS = (
    "iterator.epochs(num_epochs), or stream(num_epochs, ...) of the iterator function; for a "
    "dataset of Grain or tf.data, its repeat()"
)
_ENDLESS = "stream(...) of the iterator function, which has no end"
_DEPTH = ("prefetch=", "prefetch_queue_depth=")
_THREADS = "num_threads=, DALI's threads (read_threads of a source sets its reading threads)"
_SHUFFLED = "shuffle=True, which shuffles all records of a source (random_shuffle=True of a reader)"
_ON_DEVICE = "nothing, omit it: batches are already on their device"
_GRAPH = "DALI's operators in the graph function"
_SHARDING = "sharding=NamedSharding(mesh, PartitionSpec('data'))"
_SOURCE = "source=, one of dalijax.sources"
_SAMPLER = "sampler=grain.samplers.IndexSampler(..., {})"
_PIPE = "ds.pipe(...) of Grain's dataset, or DALIIterDataset(iterator_function, source=...)"
_FOLDER = ("folder=", "paths=", _SOURCE)
_CALL = "of the iterator function that data_iterator returns"

# Arguments of other libraries, with replacements. Of several replacements, errors suggest the first
# that is an argument of the function.
ARGUMENTS: Mapping[str, str | tuple[str, ...]] = {
    "drop_last": "drop_remainder=True",
    **dict.fromkeys(
        ("num_epochs", "epochs", "n_epochs"),
        (_SAMPLER.format("num_epochs=3"), _EPOCHS),
    ),
    "repeat": _ENDLESS,
    **dict.fromkeys(("prefetch", "prefetch_factor", "prefetch_size", "buffer_size"), _DEPTH),
    **dict.fromkeys(("shuffle_buffer_size", "shuffle_buffer", "shuffle_files"), _SHUFFLED),
    **dict.fromkeys(("num_workers", "worker_count", "workers"), ("worker_count=", _THREADS)),
    **dict.fromkeys(("threads", "num_parallel_calls"), _THREADS),
    **dict.fromkeys(("pin_memory", "persistent_workers", "non_blocking"), _ON_DEVICE),
    "device_put": "sharding=, or nothing: jax.device_put(batch) places a batch of NumPy arrays",
    "enable_profiling": "dalijax.profile.profile(iterator)",
    "cache": "nothing, omit it: the operating system caches files in memory",
    **dict.fromkeys(("collate_fn", "transform", "map_fn"), _GRAPH),
    **dict.fromkeys(("transforms", "operations", "transformations"), ("operations=", _GRAPH)),
    **dict.fromkeys(("batch", "bs", "global_batch_size"), "batch_size="),
    "mesh": _SHARDING,
    "device": "device_id=, None for the CPU, or sharding=",
    "gpu": "device_id=",
    **dict.fromkeys(("dataset", "data_source"), ("data_source=", _SOURCE)),
    "source": ("data_source=", "sources=", "paths=", _PIPE),
    "mask": ("pad='mask'", "mask=True of data_iterator"),
    "last_batch_policy": ("drop_remainder=True, or pad='mask'", f"last_batch_policy= {_CALL}"),
    **dict.fromkeys(("path", "root", "folder", "data_dir", "file_root", "directory"), _FOLDER),
    **dict.fromkeys(("files", "filenames", "urls", "file_list"), ("paths=", _SOURCE)),
    **dict.fromkeys(("exts", "ext"), ("fields=", "extensions=", "output_map=")),
    "shuffle": (
        _SAMPLER.format("shuffle=True"),
        f"shuffle= {_CALL}, or ds.shuffle() of Grain's dataset",
    ),
    **dict.fromkeys(("start_step", "initial_step"), "seek_step(n) of the stream"),
    **dict.fromkeys(("num_steps", "steps"), "itertools.islice(stream, num_steps)"),
    **dict.fromkeys(("n", "num_layers"), ("num_ops=",)),
    "m": ("magnitude=",),
    **dict.fromkeys(("p", "prob"), ("probability=", "flip=")),
    **dict.fromkeys(("rng", "key", "random_seed"), "seed=, a whole number"),
    **dict.fromkeys(("outputs", "output_names", "keys"), "output_map="),
    "compression_type": "nothing, omit it, and decompress the files: they have no random access",
    "worker_init_fn": "nothing, omit it: there are no worker processes",
    "sampler": "shuffle= (a source defines its own order)",
}

_GLOBAL = (
    "a dalijax.fn.jax_function of the global batch (docs/functions.md), or the training step, "
    "since it mixes records"
)
_FLIP = "flip(images, draw=draw), with vertical=True for top and bottom"
_COCO = "Coco(annotations, images)"
_FILES, _TAR, _TFRECORD = "Files(folder)", "Tar(paths, fields)", "TFRecord(paths, fields)"
_RLDS = "RLDS(paths, {'image': 'steps/observation/image'})"
_RECORDS, _ARRAYS = "Records(dataset), of records by number", "Arrays({'x': array})"
_MIXTURE = "Mixture([(source, weight), ...])"
_SELECTION = "Selection(source, records), with a boolean for each record"
_GET, _SET = "json.dump(iterator.get_state(), file)", "iterator.set_state(state)"
_LENGTH = "len(iterator)"

# Attributes of other libraries, with replacements: a table for each object that lacks them.
AUGMENT: Mapping[str, str] = {
    **dict.fromkeys(("mixup", "cutmix"), _GLOBAL),
    **dict.fromkeys(("randomhorizontalflip", "randomverticalflip", "horizontalflip"), _FLIP),
    **dict.fromkeys(("hflip", "vflip", "randomflip", "randomflipleftright"), _FLIP),
    "totensor": "normalize(images, mean, std); batches are jax.Arrays",
    "resize": "nvidia.dali.fn.resize(images, size=(224, 224))",
    **dict.fromkeys(
        ("randomrotation", "rotate"),
        "nvidia.dali.fn.rotate(images, angle=draw.uniform(-10, 10))",
    ),
    **dict.fromkeys(("randomgrayscale", "togray"), "grayscale"),
    "randomsolarize": "solarize",
    "randomioucrop": "iou_window",
    "scalejitter": "scale_window",
    **dict.fromkeys(("randomshortestsize", "resizeshortestedge"), "fit_window"),
    "randomaffine": "affine_window",
    "sanitizeboundingboxes": "min_size= of window.boxes, of any window",
    "todtype": "normalize(images, mean, std)",
    "randomapply": "the argument probability= of a function, as in color_jitter",
    **dict.fromkeys(("compose", "sequential"), "the functions, called one after another"),
    "trivialaugmentwide": "trivial_augment",
    **dict.fromkeys(("cutout", "erase"), "random_erasing"),
}
SOURCES: Mapping[str, str] = {
    **dict.fromkeys(("imagefolder", "datasetfolder", "folder", "directory", "images"), _FILES),
    **dict.fromkeys(("cocodetection", "cocodataset", "lvis"), _COCO),
    **dict.fromkeys(("webdataset", "tardataset", "wds"), _TAR),
    **dict.fromkeys(("tfrecorddataset", "tfrecords"), _TFRECORD),
    **dict.fromkeys(("rldsdataset", "episodes", "trajectories", "droid", "oxe"), _RLDS),
    **dict.fromkeys(("huggingface", "hf", "arrayrecord", "arrayrecorddatasource"), _RECORDS),
    **dict.fromkeys(("parquetiterdataset", "iterabledataset"), "Parquet(paths, fields)"),
    **dict.fromkeys(("tfds", "lmdb", "hdf5", "csv", "json", "dataset"), _RECORDS),
    **dict.fromkeys(("grain", "torch", "loaddataset", "randomaccessdatasource"), _RECORDS),
    **dict.fromkeys(("numpy", "npy", "tensordataset", "fromtensorslices", "array"), _ARRAYS),
    **dict.fromkeys(("concatdataset", "concatenate", "interleave", "chain", "mix"), _MIXTURE),
    **dict.fromkeys(("subset", "filter", "select", "randomsplit", "split", "slice"), _SELECTION),
}
ITERATOR: Mapping[str, str] = {
    "take": "itertools.islice(iterator, n)",
    "map": "DALI's operators in the graph function, source.map(f), or map(f, iterator)",
    "filter": "source=sources.Selection(source, records)",
    "shuffle": _SHUFFLED,
    **dict.fromkeys(("statedict", "save", "savestate", "checkpoint"), _GET),
    **dict.fromkeys(("loadstatedict", "restore", "load", "loadstate"), _SET),
    **dict.fromkeys(("repeat", "cycle"), _ENDLESS),
    **dict.fromkeys(("batch", "setbatchsize"), "batch_size= of the call"),
    "prefetch": "prefetch_queue_depth= of the call",
    "cache": "nothing: the operating system caches files in memory",
    "shard": _SHARDING,
    "enumerate": "enumerate(iterator)",
    "zip": "zip(iterator, other)",
    **dict.fromkeys(("asnumpyiterator", "numpy"), "as_numpy=True of the call"),
    **dict.fromkeys(("cardinality", "numbatches", "stepsperepoch"), _LENGTH),
    "getnext": "next(iterator)",
    **dict.fromkeys(("spec", "outputtypes", "outputshapes"), "element_spec"),
    "setepoch": "seek(epoch), over a source",
    "seek": "seek_step(step)",
    "stream": _ENDLESS,
    "epochs": "num_epochs= of stream(...), or epochs(num_epochs) of an iterator",
}
SOURCE: Mapping[str, str] = {
    **{name: ITERATOR[name] for name in ("filter", "shuffle", "repeat", "batch", "prefetch")},
    **dict.fromkeys(
        ("take", "select", "skip", "split", "randomsplit", "traintestsplit"), _SELECTION
    ),
    **dict.fromkeys(("decode", "settransform", "withtransform"), _GRAPH),
    **dict.fromkeys(("concatenate", "interleave"), _MIXTURE),
    "shard": _SHARDING,
    **dict.fromkeys(("features", "elementspec", "columnnames"), "fields"),
}
# Methods of Grain's MapDataset that its IterDataset lacks.
BATCHES: Mapping[str, str] = dict.fromkeys(
    ("shuffle", "repeat", "slice"),
    "the method of the MapDataset before the transform, as in ds.shuffle().repeat(90).pipe(...); "
    "of DALIIterDataset, use the arguments shuffle= and num_epochs=",
)
# Operators, in place of functions of other libraries that have no similar name in DALI.
OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("decodeimage", "decodejpeg", "imdecode", "imread"), "fn.decoders.image"),
    **dict.fromkeys(("totensor", "astype", "tofloat", "convertimagedtype"), "fn.cast"),
    **dict.fromkeys(("randomcrop", "centercrop"), "dalijax.augment"),
    **dict.fromkeys(("hflip", "vflip", "flipleftright", "randomhorizontalflip"), "fn.flip"),
    **dict.fromkeys(("permute", "t", "swapaxes", "moveaxis"), "fn.transpose"),
    **dict.fromkeys(("float", "half", "int", "long"), "fn.cast"),
    **dict.fromkeys(("view", "flatten", "ravel"), "fn.reshape"),
    "unsqueeze": "fn.expand_dims",
    **dict.fromkeys(("cuda", "to"), ".gpu()"),
    **dict.fromkeys(("size", "height", "width"), ".shape()"),
    **dict.fromkeys(("clip", "clamp"), "nvidia.dali.math.clamp"),
    "std": "fn.reductions.std_dev",
    "var": "fn.reductions.variance",
}
_GRAIN, _TFDATA = "dalijax.adapters.grain", "dalijax.adapters.tfdata"
PACKAGE: Mapping[str, str] = {
    **{name.lower(): f"{_GRAIN}.{name}" for name in ("DALITransform", "DALIIterDataset")},
    "dalidataloader": f"{_GRAIN}.DALIDataLoader",
    "dalidataset": f"{_TFDATA}.DALIDataset",
    "dalidatasetiterator": "dalijax.adapters.clu.DALIDatasetIterator",
    "reportinput": "dalijax.adapters.clu.ReportInput",
    **dict.fromkeys(("dataloader", "loader", "dataset"), "data_iterator"),
    "pipelinedef": "data_iterator, which takes the plain function",
}


def suggest_name(name: str, names: Collection[str], table: Mapping[str, str]) -> str:
    """Returns a suggestion for an unknown name: "use flip", "did you mean 'Tar'?", or "".

    Args:
        name: The name, in any spelling: RandomResizedCrop, random_resized_crop.
        names: The existing names.
        table: Replacements by the names of other libraries, lower case without underscores.
    """
    spelling = plain(name)
    spelled = [existing for existing in names if plain(existing) == spelling]
    if spelled:
        return f"use {spelled[0]}"
    if spelling in table:
        return f"use {table[spelling]}"
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else ""


def suggest_argument(name: str, names: Collection[str]) -> str:
    """Returns a suggestion for an unknown argument: "did you mean 'seed'?", or "".

    Args:
        name: The unknown argument.
        names: The arguments that the function accepts.
    """
    cures = ARGUMENTS.get(name)
    if cures is None:
        close = difflib.get_close_matches(name, names, 1)
        return f"did you mean {close[0]!r}?" if close else ""
    if isinstance(cures, str):
        return f"instead of {name}, use {cures}"
    existing = (cure for cure in cures if cure.partition("=")[0] in names)
    return f"instead of {name}, use {next(existing, cures[-1])}"


def no_attribute(
    owner: str, name: str, names: Collection[str], table: Mapping[str, str]
) -> AttributeError:
    """Returns the error for a missing attribute, with a suggested replacement."""
    public = sorted(existing for existing in names if not existing.startswith("_"))
    cure = "" if name.startswith("_") else suggest_name(name, public, table)
    return AttributeError(f"{owner} has no attribute {name!r}" + (f": {cure}" if cure else ""))


# Tables and data sets of other libraries, by the names of a module and a class, and the source that
# replaces them.
_TABLES: Mapping[tuple[str, str], str] = {
    ("pandas", "DataFrame"): "Records(frame.to_dict('records'))",
    ("pandas", "Series"): "Records(series.to_list())",
    ("polars", "DataFrame"): "Records(frame.to_arrow())",
    ("polars", "LazyFrame"): "Records(frame.collect().to_arrow())",
    ("polars", "Series"): "Records(series.to_list())",
    ("pyarrow", "Table"): "Records(table)",
    ("pyarrow", "RecordBatch"): "Records(batch)",
    ("pyarrow", "Array"): "Records(pyarrow.table({'x': array}))",
    ("pyarrow", "ChunkedArray"): "Records(pyarrow.table({'x': array}))",
    ("pyarrow", "Dataset"): "Records(dataset.to_table())",
    ("datasets", "DatasetDict"): "Records(dataset['train'])",
    ("datasets", "IterableDataset"): (
        "Parquet(paths) of its files, or Records of a data set without streaming=True"
    ),
    ("tensorflow", "DatasetV2"): "Records(list(dataset.as_numpy_iterator()))",
    ("builtins", "set"): "Records(sorted(values)), since a set has no order",
    ("builtins", "frozenset"): "Records(sorted(values)), since a set has no order",
}
# The source for a file, by its extension.
_FILES_OF_RECORDS: Mapping[str, str] = {
    "parquet": "Parquet({})",
    "csv": "Records(datasets.Dataset.from_csv({}))",
    "json": "Records(datasets.Dataset.from_json({}))",
    "jsonl": "Records(datasets.Dataset.from_json({}))",
    "arrow": "Records(datasets.Dataset.from_file({}))",
    "array_record": "Records(grain.sources.ArrayRecordDataSource({}))",
    "npy": "Arrays({{'x': numpy.load({}, mmap_mode='r')}})",
}


def suggest_table(value: Any) -> str:
    """Returns code that creates a source of a table, a data set or a path; "" for other values."""
    if isinstance(value, (str, bytes, os.PathLike)):
        return source_call(value)
    if getattr(getattr(value, "dtype", None), "names", None):  # a structured array of NumPy
        return "sources.Arrays({name: array[name] for name in array.dtype.names})"
    for kind in type(value).__mro__:
        call = _TABLES.get((kind.__module__.partition(".")[0], kind.__name__))
        if call is not None:
            return f"sources.{call}"
    return ""


def suggest_source(value: Any) -> str:
    """Returns a suggestion of the source to create from a value that is not a source."""
    if call := suggest_table(value):
        return f"create one with dalijax.{call}"
    if isinstance(value, type):
        return f"create an instance, e.g. {value.__name__}(...)"
    if isinstance(value, Mapping) or hasattr(value, "shape"):
        return "create one with dalijax.sources.Arrays({'x': array})"
    if hasattr(value, "__next__"):
        return (
            "an iterator has no random access. Pass its records, e.g. by "
            "dalijax.sources.Records(list(...))"
        )
    if type(value).__module__.partition(".")[0] == "grain":
        return (
            "pass dalijax.sources.Records(...) of its data source, or use "
            "dalijax.adapters.grain.DALITransform to keep Grain's order of records"
        )
    return (
        "wrap any sequence of records (__len__ and __getitem__) in dalijax.sources.Records(...), "
        "or subclass dalijax.sources.Source"
    )


def source_call(path: str | bytes | os.PathLike[Any]) -> str:
    """Returns code that creates a source for a path, such as "sources.Files('train')"."""
    text = printable(path)
    name = text.rpartition("/")[2].lower()
    form = _FILES_OF_RECORDS.get(name.rpartition(".")[2])
    if form is not None:
        call = form.format(repr(text))
    elif ".tar" in name:
        call = f"Tar({text!r}, {{'data': 'jpg', 'label': 'cls'}})"
    elif "tfrecord" in name:
        call = f"TFRecord({text!r}, {{'data': 'image/encoded'}})"
    else:
        call = f"Files({text!r})"
    return f"sources.{call}"


class _Uncallable(types.ModuleType):
    """A module named like its function; calling it raises an error that names the import."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__
        function = name.rpartition(".")[2]
        raise TypeError(
            f"{name} is a module. Write `from {name} import {function}`, and call that function"
        )


def not_callable(module: str) -> None:
    """Makes calls of a module raise a TypeError that names the import of its function."""
    sys.modules[module].__class__ = _Uncallable


def plain(name: str) -> str:
    """Returns a name in lower case without underscores, as in the tables of replacements."""
    return name.replace("_", "").lower()
