"""Records: keys that a graph takes, keys that bypass it, and errors about unequal records."""

import collections
import dataclasses
import pathlib

import grain
import numpy as np
import pytest
from grain.experimental import ShapeDtypeStruct
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn, types
from PIL import Image

import dalijax
from conftest import write_jpegs
from dalijax import data_iterator
from dalijax.adapters.grain import DALITransform
from dalijax.core.feeding.schema import Column, described, schema_of, stacked
from dalijax.core.formats.field import Field
from dalijax.core.sources.values import leaf
from dalijax.sources import Records

I8 = np.dtype(np.uint8)
I32 = np.dtype(np.int32)


def as_object_array(value):
    """Stores bytes so that NumPy keeps their trailing NULs."""
    array = np.empty((), object)
    array[()] = value
    return array


# Pure functions


@pytest.mark.parametrize("data", (b"", b"a", b"a\0\0", b"\0", bytes(range(256))))
@pytest.mark.parametrize("kind", (bytes, bytearray, memoryview, as_object_array))
def test_bytes_are_uint8_of_their_full_length(data, kind):
    array = leaf(kind(data))
    assert array.dtype == I8 and array.tolist() == list(data)


def test_memoryviews_of_any_order_are_their_bytes():
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    for view in (memoryview(array), memoryview(array).toreadonly()):
        assert leaf(view).tobytes() == bytes(view)


@pytest.mark.parametrize("text", ("", "a", "é😀\0"))
def test_text_is_utf8(text):
    assert leaf(text).tolist() == list(text.encode()) == leaf(np.str_(text)).tolist()


@pytest.mark.parametrize(
    "value", (3, 2.5, True, np.float16(2), [1, 2], [[1.0]], np.zeros((2, 0), np.int8))
)
def test_numbers_are_converted_like_numpy(value):
    array = leaf(value)
    np.testing.assert_array_equal(array, np.asarray(value))
    assert array.dtype == np.asarray(value).dtype


@pytest.mark.parametrize("value", (None, 1j, ["a"], np.array([b"x"]), np.array([None])))
def test_values_that_no_pipeline_takes_are_refused(value):
    with pytest.raises(TypeError, match="not supported by DALI") as error:
        leaf(value)
    assert repr(value)[:20] in str(error.value)


@pytest.mark.parametrize("value", (np.array([b"x"]), np.array(["x"]), [b"x", b"y"]))
def test_a_batch_of_files_before_dali_is_named(value):
    with pytest.raises(TypeError, match="If it is a batch of files or texts, do not batch before"):
        leaf(value)


RECORD = {"image": b"abc", "number": np.int32(3), "name": "x"}
LEARNT = [
    (lambda image: 0, RECORD, {}, ("image",), ("number", "name")),
    (lambda name, image: 0, RECORD, {}, ("image", "name"), ("number",)),
    (lambda image, size=3: 0, RECORD, {}, ("image",), ("number", "name")),
    (lambda image, number=3: 0, RECORD, {}, ("image", "number"), ("name",)),
    (lambda image, size: 0, RECORD, {"size": 3}, ("image",), ("number", "name")),
    (lambda *, image: 0, RECORD, {}, ("image",), ("number", "name")),
    (lambda record: 0, RECORD, {}, None, ()),
    (lambda record, size=3: 0, RECORD, {}, None, ()),
    (lambda data: 0, b"abc", {}, None, ()),
    (lambda data, size=3: 0, b"abc", {}, None, ()),
    (lambda data, size: 0, b"abc", {"size": 3}, None, ()),
    (lambda data=None: 0, b"abc", {}, None, ()),
]


@pytest.mark.parametrize("function,record,call,taken,passed", LEARNT)
def test_parameters_take_keys_and_other_keys_bypass_them(function, record, call, taken, passed):
    schema = schema_of(record, function, call)
    assert schema.argument_keys == taken and schema.passed == passed
    kinds = {"image": (I8, 1), "number": (I32, 0), "name": (I8, 1), "": (I8, 1)}
    for column in schema.columns:
        assert (column.field.dtype, column.field.ndim) == kinds["/".join(column.path)]
    whole = taken is None and isinstance(record, dict)
    paths = [(k,) for k in (sorted(record) if whole else taken or ())]
    assert [column.path for column in schema.columns] == (paths or [()])


REFUSED = [
    (lambda image, size: 0, RECORD, {}, r"needs \['size'\] of the record's keys"),
    (lambda a, b: 0, RECORD, {}, r"needs \['a', 'b'\]"),
    (lambda: 0, RECORD, {}, "needs at least one of the record's keys.*image.*name.*number"),
    (lambda image: 0, RECORD, {"image": 3}, "gets.*image.*records have these keys, too"),
    (lambda a, b: 0, b"abc", {}, r"must have a single parameter.*\['a', 'b'\]"),
    (lambda: 0, b"abc", {}, "must have a single parameter"),
    (lambda name: 0, {"name": None}, {}, "not supported by DALI"),
]


@pytest.mark.parametrize("function,record,call,words", REFUSED)
def test_functions_that_match_no_record_are_refused(function, record, call, words):
    with pytest.raises(TypeError, match=words):
        schema_of(record, function, call)


LEAVES = st.one_of(
    st.binary(max_size=5), st.text(max_size=5), st.integers(-9, 9), st.floats(-9, 9), st.booleans()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1),
    max_leaves=8,
)


def flat(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key in tree for k, v in flat(tree[key], (*path, key)).items()}


@settings(max_examples=60)
@given(TREES)
def test_the_function_gets_the_record_s_structure(tree):
    schema = schema_of(tree, lambda whole: 0, {})
    args, kwargs = schema.arguments([column.path for column in schema.columns])
    assert kwargs == {} and len(args) == 1
    assert flat(args[0]) == {path: path for path in flat(tree)}
    assert [column.path for column in schema.columns] == sorted(flat(tree))
    for index, (path, value) in enumerate(sorted(flat(tree).items())):
        for array in schema.column(index, [tree, tree]):
            np.testing.assert_array_equal(array, leaf(value), str(path))


def test_a_given_spec_replaces_the_first_record():
    spec = {"a": ShapeDtypeStruct((None, 3), np.int16), "b": np.zeros(2), "c": b""}
    schema = schema_of({"ignored": 1}, lambda a, b: 0, {}, spec)
    assert schema.columns == (
        Column(("a",), Field(np.int16, 2), sizes=(3,)),
        Column(("b",), Field(np.float64, 1)),
    )
    assert schema.passed == ("c",)


OTHERS = [
    ({"a": {}}, "record 1 of the batch has no 'a/b', which the first record has"),
    ({"a": 3}, "record 1 of the batch has no 'a/b'"),
    ({}, "record 1 of the batch has no 'a/b'"),
    ({"a": {"b": np.int64(3)}}, "a/b is int64 with 0 dimensions in record 1.*int32 with 0"),
    ({"a": {"b": np.zeros(2, np.int32)}}, "a/b is int32 with 1 dimensions in record 1"),
]


@pytest.mark.parametrize("other,words", OTHERS)
def test_records_unlike_the_first_are_named(other, words):
    first = {"a": {"b": np.int32(3)}}
    schema = schema_of(first, lambda whole: 0, {})
    with pytest.raises(ValueError, match=words):
        schema.column(0, [first, other])


@settings(max_examples=50)
@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=4)), min_size=1, max_size=5))
def test_texts_and_bytes_are_batched_as_they_are(values):
    for own in (values, [as_object_array(value) for value in values]):
        made = stacked(own, "k")
        assert made.dtype == object and made.shape == (len(values),)
        assert [type(v) for v in made] == [type(v) for v in values] and list(made) == values


@pytest.mark.parametrize("dtype", (np.bool_, np.int8, np.float16, np.int64))
@pytest.mark.parametrize("shape", ((), (1,), (2, 0), (2, 3)))
def test_numbers_are_stacked(dtype, shape):
    values = [np.full(shape, k % 2, dtype) for k in range(3)]
    made = stacked([{"n": {"k": v}} for v in values], "top")["n"]["k"]
    np.testing.assert_array_equal(made, np.stack(values))
    assert made.dtype == dtype


def test_tuples_are_kept():
    pair = collections.namedtuple("pair", ["a", "b"])
    assert type(stacked([(1, b"x"), (2, b"y")], "top")) is tuple
    made = stacked([pair(1, b"x"), pair(2, b"y")], "top")
    assert type(made) is pair and made.a.tolist() == [1, 2] and made.b.tolist() == [b"x", b"y"]


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"'top/k' bypasses the graph.*\(2,\).*\(3,\)"):
        stacked([{"k": np.zeros(2)}, {"k": np.zeros(3)}], "top")


SAID = [
    (b"abc\0", r"bytes of 4 bytes, first b'abc\x00'"),
    ({"image": b"x" * 40}, f"image of 40 bytes, first b'{'x' * 12}'"),
    ({"image": as_object_array(b"abc")}, "image of 3 bytes, first b'abc'"),
    ({"image": np.frombuffer(b"abc", np.uint8)}, "image of 3 bytes, first b'abc'"),
    ({"a": {"key": "x.jpg"}, "n": 3}, "a/key 'x.jpg'; n 3"),
    (np.zeros((2, 3)), "array of shape (2, 3)"),
    ({"long": "x" * 500}, "long 'xxxx"),
]


@pytest.mark.parametrize("record,words", SAID)
def test_a_record_is_described_in_few_words(record, words):
    assert described(record).startswith(words) and len(described(record)) < 200


# Through Grain and DALI


def through(records, graph, names, **options):
    options = {"batch_size": 2, "num_threads": 1, **options}
    transform = DALITransform(graph, output_map=names, **options)
    return iter(grain.MapDataset.source(records).pipe(transform))


def test_ragged_bytes_keep_their_nulls_inside_and_outside_the_graph():
    data = [b"a\0\0", b"\0", b"abcdef\0", b"x"]
    records = [{"data": d, "beside": d, "text": f"é{i}"} for i, d in enumerate(data)]
    batches = list(through(records, lambda data: (data.shape(), fn.pad(data)), ["n", "x"]))
    for k, batch in enumerate(batches):
        own = data[2 * k : 2 * k + 2]
        assert batch["n"].ravel().tolist() == [len(d) for d in own]
        assert [row.tobytes() for row in batch["x"]] == [
            d.ljust(max(map(len, own)), b"\0") for d in own
        ]
        assert list(batch["beside"]) == own and batch["beside"].dtype == object
        assert list(batch["text"]) == [f"é{2 * k}", f"é{2 * k + 1}"]


@pytest.mark.parametrize(
    "dtype", (np.bool_, np.uint8, np.int16, np.int64, np.float16, np.float32, np.float64)
)
@pytest.mark.parametrize("shape", ((), (3,), (2, 1, 2)))
def test_every_dtype_and_rank_is_delivered(dtype, shape):
    arrays = [np.full(shape, k % 2, dtype) for k in range(3)]
    got = list(through(arrays, lambda one: one, ["x"]))
    assert [len(batch["x"]) for batch in got] == [2, 1]
    made = np.concatenate([batch["x"] for batch in got])
    np.testing.assert_array_equal(made, np.stack(arrays))
    assert made.dtype == dtype


def test_nested_records_keep_their_structure():
    records = [{"in": {"a": np.int32(k), "b": {"c": [k, k]}}, "out": {"d": k}} for k in range(4)]

    def graph(whole):
        return whole["in"]["a"] + 1, whole["in"]["b"]["c"], whole["out"]["d"]

    for k, batch in enumerate(through(records, graph, ["a", "c", "d"])):
        assert batch["a"].ravel().tolist() == [2 * k + 1, 2 * k + 2]
        assert batch["c"].tolist() == [[2 * k] * 2, [2 * k + 1] * 2]
        assert set(batch) == {"a", "c", "d"}


def test_arguments_of_the_graph_are_not_keys():
    records = [{"x": np.int32(k), "factor": k} for k in range(2)]
    without = [{"x": record["x"]} for record in records]
    (batch,) = through(without, lambda x, factor: x * factor, ["y"], factor=3)
    assert batch["y"].ravel().tolist() == [0, 3]
    with pytest.raises(TypeError, match="factor.*as arguments"):
        next(through(records, lambda x, factor: x * factor, ["y"], factor=3))


def test_a_spec_adds_what_the_first_record_lacks():
    # The first record is int64; without a spec, the second record would be wrong.
    records = [np.int64(1), np.int32(2), np.int32(3)]
    with pytest.raises(ValueError, match="int64 with 0 dimensions in record 0"):
        next(through(records, lambda x: x, ["y"], element_spec=ShapeDtypeStruct((), np.int32)))
    with pytest.raises(ValueError, match="int32 with 0 dimensions in record 1.*int64"):
        next(through(records, lambda x: x, ["y"]))


ROWS = [[[0.0, 0, 1, 1]], [], [[0.0, 0, 1, 1], [1.0, 1, 2, 2]]]


def boxes(x):
    padded = fn.pad(fn.cast(x, dtype=types.FLOAT), axes=[0], shape=[2])
    return {"n": x.shape(dtype=types.INT32), "x": padded}


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("order", ((0, 1, 2), (1, 1, 1, 0, 2), (1,) * 40 + (2,)), ids=len)
@pytest.mark.parametrize("nested", (False, True))
def test_an_empty_list_has_the_kind_of_the_next_records(order, size, nested):
    records = [{"x": {"y": ROWS[k], "z": []}} if nested else {"x": ROWS[k]} for k in order]
    graph = (lambda x: boxes(x["y"])) if nested else boxes
    batches = list(through(records, graph, [], batch_size=size, pad="mask", on_error="mask"))
    rows = [(batch, row) for batch in batches for row in range(size)][: len(order)]
    for (batch, row), k in zip(rows, order):
        assert batch["mask"][row] and batch["n"][row].tolist() == [len(ROWS[k]), 4]
        np.testing.assert_array_equal(batch["x"][row], [*ROWS[k], [0] * 4, [0] * 4][:2])


@pytest.mark.parametrize("graph, name", ((boxes, "x"), (lambda one: boxes(one["x"]), "x")))
def test_lists_that_are_all_empty_are_refused_with_a_cure(graph, name):
    records = [{"x": []}] * 90
    options = {"pad": "mask", "on_error": "mask"}
    with pytest.raises((TypeError, ValueError), match=f"^{name} is an empty list.* element_spec="):
        next(through(records, graph, [], **options))
    spec = {"x": ShapeDtypeStruct((None, 4), np.float32)}
    arrays = [{"x": np.zeros((0, 4), np.float32)}] * 3
    for rows, spec in ((records, spec), (arrays, None)):
        batch = next(through(rows, graph, [], element_spec=spec, **options))
        assert batch["n"].tolist() == [[0, 4]] * 2 and batch["mask"].all()


WRONG = [
    ([{"x": 1, "k": 1}, {"k": 1}], "record 1 of the batch has no 'x'"),
    ([{"x": 1, "k": 1}, {"x": 1.5, "k": 1}], "x is float64 with 0 dimensions in record 1"),
    ([{"x": [1], "k": 1}, {"x": [1, 2], "k": 1}], "output 'y' is ragged"),
    (
        [{"x": 1, "k": [1]}, {"x": 1, "k": [1, 2]}],
        "'k' bypasses the graph.*different",
    ),
    ([{"x": 1, "y": 1}, {"x": 1, "y": 1}], "key 'y' bypasses the graph, but an output"),
    ([{"x": 1, "k": 1}, {"x": 1}], "k"),
    ([{"x": np.complex64(1)}], "not supported by DALI"),
    ([{"x": [[1], [2, 3]]}], "x of the first record can't be converted: its lists differ"),
    ([{"x": [1]}, {"x": [None]}], "x in record 1 of the batch can't be converted: .None."),
    ([{"x": [1]}, {"x": [0.5]}], "x is float64 with 1 dimensions in record 1"),
    ([{"x": 1}, {"x": [1]}], "x is int64 with 1 dimensions in record 1"),
    ([{"x": [1]}, {"x": np.ma.array([1], mask=[1])}], "x in record 1 of the batch .* masked el"),
    ([{"x": 1, "k": np.ma.masked}], "'k' bypasses the graph, but it has masked elements"),
]


@pytest.mark.parametrize("records,words", WRONG)
def test_records_that_cannot_be_batched_are_named(records, words):
    with pytest.raises((ValueError, TypeError, KeyError), match=words):
        next(through(records, lambda x: x, ["y"]))


def test_a_missing_key_that_bypasses_the_graph_is_reported():
    with pytest.raises(ValueError, match="record 1 of the batch has no 'k'"):
        next(through([{"x": 1, "k": 1}, {"x": 1}], lambda x: x, ["y"]))


@pytest.mark.parametrize("values", [(1, 1.5), ("a", None), (True, 2), ("a", 2)])
def test_a_bypassing_key_of_several_kinds_is_batched_like_grain(values):
    records = [{"x": 1, "k": value} for value in values]
    got = next(through(records, lambda x: x, ["y"]))["k"]
    want = next(iter(grain.MapDataset.source(records).batch(2)))["k"]
    assert got.tolist() == want.tolist() or values == ("a", 2)  # NumPy would convert it to text
    assert got.dtype == want.dtype or want.dtype.kind == "U"


def test_integers_that_fit_no_dtype_are_refused():
    records = [{"x": 1, "k": np.uint64(1 << 63)}, {"x": 1, "k": np.int64(-1)}]
    with pytest.raises(ValueError, match=r"'k' .*integers of the dtypes \['int64', 'uint64'\]"):
        next(through(records, lambda x: x, ["y"]))


def test_paths_are_opened_in_the_graph(tmp_path):
    paths = write_jpegs(tmp_path / ("é" * 60), 6)  # the end of a long path is in the error

    def opened(path):
        return fn.decoders.image(dalijax.fn.read_file(path))[0, 0, 0]

    got = through(paths, opened, ["x"], batch_size=4)
    assert [batch["x"].tolist() for batch in got] == [[0, 8, 16, 24], [32, 40]]
    pathlib.Path(paths[5]).unlink()
    iterator = through([{"path": path} for path in paths], opened, ["x"], batch_size=4)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"record 5 of the stream \(path '/.*00005.jpg'\)"):
        next(iterator)


def test_an_error_of_a_record_is_not_the_end_of_the_data():
    class Lazy(dict):
        def __getitem__(self, key):
            if key == "x" and dict.__getitem__(self, "i") == 5:
                raise KeyError("blob 5 is not in the store")
            return dict.__getitem__(self, key)

    records = [Lazy(x=np.full(2, i, np.int32), i=i) for i in range(12)]
    iterator = iter(
        grain.MapDataset.source(records).pipe(
            DALITransform(lambda x: x + 0, batch_size=4, output_map=["y"], num_threads=1)
        )
    )
    assert next(iterator)["y"][:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="blob 5 is not in the store"):
        next(iterator)


def test_arrays_may_have_any_memory_layout():
    plain = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for array in (plain[:, ::-1], np.asfortranarray(plain), plain[::2], plain.astype(">i4")):
        ds = grain.MapDataset.source([{"x": array}] * 4).pipe(
            DALITransform(lambda x: x + 0, batch_size=4, output_map=["y"], num_threads=1)
        )
        np.testing.assert_array_equal(next(iter(ds))["y"], np.stack([array] * 4))


def test_records_unlike_the_first_are_named_masked_or_left_out():
    records = [{"x": np.full(2, i, np.int32)} for i in range(16)]
    records[5] = {"x": np.zeros(2, np.float32)}
    records[9] = {"y": 3}

    def over(**options):
        made = DALITransform(
            lambda x: x + 0, batch_size=4, output_map=["y"], num_threads=1, **options
        )
        return iter(grain.MapDataset.source(records).pipe(made))

    iterator, got = over(), []
    for _ in range(4):
        try:
            got.append(next(iterator)["y"][:, 0].tolist())
        except ValueError as error:
            got.append(str(error))
    assert got[0] == [0, 1, 2, 3] and got[3] == [12, 13, 14, 15]
    assert "can't take record 5 of the stream" in got[1] and "float32" in got[1]
    assert "can't take record 9 of the stream" in got[2] and "has no 'x'" in got[2]
    left = [batch["y"][:, 0].tolist() for batch in over(on_error="skip")]
    assert left == [[0, 1, 2, 3], [12, 13, 14, 15]]
    masked = list(over(on_error="mask", pad="mask"))
    assert [batch["mask"].tolist() for batch in masked[1:3]] == [[1, 0, 1, 1]] * 2
    assert [batch["y"][batch["mask"]][:, 0].tolist() for batch in masked[1:3]] == [
        [4, 6, 7],
        [8, 10, 11],
    ]


def test_bypassing_values_keep_their_structure():
    assert stacked([("cat", 3), ("dog", 4)], "k")[0].tolist() == ["cat", "dog"]
    assert stacked([("cat", 3), ("dog", 4)], "k")[1].tolist() == [3, 4]
    for values, words in (
        ([{"a": 1}, {"a": 1, "b": 2}], "without the keys"),
        ([{"a": 1}, {}], "without the keys"),
        ([{"a": 1}, None], "without the keys"),
        ([None, {"a": 1}], "is a dict or a list, but the first record has None"),
        ([1, [1, 2]], "is a dict or a list, but the first record has 1"),
        ([np.zeros(1), np.zeros(2)], "different shapes"),
        ([(1,), (1, 2)], "different lengths"),
    ):
        with pytest.raises(ValueError, match=words):
            stacked(values, "k")


def huggingface(i, path=None):
    return {"image": {"bytes": bytes([i, i]), "path": path}, "label": i}


def test_unused_values_of_nested_records_need_not_be_arrays():
    records = [huggingface(i, path) for i, path in enumerate([None, "a.jpg", None, "b", None])]

    def graph(image):
        return image["bytes"] + 1

    got = list(through(records, graph, ["y"]))
    assert [batch["y"].tolist() for batch in got] == [[[1, 1], [2, 2]], [[3, 3], [4, 4]], [[5, 5]]]
    assert [batch["label"].tolist() for batch in got] == [[0, 1], [2, 3], [4]]
    whole = list(through(records, lambda record: record["image"]["bytes"] + 1, ["y"]))
    assert [batch["y"].tolist() for batch in whole] == [batch["y"].tolist() for batch in got]
    for of_another in (records[::-1], records[1:]):  # whichever is first
        assert len(list(through(of_another, graph, ["y"]))) == -(-len(of_another) // 2)


def test_a_missing_key_of_nested_records_is_named_with_the_existing_keys():
    def graph(image):
        return image["byte"]

    transform = DALITransform(graph, output_map=["x"], batch_size=2)
    records = grain.MapDataset.source([{"image": {"bytes": np.zeros(3), "path": None}}] * 4)
    with pytest.raises(KeyError, match="'byte'.*image/bytes.*image/path"):
        next(iter(records.pipe(transform)))


@pytest.mark.parametrize(
    "graph",
    (
        lambda image: fn.decoders.image(image),
        lambda image: image / 2.0,
        lambda image: image.shape(),
        lambda image: {"x": image},
    ),
    ids=("operator", "arithmetic", "attribute", "output"),
)
def test_a_dict_in_place_of_an_image_is_named(graph):
    words = r"(?s)dict.*\['image'\] are dicts.* e.g. image\['bytes'\] of the keys"
    with pytest.raises(TypeError, match=words):
        next(through([huggingface(0)] * 2, graph, []))
    batch = next(through([huggingface(0)] * 2, lambda image: image["bytes"] + 0, ["y"]))
    assert len(batch["y"]) == 2


def test_a_dict_of_outputs_in_an_output_is_named():
    with pytest.raises(TypeError, match="a dict as 'views'.*{'views/first': ...}"):
        next(through([{"x": 1}] * 2, lambda x: {"views": {"first": x}}, []))


@pytest.mark.parametrize("kind", (np.asarray, Image.fromarray), ids=("array", "Pillow"))
def test_pixels_that_a_graph_decodes_are_named(kind):
    records = [{"image": kind(np.full((3, 4, 3), k, np.uint8))} for k in range(2)]
    options = {"pad": "mask", "on_error": "mask"}
    words = r"decodes 'image' .* uint8 with 3 dimensions in the records.* omit the decoder"
    with pytest.raises(TypeError, match=words):
        next(through(records, lambda image: fn.decoders.image(image), ["y"], **options))
    with pytest.raises(TypeError, match=words):
        make = data_iterator(lambda image: fn.decoders.image(image), ["y"], mask="mask")
        next(make(source=Records(records), batch_size=2, on_error="mask"))
    (batch,) = through(records, lambda image: image + np.uint8(1), ["y"])
    np.testing.assert_array_equal(batch["y"][:, 0, 0, 0], [1, 2])


def test_an_invalid_value_of_a_nested_record_is_named():
    def graph(image):
        return image["bytes"] + 1, image["path"].shape()

    records = [huggingface(0), huggingface(1, "a")]
    with pytest.raises(ValueError, match="None .dtype object. is not supported by DALI"):
        next(through(records, graph, ["y", "n"]))
    records = [huggingface(0, "b"), huggingface(1, "a"), huggingface(2), huggingface(3, "c")]
    iterator = through(records, graph, ["y", "n"], on_error="mask", pad="mask")
    assert [batch["mask"].tolist() for batch in iterator] == [[True, True], [False, True]]


def test_a_truncated_file_is_named_or_masked():
    wav = b"RIFF" + (6000).to_bytes(4, "little") + b"WAVE" + bytes(5996)
    records = [{"data": one} for one in (wav, wav[:99], wav, wav)]

    def graph(data):
        return data.shape()

    with pytest.raises(ValueError, match="data in record 1 of the batch: it is cut off.*6008.*99"):
        next(through(records, graph, ["n"]))
    iterator = through(records, graph, ["n"], on_error="mask", pad="mask")
    assert [batch["mask"].tolist() for batch in iterator] == [[True, False], [True, True]]


Pair = collections.namedtuple("Pair", "x label")


@dataclasses.dataclass
class Record:
    x: bytes
    label: int


@pytest.mark.parametrize(
    "record,way,keyed",
    (
        ((b"a", 1), r"ds.map\(lambda r: {'image': r\[0\]}\)", lambda r: {"x": r[0]}),
        (Pair(b"a", 1), r"ds.map\(lambda r: r._asdict\(\)\)", lambda r: r._asdict()),
        (Record(b"a", 1), r"ds.map\(vars\)", vars),
    ),
)
def test_records_without_keys_raise_with_the_fix(record, way, keyed):
    for function in (lambda x: x + 0, lambda x, label: (x + 0, label + 0)):
        with pytest.raises(TypeError, match=way):
            next(through([record], function, ["y", "z"]))
    (batch,) = through([keyed(record)], lambda x: x + 0, ["y"])
    assert batch["y"].tolist() == [[97]]
