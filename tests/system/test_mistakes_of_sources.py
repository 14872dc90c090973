"""Mistakes of newcomers with sources: each raises an error that names the value and the fix."""

import pathlib

import numpy as np
import pytest
from mistakes import (
    BATCH,
    COUNT,
    NUMBERS,
    check,
    grain_records,
    label_reader,
    open_numbers,
    same,
    take,
    with_reader,
)
from nvidia.dali import pipeline_def

from dalijax import data_iterator, sources
from dalijax import tune as tune_module
from tars import FIELDS


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


PROGRAMS = {
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
}


@pytest.mark.parametrize("mistake", PROGRAMS)
def test_mistakes_name_the_value_and_the_fix(mistake, eight_images):
    program, kind, words = PROGRAMS[mistake]
    check(program, kind, words.split(" "), eight_images)
