"""Fields of numbers that bypass the graph: their values and dtypes in the batch."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dalijax import data_iterator
from dalijax.sources import Field, Mixture, Named, Records, Source

COUNT = 10
DTYPES = (np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_)
KINDS = {
    "x": Field(np.int32),
    **{np.dtype(d).name: Field(d, 2, bypass=True) for d in DTYPES},
    "label": Field(np.int16, bypass=True),
    "dropped": Field(np.float32, 1),
}


class Rows(Source):
    """Records whose values are functions of their numbers; some can't be read."""

    fields = KINDS

    def __init__(self, bad=()):
        self.bad = bad

    def __len__(self):
        return COUNT

    def identity(self):
        return "rows"

    def read(self, indices, names):
        assert "dropped" not in names
        if any(index in self.bad for index in indices.tolist()):
            raise ValueError("a bad record")
        return {name: values_of(name, indices) for name in names}


def values_of(name, indices):
    """Returns the values of records: integers that every dtype represents."""
    field = KINDS[name]
    values = indices
    if field.ndim:
        values = indices.reshape(-1, 1, 1) + np.arange(6).reshape(2, 3)
    return (values % 2 if field.dtype == np.bool_ else values).astype(field.dtype)


def batches(source, **config):
    make = data_iterator(lambda x: x + 0, ["y"], shuffle=False, mask="mask", **config)
    return list(make(source=source, batch_size=4, num_threads=1, last_batch_padded=True))


WRAPPED = {
    "source": lambda source: source,
    "Named": lambda source: Named(source, "name"),
    "Mixture": lambda source: Mixture([(source, 1)]),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_numbers_keep_their_values_and_dtypes(kind):
    source = WRAPPED[kind](Rows())
    name = {"name"} if kind == "Named" else set()
    for batch in batches(source):
        assert batch.keys() == {"y", "mask", *KINDS, *name} - {"x", "dropped"}
        for key in KINDS.keys() - {"x", "dropped"}:
            wanted = values_of(key, np.asarray(batch["y"]))
            np.testing.assert_array_equal(batch[key], wanted, key, strict=True)


def test_a_sharding_places_numbers_like_outputs():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    for batch in batches(Rows(), sharding=sharding):
        assert batch["float32"].sharding == batch["y"].sharding
        np.testing.assert_array_equal(
            batch["float32"], values_of("float32", np.asarray(batch["y"]))
        )


def test_a_masked_row_has_the_numbers_of_its_stand_in():
    for batch in batches(Rows(bad=(1, 8)), on_error="mask"):
        wanted = values_of("float32", np.asarray(batch["y"]))
        np.testing.assert_array_equal(batch["float32"], wanted)


def test_a_field_that_the_graph_takes_does_not_bypass_it():
    make = data_iterator(lambda label: label + 0, ["y"])
    batch = next(make(source=Rows(), batch_size=4, num_threads=1))
    assert "label" not in batch and "float32" in batch and "x" not in batch


def test_kinds_of_records_bypass_the_graph():
    data = [{"x": k, "state": np.full(3, k, np.float32)} for k in range(4)]
    source = Records(data, kinds={"state": Field(np.float32, 1, bypass=True)})
    (batch,) = batches(source)
    np.testing.assert_array_equal(batch["state"], np.repeat(np.arange(4.0), 3).reshape(4, 3))


def test_an_output_with_the_name_of_a_field_that_bypasses_is_refused():
    make = data_iterator(lambda x: x + 0, ["label"])
    with pytest.raises(ValueError, match="'label' bypasses the graph, but an output"):
        next(make(source=Rows(), batch_size=4, num_threads=1))
