"""`dalijax.profile`: the verdict from figures, and real loops with a single slow part."""

import itertools
import threading
import time

import grain
import jax
import numpy as np
import pytest
from host_batches import on_devices
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def, types
from PIL import Image

from dalijax import DALIGenericIterator, data_iterator, fn, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from dalijax.core.stats import Call
from dalijax.core.tools.profile.loop import LoopTimes, loop_times
from dalijax.core.tools.profile.replay import Replay, Stage, _running, measured
from dalijax.core.tools.profile.verdict import verdict
from dalijax.profile import profile

BATCH = 4
SLOW = 0.05  # seconds per batch, in graphs that take less than two milliseconds
CALL = {"batch_size": BATCH, "num_threads": 1, "device_id": None}

# The verdict, from figures

GRAPH = (
    Stage("fn.readers.file", "input", 0.02),
    Stage("fn.decoders.image", "cpu", 0.07),
    Stage("fn.resize", "cpu", 0.01),
)


def loop(pipelines=0.0, placing=0.0, rest=0.1, **functions):
    waits = {"pipelines": pipelines, "placing": placing}
    waits |= {f"function {name}": seconds for name, seconds in functions.items()}
    total = rest + sum(waits.values())
    return LoopTimes(10, 100.0, 10 * total, {k: 10 * v for k, v in waits.items()})


def said(times, replay=None, unknown="", cores=8):
    return verdict(times, replay, unknown, cores)


@pytest.mark.parametrize(
    "times,bound,what",
    [
        (loop(pipelines=0.005), False, ""),
        (loop(pipelines=0.011), False, ""),
        (loop(pipelines=0.012), True, "fn.decoders.image"),
        (loop(pipelines=10.0), True, "fn.decoders.image"),
        (loop(pipelines=0.1, placing=0.05, flip=0.02), True, "fn.decoders.image"),
        (loop(pipelines=0.01, placing=0.05, flip=0.02), True, "placing"),
        (loop(pipelines=0.01, placing=0.05, flip=0.2), True, "function flip"),
        (loop(placing=0.5, rest=0.0), True, "placing"),
    ],
)
def test_the_loop_decides_and_the_greatest_wait_is_named(times, bound, what):
    found = said(times, Replay(0.1, GRAPH, 4))
    assert (found.input_bound, found.input) == (bound, what)
    words = "input-bound" if bound else "not input-bound"
    assert found.text.startswith(f"{words}: next() takes ")
    assert (f"input: {what} takes " in found.text) == bound


def test_the_words_have_the_rates_the_share_and_the_cure():
    found = said(loop(pipelines=0.06, rest=0.04), Replay(0.1, GRAPH, 4))
    assert found.text == (
        "input-bound: next() takes 60 % of the loop's time; the loop takes 1,000 samples/s, and "
        "would take 2,500 samples/s without waiting; the graph alone produces 1,000 samples/s; "
        "input: fn.decoders.image takes 70 % of the graph's time; try num_threads=8 (python -m "
        "dalijax.tune)"
    )
    found = said(loop(pipelines=0.001, rest=0.099), Replay(0.001, GRAPH, 4))
    assert found.text == (
        "not input-bound: next() takes 1 % of the loop's time; it takes 1,000 samples/s; the "
        "graph alone produces 100.0 k samples/s"
    )


@pytest.mark.parametrize(
    "stages,threads,pipelines,cure",
    [
        (GRAPH, 4, 1, "try num_threads=8 "),
        (GRAPH, 4, 2, "dalijax.tune tries other settings"),
        (GRAPH, 8, 1, "dalijax.tune tries other settings"),
        ((Stage("function flip", "cpu", 1.0), *GRAPH), 4, 1, "compile it with jit"),
        ((Stage("source Files", "input", 1.0), *GRAPH), 4, 1, "reading is slow"),
        ((*GRAPH, Stage("fn.rotate", "gpu", 1.0)), 4, 1, "dalijax.tune tries other settings"),
    ],
)
def test_the_cure_fits_the_stage(stages, threads, pipelines, cure):
    found = said(loop(pipelines=0.1), Replay(0.1, stages, threads, pipelines))
    assert cure in found.text.rpartition("; ")[2]


def test_the_slowest_stage_is_of_the_slowest_lane():
    # Two operators of the CPU take longer than the GPU operator, which works at the same time.
    stages = (Stage("a", "cpu", 4.0), Stage("b", "cpu", 5.0), Stage("c", "gpu", 6.0))
    assert Replay(1.0, stages).slowest.name == "b"
    assert Replay(1.0, stages).shares == {"a": 4 / 15, "b": 5 / 15, "c": 6 / 15}
    assert Replay(1.0).slowest is None and Replay(1.0).shares == {}


def test_missing_information_is_reported():
    found = said(loop(pipelines=0.1), None, "a generator can't run twice")
    assert found.input_bound and found.input == ""
    assert "but the part is unknown: a generator can't run twice" in found.text
    assert "graph alone" not in found.text
    found = said(loop(pipelines=0.1), Replay(0.1))
    assert found.input_bound and "Pass more seconds" in found.text
    assert not said(loop(), None, "a generator").input_bound
    nothing = said(LoopTimes(0, 0.0, 0.0, {}))
    assert nothing.input_bound is None and "took no batch" in nothing.text


def test_a_machine_that_is_busy_with_other_work_is_reported():
    found = said(loop(pipelines=0.1), Replay(0.05, GRAPH, 4))
    assert "in the loop it reaches 1/4.0 of that" in found.text
    assert "in the loop" not in said(loop(pipelines=0.1), Replay(0.19, GRAPH, 4)).text


def calls(count, seconds, every, **spans):
    return [Call(k * every, k * every + seconds, dict(spans), True) for k in range(count)]


def test_the_times_of_a_loop_leave_the_first_steps_out():
    spans = {"dalijax.place": 0.1, "dalijax.wait": 0.2, "graph.<locals>.flip": 0.05}
    first = [Call(*times, {}, True) for times in ((-100.0, -50.0), (-50.0, -20.0), (-20.0, -1.0))]
    times = loop_times([*first, *calls(10, 0.5, 1.0, **spans)], 10.0, 8.0)
    assert (times.steps, times.seconds) == (10, 10.0)
    expected = {"pipelines": 3.5, "placing": 1.0, "function flip": 0.5}
    assert times.waits == pytest.approx(expected)
    assert times.wait_share == pytest.approx(0.5)
    assert (times.rate, times.unblocked_rate) == pytest.approx((8.0, 16.0))
    assert loop_times(calls(1, 0.5, 1.0), 1.0, 8.0).steps == 1
    nothing = LoopTimes(0, 8.0, 0.0, {"pipelines": 0.0})
    assert loop_times([], 1.0, 8.0) == nothing
    assert loop_times([Call(0.0, 0.5, {}, False)], 1.0, 8.0) == nothing  # the end of an epoch


def test_the_slowest_part_of_a_graph_is_looked_into():
    costs = [1, 0, 0, 1, 50, 2, 0, 1, 0, 0]
    cuts, seen = range(1, len(costs) + 1), []

    def latency(cut):
        seen.append(cut)
        if cut == 3:
            raise RuntimeError("no cut here")
        return float(sum(costs[:cut]))

    known = measured(cuts, latency, lambda: True)
    assert known[4] == 2 and known[5] == 52 and 3 not in known
    assert known[1] == 1 and known[10] == 55 and len(seen) < len(costs)
    # After the time limit, the slowest operator is still found.
    known = measured(cuts, latency, lambda: False)
    assert known[4] == 2 and known[5] == 52 and len(known) < 7
    assert measured([0, 1], lambda cut: 3.0, lambda: True) == {0: 0.0, 1: 3.0}


# Real loops


def run(iterator, steps=14, model=0.0, seconds=1.5):
    """Returns the report of a loop over some epochs.

    Its step sleeps for the given seconds, and at least 20 times as long as ``next()`` took: with a
    model it is not input-bound, however slow the machine is.
    """

    def step():
        nonlocal begin
        time.sleep(model and max(model, 20 * (time.perf_counter() - begin)))
        begin = time.perf_counter()

    left = steps
    with profile(iterator, seconds=seconds) as report:
        begin = time.perf_counter()
        while left:
            for _ in itertools.islice(iterator, left):
                step()
                left -= 1
            step()  # the end of an epoch may take as long as a batch
    return report


def numbers(count=64):
    return sources.Arrays({"number": np.arange(count, dtype=np.int32)[:, None]})


def as_float(number):
    return dali_fn.cast(number, dtype=types.FLOAT)


NUMBERS = data_iterator(as_float, ["x"], source=numbers())


def test_a_slow_model_is_not_input_bound():
    with NUMBERS(**CALL) as iterator:
        report = run(iterator, model=SLOW)
    assert report.input_bound is False and report.input == ""
    assert str(report).startswith("not input-bound: ")
    assert report.pipeline_rate > report.loop_rate > 0
    assert {*report.stages} == {"source Arrays", "fn.cast"}
    assert sum(report.stages.values()) == pytest.approx(1)
    assert report.steps == 11
    assert report.loop_rate == pytest.approx(BATCH * report.steps_per_second)
    assert sum(report.waits.values()) == pytest.approx(report.wait_share)


def test_ends_of_epochs_are_not_steps():
    with data_iterator(as_float, ["x"], source=numbers(2 * BATCH))(**CALL) as iterator:
        report = run(iterator, steps=12, model=SLOW, seconds=0)
    assert report.steps <= 12
    assert report.loop_rate <= BATCH / SLOW  # each step sleeps


def slowest_of(report):
    assert report.input_bound and str(report).startswith("input-bound: ")
    assert f"input: {report.input} takes " in str(report)
    assert report.input == max(report.stages, key=report.stages.get)
    return report.input


def test_a_slow_python_source_of_a_graph():
    def read(info):
        time.sleep(SLOW)
        return np.zeros((BATCH, 8), np.float32)

    def graph():
        return dali_fn.cast(dali_fn.external_source(read, batch=True), dtype=types.INT32)

    with data_iterator(graph, ["x"])(**CALL) as iterator:
        assert slowest_of(run(iterator)) == "fn.external_source"


class SlowSource(sources.Arrays):
    def read(self, indices, names):
        time.sleep(2 * SLOW)
        return super().read(indices, names)


def test_a_slow_source():
    source = SlowSource({"number": np.arange(64, dtype=np.int32)[:, None]})
    with data_iterator(as_float, ["x"], source=source)(**CALL) as iterator:
        assert slowest_of(run(iterator)) == "source SlowSource"


class CountedSource(sources.Arrays):
    """Counts the reads, and notifies those who wait for one."""

    def __init__(self, data):
        super().__init__(data)
        self.reads, self.changed = 0, threading.Condition()

    def read(self, indices, names):
        with self.changed:
            self.reads += 1
            self.changed.notify_all()
        return super().read(indices, names)


def test_each_batch_of_a_replay_is_read_ahead():
    source = CountedSource({"number": np.arange(64, dtype=np.int32)[:, None]})
    with (
        data_iterator(as_float, ["x"], source=source)(**CALL) as iterator,
        _running(iterator, 1) as (runner, *_),
    ):
        before = source.reads
        for batches in range(1, 9):
            runner.run_alone()
            with source.changed:
                assert source.changed.wait_for(lambda: source.reads > before + batches, 30)


@pytest.mark.parametrize("depth", (1, 3, 5))
def test_several_pipelines_are_replayed(depth):
    settings = {"batch_size": 8, "num_threads": 1, "prefetch_queue_depth": depth}
    with (
        NUMBERS(**settings, **on_devices(4)) as iterator,
        profile(iterator, seconds=0.5) as report,
    ):
        for _ in range(6):
            next(iterator)
    assert report.unknown == "" and {*report.stages} == {"source Arrays", "fn.cast"}


def slow(x):
    time.sleep(SLOW)
    return x


def test_a_slow_function_of_a_graph():
    def graph(number):
        return fn.jax_function(slow)(as_float(number)) + 1.0

    with data_iterator(graph, ["x"], source=numbers())(**CALL) as iterator:
        assert slowest_of(run(iterator)) == "function slow"


@pytest.fixture(scope="module")
def large_jpegs(tmp_path_factory):
    """JPEGs of a million pixels of noise, which are slow to decode."""
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(0).integers(0, 256, (800, 1200, 3), np.uint8)
    for k in range(2):
        Image.fromarray(noise).save(folder / f"{k}.jpg", quality=90)
    return [str(folder / f"{k % 2}.jpg") for k in range(8)]


def decode(files):
    data, label = dali_fn.readers.file(files=files, labels=[0] * len(files), name="reader")
    image = dali_fn.decoders.image(data)
    return dali_fn.slice(image, (0, 0), (8, 8), axes=(0, 1), normalized_anchor=False), label


def test_slow_decoding(large_jpegs):
    make = data_iterator(decode, ["image", "label"], reader_name="reader")
    with make(large_jpegs, **CALL) as iterator:
        report = run(iterator)
        assert slowest_of(report) == "fn.decoders.image"
    # Constants take no time, so that no operator is measured alone.
    assert list(report.stages) == ["fn.readers.file", "fn.decoders.image", "fn.slice"]


def test_a_slow_batch_map():
    """Its NumPy arrays are waited for in next(); jax.Arrays are not."""

    def slow(x):
        time.sleep(SLOW)
        return x

    def centered(batch, key):
        x = batch["x"] - batch["x"].mean()
        return {"x": jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}

    make = data_iterator(as_float, ["x"], source=numbers(), as_numpy=True, batch_map=centered)
    with make(batch_size=BATCH, num_threads=1) as iterator:
        report = run(iterator)
    assert report.input_bound and report.input == "function centered"
    assert max(report.waits, key=report.waits.get) == "function centered"


def test_slow_placing():
    def graph():  # arrays that cost no time to create; the older executor copies them
        return dali_fn.constant(idata=[1], shape=[1 << 24], dtype=types.UINT8)

    with data_iterator(graph, ["x"], size=4096)(**CALL, exec_dynamic=False) as iterator:
        report = run(iterator)
    assert report.input_bound and report.input == "placing"
    assert report.waits["placing"] > report.waits["pipelines"]
    assert "input: placing takes " in str(report)


# What the profiler leaves unchanged


@pytest.mark.parametrize("kind", ("reader", "source"))
def test_the_iterator_does_not_move(kind, arrays_dir):
    def read():
        x = dali_fn.readers.numpy(
            file_root=arrays_dir, name="reader", random_shuffle=True, pad_last_batch=True
        )
        return x + dali_fn.random.uniform(range=(0.0, 1.0))

    def drawn(number, draw):
        return as_float(number) + draw.uniform(0.0, 1.0)

    def make():
        if kind == "reader":
            return data_iterator(read, ["x"], reader_name="reader", auto_reset=True)(**CALL)
        return data_iterator(drawn, ["x"], source=numbers(12), auto_reset=True)(**CALL)

    def batches(iterator, count):
        found = []
        while len(found) < count:
            found += [np.asarray(b["x"]) for b in itertools.islice(iterator, count - len(found))]
        return found

    with make() as iterator, make() as other:
        expected = batches(other, 12)
        with profile(iterator, seconds=0.5) as report:
            assert "has not ended" in str(report)
            seen = batches(iterator, 5)
            state = iterator.get_state()
        assert report.pipeline_rate and report.input_bound is not None
        assert iterator.get_state() == state and iterator._stats is None
        np.testing.assert_array_equal(seen + batches(iterator, 7), expected)


def test_other_observers_continue_to_count():
    with NUMBERS(**CALL) as iterator:
        stats = iterator.watch()
        next(iterator)
        run(iterator, steps=4, seconds=0)
        next(iterator)
        assert iterator.watch() is stats and stats.batches == 6 and stats._calls is None


def test_a_failed_loop_is_cleaned_up():
    with NUMBERS(**CALL) as iterator:
        with pytest.raises(KeyError), profile(iterator) as report:
            next(iterator)
            raise KeyError
        assert iterator._stats is None and "has not ended" in str(report)
        with (
            profile(iterator, seconds=0),
            pytest.raises(RuntimeError, match="already being profiled"),
            profile(iterator),
        ):
            pass
        with profile(iterator) as report:
            pass
        assert report.input_bound is None and "took no batch" in str(report)
        run(iterator, steps=3, seconds=0)


# Graphs that can't be replayed


def test_a_generator_is_not_taken_from():
    taken = []

    def batches():
        for k in range(40):
            taken.append(k)
            time.sleep(SLOW)
            yield np.full((BATCH, 1), k, np.float32)

    generator = batches()
    make = data_iterator(lambda: dali_fn.external_source(generator, batch=True), ["x"])
    with make(**CALL) as iterator:
        report = run(iterator, steps=8)
        assert len(taken) <= 8 + 2  # the batches that DALI prepares ahead
    assert report.input_bound and report.input == "" and report.pipeline_rate is None
    assert "fn.external_source can't run a second time" in report.unknown
    assert report.unknown in str(report) and report.stages == {}


def test_pipelines_made_by_hand(arrays_dir):
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def graph():
        return dali_fn.readers.numpy(file_root=arrays_dir, name="reader")

    with DALIGenericIterator(graph(), ["x"], reader_name="reader", auto_reset=True) as iterator:
        report = run(iterator, model=SLOW, steps=6)
    assert report.input_bound is False and report.pipeline_rate is None
    assert "handmade pipelines" in report.unknown


# Adapters


@pytest.mark.parametrize("adapter", ("clu", "tfdata", "grain"))
def test_the_iterators_of_adapters(adapter):
    def graph(number):
        return fn.jax_function(slow)(as_float(number))

    make = data_iterator(graph, ["x"], source=numbers())
    if adapter == "clu":
        iterator = DALIDatasetIterator(make, **CALL)
    elif adapter == "tfdata":
        iterator = iter(DALIDataset(make, **CALL).repeat())
    else:
        iterator = iter(DALIIterDataset(make, num_epochs=None, **CALL))
    try:
        with profile(iterator, seconds=1) as report:
            for _ in range(10):
                next(iterator)
        assert iterator._core._stats is None
    finally:
        iterator.close()
    assert slowest_of(report) == "function slow"


def test_a_grain_transform_has_the_times_of_the_loop():
    ds = grain.MapDataset.source([{"x": np.int32(k)} for k in range(48)])
    transform = DALITransform(
        lambda x: fn.jax_function(slow)(as_float(x)), output_map=["x"], **CALL
    )
    iterator = iter(ds.pipe(transform))
    with profile(iterator) as report:
        for _ in range(10):
            next(iterator)
    assert report.input_bound and report.input == "" and report.stages == {}
    assert "its records come from outside the graph" in str(report)


@pytest.mark.parametrize("other", (NUMBERS, [1, 2], DALIDataset(NUMBERS, **CALL)))
def test_other_objects_are_refused(other):
    with pytest.raises(TypeError, match="does not count its batches"), profile(other):
        pass
