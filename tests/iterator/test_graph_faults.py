"""Operators that fail after the decoder: the error names them, and blames no file."""

import io
import pathlib

import grain
import numpy as np
import pytest
from nvidia.dali import fn
from PIL import Image

import dalijax
from conftest import write_jpegs
from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.pipeline.failure import failure_of
from dalijax.errors import BatchError, GraphError, RecordError
from full import in_full

COUNT, BATCH = 24, 4
MODES = ("raise", "skip", "mask")


def jpeg(height, width):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


GOOD = jpeg(32, 40)


def raising(array):
    raise KeyError("boom")


@dalijax.fn.jax_function
def raising_in_jax(batch):
    raise KeyError("boom")


@dalijax.fn.jax_function
def unbatched(batch):
    return batch.sum()


FAULTS = {
    "math.add": (lambda x: x + np.float32([1, 2]), "Can't broadcast shapes"),
    "crop": (lambda x: fn.crop(x, crop=(900, 900)), "Slice can't be placed out of bounds"),
    "reshape": (lambda x: fn.reshape(x, shape=[7, 7]), "must occupy the same size"),
    "reductions.mean": (lambda x: fn.reductions.mean(x, axes=[5]), "Axis index out of range"),
    "cat": (lambda x: fn.cat(x, x[:4, :5], axis=0), "can differ in size only in the"),
    "python_function": (lambda x: fn.python_function(x, function=raising), "KeyError: 'boom'"),
    "jax_function": (raising_in_jax, "KeyError: 'boom'"),
    "jax_function ": (unbatched, "Its first dimension must be the batch"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_jpegs(tmp_path_factory.mktemp("faults") / "class0", COUNT)


def over_reader(fault, files, on_error, **more):
    def graph():
        data, _ = fn.readers.file(files=files, name="reader")
        return fault(fn.decoders.image(data))

    make = data_iterator(graph, ["x"], reader_name="reader", on_error=on_error, as_numpy=True)
    return make(batch_size=BATCH, **more)


def over_source(source, fault, on_error, batch_size=BATCH, **more):
    def graph(data):
        return fault(fn.decoders.image(data))

    mask = "mask" if on_error == "mask" else None
    make = data_iterator(graph, ["x"], source=source, on_error=on_error, mask=mask, **more)
    return make(batch_size=batch_size, shuffle=False)


def records(count=COUNT, **special):
    data = [special.get(f"at_{k}", GOOD) for k in range(count)]
    return sources.Records([{"data": one} for one in data], identity="records")


def over_grain(fault, on_error, data=(GOOD,) * COUNT):
    def graph(data):
        return fault(fn.decoders.image(data))

    ds = grain.MapDataset.source([{"data": np.frombuffer(one, np.uint8)} for one in data])
    pad = "mask" if on_error == "mask" else None
    return iter(
        ds.pipe(
            DALITransform(
                graph, batch_size=BATCH, output_map=["x"], on_error=on_error, pad=pad, seed=0
            )
        )
    )


# Every operator, and every mode with the first one and with a function.
CASES = [
    (name, mode) if k in (0, 6) or k % 3 == number else in_full(name, mode)
    for k, name in enumerate(FAULTS)
    for number, mode in enumerate(MODES)
]


@pytest.mark.parametrize("name,on_error", CASES)
def test_a_graph_that_fails_for_every_record_of_a_source(name, on_error):
    fault, message = FAULTS[name]
    iterator = over_source(records(), fault, on_error)
    for _ in range(2):
        with pytest.raises(GraphError) as caught:
            next(iterator)
        first = str(caught.value).splitlines()[0]
        assert f"operator {name.strip()} failed for every record: " in first
        assert message in str(caught.value).split("DALI says:")[0]
        assert "decoded" not in first and caught.value.files == ()
    assert iterator.errors == ()


@pytest.mark.parametrize("name", ["math.add", "jax_function"])
@pytest.mark.parametrize("on_error", MODES)
def test_a_graph_that_fails_for_every_record_of_grain(name, on_error):
    fault, message = FAULTS[name]
    iterator = over_grain(fault, on_error)
    with pytest.raises(GraphError) as caught:
        next(iterator)
    first = str(caught.value).splitlines()[0]
    assert f"operator {name} failed for every record: {message}" in first


@pytest.mark.parametrize("name", ["math.add", "crop", "python_function", "jax_function"])
def test_a_graph_that_fails_for_every_batch_of_a_reader(files, name):
    fault, message = FAULTS[name]
    with pytest.raises(BatchError) as caught:
        next(over_reader(fault, files * 2, "raise"))
    assert f"operator {name} failed: {message}" in str(caught.value).splitlines()[0]
    assert "can't be decoded" not in str(caught.value)
    iterator = over_reader(fault, files * 2, "skip")
    with pytest.raises(GraphError) as caught:
        next(iterator)
    assert f"operator {name} failed for every record: {message}" in str(caught.value)
    assert len(iterator.errors) == 7  # the eighth is raised


@pytest.mark.parametrize("at", (1, 9))
def test_a_record_that_fails_in_an_operator_is_named_with_the_operator(at):
    def crop(images):
        return fn.crop(images, crop=(16, 16))

    source = records(**{f"at_{at}": jpeg(8, 8)})
    iterator = over_source(source, crop, "raise")
    outcomes = []
    for _ in range(COUNT // BATCH):
        try:
            outcomes.append(next(iterator)["x"].shape)
        except BatchError as error:
            outcomes.append(error.files)
            text = str(error).splitlines()[0]
            assert f"operator crop failed for record {at}: Slice can't be placed" in text
            assert not isinstance(error, GraphError)
    whole = [(BATCH, 16, 16, 3)] * (COUNT // BATCH)
    whole[at // BATCH] = (f"record {at}",)
    assert outcomes == whole
    iterator = over_source(source, crop, "skip")
    assert len(list(iterator)) == COUNT // BATCH - 1
    assert [error.files for error in iterator.errors] == [(f"record {at}",)]
    iterator = over_source(source, crop, "mask")
    masks = np.concatenate([np.asarray(batch["mask"]) for batch in iterator])
    assert np.flatnonzero(~masks).tolist() == [at]
    data = [jpeg(8, 8) if k == at else GOOD for k in range(COUNT)]
    masked = np.concatenate([np.asarray(b["mask"]) for b in over_grain(crop, "mask", data)])
    assert np.flatnonzero(~masked).tolist() == [at]
    with pytest.raises(RecordError, match=f"operator crop failed for record {at} "):
        list(over_grain(crop, "raise", data))


def test_a_failing_batch_of_one_record_does_not_blame_the_graph():
    source = records(8, at_0=jpeg(8, 8))
    iterator = over_source(source, lambda x: fn.crop(x, crop=(16, 16)), "skip", batch_size=1)
    assert len(list(iterator)) == 7


@pytest.mark.parametrize("kind", ("unreadable", "cut off"))
@pytest.mark.parametrize("bad", (40, 200))
def test_bad_files_at_the_start(tmp_path, kind, bad):
    count, batch = bad + 16, 8 if kind == "unreadable" else bad
    paths = write_jpegs(tmp_path / "class0", count)
    for path in paths[:bad]:
        with open(path, "rb+") as file:
            file.truncate(0 if kind == "unreadable" else len(file.read()) - 200)
    source, whole = sources.Files(tmp_path), -(-bad // batch)

    def over(on_error):
        def graph(data):
            return fn.resize(fn.decoders.image(data), size=[4, 4])

        make = data_iterator(graph, ["x"], source=source, on_error=on_error, mask="mask")
        return make(batch_size=batch, shuffle=False)

    iterator = over("raise")
    for step in range(whole):
        with pytest.raises(BatchError, match=f"batch {step} of epoch 0.*class0/0.*can't be"):
            next(iterator)
    assert len(list(iterator)) == -(-count // batch) - whole
    iterator = over("skip")
    assert len(list(iterator)) == -(-count // batch) - whole == len(iterator) - whole
    masks = np.concatenate([np.asarray(one["mask"]) for one in over("mask")])
    assert np.flatnonzero(masks).tolist() == list(range(bad, count))


def test_ragged_outputs_name_two_records(tmp_path):
    images = records(at_2=jpeg(20, 20))
    with pytest.raises(
        ValueError, match=r"\(32, 40, 3\) \(record 0\) and \(20, 20, 3\) \(record 2"
    ):
        next(over_source(images, lambda x: x, "raise"))
    data = [GOOD, GOOD, GOOD, jpeg(20, 20)]
    with pytest.raises(ValueError, match=r"\(record 0 .*\) and \(20, 20, 3\) \(record 3"):
        next(over_grain(lambda x: x, "raise", data))
    files = [str(tmp_path / f"{k}.jpg") for k in range(BATCH)]
    for path, content in zip(files, data):
        pathlib.Path(path).write_bytes(content)
    with pytest.raises(ValueError, match=r"\(32, 40, 3\) \(.*0.jpg\) and \(20, 20, 3\) \(.*3.jpg"):
        next(over_reader(lambda x: x, files, "raise"))


def test_a_source_in_the_graph_is_not_mistaken_for_bad_records():
    def graph(data):
        rows = fn.external_source(lambda: np.zeros((BATCH, 3), np.float32))  # fits only BATCH rows
        images = fn.resize(fn.decoders.image(data), size=[2, 2])
        return images + fn.reshape(rows, shape=[5])

    make = data_iterator(graph, ["x"], source=records())
    with pytest.raises(BatchError, match="operator reshape failed: ") as caught:
        next(make(batch_size=BATCH))
    assert caught.value.files == ()


@pytest.mark.parametrize("kind", ["source", "MapDataset", "IterDataset"])
def test_the_end_of_a_source_in_the_graph_is_an_error(kind):
    def graph(x):
        return x + 0, fn.external_source(iter([np.zeros((BATCH, 3), np.float32)] * 2), ndim=1)

    rows = [{"x": k} for k in range(COUNT)]
    if kind == "source":
        source = sources.Records(rows)
        iterator = data_iterator(graph, ["x", "y"], source=source)(batch_size=BATCH)
    else:
        ds = grain.MapDataset.source(rows)
        ds = ds if kind == "MapDataset" else ds.to_iter_dataset()
        transform = DALITransform(graph, batch_size=BATCH, output_map=["x", "y"], seed=0)
        iterator = iter(ds.pipe(transform))
    for _ in range(2):
        next(iterator)
    with pytest.raises(RuntimeError, match="an external_source of the graph has ended before"):
        next(iterator)


@pytest.mark.parametrize("count", [BATCH, 3 * BATCH, 20 * BATCH])
@pytest.mark.parametrize("kind", ["source", "Grain"])
def test_a_data_set_of_bad_records_names_them(kind, count):
    rows = [{"x": np.frombuffer(b"not an array", np.uint8)} for _ in range(count)]
    if kind == "source":
        options = {"mask": "mask", "on_error": "mask", "source": sources.Records(rows)}
        iterator = data_iterator(lambda x: fn.decoders.numpy(x), ["x"], **options)(batch_size=BATCH)
    else:
        options = {"batch_size": BATCH, "output_map": ["x"], "pad": "mask", "on_error": "mask"}
        transform = DALITransform(lambda x: fn.decoders.numpy(x), **options, seed=0)
        iterator = iter(grain.MapDataset.source(rows).pipe(transform))
    for _ in range(min(2, count // BATCH)):
        text = "can't be decoded: Got bad magic string"
        with pytest.raises((BatchError, RecordError), match=text) as caught:
            next(iterator)
        assert len(caught.value.files) == BATCH


def test_an_error_of_dalis_reader_cannot_be_skipped(tmp_path):
    for k in range(6):
        np.save(tmp_path / f"{k}.npy", np.array([k], np.int32))
    good = (tmp_path / "3.npy").read_bytes()
    (tmp_path / "3.npy").write_bytes(b"no array")

    def graph():
        return fn.readers.numpy(
            file_root=str(tmp_path), file_filter="*.npy", name="reader", dont_use_mmap=True
        )

    make = data_iterator(graph, ["x"], reader_name="reader", on_error="skip", as_numpy=True)
    iterator = make(batch_size=2)
    assert next(iterator)["x"].ravel().tolist() == [0, 1]
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="on_error='skip' can't skip it, because DALI's reader"
        ):
            next(iterator)
    (tmp_path / "3.npy").write_bytes(good)
    assert [batch["x"].ravel().tolist() for batch in iterator] == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("operator", "text", "message", "reads_file"),
    [
        ("fn.decoders.image", "Bad\nC++ context: x", "Bad", True),
        ("fn.decoders.image_slice", "The cropping window [0]", "The cropping window [0]", False),
        ("fn.readers.file", "No", "No", True),
        ("fn.experimental.readers.video", "No", "No", True),
        ("fn.legacy.readers.video", "No", "No", True),
        ("fn.io.file.read", 'Assert on "x != y" failed: Could not open', "Could not open", True),
        ("fn.experimental.peek_image_shape", "No", "No", True),
        ("math.add", "Shapes", "Shapes", False),
    ],
)
def test_dalis_errors_are_parsed(operator, text, message, reads_file):
    lines = f"Error in GPU operator `nvidia.dali.{operator}`,\nused in: x\n\nencountered:\n\n"
    failure = failure_of(RuntimeError(f"Critical error in pipeline:\n{lines}{text}"))
    assert failure.operator == operator.removeprefix("fn.")
    assert (failure.message, failure.reads_file) == (message, reads_file)
    assert failure.stops_reader == (".readers." in operator)
    assert not failure.environment
    unnamed = failure_of(RuntimeError("Critical error in pipeline:\nout of ideas"))
    assert (unnamed.operator, unnamed.message) == ("", "out of ideas")


def test_an_argument_of_the_call_that_may_be_a_field_is_refused():
    source = sources.Records([{"mask": np.arange(6, dtype=np.uint8)}] * 2)

    def graph(mask):
        return {"x": mask}

    with pytest.raises(ValueError, match="mask= .*data_iterator, or rename the field"):
        data_iterator(graph)(source=source, batch_size=2, mask=True)
    batch = next(data_iterator(graph, mask="valid")(source=source, batch_size=2))
    assert np.asarray(batch["valid"]).all()
    assert np.asarray(batch["x"]).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
