"""Draws that one input feeds, in graphs of a GPU."""

import jax
import numpy as np
import pytest
from nvidia.dali import backend, fn

from dalijax import data_iterator, sources
from dalijax.core.feeding import joined_draws
from dalijax.core.native.operators import checked_library
from dalijax.core.pipeline import alternatives
from dalijax.core.state.operators import operators
from drawing import drawn_image, four_views, png

pytestmark = [
    pytest.mark.skipif(
        backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
        reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
    ),
    pytest.mark.skipif(
        isinstance(checked_library(), str), reason="dalijax was installed without a C compiler"
    ),
]


def views(data, *, draw):
    found = four_views(fn.decoders.image(data, device="mixed"), draw)
    copied = [draw.uniform(name=f"copied {k}").gpu() for k in range(4)]
    kept = [draw.uniform(name=f"kept {k}") for k in range(4)]
    both = draw.uniform(shape=[3], name="both")
    return found, fn.stack(*copied), fn.stack(*kept), both, both.gpu() + 1.0


NAMES = ["views", "copied", "kept", "both", "more"]


def rows_of(device_id):
    records = [{"data": png(drawn_image(k, 40 + k, 60))} for k in range(11)]
    make = data_iterator(views, NAMES, source=sources.Records(records), mask="mask")
    iterator = make(batch_size=4, num_threads=2, seed=5, device_id=device_id)
    batches = [batch for _ in range(3) for batch in iterator]
    return {k: np.concatenate([np.asarray(batch[k]) for batch in batches]) for k in batches[0]}


@pytest.mark.parametrize("device_id", range(jax.local_device_count()))
def test_joined_draws_have_the_numbers_of_single_draws(device_id, monkeypatch):
    kinds, choose = [], alternatives.choose

    def noted(pipeline):
        choose(pipeline)
        kinds.extend(getattr(o._op, "schema_name", "") for o in operators(pipeline))

    monkeypatch.setattr(alternatives, "choose", noted)
    joined = rows_of(device_id)
    assert "NumbaFunction" in kinds
    kinds.clear()
    monkeypatch.setattr(joined_draws, "checked_library", lambda: "none")
    single = rows_of(device_id)
    assert kinds and "NumbaFunction" not in kinds
    for name in (*NAMES[1:], "mask"):
        np.testing.assert_array_equal(joined[name], single[name])
    assert len(np.unique(joined["copied"])) > 40
    # The order in which a GPU sums a mean may differ.
    assert np.mean(joined["views"] != single["views"]) < 1e-3
