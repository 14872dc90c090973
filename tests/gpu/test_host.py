"""NumPy batches of GPU pipelines: the pipeline copies them to the host."""

import jax
import numpy as np
import pytest
from nvidia.dali import backend

from dalijax import data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.tfdata import DALIDataset
from photographs import BATCH, graph, photos  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
FUNCTION = data_iterator(graph, ["image", "x"], reader_name="reader", mask="mask")


def called(files, dynamic=True):
    call = {"files": files, "augment": True, "batch_size": BATCH}
    return call if dynamic else call | {"exec_dynamic": False}


@pytest.mark.parametrize("dynamic", (True, False), ids=("dynamic", "older executor"))
def test_they_equal_the_batches_of_the_device(photos, dynamic):
    call = called(photos, dynamic)
    want = list(DALIDatasetIterator(FUNCTION, num_epochs=2, element="jax", **call))
    got = list(DALIDatasetIterator(FUNCTION, num_epochs=2, **call))  # kept while DALI continues
    data = list(DALIDataset(FUNCTION, **call).repeat(2))
    assert len(want) == len(got) == len(data)
    for one, two, three in zip(want, got, data):
        for name, array in one.items():
            assert isinstance(two[name], np.ndarray) and isinstance(three[name], np.ndarray)
            np.testing.assert_array_equal(two[name], np.asarray(array), name)
            np.testing.assert_array_equal(three[name], np.asarray(array), name)


@pytest.mark.parametrize("count", (0, 1, 2, 5))
def test_states_are_the_same_on_the_host_and_on_the_device(photos, count):
    call = called(photos)
    both = (FUNCTION, FUNCTION._for_host(call))
    for ours, others in (both, both[::-1]):
        stream = ours.stream(None, **call)
        for _ in range(count):
            next(stream)
        state = stream.get_state()
        want = [next(stream) for _ in range(4)]
        other = others.stream(None, **call)
        other.set_state(state)
        for one in want:
            two = next(other)
            for name in one:
                np.testing.assert_array_equal(np.asarray(two[name]), np.asarray(one[name]), name)


def test_they_come_from_dali_as_they_are(photos):
    stream = FUNCTION._for_host(called(photos)).stream(None, **called(photos))
    batch = next(stream)
    assert all(type(array) is np.ndarray for array in batch.values())
    assert not batch["image"].flags.writeable and not batch["image"].flags.owndata
