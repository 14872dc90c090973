"""Random numbers of records in a graph: as in NumPy, and independent of the rest of the batch."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, pipeline_def

from dalijax.core.feeding.graph import field_graph
from dalijax.core.formats.field import Field
from dalijax.core.random.draw import Draw, DrawFunction, DrawRows, described_draws
from dalijax.core.random.hashing import column_keys, fold, uniform

ROWS = 6


def run(graph, records, seed=3, epoch=1, sizes=None, **more):
    """Runs a graph of draws for some records."""

    def rows(*_):
        return DrawRows(fold(seed, epoch, np.asarray(records)), lambda field: sizes[field], **more)

    @pipeline_def(batch_size=len(records), num_threads=1, device_id=None)
    def pipeline():
        return graph(Draw(rows, {}))

    built = pipeline()
    built.build()
    return [np.asarray(one.as_tensor()) for one in built.run()]


def numbers(records, name, count, seed=3, epoch=1):
    return uniform(fold(seed, epoch, np.asarray(records)), column_keys(name, count)).astype(float)


def test_images_of_unknown_size_are_refused():
    sizes, refused = np.array([[4, 5], [-1, -1], [0, 2], [1, 1]], np.int64), {}
    rows = DrawRows(fold(0, np.arange(4)), lambda field: sizes, refused.setdefault)
    found = rows.image_sizes("image")
    assert found.dtype == np.int32 and found.tolist() == [[4, 5], [1, 1], [1, 1], [1, 1]]
    assert sizes[1:3].tolist() == [[-1, -1], [0, 2]]  # the source may keep this array
    assert {row: str(error) for row, error in refused.items()} == {
        1: "the size of the image can't be read from its header",
        2: "the image has no pixels",
    }
    with pytest.raises(ValueError, match="can't be read from its header"):
        DrawRows(fold(0, np.arange(4)), lambda field: sizes).image_sizes("image")


def test_draws_are_functions_of_seed_epoch_record_and_name():
    def graph(draw):
        return (
            draw.uniform(-2, 4),
            draw.uniform(shape=(2, 3), name="many"),
            draw.normal(5, 2, shape=[2]),
            draw.coin_flip(0.3, shape=[50]),
            draw.choice([1.5, 2.5, 9], p=[1, 2, 1], shape=[50]),
            draw.choice([7, 9]),
        )

    records = [4, 0, 10**10, 2, 2, 77]
    plain, many, normal, coins, chosen, whole = run(graph, records)
    np.testing.assert_allclose(plain, numbers(records, "#0", 1)[:, 0] * 6 - 2, rtol=1e-6)
    np.testing.assert_allclose(many.reshape(ROWS, 6), numbers(records, "many", 6), rtol=1e-6)
    u = numbers(records, "#2", 4)
    expected = np.sqrt(-2 * np.log1p(-u[:, :2])) * np.cos(2 * np.pi * u[:, 2:]) * 2 + 5
    np.testing.assert_allclose(normal, expected, rtol=1e-6)
    np.testing.assert_array_equal(coins, numbers(records, "#3", 50) < 0.3)
    share = numbers(records, "#4", 50)
    np.testing.assert_array_equal(
        chosen, np.where(share < 0.25, 1.5, np.where(share < 0.75, 2.5, 9))
    )
    np.testing.assert_array_equal(whole, np.where(numbers(records, "#5", 1)[:, 0] < 0.5, 7, 9))
    assert [a.dtype.name for a in (plain, normal, coins, chosen, whole)] == [
        *("float32", "float32", "int32", "float32", "int32")
    ]
    again = run(graph, records[3:])
    for a, b in zip((plain, many, normal, coins, chosen, whole), again):
        np.testing.assert_array_equal(a[3:], b)


def test_a_function_may_have_several_outputs_in_any_order_of_memory():
    def graph(draw):
        forms = [((), np.float32), ((2,), np.int32)]
        return draw._compute_outputs(
            lambda u, _: (u.T[1], (u[:, :2] * 10).T[::-1].T), forms, columns=3, name="a"
        )

    first, second = run(graph, np.arange(5))
    u = numbers(np.arange(5), "a", 3)
    np.testing.assert_array_equal(first, u[:, 1].astype(np.float32))
    np.testing.assert_array_equal(second, (u[:, 1::-1] * 10).astype(np.int32))


def test_outputs_have_any_shape_and_dtype():
    forms = [
        *(((2, 3), np.float32), ((), np.int32), ((4,), np.float32), ((), np.float32)),
        *(((), np.uint8), ((3, 1, 2), np.int32), ((9, 8), np.float32), ((0, 2), np.float32)),
    ]
    counts = [int(np.prod(shape)) for shape, _ in forms]
    made = []

    def function(u, _):
        cut = np.split(np.floor(u * 100), np.cumsum(counts)[:-1], axis=1)
        return [one.reshape(len(one), *shape) for one, (shape, _) in zip(cut, forms)]

    def graph(draw):
        made.extend(draw._compute_outputs(function, forms, columns=sum(counts), name="a"))
        return tuple(made)

    outputs = run(graph, np.arange(5))
    expected = function(numbers(np.arange(5), "a", sum(counts)).astype(np.float32), None)
    for output, (shape, dtype), values in zip(outputs, forms, expected):
        assert output.dtype == dtype and output.shape == (5, *shape)
        np.testing.assert_array_equal(output, values)


_buffer, _calls = np.empty((5, 2)), itertools.count()


def written(u, _):
    """Returns the same array at each call, as float64: DALI gets a copy of it."""
    _buffer[:] = u
    return _buffer


def stops(u, _):
    raise StopIteration


@pytest.mark.parametrize(
    ("function", "message"),
    (
        (written, "returns the same array at each call.*Return a new array, e.g. array.copy"),
        (lambda u, _: written(u, _)[:, ::-1], "returns the same array at each call"),
        (lambda u, _: u + next(_calls), "returned different numbers for equal inputs"),
        (stops, "the function of the draw 'a' raised StopIteration"),
    ),
)
def test_a_function_that_is_not_pure_is_refused(function, message):
    with pytest.raises(Exception, match=message):
        run(lambda draw: (draw.compute(function, (2,), name="a"),), np.arange(5))


@pytest.mark.parametrize(
    ("result", "shape"),
    ((lambda u: u[:1], r"\(1, 2\)"), (lambda u: None, r"\(\)"), (lambda u: 1.0, r"\(\)")),
)
def test_a_function_returns_an_array_of_its_shape(result, shape):
    text = rf"draw 'a' returned the shape {shape} for 5 records. Return an array of shape \(5, 2\)"
    with pytest.raises(Exception, match=text):
        run(lambda draw: (draw.compute(lambda u, _: result(u), (2,), name="a"),), np.arange(5))


@pytest.mark.parametrize("given", (0, 1, 3))
def test_a_function_returns_an_array_for_each_output(given):
    def graph(draw):
        return draw._compute_outputs(
            lambda u, _: [u[:, 0]] * given, [((), np.float32)] * 2, columns=1, name="a"
        )

    with pytest.raises(Exception, match=rf"draw 'a' returned {given} arrays, not 2"):
        run(graph, np.arange(5))


def test_a_function_may_return_read_only_arrays():
    constant = np.broadcast_to(np.float32(3), (5, 2))
    drawn = run(
        lambda draw: (
            draw.compute(lambda u, _: constant, (2,)),
            draw.compute(lambda u, _: jnp.where(u > 2, u, jnp.nan), (2,)),
            draw.compute(lambda u, _: u[:, ::-1], (2,)),
            draw.compute(lambda u, _: u.tolist(), (2,)),
        ),
        np.arange(5),
    )
    u = [numbers(np.arange(5), f"#{k}", 2).astype(np.float32) for k in range(4)]
    expected = (constant, np.full((5, 2), np.nan), u[2][:, ::-1], u[3])
    for output, values in zip(drawn, expected):
        np.testing.assert_array_equal(output, values)


def test_a_draw_is_computed_without_a_pipeline():
    calls = []
    keys = column_keys("a", 4)

    def function(rows):
        u = rows.uniform(keys)
        calls.append(len(u))
        return u[:, 0], u[:, 1:3], u[:, 3] * 10

    forms = [((), np.dtype("float32")), ((2,), np.dtype("float32")), ((), np.dtype("int32"))]
    drawn = DrawFunction("a", function, forms)
    for count in (3, 3, 2):
        one, two, integers = drawn(DrawRows(fold(3, 1, np.arange(count)), dict.get))
        u = numbers(np.arange(count), "a", 4).astype(np.float32)
        np.testing.assert_array_equal(np.column_stack([one, two]), u[:, :3])
        np.testing.assert_array_equal(integers, (u[:, 3] * 10).astype(np.int32))
    # The first call is repeated, to check that the function is pure.
    assert calls == [3, 3, 3, 2]


def test_a_function_gets_its_own_sizes():
    calls = []

    def function(u, sizes):
        calls.append(sizes.tolist())
        sizes[:] = 0  # the function owns its arguments
        return (u[:, 0],)

    def graph(draw):
        return draw._compute_outputs(
            function,
            [((), np.float32)],
            columns=1,
            images=draw.sized(draw.uniform(), (7, 9)),
        )

    run(graph, np.arange(3))
    assert set(map(str, calls)) == {str([[7, 9]] * 3)}


def test_distributions():
    records = np.arange(4000)
    normal, coins = run(
        lambda d: (d.normal(1, 3, shape=[10]), d.coin_flip(0.2, shape=[10])), records
    )
    assert abs(normal.mean() - 1) < 5 * 3 / 200
    assert abs(normal.std() - 3) < 5 * 3 / 200 / np.sqrt(2)
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 5 / np.sqrt(4000)
    assert abs(coins.mean() - 0.2) < 5 * 0.4 / 200


def test_a_function_gets_the_sizes_of_the_images_of_a_field():
    sizes = np.array([[3, 4], [5, 6]], np.int32)
    white = np.full((8, 8, 3), 255, np.uint8)
    bytes_ = np.frombuffer(b"P6 8 8 255\n" + white.tobytes(), np.uint8)

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def pipeline(behind):
        data = fn.external_source(source=lambda: [bytes_] * 2, batch=True)
        rows = DrawRows(
            fold(0, np.arange(2)), lambda field: sizes, orientations=lambda field: np.array([1, 6])
        )
        draw = Draw(lambda *_: rows, {data.name: "data"})
        images = behind(fn.decoders.image, data)
        return draw.compute(lambda u, hw: hw * 10, (2,), np.int32, images=images, columns=0)

    built = pipeline(lambda decode, data: decode(data))
    built.build()
    np.testing.assert_array_equal(np.asarray(built.run()[0].as_tensor()), sizes * 10)
    # Sizes have the EXIF orientation applied; the orientation 6 swaps height and width.
    built = pipeline(lambda decode, data: decode(data, adjust_orientation=False))
    built.build()
    stored = [sizes[0], sizes[1, ::-1]]
    np.testing.assert_array_equal(np.asarray(built.run()[0].as_tensor()) // 10, stored)
    for behind, kind in (
        (lambda decode, data: fn.resize(decode(data), size=4), "Resize"),
        (lambda decode, data: data, "another value"),
    ):
        with pytest.raises(TypeError, match=f"not after .*{kind}.*directly after the decoder"):
            pipeline(behind)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda d: d.uniform(2, 1), "with low <= high"),
        (lambda d: d.uniform(0, np.inf), "must be finite"),
        (lambda d: d.normal(stddev=-1), "stddev"),
        (lambda d: d.coin_flip(1.5), "from 0 to 1, not 1.5"),
        (lambda d: d.choice([]), "non-empty list"),
        (lambda d: d.choice(["a"]), "list of numbers"),
        (lambda d: d.choice([1, 2], p=[1]), "each of 2 values"),
        (lambda d: d.choice([1, 2**40]), "fit into int32, not .*1099511627776"),
        (lambda d: d.uniform(shape=(-1,)), "shape must be .*, not \\(-1,\\)"),
        (lambda d: d.uniform(shape=(2.5,)), "shape must be .*, not \\(2.5,\\)"),
        (lambda d: d.uniform(shape=3), "shape must be a tuple .*, not 3"),
        (lambda d: d.normal(shape=3), "shape must be a tuple .*, not 3"),
        (lambda d: d.compute(np.floor, 3, columns=3), "shape must be a tuple .*, not 3"),
        (lambda d: d.compute(lambda u: u), r"called with \(u, sizes\).* too many positional"),
        (lambda d: d.uniform(name=3), "name must be a string, not 3"),
        (lambda d: (d.coin_flip(name="a"), d.uniform(name="a")), "two draws have the name 'a'"),
    ],
)
def test_invalid_draws_are_refused(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run(call, [0])


def test_a_stored_draw_is_refused_outside_its_graph():
    kept = []
    run(lambda d: (kept.append(d), d.uniform())[1], [0])
    with pytest.raises(ValueError, match="while its own graph function runs"):
        kept[0].uniform(name="outside")
    with pytest.raises(ValueError, match="while its own graph function runs"):
        run(lambda d: kept[0].uniform(name="elsewhere"), [0])


def test_draws_are_described_with_their_settings():
    def lines(graph):
        @pipeline_def(batch_size=2, num_threads=1, device_id=None)
        def pipeline():
            return graph(Draw(lambda *_: DrawRows(fold(np.arange(2)), lambda field: None), {}))

        return [
            " ".join([kind, name, *(f"{key}={value}" for key, value in settings.items())])
            for kind, name, settings in described_draws(pipeline())
        ]

    def graph(d, high=4, p=None, settings=None):
        return (
            d.uniform(-2, high),
            d.normal(np.float32(0.5), shape=[2], name="a b"),
            d.choice([1, 2], p=p),
            d.compute(lambda u, _: u, settings=settings),
        )

    assert lines(graph) == [
        'draw.uniform __draw_0 place="#0" outputs=[["float32"]] low=-2 high=4',
        'draw.normal draw.a b outputs=[[2,"float32"]] mean=0.5 stddev=1.0',
        'draw.choice __draw_2 place="#2" outputs=[["int32"]] values=[1,2] p=null',
        'draw.compute __draw_3 place="#3" outputs=[["float32"]]',
    ]
    changes = ({"high": 5}, {"p": [1, 3]}, {"settings": {"strength": 1}})
    for number, change in zip((0, 2, 3), changes):
        changed = lines(lambda d: graph(d, **change))
        assert [k for k, (a, b) in enumerate(zip(changed, lines(graph))) if a != b] == [number]
    plain = pipeline_def(lambda: fn.constant(fdata=[1.0]), batch_size=1, num_threads=1)
    assert described_draws(plain(device_id=None)) == []


def test_functions_of_users_are_computed_for_each_draw_by_itself():
    """Whatever they are called, since they may be different, and may depend on all rows."""

    def graph(draw):
        functions = (lambda u, _: u, lambda u, _: -u, lambda u, _: u - u.mean())
        return tuple(
            draw.compute(function, name=name, kind="augment.mine")
            for function, name in zip(functions, "abc")
        )

    a, b, c = run(graph, range(ROWS))
    np.testing.assert_array_equal(a, numbers(range(ROWS), "a", 1)[:, 0])
    np.testing.assert_array_equal(b, -numbers(range(ROWS), "b", 1)[:, 0])
    expected = numbers(range(ROWS), "c", 1)[:, 0]
    np.testing.assert_allclose(c, expected - expected.mean(), atol=1e-6)


def test_outputs_that_are_copied_to_the_gpu_are_noted():
    draws = []

    def graph(label, *, draw):
        draws.append(draw)
        angle, cpu = draw.uniform(name="argument"), draw.uniform(name="CPU")
        forms = [((), np.float32)] * 2
        first, second = draw._compute_outputs(lambda u, _: [u, u], forms, columns=1, name="second")
        image = fn.rotate(fn.constant(idata=1, shape=[2, 2, 3], device="gpu"), angle=angle)
        both, output = draw.uniform(name="both"), draw.uniform(name="output")
        return image, cpu, first, second.gpu() + label, both, fn.copy(both.gpu()), output.gpu()

    fields = {"label": Field(np.dtype(np.float32), 0)}
    with Pipeline(1, 1, 0):
        field_graph(graph, fields, {}, lambda name: 0)(lambda name: None, lambda run: None)
    outputs = draws[0]._outputs.values()
    copied = {(output.draw.name, output.index) for output in outputs if output.is_copied}
    assert copied == {("second", 1), ("both", 0), ("output", 0)}
