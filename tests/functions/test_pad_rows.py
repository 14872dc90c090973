"""`pad_rows` compared with NumPy: dtypes, shapes, fills, sources, Grain and readers."""

import json

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.errors import StateError
from dalijax.fn import cast, pad_rows

DTYPES = [np.dtype(name) for name in (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "float32", "float64",
)]  # fmt: skip


def expected(sample, n, fill):
    """The first ``n`` rows, and at least ``n`` by rows of a number."""
    dtype = sample.dtype
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        fill = min(max(fill, int(info.min)), int(info.max))
    rows = np.full((n, *sample.shape[1:]), fill, dtype)
    count = min(len(sample), n)
    rows[:count] = sample[:count]
    return rows, count


def run(samples, n, layout=None, **options):
    """The samples of both outputs of a pipeline, and the layout of the rows."""

    @pipeline_def(batch_size=len(samples), num_threads=1, device_id=None)
    def graph():
        data = dali_fn.external_source(source=lambda: samples, batch=True, layout=layout)
        return pad_rows(data, n, **options)

    pipeline = graph()
    pipeline.build()
    rows, counts = pipeline.run()
    outputs = [[np.array(out.at(k)) for k in range(len(samples))] for out in (rows, counts)]
    return outputs, rows.layout()


def check(samples, n, fill=0):
    (rows, counts), _ = run(samples, n, fill=fill)
    for sample, result, count in zip(samples, rows, counts, strict=True):
        wanted, kept = expected(sample, n, fill)
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(result, wanted)
        assert count == kept and (count.dtype, count.shape) == (np.int32, ())


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tail=st.lists(st.integers(1, 3), max_size=3),
    n=st.integers(1, 7),
    fill=st.sampled_from([0, 1, -1, 7, 300, 40_000]),
    seed=st.integers(0, 9),
)
def test_rows_of_any_dtype_and_shape(dtype, lengths, tail, n, fill, seed):
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, 100, (k, *tail)).astype(dtype) for k in lengths]
    check(samples, n, fill)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", ((0,), (0, 0), (5,), (4,), (0, 3, 4, 5)), ids=str)
def test_no_row_and_more_rows_than_wanted(dtype, lengths):
    for tail in ((), (4,)):
        check([np.ones((k, *tail), dtype) for k in lengths], 4, 1)


@pytest.mark.parametrize(
    "fill, dtype, value",
    (
        ((1 << 40) + 1, "int64", (1 << 40) + 1),
        (-(1 << 63), "int64", -(1 << 63)),
        (-1, "uint8", 0),
        (1.5, "int32", 2),
        (0.1, "float64", np.float32(0.1)),
        (-np.inf, "float32", -np.inf),
        (np.nan, "float16", np.nan),
        (True, "bool", True),
        (np.int8(-3), "int32", -3),
        (np.float32(2.5), "float32", 2.5),
        (3, "bool", True),
    ),
)
def test_fills(fill, dtype, value):
    (rows, _), _ = run([np.zeros(1, dtype)], 3, fill=fill)
    np.testing.assert_array_equal(rows[0], np.array([0, value, value], dtype))


@pytest.mark.parametrize("layout", (None, "FHWC"))
def test_the_layout_is_kept(layout):
    videos = [np.ones((k, 2, 3, 1), np.uint8) for k in (1, 4)]
    (rows, _), result = run(videos, 3, layout=layout)
    assert result == (layout or "")
    for video, padded in zip(videos, rows):
        np.testing.assert_array_equal(padded, expected(video, 3, 0)[0])


@pytest.mark.parametrize(
    "n, options, kind, words",
    (
        (0, {}, ValueError, "n of pad_rows must be a number of rows, 1 or more, not 0"),
        (1.5, {}, TypeError, "n of pad_rows must be a number of rows, 1 or more, not 1.5"),
        (True, {}, TypeError, "n of pad_rows"),
        (1 << 31, {}, ValueError, "n of pad_rows"),
        (2, {"fill": "0"}, TypeError, "fill of pad_rows must be a number, not '0'"),
        (2, {"fill": [1]}, TypeError, r"fill of pad_rows must be a number, not \[1\]"),
        (2, {"fill": 1 << 63}, ValueError, "fill of pad_rows must fit into int64"),
        (2, {"fill_value": 1}, TypeError, "fill_value"),
    ),
)
def test_unsuitable_arguments_are_refused(n, options, kind, words):
    with pytest.raises(kind, match=words):
        run([np.zeros(1)], n, **options)


# Boxes and labels of images

COUNTS = (3, 0, 12, 1, 5, 8)
RECORDS = [
    {
        "boxes": np.arange(4 * k, dtype=np.float32).reshape(k, 4) + 100 * number,
        "labels": np.arange(k, dtype=np.int32) + 1,
        "crowd": np.arange(k) % 2 == 0,
    }
    for number, k in enumerate(COUNTS)
]


def detection(boxes, labels, crowd):
    boxes, count = pad_rows(boxes, 5)
    labels, _ = pad_rows(labels, 5, fill=-1)
    crowd, _ = pad_rows(crowd, 5)
    return {"boxes": boxes, "labels": labels, "crowd": crowd, "count": count}


def assert_batches(batches, order):
    names = {"boxes": 0, "labels": -1, "crowd": False}
    for name, fill in names.items():
        values = np.concatenate([np.asarray(batch[name]) for batch in batches])
        wanted = [expected(RECORDS[number][name], 5, fill)[0] for number in order]
        np.testing.assert_array_equal(values, np.stack(wanted))
        assert values.dtype == wanted[0].dtype
    counts = np.concatenate([np.asarray(batch["count"]) for batch in batches])
    assert counts.tolist() == [min(COUNTS[number], 5) for number in order]


def test_over_a_source_in_order_and_after_a_restart():
    source = sources.Records(RECORDS)
    make = data_iterator(detection)
    assert_batches(list(make(source=source, batch_size=2, shuffle=False)), range(6))
    first = make(source=source, batch_size=2, seed=1)
    next(first)
    other = make(source=source, batch_size=4, seed=1)
    other.set_state(json.loads(json.dumps(first.get_state())))
    later = [np.asarray(batch["boxes"]) for batch in other]
    np.testing.assert_array_equal(
        np.concatenate(later)[:4], np.concatenate([np.asarray(b["boxes"]) for b in first])
    )


def test_a_state_of_another_number_of_rows_is_refused():
    source = sources.Records([{"x": record["labels"]} for record in RECORDS])
    graphs = {
        "first": lambda x: {"x": pad_rows(x, 4)[0]},
        "rows": lambda x: {"x": pad_rows(x, 5)[0]},
        "fill": lambda x: {"x": pad_rows(x, 4, fill=-1)[0]},
    }
    iterators = {
        k: data_iterator(graph)(source=source, batch_size=2) for k, graph in graphs.items()
    }
    for iterator in iterators.values():
        next(iterator)
    for name in ("rows", "fill"):
        with pytest.raises(StateError, match=r"operators\."):
            iterators[name].set_state(iterators["first"].get_state())
            next(iterators[name])


def test_over_grain():
    dataset = grain.MapDataset.source(RECORDS).to_iter_dataset()
    assert_batches(list(dataset.pipe(DALITransform(detection, batch_size=2))), range(6))


def test_over_a_reader(tmp_path):
    for number, record in enumerate(RECORDS):
        np.save(tmp_path / f"{number}.npy", record["boxes"])

    @data_iterator(output_map=["boxes", "count"], reader_name="reader")
    def boxes():
        data = dali_fn.readers.numpy(
            file_root=str(tmp_path), file_filter="*.npy", name="reader", pad_last_batch=True
        )
        return pad_rows(data, 5, fill=-1)

    batch = next(boxes(batch_size=6))
    wanted = [expected(record["boxes"], 5, -1)[0] for record in RECORDS]
    np.testing.assert_array_equal(batch["boxes"], np.stack(wanted))
    assert batch["count"].tolist() == [min(k, 5) for k in COUNTS]


def test_rows_may_be_used_in_the_graph():
    def graph(boxes):
        rows, count = pad_rows(boxes, 5)
        return {"sum": dali_fn.reductions.sum(rows), "half": cast(rows, "bfloat16"), "k": count * 2}

    batch = next(data_iterator(graph)(source=sources.Records(RECORDS), batch_size=6, shuffle=False))
    totals = [record["boxes"][:5].sum() for record in RECORDS]
    np.testing.assert_allclose(batch["sum"], totals)
    assert batch["half"].shape == (6, 5, 4) and batch["half"].dtype == "bfloat16"
    assert batch["k"].tolist() == [2 * min(k, 5) for k in COUNTS]
