"""Records and arrays compared with the data that they were created from."""

import collections
import concurrent.futures
import pathlib
import pickle
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import fn, types

from dalijax import data_iterator
from dalijax.core.sources.values import kind_of, leaf
from dalijax.errors import StateError
from dalijax.sources import Arrays, Field, Records

ROWS = [
    {
        "data": bytes([i] * i),
        "label": i,
        "score": i / 3,
        "box": np.arange(4.0) + i,
        "text": f"t{i}",
        "meta": {"n": i},
    }
    for i in range(1, 8)
]


def equal(values, expected):
    assert len(values) == len(expected)
    for value, other in zip(values, expected):
        np.testing.assert_array_equal(value, other, strict=True)


def test_fields_are_those_of_the_first_record():
    source = Records(ROWS)
    assert dict(source.fields) == {
        "data": Field(np.dtype(np.uint8), 1),
        "label": Field(np.dtype(np.int32)),
        "score": Field(np.dtype(np.float32)),
        "box": Field(np.dtype(np.float64), 1),
        "text": Field(None),
        "meta": Field(None),
    }
    indices = np.array([6, 0, 6])
    values = source.read(indices, list(source.fields))
    equal(values["data"], [np.frombuffer(ROWS[i]["data"], np.uint8) for i in indices])
    equal(values["label"], [np.array(ROWS[i]["label"], np.int32) for i in indices])
    equal(values["score"], [np.array(ROWS[i]["score"], np.float32) for i in indices])
    equal(values["box"], [ROWS[i]["box"] for i in indices])
    assert values["text"] == ["t7", "t1", "t7"] and values["meta"][1] == {"n": 1}
    assert set(source.read(indices, ["text"])) == {"text"}


def test_keys_are_chosen_and_reached_by_their_paths():
    rows = [{"image": {"bytes": b"ab", "path": None}, "label": np.int64(3)}]
    assert Records(rows).fields["image"] == Field(None)
    source = Records(rows, fields={"data": "image/bytes", "label": "label"})
    assert source.fields["data"] == Field(np.dtype(np.uint8), 1)
    equal(source.read(np.array([0]), ["data"])["data"], [np.array([97, 98], np.uint8)])
    with pytest.raises(ValueError, match=r"no 'image/jpeg'. It has \['bytes', 'path'\]"):
        Records(rows, fields={"data": "image/jpeg"})
    with pytest.raises(ValueError, match="fields must map names of fields to keys"):
        Records(rows, fields={})


def test_records_that_are_not_dicts():
    source = Records([b"ab", b"c"])
    equal(source.read(np.array([1]), ["data"])["data"], [np.array([99], np.uint8)])
    with pytest.raises(TypeError, match="Convert them to dicts"):
        Records([(1, 2)])


def test_whole_batches_are_requested_if_the_object_supports_it():
    class Many(list):
        def __getitems__(self, numbers):
            asked.append(numbers)
            return [self[i] for i in numbers]

    asked = []
    assert list(Records(Many(ROWS)).read(np.array([2, 5]), ["label"])["label"]) == [3, 6]
    assert asked == [[2, 5]]


@pytest.fixture(scope="module")
def array_records(tmp_path_factory):
    """Three files of ArrayRecord with the numbers of their records as text, 5 in each file."""
    array_record = pytest.importorskip("array_record.python.array_record_module")
    folder = tmp_path_factory.mktemp("array_record")
    paths = [str(folder / f"{number}.array_record") for number in range(3)]
    for number, path in enumerate(paths):
        writer = array_record.ArrayRecordWriter(path, "group_size:1")
        for record in range(5 * number, 5 * number + 5):
            writer.write(b"%d" % record)
        writer.close()
    return paths


def texts(source, indices):
    return [value.tobytes().decode() for value in source.read(np.array(indices), ["data"])["data"]]


@pytest.mark.parametrize("library", ("grain", "array_record"))
def test_array_record_files(array_records, library):
    if library == "grain":
        kind = pytest.importorskip("grain").sources.ArrayRecordDataSource
    else:
        kind = pytest.importorskip("array_record.python.array_record_data_source")
        kind = kind.ArrayRecordDataSource
    source = Records(kind(array_records))
    indices = [14, 3, 3, 0, 7]
    assert texts(source, indices) == ["14", "3", "3", "0", "7"]
    assert texts(pickle.loads(pickle.dumps(source)), indices) == ["14", "3", "3", "0", "7"]
    new = Records(kind(array_records))  # opens its files at the first read
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda _: texts(new, range(15)), range(32))
        assert list(results) == [[str(number) for number in range(15)]] * 32
    assert source.identity() == Records([b"%d" % number for number in range(15)]).identity()
    part = Records(kind([f"{array_records[1]}[1:3]", array_records[0]]))
    assert len(part) == 7 and texts(part, [0, 1, 2, 6]) == ["6", "7", "0", "4"]


def test_methods_of_a_subclass_of_array_record_are_used(array_records):
    grain = pytest.importorskip("grain")

    class Parsed(grain.sources.ArrayRecordDataSource):
        def __getitem__(self, key):
            return {"number": int(super().__getitem__(key))}

    class Together(Parsed):
        def __getitems__(self, keys):
            return [{"number": 100 + self[key]["number"]} for key in keys]

    for kind, added in ((Parsed, 0), (Together, 100)):
        numbers = Records(kind(array_records)).read(np.array([9, 2]), ["number"])["number"]
        assert [int(number) for number in numbers] == [9 + added, 2 + added]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": 1.5}, r"'x' of record 1 is float64, not int32"),
        (
            {"x": 1 << 40},
            r"'x' of record 1 has the number 1099511627776, which does not fit into int32",
        ),
        ({"x": b"ab"}, r"'x' of record 1 is uint8 with 1 dimensions, not int32 with 0"),
        ({"x": None}, r"'x' of record 1 can't be converted: None .*not supported by DALI"),
        ({"y": 1}, r"record 1 has no 'x'. It has \['y'\]"),
    ],
)
def test_a_record_unlike_the_first_is_named(row, words):
    source = Records([{"x": 1}, row])
    with pytest.raises(ValueError, match=words):
        source.read(np.array([0, 1]), ["x"])
    assert list(source.read(np.array([0]), ["x"])["x"]) == [1]


def test_a_fraction_beyond_float32_is_named():
    with pytest.raises(
        ValueError, match="'x' of record 1 has the number 1e.300, which does not fit into flo"
    ):
        Records([{"x": 0.5}, {"x": 1e300}]).read(np.array([1]), ["x"])


def test_kinds_that_the_first_record_does_not_show():
    source = Records([{"x": 1}, {"x": 1 << 40}], kinds={"x": Field(np.dtype(np.int64))})
    equal(source.read(np.array([1]), ["x"])["x"], [np.array(1 << 40)])


def test_objects_without_records_are_refused():
    with pytest.raises(TypeError, match="Use dalijax.sources.Arrays for a dict of arrays"):
        Records({"x": [1, 2]})
    with pytest.raises(ValueError, match="list has no records"):
        Records([])
    with pytest.raises(TypeError, match="Records requires __len__ .* a generator"):
        Records(i for i in range(3))


def test_the_identity_of_records_depends_on_their_bytes():
    assert Records(ROWS).identity() == Records(list(ROWS)).identity()
    assert Records(ROWS).identity() != Records(ROWS[:-1]).identity()
    assert Records(ROWS).identity() != Records(ROWS[::-1]).identity()
    assert Records(ROWS, identity="mine").identity() == "mine"
    assert Records([{"x": object()}]).identity() == Records([{"x": object()}]).identity()


@pytest.mark.parametrize(
    "one,other",
    [
        ({"id": np.int64(1)}, {"id": np.int64(2)}),
        ({"id": [np.arange(3)]}, {"id": [np.arange(1, 4)]}),
        ({"id": b"a"}, {"id": b"b"}),
        ({"id": {"a", "b"}}, {"id": {"a", "c"}}),
        (np.array(["a", None], object), np.array(["b", None], object)),
    ],
)
def test_the_identity_depends_on_the_values_of_objects(one, other):
    copied = pickle.loads(pickle.dumps(one))
    first, equal, second = (Records([{"x": value}]).identity() for value in (one, copied, other))
    assert first == equal != second


ARRAYS = {
    "x": np.arange(24, dtype=np.float16).reshape(6, 2, 2),
    "label": np.arange(6) * 5,
    "weight": np.arange(6) / 4,
    "text": np.array(["a", "b", "c", "d", "e", "f"]),
}


def test_rows_of_arrays():
    source = Arrays(ARRAYS)
    assert source.fields["x"] == Field(np.dtype(np.float16), 2)
    assert source.fields["label"] == Field(np.dtype(np.int32))
    values = source.read(np.array([5, 0, 5]), list(ARRAYS))
    equal(values["x"], ARRAYS["x"][[5, 0, 5]])
    equal(values["label"], np.array([25, 0, 25], np.int32))
    equal(values["weight"], np.array([1.25, 0, 1.25], np.float32))
    assert values["text"] == ["f", "a", "f"]


def test_rows_are_copies(tmp_path):
    array = np.zeros((3, 2))
    rows = Arrays({"x": array}).read(np.array([0]), ["x"])["x"]
    array[:] = 1
    np.testing.assert_array_equal(rows[0], [0, 0])


def test_a_memory_map_and_its_copy_agree(tmp_path):
    np.save(tmp_path / "a.npy", ARRAYS["x"].astype(">f2"))
    shutil.copy(tmp_path / "a.npy", tmp_path / "b.npy")
    first, second = (
        Arrays({"x": np.load(tmp_path / f, mmap_mode="r")}) for f in ("a.npy", "b.npy")
    )
    rows = first.read(np.array([1]), ["x"])["x"]
    equal(rows, ARRAYS["x"][[1]])  # in native order
    assert type(rows) is np.ndarray and first.identity() == second.identity()
    assert pickle.loads(pickle.dumps(first)).identity() == first.identity()


def test_unsuitable_arrays_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        Arrays({"x": np.zeros(3), "y": np.zeros(4)})
    for arrays in ({}, {"x": np.zeros((0, 3))}, {"x": np.zeros(())}):
        with pytest.raises(ValueError, match="must be non-empty"):
            Arrays(arrays)
    with pytest.raises(TypeError, match="'x' is an array of object"):
        Arrays({"x": np.array([None, 1])})
    for values, dtype in (([1, 1 << 40], "int32"), ([0.1, -1e300, np.inf], "float32")):
        np.save(tmp_path / "x.npy", np.array(values))
        in_file = np.load(tmp_path / "x.npy", mmap_mode="r")  # not read by the check
        with pytest.raises(ValueError, match=f"'x' of row 1 has .* does not fit into {dtype}"):
            Arrays({"x": in_file}).read(np.arange(len(values)), ["x"])


def test_fractions_are_rounded_and_infinities_are_kept():
    values = np.array([0.1, np.inf, -np.inf, np.nan, 3e38])
    (read,) = Arrays({"x": values}).read(np.arange(5), ["x"]).values()
    np.testing.assert_array_equal(read, values.astype(np.float32))


FOREIGN = [
    (
        np.zeros(3, jnp.bfloat16),
        r"convert it by \.astype\('float32'\), and cast outputs to bfloat16",
    ),
    (
        np.zeros(3, jnp.float8_e5m2),
        r"convert it by \.astype\('float32'\)",
    ),  # of kind "f", like float32
    (np.zeros(3, jnp.int4), r"convert it by \.astype\('int8'\)"),
    (np.zeros(3, np.longdouble), r"convert it by \.astype\('float32'\)"),
    (np.zeros(3, np.complex64), r"\.real and \.imag"),
    (np.zeros(3, "M8[D]"), r"\.astype\('int64'\)"),
    (np.zeros(3, [("a", "i4"), ("b", "f4")]), "a field for each of a, b"),
    (np.array([None]), "convert it to arrays of numbers, text or bytes"),
]


@pytest.mark.parametrize("array,words", FOREIGN, ids=lambda one: str(getattr(one, "dtype", "")))
def test_dtypes_that_dali_lacks_are_refused_with_a_replacement(array, words):
    with pytest.raises(TypeError, match=f"not supported by DALI: .*{words}"):
        leaf(array)
    with pytest.raises(TypeError, match=f"'x' is an array of .*{words}"):
        Arrays({"x": array})
    field = kind_of(array)
    assert field.dtype is None  # in records it bypasses the graph


@pytest.mark.parametrize("array", [one for one, _ in FOREIGN if not one.dtype.names])
def test_a_graph_does_not_take_fields_of_dtypes_that_dali_lacks(array):
    with pytest.raises(TypeError, match="field 'x', for which DALI has no type.*arrays of numbers"):
        data_iterator(lambda x: x, ["x"])(source=Records([{"x": array}] * 4), batch_size=2)


@pytest.mark.parametrize("error", (KeyError("five"), StopIteration(), OSError("disk")), ids=repr)
def test_an_unreadable_record_of_the_identity_is_named(error):
    class Broken(list):
        def __getitem__(self, k):
            if k == 5:
                raise error
            return super().__getitem__(k)

    rows = [{"x": np.int32(k)} for k in range(9)]
    with pytest.raises(StateError, match="record 5 can't be read.*pass identity="):
        Records(Broken(rows)).identity()
    assert Records(Broken(rows), identity="mine").identity() == "mine"


def test_keys_with_slashes_are_read_and_the_error_has_the_right_fields():
    rows = [{"image/encoded": b"x", "image/class/label": 1, "a": {"b/c": {"d": 2}}}]
    fields = {"data": "image/encoded", "label": "image/class/label", "deep": "a/b/c/d"}
    values = Records(rows, fields).read(np.array([0]), ["data", "label", "deep"])
    assert [values["data"][0].tobytes(), int(values["label"][0]), int(values["deep"][0])] == [
        b"x",
        1,
        2,
    ]
    words = r"e.g. fields=\{'encoded': 'image/encoded', 'label': 'image/class/label', 'a': 'a'\}"
    with pytest.raises(ValueError, match=words):
        Records(rows)
    for odd in ({1: 2}, {"a/x": 1, "b/x": 2}, {}):
        with pytest.raises(ValueError, match=r"Name the fields by fields=\{name: key\}"):
            Records([odd])
    with pytest.raises(ValueError, match="record 0 has no 'image/jpeg'. It has"):
        Records(rows, {"data": "image/jpeg"})


def test_a_field_takes_every_dtype_that_numpy_takes():
    assert Field(np.int32) == Field("int32") == Field(np.dtype(np.int32))
    assert Field(None).dtype is None
    with pytest.raises(TypeError, match="nonsense"):
        Field("nonsense")


@pytest.mark.parametrize(
    "records, right",
    (
        ([{0: 1, 1: 2}], {"field_0": 0, "field_1": 1}),
        ([{b"a": 1, b"b/c": 2}], {"a": b"a", "c": b"b/c"}),
        ([{"a/b": 1, "a": {"b": 2}}], {"b": "a/b", "a": "a"}),
        ([{("a", "b"): 1}], None),
        ([{"a/b": 1, "c/b": 2}], None),
    ),
    ids=str,
)
def test_the_fields_that_an_error_suggests_work(records, right):
    with pytest.raises(ValueError, match="Name the fields by fields=") as error:
        Records(records)
    assert str(error.value).endswith(f", e.g. fields={right}" if right else "fields={name: key}")
    fields = right or {f"x{number}": key for number, key in enumerate(records[0])}
    source = Records(records, fields)
    values = source.read(np.array([0]), list(source.fields))
    assert {key: values[name][0] for name, key in fields.items()} == records[0]


@pytest.mark.parametrize(
    "right",
    (
        {"data": "image/bytes", "y": "label"},
        {"data": "image", "label": "label"},
        {"y": "deep/value"},
    ),
    ids=str,
)
def test_swapped_fields_are_corrected(right):
    records = [{"image": {"bytes": b"x"}, "label": 1, "deep/value": 2}]
    assert list(Records(records, right).fields) == list(right)
    words = rf"names of fields to keys, .* Did you mean {re.escape(str(right))}\? If not"
    with pytest.raises(ValueError, match=words):
        Records(records, {key: name for name, key in right.items()})


def test_a_misspelled_key_is_named():
    with pytest.raises(ValueError, match=r"Did you mean .*If not, correct \['labels'\]"):
        Records([{"image": b"x", "label": 1}], {"image": "image", "label": "labels"})
    with pytest.raises(ValueError, match="record 0 has no <class 'int'>"):
        Records([{"image": b"x", "label": 1}], {"label": int})


def test_two_fields_may_have_the_same_key():
    values = Records([{"a": 1}, {"a": 2}], {"x": "a", "y": "a"}).read(np.arange(2), ["x", "y"])
    assert {name: list(map(int, column)) for name, column in values.items()} == {
        "x": [1, 2],
        "y": [1, 2],
    }


def test_mistakes_in_fields_and_kinds_are_named():
    records = [{"a": 1, "b": 2}]
    for fields, kind, words in (
        (["a"], ValueError, r"fields must map names of fields to keys, .* not \['a'\]"),
        ({}, ValueError, "fields must map names of fields to keys"),
        ({1: "a"}, TypeError, "names of fields must be strings, not 1"),
        ({"x": ["a"]}, TypeError, r"fields\['x'\] must be a key of the records, not \['a'\]"),
        ({"x": ([], 1)}, TypeError, r"fields\['x'\] must be a key of the records, not"),
        ({"x": ("a", [])}, ValueError, r"fields\['x'\] has no numbers: \[\] is empty"),
        ({"x": ("a", 1.0)}, TypeError, r"the numbers 1.0. Pass an integer such as 0, or range\(4"),
        ({"x": ("a", [True])}, TypeError, r"has the numbers \[True\]"),
        ({"x": ("a", [0, -1])}, ValueError, "has the number -1, but .* are numbered from 0"),
        ({"x": ("a", [1]), "x_0": "b"}, ValueError, "'x_0', which is also the name of a value of"),
    ):
        with pytest.raises(kind, match=words):
            Records(records, fields)
    with pytest.raises(ValueError, match=r"kinds has \['x'\], but the fields are \['a', 'b'\]"):
        Records(records, kinds={"x": Field(np.int32)})
    with pytest.raises(TypeError, match=r"kinds\['a'\] must be a dalijax.sources.Field, such as"):
        Records(records, kinds={"a": np.int32})


BOXES = [[[0.0, 0, 1, 1]], [], [[0.0, 0, 1, 1], [1.0, 1, 2, 2]]]
EMPTY = {
    "lists": (BOXES, {}, np.zeros((0, 4))),
    "integers": ([[1, 2], [], [3]], {}, np.zeros(0, np.int64)),
    "nested": ([[[[1, 2]]], [], [[[3, 4]]]], {}, np.zeros((0, 1, 2), np.int64)),
    "np.array(list)": (list(map(np.array, BOXES)), {}, np.zeros((0, 4))),
    "shaped arrays": (
        [np.ones((1, 4), np.float32), np.zeros((0, 4)), np.ones((2, 4), np.float32)],
        {},
        np.zeros((0, 4), np.float32),
    ),
    "kinds": (BOXES, {"kinds": {"x": Field(np.float32, 2)}}, np.zeros((0, 4), np.float32)),
}


@pytest.mark.parametrize("order", ((0, 1, 2), (1, 0, 2), (1, 1, 1, 2, 0)), ids=str)
@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_list_has_the_kind_of_the_other_records(case, order):
    values, options, empty = EMPTY[case]
    source = Records([{"x": values[k]} for k in order], **options)
    assert source.fields["x"] == Field(empty.dtype, empty.ndim)
    expected = [empty if k == 1 else np.array(values[k], empty.dtype) for k in order]
    equal(source.read(np.arange(len(order)), ["x"])["x"], expected)


def test_fields_whose_lists_are_all_empty():
    rows = [{"x": [], "k": 1}] * 70
    assert Records(rows).fields["x"] == Field(None)
    with pytest.raises(TypeError, match=r"'x'.* an empty list .*kinds=\{'boxes': Field\(np.float"):
        data_iterator(lambda x: x, ["x"])(source=Records(rows), batch_size=2)
    empty = np.zeros((0, 4), np.float32)
    for value, options, expected in (
        ([], {"kinds": {"x": Field(np.float32, 2)}}, empty[:, :0]),
        (empty, {}, empty),
    ):
        source = Records([{"x": value}] * 70, **options)
        equal(source.read(np.array([69]), ["x"])["x"], [expected])


@pytest.mark.parametrize("dtype", (np.int32, np.int64, np.float32, np.uint8))
def test_kinds_convert_lists_and_arrays_without_a_loss(dtype):
    rows = [{"x": x} for x in ([1, 2], [3], [], np.array([4]))]
    source = Records(rows, kinds={"x": Field(dtype, 1)})
    expected = [np.array(row["x"], dtype) for row in rows]
    equal(source.read(np.arange(4), ["x"])["x"], expected)


@pytest.mark.parametrize(
    "value, dtype, words",
    (
        ([1 << 40], np.int32, "has the number 1099511627776, which does not fit into int32"),
        ([(1 << 24) + 1], np.float32, "has the number 16777217, which does not fit into float32"),
        ([0.5, 2], np.int32, r"is float64, not int32 \(0.5\)"),
        (np.array([-1]), np.uint8, "has the number -1, which does not fit into uint8"),
        (b"ab", np.float32, "is uint8, not float32|is uint8 with 1 dimensions, not float32"),
        (3, np.int32, "is int64 with 0 dimensions, not int32 with 1"),
        ([[]], np.int32, "is float64 with 2 dimensions, not int32 with 1"),
        ([None], np.int32, "can't be converted: .None. .* not supported by DALI"),
        ([[1], [2, 3]], np.int32, "can't be converted: its lists differ in length. Pad them"),
    ),
)
def test_a_list_that_does_not_fit_is_named(value, dtype, words):
    source = Records([{"x": [1]}, {"x": value}], kinds={"x": Field(dtype, 1)})
    with pytest.raises(ValueError, match=f"'x' of record 1 ({words})"):
        source.read(np.array([1]), ["x"])


def test_arrays_of_another_dtype_are_converted_only_if_kinds_says_so():
    rows = [{"x": np.ones(2, np.float32)}, {"x": np.ones(2)}]
    with pytest.raises(ValueError, match="'x' of record 1 is float64 with 1 dimensions, not float"):
        Records(rows).read(np.array([1]), ["x"])
    mixed = Records([{"x": [0.5]}, {"x": [1]}]).read(np.array([1]), ["x"])
    equal(mixed["x"], [np.array([1.0])])


@pytest.mark.parametrize("order", ((0, 1, 2, 1), (1, 0, 2, 1)), ids=str)
def test_no_image_without_boxes_is_masked(order):
    def graph(x):
        return {"n": x.shape(dtype=types.INT32)[0], "x": fn.pad(x, axes=[0], shape=[3])}

    iterator_fn = data_iterator(graph, mask=True, on_error="mask", as_numpy=True)
    source = Records([{"x": BOXES[k]} for k in order], kinds={"x": Field(np.float32, 2)})
    batch = next(iterator_fn(source=source, batch_size=4, shuffle=False))
    assert batch["mask"].all()
    assert batch["n"].tolist() == [len(BOXES[k]) for k in order]
    for row, k in enumerate(order):
        padded = [*BOXES[k], *[[0.0] * 4] * (3 - len(BOXES[k]))]
        np.testing.assert_array_equal(batch["x"][row], padded)


def frame():
    return pytest.importorskip("pandas").DataFrame({"x": [1, 2], "t": ["a", "b"]})


def polars_frame():
    return pytest.importorskip("polars").DataFrame({"x": [1, 2], "t": ["a", "b"]})


STRUCTURED = np.array([(1, 0.5), (2, 1.5)], [("x", "i4"), ("y", "f4")])
TABLES = {
    "pandas": (frame, lambda: Records(frame().to_dict("records")), {"x": 2, "t": "b"}),
    "a column of pandas": (
        lambda: frame()["x"],
        lambda: Records(frame()["x"].to_list()),
        {"data": 2},
    ),
    "polars": (polars_frame, lambda: Records(polars_frame().to_arrow()), {"x": 2, "t": "b"}),
    "structured": (
        lambda: STRUCTURED,
        lambda: Arrays({name: STRUCTURED[name] for name in STRUCTURED.dtype.names}),
        {"x": 2, "y": 1.5},
    ),
    "set": (lambda: {1, 2}, lambda: Records(sorted({1, 2})), {"data": 2}),
}


@pytest.mark.parametrize("case", TABLES)
def test_the_conversion_that_an_error_about_a_table_names_works(case):
    table, convert, last = TABLES[case]
    with pytest.raises(TypeError, match="Records requires a list of records, not .* Use dalijax"):
        Records(table())
    source = convert()
    assert {name: values[0] for name, values in source.read(np.array([1]), [*last]).items()} == last


@pytest.mark.parametrize(
    "path, call",
    (
        ("a/train.parquet", r"Parquet\('a/train.parquet'\)"),
        (pathlib.Path("a.csv"), r"Records\(datasets.Dataset.from_csv\('a.csv'\)\)"),
        (b"a/train-000.tar", r"Tar\('a/train-000.tar', "),
        ("a.array_record", r"Records\(grain.sources.ArrayRecordDataSource\('a.array_record'\)\)"),
        ("a/train", r"Files\('a/train'\)"),
    ),
    ids=str,
)
def test_a_path_is_no_list_of_records(path, call):
    with pytest.raises(TypeError, match=f"not .*. Use dalijax.sources.{call}"):
        Records(path)


def test_values_of_lists_are_named_by_their_indices():
    frames = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    rows = [
        {"images": [b"ab", b"c"], "frames": frames, "deep": [{"a/b": 1}, {"a/b": 2}], "0": 3}
    ] * 2
    fields = {"x": "images/1", "y": "frames/0", "z": "deep/1/a/b", "w": "0"}
    values = Records(rows, fields).read(np.array([1]), [*fields])
    assert values["x"][0].tobytes() == b"c" and values["z"] == [2] and values["w"] == [3]
    np.testing.assert_array_equal(values["y"][0], frames[0])
    for key in (0, "0"):
        equal(Records([(b"ab", 1)], {"x": key}).read(np.array([0]), ["x"])["x"], [leaf(b"ab")])
    varying = Records([{"x": [1, 2]}, {"x": [3]}, {"x": []}], {"x": "x/1"})
    for record, count in ((1, 1), (2, 0)):
        words = rf"'x' of record {record} has {count} values?, but fields= requires 2"
        with pytest.raises(ValueError, match=words):
            varying.read(np.array([record]), ["x"])


@pytest.mark.parametrize("value", ([b"a", b"b"], ["a", "b"], [{"bytes": b"a"}], np.array([b"a"])))
def test_several_images_in_one_input_are_refused_with_a_cure(value):
    words = r"several images or texts need an input each.*fields=\{'images': \('images', range"
    with pytest.raises(TypeError, match=words):
        data_iterator(lambda x: x, ["x"])(source=Records([{"x": value}] * 2), batch_size=2)
    with pytest.raises(TypeError, match=words):
        leaf(value)
    if isinstance(value, list):
        words = rf"list of {len(value)} .*'images': \('x/bytes', range\({len(value)}\)\)"
        with pytest.raises(ValueError, match=words):
            Records([{"x": value}], {"y": "x/bytes"})


@pytest.mark.parametrize(
    "value, words",
    (
        ("a.jpg", r"it is text, 'a.jpg'; for the path of a file, return path.encode\(\)"),
        ({"bytes": b"a"}, r"a dict with the keys \['bytes'\].*fields=\{'data': 'image/bytes'\}"),
        ([1, None], "None.* replace None by a number"),
        (None, "None .* not supported by DALI"),
    ),
    ids=str,
)
def test_the_reason_why_a_field_has_no_type_is_named(value, words):
    with pytest.raises(TypeError, match=f"field 'x', for which DALI has no type: .*{words}"):
        data_iterator(lambda x: x, ["x"])(source=Records([{"x": value}] * 2), batch_size=2)


MASKED = np.ma.array([1.0, 2.0], mask=[False, True])


@pytest.mark.parametrize("value", (MASKED, [MASKED], np.ma.masked), ids=("array", "list", "scalar"))
def test_masked_elements_are_refused(value):
    with pytest.raises(ValueError, match=r"'x' .* masked elements.* by .filled\(value\)"):
        Records([{"x": value}])
    first = np.ones(np.shape(value))
    with pytest.raises(ValueError, match=r"'x' of record 1 .* masked elements"):
        Records([{"x": first}, {"x": value}]).read(np.array([1]), ["x"])
    if value is MASKED:
        with pytest.raises(ValueError, match="'x' can't be converted: it has masked elements"):
            Arrays({"x": value})
        plain = np.ma.array([1.0, 2.0])
        equal(Arrays({"x": plain}).read(np.arange(2), ["x"])["x"], np.array([1, 2], np.float32))
        equal(Records([{"x": plain}]).read(np.array([0]), ["x"])["x"], [plain.filled()])


def test_lists_of_dicts_need_a_map():
    objects = [{"box": [1.0, 2.0]}, {"box": [3.0, 4.0]}]
    cure = (
        "source.map(lambda record: {**record, 'box': np.array([item['box'] for item in "
        "record['objects']])})"
    )
    with pytest.raises(ValueError, match="record 0 is a list of 2 dicts.*" + re.escape(cure)):
        Records([{"objects": objects}], fields={"box": "objects/box"})
    mapped = Records([{"objects": objects}]).map(
        lambda record: {**record, "box": np.array([item["box"] for item in record["objects"]])}
    )
    value = mapped.read(np.array([0]), ["box"])["box"][0]
    np.testing.assert_array_equal(value, [[1, 2], [3, 4]])


def test_a_missing_key_of_a_record_with_defaults_is_an_error():
    records = [collections.defaultdict(int, x=k, y=k) for k in range(5)]
    del records[3]["y"]
    source = Records(records)
    with pytest.raises(ValueError, match="record 3 has no 'y'"):
        source.read(np.arange(5), ["x", "y"])
    assert "y" not in records[3]


@pytest.mark.parametrize(
    "values",
    ([2**63, 2**24 + 1], [1, 2**31], [True, 1], [np.longdouble(1.5)] * 2, [1.5, 1], [None, 1]),
    ids=str,
)
@pytest.mark.parametrize("dtype", (np.float32, np.int32))
def test_numbers_are_converted_together_as_alone(values, dtype):
    source = Records([{"x": 1}] + [{"x": v} for v in values], kinds={"x": Field(dtype)})

    def read(indices):
        try:
            return [*map(float, source.read(np.array(indices), ["x"])["x"])]
        except ValueError as error:
            return str(error).replace("record 2", "record 1")

    both, alone = read([1, 2]), [read([1]), read([2])]
    failed = [text for text in alone if isinstance(text, str)]
    assert both == (failed[0] if failed else [x for row in alone for x in row])


def test_only_records_of_a_list_are_known_to_contain_their_arrays():
    records = [{"x": np.full(2, k, np.float32)} for k in range(4)]
    stored = Records(records).read(np.arange(4), ["x"])["x"]
    assert all(value is record["x"] for value, record in zip(stored, records))

    class Refilling:
        """Fills the same array for each record."""

        array = np.zeros(2, np.float32)

        def __len__(self):
            return 8

        def __getitem__(self, k):
            self.array[:] = k
            return {"x": self.array}

    iterator = data_iterator(lambda x: x, ["x"])(source=Records(Refilling()), batch_size=4)
    with pytest.raises(ValueError, match="in the same memory"):
        next(iterator)
