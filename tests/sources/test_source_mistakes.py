"""Mistakes of users' sources: memory that is filled again, and fields that are not there."""

import numpy as np
import pytest

from dalijax import data_iterator
from dalijax.core.sources.reuse import ReuseCheck
from dalijax.sources import Field, Records, Source

N, BATCH = 300, 8


class Rows(Source):
    """Rows of three numbers, each its own number; `read` is the test's."""

    fields = {"x": Field(np.int32, 1), "k": Field(np.int32)}

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return N

    def identity(self):
        return "rows"

    def read(self, indices, names):
        columns = {"x": [self.make(int(k)) for k in indices], "k": indices.astype(np.int32)}
        return {name: columns[name] for name in names}


BUFFER = np.zeros(3, np.int32)
TABLE = np.repeat(np.arange(N, dtype=np.int32)[:, None], 3, axis=1)
ONES = np.ones(3, np.int32)


def fill(k):
    BUFFER[:] = k
    return BUFFER


def batches(source, on_error="raise", mask=None, **options):
    take = data_iterator(
        lambda x, k: (x + 0, k + 0),
        ["x", "k"],
        source=source,
        as_numpy=True,
        on_error=on_error,
        mask=mask,
    )
    with take(batch_size=BATCH, num_threads=1, last_batch_padded=True, **options) as iterator:
        return [(batch["x"].copy(), batch["k"].copy()) for batch in iterator]


@pytest.mark.parametrize("shuffle", (True, False))
def test_a_buffer_that_is_filled_again_is_refused(shuffle):
    with pytest.raises(ValueError, match=r"Rows\.read\(\) gave 'x' .* same memory.*new arrays"):
        batches(Rows(fill), shuffle=shuffle)


def test_a_column_that_is_filled_again_is_refused():
    column = np.zeros(N, np.int32)

    class Columns(Rows):
        def read(self, indices, names):
            column[: len(indices)] = indices
            values = {"x": [np.full(3, k, np.int32) for k in indices], "k": column[: len(indices)]}
            return {name: values[name] for name in names}

    with pytest.raises(ValueError, match=r"Columns\.read\(\) gave 'k'"):
        batches(Columns(None))


def test_an_object_that_fills_one_buffer_is_refused():
    class Data:
        def __len__(self):
            return N

        def __getitem__(self, k):
            return {"x": fill(int(k)), "k": np.int32(k)}

    with pytest.raises(ValueError, match=r"Records\.read\(\) gave 'x'"):
        batches(Records(Data(), identity="data"))


@pytest.mark.parametrize(
    "make",
    (lambda k: np.full(3, k, np.int32), lambda k: TABLE[k], lambda k: TABLE[k].copy()),
    ids=("new", "view", "copy"),
)
def test_rows_of_their_own_are_delivered(make):
    for x, k in batches(Rows(make), seed=1):
        np.testing.assert_array_equal(x, np.repeat(k[:, None], 3, axis=1))


def test_a_constant_may_be_shared():
    seen = batches(Rows(lambda k: ONES), seed=1)
    assert sorted({int(k) for _, ks in seen for k in ks}) == list(range(N))
    assert all((x == 1).all() for x, _ in seen)


@pytest.mark.parametrize(
    "wrong, error, text",
    (
        (lambda x, k: None, TypeError, "must return a dict of them, not NoneType"),
        (lambda x, k: {"x": x}, ValueError, r"returned \['x'\], without \['k'\]"),
        (lambda x, k: {"x": x[:-1], "k": k}, ValueError, r"returned \d+ values of 'x': return one"),
        (lambda x, k: {"x": x, "k": 3}, ValueError, "returned 3 values of 'k': return one"),
    ),
    ids=("none", "no-field", "few", "a-number"),
)
@pytest.mark.parametrize("on_error", ("raise", "mask"))
def test_fields_that_are_not_what_was_asked_for(wrong, error, text, on_error):
    class Wrong(Rows):
        def read(self, indices, names):
            return wrong([np.full(3, k, np.int32) for k in indices], indices.astype(np.int32))

    with pytest.raises(error, match=rf"Wrong\.read\(\) of \d+ records .*{text}"):
        batches(Wrong(None), on_error=on_error, mask="mask")


def test_arrays_that_were_freed_are_forgotten():
    check = ReuseCheck(Rows(None))
    alive = [np.full(3, k, np.int32) for k in range(5000)]
    check.check(np.arange(5000), {"x": alive})
    assert len(check._alive) == 5000
    del alive
    for k in range(2):
        check.check(np.array([k]), {"x": [np.full(3, k, np.int32)]})
    assert len(check._alive) <= 2
