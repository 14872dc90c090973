"""Warnings of batches that do not fit a source's epochs, and cases without a warning."""

import warnings

import numpy as np
import pytest

from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.tfdata import DALIDataset

ROWS = 75
SOURCE = sources.Arrays({"x": np.arange(ROWS, dtype=np.int32)})
take = data_iterator(lambda x: x + 0, ["x"])


def passes(batch_size, count=2, **call):
    """Returns the rows of some passes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with take(source=SOURCE, batch_size=batch_size, **call) as iterator:
            rows = [np.concatenate([batch["x"] for batch in iterator]) for _ in range(count)]
    return rows, [str(warning.message) for warning in caught]


def test_an_evaluation_whose_last_batch_has_rows_of_the_next_epoch_warns_once():
    rows, texts = passes(50, count=3, shuffle=False)
    assert [len(one) for one in rows] == [100, 50, 100]
    assert rows[0].tolist() == [*range(75), *range(25)] and rows[1].tolist() == [*range(25, 75)]
    assert len(texts) == 1
    words = ("25 records of the next epoch", "batch_size=50", "75", "mask=True", "'partial'")
    assert [word for word in words if word not in texts[0]] == []


@pytest.mark.parametrize("batch_size", [50, 200], ids=["rows of two epochs", "repeated records"])
def test_warnings_name_the_line_of_the_user(batch_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with take(source=SOURCE, batch_size=batch_size, shuffle=False) as iterator:
            list(iterator)
        with take.stream(1, source=SOURCE, batch_size=batch_size, shuffle=False) as stream:
            list(stream)
    assert [warning.filename for warning in caught] == [__file__] * len(caught)
    assert len(caught) >= 2


@pytest.mark.parametrize(
    "batch_size, call",
    [
        (25, {"shuffle": False}),
        (50, {}),  # each record is delivered equally often over the epochs
        (50, {"shuffle": False, "mask": "mask"}),
        (50, {"shuffle": False, "last_batch_policy": LastBatchPolicy.PARTIAL}),
        (50, {"shuffle": False, "last_batch_policy": LastBatchPolicy.DROP}),
        (50, {"shuffle": False, "last_batch_padded": True}),
        (100, {"mask": "mask"}),
        (150, {"last_batch_policy": LastBatchPolicy.PARTIAL}),
    ],
)
def test_other_settings_do_not_warn(batch_size, call):
    assert passes(batch_size, **call)[1] == []


def test_finite_streams_warn_and_endless_streams_do_not():
    for num_epochs, expected in ((None, 0), (2, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = take.stream(num_epochs, source=SOURCE, batch_size=50, shuffle=False)
            assert [len(next(stream)["x"]) for _ in range(3)] == [50, 50, 50]
            stream.close()
        assert len(caught) == expected, num_epochs


def test_a_dataset_of_tf_data_warns():
    dataset = DALIDataset(take, source=SOURCE, batch_size=50, shuffle=False)
    with pytest.warns(RuntimeWarning, match="25 records of the next epoch"):
        assert sum(len(batch["x"]) for batch in dataset) == 100


def test_the_batch_is_delivered_if_the_warning_is_an_error():
    with take(source=SOURCE, batch_size=50, shuffle=False) as iterator:
        next(iterator)
        with pytest.raises(RuntimeWarning), warnings.catch_warnings():
            warnings.simplefilter("error")
            next(iterator)
        assert next(iterator)["x"].tolist() == [*range(50, 75), *range(25)]


@pytest.mark.parametrize("call", ({"mask": "mask"}, {}, {"shuffle": False}))
def test_a_batch_of_more_than_twice_the_records_warns(call):
    with pytest.warns(RuntimeWarning, match="batch_size=151 is more than twice the 75 records"):
        take(source=SOURCE, batch_size=151, **call).close()
