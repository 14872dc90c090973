"""Records of HuggingFace data sets, compared with lists of the rows that the library returns."""

import concurrent.futures
import io
import os
import pickle
import warnings

import numpy as np
import pytest
from nvidia.dali import fn
from PIL import Image as Picture

from dalijax import data_iterator
from dalijax.sources import Field, Records

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
# pyarrow warns the library of a deprecated option.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
Features, Image, Value = datasets.Features, datasets.Image, datasets.Value

COUNT = 23
FIELDS = {"data": "image/bytes", "label": "label"}


def jpeg(number):
    file = io.BytesIO()
    Picture.fromarray(np.full((8, 8 + number, 3), 10 * number, np.uint8)).save(file, "jpeg")
    return file.getvalue()


ENCODED = [jpeg(number) for number in range(COUNT)]
ROWS = {
    "image": [
        {"bytes": data, "path": f"{number}.jpg" if number % 3 else None}
        for number, data in enumerate(ENCODED)
    ],
    "label": [7 * number for number in range(COUNT)],
    "text": [f"t{number}" for number in range(COUNT)],
}
KINDS = Features({"image": Image(), "label": Value("int64"), "text": Value("string")})
OTHERS = {"weight": [number / 4 for number in range(COUNT)]}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A data set in memory-mapped files, in several batches of Arrow."""
    path = tmp_path_factory.mktemp("huggingface")
    with datasets.arrow_writer.ArrowWriter(
        path=str(path / "a.arrow"), features=KINDS, writer_batch_size=5
    ) as writer:
        for number in range(COUNT):
            writer.write({key: values[number] for key, values in ROWS.items()})
        writer.finalize()
    return datasets.Dataset.from_file(str(path / "a.arrow"))


FORMS = {
    "plain": lambda ds: ds,
    "in memory": lambda ds: datasets.Dataset.from_dict(ROWS, features=KINDS),
    "not decoded": lambda ds: ds.cast_column("image", Image(decode=False)),
    "shuffled": lambda ds: ds.shuffle(seed=1),
    "selected": lambda ds: ds.select([22, 3, 3, 0, 17]),
    "selected range": lambda ds: ds.select(range(4, 19)),
    "shuffled twice": lambda ds: ds.shuffle(seed=1).select(range(9)).shuffle(seed=2),
    "sharded": lambda ds: ds.shard(4, 1),
    "sorted": lambda ds: ds.sort("label", reverse=True),
    "filtered": lambda ds: ds.filter(lambda label: label % 2 == 0, input_columns="label"),
    "flattened": lambda ds: ds.shuffle(seed=3).flatten_indices(),
    "concatenated": lambda ds: datasets.concatenate_datasets(
        [ds.shuffle(seed=4), ds.select([1, 2]), datasets.Dataset.from_dict(ROWS, features=KINDS)]
    ),
    "columns": lambda ds: datasets.concatenate_datasets(
        [ds, datasets.Dataset.from_dict(OTHERS)], axis=1
    ),
    "renamed twice": lambda ds: ds.rename_column("label", "x").rename_column("x", "label"),
    "large bytes": lambda ds: datasets.Dataset(
        pa.table(
            {
                "image": pa.StructArray.from_arrays(
                    [pa.array(ENCODED, pa.large_binary()), pa.array(["a"] * COUNT)],
                    ["bytes", "path"],
                ),
                "label": pa.array(ROWS["label"], pa.uint16()),
                "text": ROWS["text"],
            }
        )
    ),
}


def rows_of(ds):
    """The rows as the library returns them, with encoded images."""
    if "image" in ds.features and getattr(ds.features["image"], "decode", False):
        ds = ds.cast_column("image", Image(decode=False))
    return [ds[number] for number in range(len(ds))]


def equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert len(first[name]) == len(second[name])
        for value, other in zip(first[name], second[name]):
            np.testing.assert_array_equal(value, other)
            if not isinstance(other, str):
                assert (value.dtype, value.shape) == (other.dtype, other.shape)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_values_of_its_rows(stored, form):
    ds = FORMS[form](stored)
    fields = FIELDS | {"text": "text", "again": "label"}
    source, expected = Records(ds, fields), Records(rows_of(ds), fields)
    assert dict(source.fields) == dict(expected.fields) and len(source) == len(ds)
    order = np.random.default_rng(0).integers(0, len(ds), 40)
    for names in (["data", "label", "text"], ["text"], ["label", "data"], ["again", "label"]):
        equal(source.read(order, names), expected.read(order, names))
    assert source.identity() == expected.identity()


def test_bytes_are_views_and_images_are_not_decoded(stored, monkeypatch):
    monkeypatch.setattr(Image, "decode_example", None)
    source = Records(stored.shuffle(seed=1), FIELDS)
    first, again = (source.read(np.array([4, 20]), ["data"])["data"] for _ in range(2))
    assert all(np.shares_memory(*pair) for pair in zip(first, again))
    assert not any(value.flags.writeable for value in first)


def test_an_image_as_a_whole_is_decoded(stored):
    source = Records(stored)
    assert source.fields["image"] == Field(np.uint8, 3)
    for number, value in zip((9, 2), source.read(np.array([9, 2]), ["image"])["image"]):
        np.testing.assert_array_equal(value, np.asarray(stored[number]["image"]))
    both = Records(stored, {"image": "image", "data": "image/bytes"}).read(np.array([9]), ["data"])
    assert both["data"][0].tobytes() == ENCODED[9]
    with pytest.raises(ValueError, match=r"Did you mean \{'data': 'image/bytes', 'label': 'label'"):
        Records(stored, {"image/bytes": "data", "label": "label"})


def test_formats_and_transforms_keep_their_meaning(stored):
    def transform(batch):
        seen.append(len(batch["label"]))
        return {"data": [bytes([label % 256]) for label in batch["label"]]}

    seen = []
    source = Records(stored.with_transform(transform))
    values = source.read(np.array([5, 1, 5]), ["data"])["data"]
    assert [value.tolist() for value in values] == [[35], [7], [35]]
    assert seen == [1, 3]
    as_numpy = Records(stored.with_format("numpy"), {"image": "image", "label": "label"})
    assert as_numpy.fields["image"] == Field(np.uint8, 3)
    some = stored.with_format(columns=["label"])
    assert dict(Records(some).fields) == {"label": Field(np.int32)}
    with pytest.raises(ValueError, match=r"no 'image/bytes'. It has \['label'\]"):
        Records(some, FIELDS)


NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
FRACTIONS = ("float16", "float32", "float64")


@pytest.mark.parametrize("kind", NUMBERS + FRACTIONS)
def test_numbers_of_every_type(kind):
    values = [True, False, True] if kind == "bool" else [1, 0, 100]
    ds = datasets.Dataset.from_dict({"x": values}, features=Features({"x": Value(kind)}))
    source, expected = Records(ds), Records(rows_of(ds))
    assert dict(source.fields) == dict(expected.fields)
    indices = np.array([2, 0, 1, 2])
    equal(source.read(indices, ["x"]), expected.read(indices, ["x"]))


NOTHING = {"bytes": None, "path": None}
ODD = {
    "an image that is None": ({"image": [ROWS["image"][0], None]}, Image(), {"x": "image/bytes"}),
    "bytes that are None": (
        {"image": [ROWS["image"][0], NOTHING]},
        {"bytes": Value("binary"), "path": Value("string")},
        {"x": "image/bytes"},
    ),
    "only a path": (
        {"image": [ROWS["image"][0], {"bytes": None, "path": "a.jpg"}]},
        Image(),
        {"x": "image/bytes"},
    ),
    "a number that is None": ({"x": [1, None]}, Value("int64"), {"x": "x"}),
    "a truth value that is None": ({"x": [True, None]}, Value("bool"), {"x": "x"}),
    "a fraction that is None": ({"x": [0.5, None]}, Value("float32"), {"x": "x"}),
    "a number that does not fit": ({"x": [1, 1 << 40]}, Value("int64"), {"x": "x"}),
    "a fraction that does not fit": ({"x": [0.5, 1e300]}, Value("float64"), {"x": "x"}),
}


@pytest.mark.parametrize("case", ODD)
def test_a_bad_record_is_reported_as_for_a_list(case):
    columns, feature, fields = ODD[case]
    ds = datasets.Dataset.from_dict(columns, features=Features({next(iter(columns)): feature}))
    source, expected = Records(ds, fields), Records(rows_of(ds), fields)
    equal(source.read(np.array([0, 0]), ["x"]), expected.read(np.array([0, 0]), ["x"]))
    errors = []
    for records in (source, expected):
        with pytest.raises(ValueError, match="record 1") as error:
            records.read(np.array([0, 1]), ["x"])
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_kinds_that_bypass_the_table():
    ds = datasets.Dataset.from_dict({"x": [b"ab", b"c"], "path": ["p", "qr"]})
    kinds = {"x": Field(None), "path": Field(np.uint8, 1)}
    values = Records(ds, kinds=kinds).read(np.array([1]), ["x", "path"])
    assert values["x"] == [b"c"] and values["path"][0].tobytes() == b"qr"


def test_empty_bytes_and_slices_of_tables():
    table = pa.table({"x": [b"skipped", b"", b"ab", b"", b"c"]}).slice(1)
    source = Records(datasets.Dataset(table))
    values = source.read(np.arange(4), ["x"])["x"]
    assert [value.tobytes() for value in values] == [b"", b"ab", b"", b"c"]


LISTS = {
    "fixed": (datasets.List(datasets.List(Value("float32"), length=4)), (0, 4), np.float32),
    "2D": (datasets.Array2D(shape=(None, 4), dtype="int32"), (0, 4), np.int32),
    "varying": (datasets.List(datasets.List(Value("float64"))), (0, 4), np.float64),
    "large": (datasets.LargeList(Value("int16")), (0,), np.int16),
    "struct": ({"y": datasets.List(Value("uint8"))}, (0,), np.uint8),
}


@pytest.mark.parametrize("form", ("plain", "numpy"))
@pytest.mark.parametrize("case", LISTS)
def test_lists_have_the_kinds_of_the_features(case, form):
    feature, shape, dtype = LISTS[case]
    rows = [[], [[1, 2, 3, 4]] if len(shape) == 2 else [5, 6], []]
    values = [{"y": row} for row in rows] if case == "struct" else rows
    ds = datasets.Dataset.from_dict({"x": values}, features=Features({"x": feature}))
    fields = {"x": "x/y" if case == "struct" else "x"}
    source = Records(ds if form == "plain" else ds.with_format("numpy"), fields)
    if form == "plain":
        assert source.fields["x"] == Field(dtype, len(shape))
    dtype = source.fields["x"].dtype
    expected = [np.zeros(shape, dtype), np.array(rows[1], dtype), np.zeros(shape, dtype)]
    equal({"x": source.read(np.arange(3), ["x"])["x"]}, {"x": expected})


def test_a_first_record_without_a_value_is_a_bad_record():
    columns = {"image": [None, ROWS["image"][1]], "x": [None, 1], "y": [None, [[1.0]]]}
    features = {
        "image": Image(),
        "x": Value("int64"),
        "y": datasets.List(datasets.List(Value("float32"))),
    }
    ds = datasets.Dataset.from_dict(columns, features=Features(features))
    source = Records(ds, {"data": "image/bytes", "x": "x", "y": "y"})
    kinds = {"data": Field(np.uint8, 1), "x": Field(np.int32), "y": Field(np.float32, 2)}
    assert dict(source.fields) == kinds
    for name in kinds:
        assert len(source.read(np.array([1]), [name])[name]) == 1
        with pytest.raises(ValueError, match="record 0"):
            source.read(np.array([0]), [name])


TABLE = pa.table(
    {
        "x": pa.chunked_array([[1, 2], [3]]),
        "text": ["a", "b", "c"],
        "data": [b"1", b"22", b""],
        "boxes": pa.array([[], [[1.0, 2.0]], []], pa.list_(pa.list_(pa.float32(), 2))),
        "struct": [{"y": 1}, {"y": 2}, {"y": 3}],
    }
)


@pytest.mark.parametrize(
    "table",
    (TABLE, TABLE.slice(1), TABLE.combine_chunks().to_batches()[0]),
    ids=("", "1:", "batch"),
)
def test_the_rows_of_a_table_are_records(table):
    fields = {"x": "x", "text": "text", "data": "data", "boxes": "boxes", "y": "struct/y"}
    rows = table.to_pylist()
    expected = Records(rows, fields, kinds={"boxes": Field(np.float32, 2)})
    for source in (Records(table, fields), pickle.loads(pickle.dumps(Records(table, fields)))):
        assert dict(source.fields) == dict(expected.fields) and len(source) == len(rows)
        indices = np.arange(len(rows))[::-1]
        equal(source.read(indices, [*fields]), expected.read(indices, [*fields]))
        assert source.identity() == expected.identity()
    with pytest.raises(TypeError, match=r"Use dalijax.sources.Records\(pyarrow.table\("):
        Records(TABLE["x"])


PAIRS = [[ROWS["image"][k] for k in pair] for pair in ((0, 1), (2,), (), (3, 4, 5))]
NESTED = {
    "images": (datasets.List(Image()), PAIRS, "x/{}/bytes"),
    "large": (datasets.LargeList(Image()), PAIRS, "x/{}/bytes"),
    "fixed": (
        datasets.List(datasets.List(Value("int64"), length=2)),
        [[[5, 6], [7, 8]], [[1, 2]], [], [[0, 1]]],
        "x/0/{}",
    ),
    "struct": ({"y": datasets.List(Image())}, [{"y": pair} for pair in PAIRS], "x/y/{}/bytes"),
}


@pytest.mark.parametrize("order", ([0, 1, 2, 3], [3, 1, 2], [0, 2]), ids=str)
@pytest.mark.parametrize("case", NESTED)
def test_values_of_lists_are_read_from_the_table(case, order):
    feature, values, key = NESTED[case]
    ds = datasets.Dataset.from_dict({"x": values}, features=Features({"x": feature})).select(order)
    rows = [{"x": values[k]} for k in order]
    for index in (0, 1):
        fields = {"x": key.format(index)}
        source, expected = Records(ds, fields), Records(rows, fields)
        for number in range(len(order)):
            indices, found = np.array([number]), []
            for records in (source, expected):
                try:
                    found.append(records.read(indices, ["x"])["x"][0].tolist())
                except ValueError as error:
                    found.append(str(error))
            assert found[0] == found[1]


def digest(source):
    values = source.read(np.arange(len(source))[::-1], ["data", "label"])
    return [(data.tobytes(), int(label)) for data, label in zip(values["data"], values["label"])]


def test_pickles_threads_and_forks(stored):
    source = Records(stored.shuffle(seed=5), FIELDS)
    expected = digest(source)
    pickled = pickle.dumps(source)
    assert len(pickled) < 20_000 and digest(pickle.loads(pickled)) == expected
    new = Records(stored.shuffle(seed=5), FIELDS)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(digest, [new] * 32)) == [expected] * 32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks
        child = os.fork()
    if not child:
        os._exit(digest(new) != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_kinds_of_data_sets_that_are_refused(stored):
    with pytest.raises(TypeError, match=r"a data set without streaming=True"):
        Records(stored.to_iterable_dataset())
    splits = datasets.DatasetDict({"train": stored, "test": stored})
    with pytest.raises(TypeError, match=r"one of the data sets \['train', 'test'\].*\['train'\]"):
        Records(splits)


@pytest.mark.parametrize("on_error", ("raise", "mask"))
def test_an_iterator_decodes_the_images_and_handles_bad_records(on_error):
    images = [{"bytes": data, "path": None} for data in ENCODED[:8]]
    images[5] = {"bytes": None, "path": "missing.jpg"}
    ds = datasets.Dataset.from_dict({"image": images}, features=Features({"image": Image()}))

    def graph(data):
        return fn.resize(fn.decoders.image(data), size=(4, 4))

    iterator_fn = data_iterator(
        graph, ["images"], source=Records(ds, {"data": "image/bytes"}), mask="mask"
    )
    iterator = iterator_fn(batch_size=8, shuffle=False, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(Exception, match="'data' of record 5"):
            next(iterator)
        return
    batch = next(iterator)
    assert np.asarray(batch["mask"]).tolist() == [number != 5 for number in range(8)]
    means = np.asarray(batch["images"]).mean(axis=(1, 2, 3))
    good = [number for number in range(8) if number != 5]
    np.testing.assert_allclose(means[good], 10.0 * np.array(good), atol=2)
