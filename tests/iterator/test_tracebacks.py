"""Errors show the user's lines, and keep neither batches nor themselves alive."""

import contextlib
import gc
import inspect
import itertools
import pathlib
import traceback
import weakref

import grain
import numpy as np
import pytest
from nvidia.dali import fn as dali_fn
from nvidia.dali import types
from nvidia.dali.tensors import TensorListCPU

from conftest import corrupt, write_jpegs
from dalijax import data_iterator, fn, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.pipeline.engine import Outcome


class OwnError(ValueError):
    pass


def fail():
    raise OwnError("an error of the user")


LINE = inspect.getsourcelines(fail)[1] + 1


class FailingSource(sources.Source):
    """Eight records; record 1 can't be read."""

    fields = {"x": sources.Field(np.int32)}

    def __len__(self):
        return 8

    def identity(self):
        return "numbers"

    def read(self, indices, names):
        if 1 in indices:
            fail()
        return {"x": np.asarray(indices, np.int32)}


def plus_zero(x):
    return x + 0


def over_failing_source(paths):
    return data_iterator(plus_zero, ["x"], source=FailingSource())(batch_size=2)


def over_failing_records(paths):
    def read(index):
        if index == 1:
            fail()
        return {"x": np.array([index], np.int32)}

    transform = DALITransform(plus_zero, batch_size=2, output_map=["x"], num_threads=1)
    return iter(grain.MapDataset.range(8).map(read).pipe(transform))


def over_failing_callback(paths):
    def graph(x):
        return fn.jax_function(lambda array: fail())(x)

    return data_iterator(graph, ["x"], source=sources.Arrays({"x": np.arange(8)}))(batch_size=2)


def over_failing_batch_map(paths):
    source = sources.Arrays({"x": np.arange(8, dtype=np.int32)})
    batch_map = [lambda batch, key: fail()]
    return data_iterator(plus_zero, ["x"], source=source, batch_map=batch_map)(batch_size=2)


def over_failing_python(paths):
    def graph():
        return dali_fn.external_source(fail, batch=True, dtype=types.INT32)

    return data_iterator(graph, ["x"])(batch_size=2, prefetch_queue_depth=1)


OF_USERS = (
    *(over_failing_source, over_failing_records, over_failing_callback),
    *(over_failing_batch_map, over_failing_python),
)


def decode(jpeg):
    return dali_fn.decoders.image(jpeg)


def over_damaged_files(paths, **arguments):
    def graph(paths):
        return decode(dali_fn.readers.file(files=paths, name="reader")[0])

    return data_iterator(graph, ["x"], reader_name="reader")(paths, batch_size=2, **arguments)


def over_damaged_source(paths, **arguments):
    records = [{"jpeg": pathlib.Path(path).read_bytes()} for path in paths]
    return data_iterator(decode, ["x"], source=sources.Records(records))(batch_size=2, **arguments)


def over_skipped_files(paths):
    return over_damaged_files([paths[1]] * 4, on_error="skip")


def over_skipped_source(paths):
    return over_damaged_source([paths[1]] * 4, on_error="skip")


def over_ragged_files(paths):
    def graph(paths):
        return dali_fn.readers.file(files=paths, name="reader")[0]

    return data_iterator(graph, ["x"], reader_name="reader")(paths, batch_size=2)


def over_ragged_source(paths):
    records = [{"x": np.zeros(k)} for k in range(4)]
    return data_iterator(plus_zero, ["x"], source=sources.Records(records))(batch_size=2)


COUNTED = (
    *(over_failing_source, over_failing_records, over_failing_callback),
    *(over_damaged_files, over_damaged_source, over_skipped_files, over_skipped_source),
    *(over_ragged_files, over_ragged_source),
)


@pytest.fixture
def paths(tmp_path):
    paths = write_jpegs(tmp_path / "class", 4)
    for path, size in zip(paths, (100, 200, 300, 400), strict=True):
        with open(path, "ab") as file:
            file.write(bytes(size))  # their sizes differ
    corrupt(paths[1])
    return paths


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


KINDS = (ValueError, RuntimeError)  # of all errors here


def raised(iterator, *calls):
    """Returns the first error of some calls."""
    for call in calls * 8:
        try:
            call(iterator)
        except StopIteration:
            pass
        except KINDS as error:
            return error
    raise AssertionError("no call raised an error")


@pytest.mark.parametrize("make", OF_USERS, ids=lambda make: make.__name__)
def test_an_error_shows_the_line_of_the_user_that_raised_it(make, paths):
    error = raised(make(paths), next)
    text = "".join(traceback.format_exception(error))
    assert "an error of the user" in text and __file__ in text, text
    assert f"line {LINE}, in fail" in text or f"({LINE}): fail" in text, text


FREED = (*COUNTED, over_failing_batch_map, over_failing_python)


@pytest.mark.parametrize("make", FREED, ids=lambda make: make.__name__)
def test_an_error_is_freed_with_its_last_reference(make, paths, without_gc):
    iterator = make(paths)
    reference = weakref.ref(raised(iterator, next))
    with contextlib.suppress(StopIteration, *KINDS):
        next(iterator)  # a reader of records refers to the last error until it reads again
    assert reference() is None, gc.get_referrers(reference())


@pytest.mark.parametrize("make", COUNTED, ids=lambda make: make.__name__)
def test_an_error_refers_to_no_batch(make, paths):
    """Lists the variables of all functions to which an error refers, and of their callers."""
    iterator = make(paths)
    error = raised(iterator, next)
    own_frame, todo, variables = inspect.currentframe(), [error], []
    while todo:
        current = todo.pop()
        for frame, _ in traceback.walk_tb(current.__traceback__):
            while frame is not None and frame is not own_frame:
                variables += frame.f_locals.values()
                frame = frame.f_back
        todo += filter(None, [current.__cause__, current.__context__])
    kinds = {type(variable) for variable in variables}
    assert type(iterator) in kinds and not kinds & {Outcome, TensorListCPU}, kinds


def test_errors_that_refer_to_each_other_are_stripped_once():
    first, second = OwnError("first"), OwnError("second")
    first.__cause__, second.__cause__ = second, first  # as after `raise first from second`
    for error in (first, second):
        with contextlib.suppress(OwnError):
            raise error
    assert Outcome(0, error=first).error is first
    assert first.__traceback__ is None and second.__traceback__ is None
    chain = [OwnError(str(place)) for place in range(64)]
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = error.__context__ = cause  # as `raise ... from` sets both
    Outcome(0, error=chain[0])
    assert chain[-1].__cause__ is None
