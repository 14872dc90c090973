"""CLU: the iterator's contract, CLU's own tests of it, and reports of the input."""

import concurrent.futures
import inspect
import json
import os
import pickle
import tempfile

import grain
import jax
import numpy as np
import pytest
import tensorflow as tf
from clu import metric_writers, periodic_actions
from clu.data import dataset_iterator, dataset_iterator_test
from nvidia.dali import fn, pipeline_def, types

from conftest import corrupt, write_jpegs
from dalijax import LastBatchPolicy, data_iterator
from dalijax.adapters import grain as grain_adapter
from dalijax.adapters.clu import (
    DALIDatasetIterator,
    DALIGenericPeekableIterator,
    ReportInput,
    peekable_data_iterator,
)
from dalijax.adapters.tfdata import DALIDataset
from dalijax.sources import Arrays
from numbered import graph as numbers
from numbered import read_files
from programs import run_python

N, B = 11, 4


NUMBERS = data_iterator(numbers, ["x", "u"], reader_name="reader", mask="mask")
PEEKABLE = peekable_data_iterator(numbers, ["x", "u"], reader_name="reader")


def make(files, **options):
    return DALIDatasetIterator(
        NUMBERS, files=files, **{"batch_size": B, "num_threads": 1, **options}
    )


def taken(batch):
    return batch["x"].ravel().tolist(), batch["u"].tolist()


class TestCLUsOwn(dataset_iterator_test.DatasetIteratorTest):
    """The tests that CLU ships, with our iterator instead of a TensorFlow iterator."""

    def _create_iterator(self, start_index, checkpoint=True):
        # Numbers 0 to 9 without 1 and 3, and their primes, in batches of two.
        index = [i for i in range(start_index, 10) if i not in (1, 3)]
        primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]

        def source(k):
            rows = index[2 * k : 2 * k + 2]
            if len(rows) < 2:
                raise StopIteration
            return np.array(rows, np.int64), np.array([primes[i] for i in rows], np.int32)

        def graph():
            return tuple(fn.external_source(source, num_outputs=2, batch=True))

        made = data_iterator(
            graph, [dataset_iterator_test.INDEX, "prime"], size=len(index) // 2 * 2
        )
        return DALIDatasetIterator(made, num_epochs=1, checkpoint=checkpoint, batch_size=2)

    def assertEqual(self, first, second, msg=None):
        # Elements are dicts of arrays, which are compared by element.
        if isinstance(first, dict) and any(isinstance(v, np.ndarray) for v in first.values()):
            assert {k: v.tolist() for k, v in first.items()} == second, msg
        else:
            super().assertEqual(first, second, msg)

    def test_tf_iterator_save_and_load(self):
        # TensorFlow writes ckpt.index; the rest of the test is CLU's.
        folder = tempfile.mkdtemp()
        it = self._create_iterator(0)
        for _ in range(3):
            next(it)
        it.save(f"{folder}/ckpt")
        it = self._create_iterator(0)
        self.assertEqual(next(it), {dataset_iterator_test.INDEX: [0, 2], "prime": [2, 5]})
        it.load(f"{folder}/ckpt")
        self.assertEqual(next(it), {dataset_iterator_test.INDEX: [8, 9], "prime": [23, 29]})


def test_it_is_a_dataset_iterator_of_clu(jpegs_many):
    iterator = make(jpegs_many)
    assert isinstance(iterator, dataset_iterator.DatasetIterator)
    assert bool(iterator) and iter(iterator) is iterator
    spec = iterator.element_spec
    assert spec == {
        "x": dataset_iterator.ArraySpec(np.int32, (B, 1)),
        "u": dataset_iterator.ArraySpec(np.float32, (B,)),
        "mask": dataset_iterator.ArraySpec(np.bool_, (B,)),
    }
    assert all(isinstance(one, dataset_iterator.ArraySpec) for one in spec.values())
    assert taken(next(iterator))[0] == [0, 1, 2, 3]
    assert taken(iterator.get_next())[0] == [4, 5, 6, 7]


def test_only_a_finite_one_has_a_length(jpegs_many):
    endless, finite = make(jpegs_many), make(jpegs_many, num_epochs=2)
    assert not hasattr(endless, "__len__") and bool(endless)
    assert len(finite) == 6 == len(list(finite)) and bool(finite)
    assert isinstance(finite, DALIDatasetIterator)
    with pytest.raises(ValueError, match="num_epochs must be at least 1"):
        make(jpegs_many, num_epochs=0)


def test_the_end_is_sticky_until_reset_rewinds_to_the_beginning(jpegs_many):
    iterator = make(jpegs_many, num_epochs=2)
    whole = [taken(batch) for batch in iterator]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    iterator.reset()
    assert [taken(batch) for batch in iterator] == whole
    iterator.reset()
    for steps in range(5):  # and at any earlier time
        got = [taken(next(iterator)) for _ in range(steps)]
        assert got == whole[:steps]
        iterator.reset()


def test_an_endless_iterator_continues_from_epoch_to_epoch(jpegs_many):
    iterator = make(jpegs_many)
    got = [taken(next(iterator))[0] for _ in range(7)]
    assert got == ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]] * 3)[:7]


@pytest.mark.parametrize("num_epochs", (None, 2))
def test_a_save_is_after_the_last_delivered_batch_despite_peeks(jpegs_many, tmp_path, num_epochs):
    iterator, want = make(jpegs_many, num_epochs=num_epochs), make(jpegs_many, num_epochs=2)
    want = [taken(batch) for batch in want]
    for step in range(7 if num_epochs else 6):
        file = tmp_path / f"at-{step}"
        if step % 3 == 1 and step < 6:
            assert taken(iterator.peek()) == want[step]
        if step % 3 == 2 and step < 6:
            assert taken(iterator.peek_async().result()) == want[step]
        iterator.save(str(file))
        assert [p.name for p in tmp_path.iterdir() if "new" in p.name] == []
        assert file.is_file()
        for other in (make(jpegs_many, num_epochs=num_epochs), iterator):
            other.restore(file)
            got = [taken(next(other)) for _ in range(6 - step)]
            assert got == want[step:]
        iterator.restore(file)
        if step < 6:
            assert taken(next(iterator)) == want[step]


def test_saving_replaces_a_file_and_restoring_refuses_other_files(jpegs_many, tmp_path):
    iterator = make(jpegs_many)
    next(iterator)
    file = tmp_path / "deep" / "input"
    iterator.save(file)
    next(iterator)
    iterator.save(file)
    assert json.loads(file.read_text())["step"] == 2
    before = iterator.get_state()
    with pytest.raises(FileNotFoundError):
        iterator.restore(tmp_path / "missing")
    (tmp_path / "half").write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match="half: not a state of dalijax, since it is not JSON"):
        iterator.restore(tmp_path / "half")
    with pytest.raises(ValueError, match="batch_size: 4 -> 2"):
        make(jpegs_many, batch_size=2).restore(file)  # at once, before the first batch
    assert iterator.get_state() == before


def test_orbax_v1_saves_states_and_not_the_iterator(jpegs_many, tmp_path):
    from orbax.checkpoint import v1

    iterator = make(jpegs_many)
    next(iterator)
    with pytest.raises(TypeError, match=r"path of a file, not \w+\. .*save get_state\(\)"):
        iterator.save(object())  # Orbax passes an object of its own
    v1.save_checkpointables(tmp_path / "state", {"input": iterator.get_state()})
    wanted, resumed = taken(next(iterator)), make(jpegs_many)
    loaded = v1.load_checkpointables(tmp_path / "state", {"input": resumed.get_state()})
    resumed.set_state(loaded["input"])
    assert taken(next(resumed)) == wanted


def test_a_remote_path_is_written_through_epath(jpegs_many):
    # gs:// of a file system in memory, which another process is told to use.
    code = """
import sys, fsspec
from fsspec.implementations.memory import MemoryFileSystem

class Memory(MemoryFileSystem):
    def __init__(self, finalize_on_close=None, **options):
        super().__init__(**options)

fsspec.register_implementation("gcs", Memory, clobber=True)
fsspec.register_implementation("gs", Memory, clobber=True)
from etils import epath
from nvidia.dali import fn
from dalijax import data_iterator
from dalijax.adapters.clu import DALIDatasetIterator

@data_iterator(output_map=["x"], reader_name="reader")
def numbers(files):
    return fn.readers.file(files=files, labels=list(range(len(files))), name="reader")[1]

iterator = DALIDatasetIterator(numbers, files=sys.argv[1:], batch_size=4)
next(iterator)
iterator.save("gs://bucket/run/input")
assert [path.name for path in epath.Path("gs://bucket/run").iterdir()] == ["input"]
want = next(iterator)["x"].tolist()
iterator.restore("gs://bucket/run/input")
assert next(iterator)["x"].tolist() == want == [[4], [5], [6], [7]]
"""
    run_python("-c", code, *jpegs_many, env={**os.environ, "EPATH_USE_TF": "0"})


@pytest.mark.parametrize("planted", ["input.0.new", "input.new", "input"])
def test_a_save_follows_no_link(jpegs_many, tmp_path, planted):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / planted).symlink_to(precious)
    iterator = make(jpegs_many)
    next(iterator)
    iterator.save(folder / "input")
    assert precious.read_text() == "mine" and not (folder / "input").is_symlink()
    assert sorted(os.listdir(folder)) == sorted({planted, "input"})
    expected = taken(next(iterator))
    iterator.restore(folder / "input")
    assert taken(next(iterator)) == expected


def test_several_writers_may_save_to_one_file(jpegs_many, tmp_path):
    iterators = [make(jpegs_many) for _ in range(3)]

    def save(iterator):
        for _ in range(20):
            iterator.save(tmp_path / "input")
            json.loads((tmp_path / "input").read_text())

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(save, iterators))
    assert os.listdir(tmp_path) == ["input"]
    assert (tmp_path / "input").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_futures_are_fresh_after_each_batch_reset_and_restore(jpegs_many, tmp_path):
    iterator = make(jpegs_many)
    first = iterator.peek_async()
    assert iterator.peek_async() is first
    assert taken(first.result())[0] == [0, 1, 2, 3]
    next(iterator)
    second = iterator.peek_async()
    assert second is not first and taken(second.result())[0] == [4, 5, 6, 7]
    iterator.save(tmp_path / "at-1")
    next(iterator)
    iterator.restore(tmp_path / "at-1")
    assert taken(iterator.peek_async().result())[0] == [4, 5, 6, 7]
    iterator.reset()
    assert taken(iterator.peek_async().result())[0] == [0, 1, 2, 3]
    assert taken(next(iterator))[0] == [0, 1, 2, 3]


def test_it_works_in_clus_peekable_iterator(jpegs_many):
    peekable = dataset_iterator.PeekableDatasetIterator(make(jpegs_many))
    assert taken(peekable.peek())[0] == [0, 1, 2, 3]
    assert taken(next(peekable))[0] == [0, 1, 2, 3]
    peekable.reset()
    assert taken(peekable.peek_async().result())[0] == [0, 1, 2, 3]
    assert peekable.element_spec == make(jpegs_many).element_spec


def test_elements_are_numpy_or_jax(jpegs_many):
    assert all(type(a) is np.ndarray for a in next(make(jpegs_many)).values())
    placed = next(make(jpegs_many, element="jax"))
    assert all(isinstance(a, jax.Array) for a in placed.values())
    with pytest.raises(ValueError, match="element must be 'numpy' or 'jax', not 'torch'"):
        make(jpegs_many, element="torch")
    with pytest.raises(TypeError, match="Decorate it with dalijax.data_iterator"):
        DALIDatasetIterator(numbers)
    with pytest.raises(TypeError, match="got 3 as a positional argument. Pass everything after"):
        DALIDatasetIterator(NUMBERS, 3, files=jpegs_many)


def test_a_graph_may_have_arguments_of_any_name(jpegs_many):
    def graph(files, on_host="its own", as_numpy="its own", epoch_rules="its own"):
        assert on_host == as_numpy == epoch_rules == "its own"
        return fn.readers.file(files=files, name="reader", pad_last_batch=True)[1]

    iterator_fn = data_iterator(graph, ["x"], reader_name="reader")
    for element, kind in (("numpy", np.ndarray), ("jax", jax.Array)):
        iterator = DALIDatasetIterator(
            iterator_fn, element=element, num_epochs=1, files=jpegs_many[:N], batch_size=B
        )
        assert isinstance(next(iterator)["x"], kind)
    with pytest.raises(TypeError, match="no argument.*on_host"):
        NUMBERS(jpegs_many, batch_size=B, on_host=True)


@pytest.mark.parametrize(
    ("adapter", "wrong", "meant"),
    [
        (DALIDatasetIterator, "num_epoch", "num_epochs"),
        (DALIDatasetIterator, "elemnt", "element"),
        (DALIDatasetIterator, "last_batch_polcy", "last_batch_policy"),
        (grain_adapter.DALIIterDataset, "drop_remaindr", "drop_remainder"),
        (DALIDataset, "batch_sise", "batch_size"),
    ],
)
def test_a_misspelt_argument_of_an_adapter_raises_at_once(adapter, wrong, meant):
    make = data_iterator(lambda x: x, ["x"], source=Arrays({"x": np.arange(8)}))
    words = rf"no argument \['{wrong}'\] \(did you mean '{meant}'\?"
    with pytest.raises(TypeError, match=words):
        adapter(make, **{"batch_size": 2, wrong: 1})


def test_an_input_without_figures_is_refused():
    with pytest.raises(
        TypeError, match="ReportInput requires an iterator of dalijax.*list_iterator"
    ):
        ReportInput(iter([1]), writer=metric_writers.LoggingWriter(), every_steps=2)


def test_only_endless_iterators_take_auto_reset(jpegs_many):
    endless = data_iterator(numbers, ["x", "u"], reader_name="reader", auto_reset=True)
    iterator = DALIDatasetIterator(endless, files=jpegs_many, batch_size=B)
    assert [taken(next(iterator))[0][0] for _ in range(4)] == [0, 4, 8, 0]
    with pytest.raises(ValueError, match="auto_reset=True.*Omit it"):
        DALIDatasetIterator(endless, num_epochs=1, files=jpegs_many, batch_size=B)


def test_partial_batches_have_the_spec_of_complete_batches(jpegs_many):
    policy = data_iterator(
        numbers, ["x", "u"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL
    )
    iterator = DALIDatasetIterator(policy, num_epochs=1, files=jpegs_many, batch_size=B)
    assert [len(batch["x"]) for batch in iterator] == [4, 4, 3]
    assert iterator.element_spec["x"].shape == (B, 1)


@pytest.mark.slow
def test_without_tensorflow():
    code = """
import sys
import clu.data, dalijax, dalijax.adapters.clu as adapter
from nvidia.dali import fn
assert adapter.DALIDatasetIterator
loaded = sorted(m for m in sys.modules if m.split(".")[0] in ("tensorflow", "tensorboard"))
assert not loaded, loaded
"""
    run_python("-c", code)


# Reports of the input


class Kept(metric_writers.MetricWriter):
    """A writer that stores its values."""

    def __init__(self):
        self.scalars = []

    def write_scalars(self, step, scalars):
        self.scalars.append((step, dict(scalars)))

    write_summaries = write_images = write_videos = write_audios = write_texts = None
    write_histograms = write_hparams = write_pointcloud = None

    def flush(self):
        """Does nothing: there is no buffer."""

    def close(self):
        """Does nothing: no file is open."""


Kept.__abstractmethods__ = frozenset()
NAMES = {
    f"input/{name}"
    for name in (
        *("wait_fraction", "wait_ms_per_batch", "examples_per_sec", "epoch", "step_in_epoch"),
        *("padding_fraction", "errors"),
    )
}


def test_a_report_covers_the_steps_since_the_last_report(jpegs_many):
    iterator, writer = make(jpegs_many), Kept()
    report = ReportInput(iterator, writer=writer, every_steps=3, every_secs=None)
    for step in range(1, 10):
        next(iterator)
        assert report(step, t=float(step)) == (step % 3 == 0)
    assert [step for step, _ in writer.scalars] == [3, 6, 9]
    first, second, third = (scalars for _, scalars in writer.scalars)
    assert set(first) == NAMES
    # Since the first call, at step 1: batches 2 and 3, whose last batch has one padded sample.
    assert first["input/examples_per_sec"] == (4 + 3) / 2
    assert first["input/padding_fraction"] == 1 / 8
    assert second["input/examples_per_sec"] == third["input/examples_per_sec"] == 11 / 3
    assert second["input/padding_fraction"] == 1 / 12
    assert [s["input/epoch"] for _, s in writer.scalars] == [0, 1, 2]
    assert [s["input/step_in_epoch"] for _, s in writer.scalars] == [2, 2, 2]
    stats = iterator.watch()
    assert (stats.batches, stats.examples, stats.padding) == (9, 33, 3)
    waited = sum(s["input/wait_ms_per_batch"] * n for n, (_, s) in zip((2, 3, 3), writer.scalars))
    assert 0 < waited <= 1e3 * stats.wait_seconds
    for _, scalars in writer.scalars:
        assert 0 <= scalars["input/wait_fraction"] <= 1


@pytest.mark.parametrize("policy", list(LastBatchPolicy), ids=str)
def test_an_unpadded_reader_has_no_padding(policy, jpegs_many):
    iterator = make(jpegs_many, padded=False, last_batch_policy=policy, num_epochs=3)
    stats, rows = iterator.watch(), 0
    for batch in iterator:  # samples of the next epoch, with mask False, are samples as well
        rows += len(batch["x"])
    assert (stats.examples, stats.padding) == (rows, 0)


def test_the_first_call_writes_nothing_even_at_a_report_step(jpegs_many):
    iterator, writer = make(jpegs_many), Kept()
    report = ReportInput(iterator, writer=writer, every_steps=2, every_secs=None)
    next(iterator)
    assert report(1000, t=5.0) is False and writer.scalars == []  # for example, a resumed run
    next(iterator)
    assert report(1001, t=6.0) is False
    next(iterator)
    assert report(1002, t=7.0) is True
    assert writer.scalars[0][1]["input/examples_per_sec"] == (4 + 3) / 2
    with pytest.raises(ValueError, match="must be called after every step"):
        report(1010)


def test_it_reports_by_time_and_at_the_last_step(jpegs_many):
    iterator, writer = make(jpegs_many), Kept()
    report = ReportInput(iterator, writer=writer, num_train_steps=6, every_secs=10.0)
    for step, t in ((1, 0.0), (2, 5.0), (3, 11.0), (4, 12.0), (5, 13.0), (6, 14.0)):
        next(iterator)
        report(step, t)
    assert [step for step, _ in writer.scalars] == [3, 6]


def test_only_process_0_writes(jpegs_many, monkeypatch):
    iterator, writer = make(jpegs_many), Kept()
    report = ReportInput(iterator, writer=writer, every_steps=1, every_secs=None)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for step in (1, 2):
        next(iterator)
        report(step)
    assert writer.scalars == []


def test_errors_are_counted_over_the_whole_run(tmp_path):
    files = write_jpegs(tmp_path / "class", 12)
    corrupt(files[5])

    def graph():
        data, label = read_files(files)
        return fn.decoders.image(data, output_type=types.RGB), label

    def build():
        made = data_iterator(graph, ["image", "x"], reader_name="reader", on_error="skip")
        return DALIDatasetIterator(made, batch_size=4, num_epochs=2)

    iterator = build()
    stats = iterator.watch()
    next(iterator), next(iterator)
    assert stats.errors == 1 and stats.batches == 2
    resumed = build()
    resumed.set_state(iterator.get_state())
    stats = resumed.watch()
    next(resumed)
    assert (stats.epoch, stats.step, stats.errors) == (1, 0, 1)


def test_counting_starts_on_request(jpegs_many):
    iterator = make(jpegs_many)
    next(iterator)
    assert iterator._stream._stats is None
    assert iterator.watch().batches == 0
    next(iterator)
    iterator.reset()
    next(iterator)
    assert iterator.watch().batches == 2  # continues after a reset


def test_grains_iterators_count_equally(jpegs_many):
    records = grain.MapDataset.source([{"number": np.int32(i), "key": i} for i in range(N)])
    transform = grain_adapter.DALITransform(
        lambda number: number + 0, batch_size=B, output_map=["x"], pad="mask", num_threads=1
    )
    source = grain_adapter.DALIIterDataset(
        numbers,
        output_map=["x", "u"],
        reader_name="reader",
        files=jpegs_many,
        batch_size=B,
        pad="mask",
    )
    sampler = grain.samplers.SequentialSampler(N)
    loader = grain_adapter.DALIDataLoader(
        [{"number": np.int32(i)} for i in range(N)],
        sampler,
        pipeline_fn=lambda number: number + 0,
        output_map=["x"],
        batch_size=B,
        pad="mask",
    )
    for iterator in (iter(records.pipe(transform)), iter(source), iter(loader)):
        stats = iterator.watch()
        assert len(list(iterator)) == 3
        assert (stats.batches, stats.examples, stats.padding, stats.step) == (3, N, 1, 2)
        assert stats.wait_seconds > 0


def test_tensorboard_reads_the_written_values(jpegs_many, tmp_path):
    writer = metric_writers.SummaryWriter(str(tmp_path))
    iterator = make(jpegs_many, num_epochs=2)
    report = ReportInput(iterator, writer=writer, every_steps=2, every_secs=None)
    progress = periodic_actions.ReportProgress(num_train_steps=6, writer=writer, every_steps=2)
    with metric_writers.ensure_flushes(writer):
        for step, _ in zip(range(1, 7), iterator):
            for hook in (report, progress):
                hook(step, t=float(step))
    writer.close()
    read = {}
    for file in tmp_path.glob("events.*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                read[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    assert {tag for tag, _ in read} >= NAMES | {"steps_per_sec"}
    assert {step for tag, step in read if tag in NAMES} == {2, 4, 6}
    assert read["input/epoch", 2] == 0 and read["input/epoch", 6] == 1
    assert read["input/step_in_epoch", 6] == 2
    assert read["input/padding_fraction", 4] == pytest.approx(1 / 8)


def test_peekable_iterators_as_dalis(jpegs_many):
    iterator = peekable_data_iterator(output_map=["x", "u"], reader_name="reader")(numbers)(
        jpegs_many, batch_size=B
    )
    spec = {k: dataset_iterator.ArraySpec(v.dtype, v.shape) for k, v in iterator.peek().items()}
    assert iterator.element_spec == spec
    start = iterator.get_state()
    peeked = taken(iterator.peek_async().result())
    assert taken(next(iterator)) == peeked and iterator.get_state() != start
    iterator.close()


def test_peekable_iterators_of_hand_made_pipelines_resume_after_a_peek(jpegs_many):
    def made(checkpoint=None):
        build = pipeline_def(enable_checkpointing=True, checkpoint=checkpoint, seed=3)(numbers)
        pipeline = build(jpegs_many, batch_size=B, num_threads=1, device_id=None)
        return DALIGenericPeekableIterator(pipeline, ["x", "u"], reader_name="reader")

    iterator = made()
    next(iterator)
    peeked = taken(iterator.peek())
    resumed = made(iterator.checkpoints()[0])  # DALI's own iterators do not provide them
    assert taken(next(iterator)) == taken(next(resumed)) == peeked


def test_peekable_iterators_have_the_same_decorator():
    assert inspect.signature(peekable_data_iterator) == inspect.signature(data_iterator)
    wrong = r"^peekable_data_iterator\(\) has no .*'reder_name'.*did you mean 'reader_name'"
    with pytest.raises(TypeError, match=wrong):
        peekable_data_iterator(output_map=["x"], reder_name="reader")
    function = pickle.loads(pickle.dumps(PEEKABLE))
    assert type(function) is type(PEEKABLE)
    adapted = function._adapted("a test", mask="mask")
    assert type(adapted) is type(PEEKABLE) and adapted._config.mask == "mask"


def test_peekable_iterators_refuse_shapes_that_change():
    def grows(info):
        return [np.zeros(1 + info.iteration, np.float32)] * 2

    @peekable_data_iterator(output_map=["x"])
    def graph():
        return fn.external_source(grows, batch_info=True)

    with graph(batch_size=2) as iterator:
        next(iterator)
        with pytest.raises(ValueError, match="was .* in the first batch"):
            iterator.peek()
