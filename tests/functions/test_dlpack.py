"""The tensors that DLPack hands over: once, where they are, at even addresses."""

import numpy as np
import pytest

from dalijax.core.functions.dlpack import DLTensor, Exported, aligned


def test_a_gpus_tensor_is_handed_over_once_where_it_is():
    tensor = DLTensor(1, None, np.arange(3.0).__dlpack__())  # of a host; it is never read
    assert tensor.__dlpack_device__() == (2, 1) and tensor.dtype == "float64"
    for wanted in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="Copy the result of from_dlpack"):
            tensor.__dlpack__(**wanted)
    capsule = tensor.__dlpack__(stream=1, max_version=(1, 0), dl_device=(2, 1), copy=False)
    assert type(capsule).__name__ == "PyCapsule"
    for again in (tensor.__dlpack__, lambda: tensor.dtype):
        with pytest.raises(RuntimeError, match="from_dlpack can be called only once"):
            again()


@pytest.mark.parametrize("dtype", (np.int64, np.float64, np.float32, np.uint8))
@pytest.mark.parametrize("offset", range(3))
def test_copies_at_even_addresses_are_what_they_were(dtype, offset):
    values = (np.arange(9) * (1 << 40) + 5).astype(dtype)[offset:]  # more than 32 bits hold
    copied = aligned(Exported(values.__dlpack__(), (1, 0)))
    assert copied.unsafe_buffer_pointer() % 16 == 0
    np.testing.assert_array_equal(np.from_dlpack(copied), values, strict=True)
