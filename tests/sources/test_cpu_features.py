"""Random numbers do not depend on the CPU's features: NumPy's loops for other CPUs agree."""

import contextlib
import io
import os

import numpy as np
import pytest

from programs import run_python

PROGRAM = """
import hashlib
import numpy as np
from nvidia.dali import fn, types
from dalijax import augment, data_iterator, sources

def graph(x, draw):
    images = draw.sized(fn.reinterpret(x, shape=(24, 32, 3), layout="HWC"), (24, 32))
    crop = draw.compute(lambda u, _: u, (), columns=1)
    windows = augment.random_resized_crop(images, 8, draw=draw)
    return draw.normal(1, 3, shape=(100,)), draw.uniform(-3, 7, shape=(100,)), windows, crop

rows = np.random.default_rng(0).integers(0, 255, (64, 24 * 32 * 3), np.uint8)
make = data_iterator(graph, ["n", "u", "w", "c"], source=sources.Arrays({"x": rows}), as_numpy=True)
for name, array in next(make(batch_size=64, num_threads=1, device_id=None)).items():
    print(name, hashlib.sha256(np.ascontiguousarray(array)).hexdigest())
from numpy._core import _multiarray_umath as m
print("dispatched", sum(m.__cpu_features__[one] for one in m.__cpu_dispatch__))
"""


@pytest.mark.slow
def test_random_numbers_do_not_depend_on_the_cpu():
    umath = pytest.importorskip("numpy._core._multiarray_umath")
    features = [one for one in umath.__cpu_dispatch__ if umath.__cpu_features__[one]]
    if not features:
        pytest.skip(f"NumPy {np.__version__} dispatches nothing on this CPU")

    def parsed(text):
        return dict(line.split() for line in text.splitlines())

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(PROGRAM, {})  # noqa: S102 - the program above
    plain = parsed(printed.getvalue())
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(features)}
    bare = parsed(run_python("-c", PROGRAM, env=environment).stdout)
    assert int(plain.pop("dispatched")) > int(bare.pop("dispatched"))
    assert len(plain) == 4 and bare == plain
