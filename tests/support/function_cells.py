"""Every function of `dalijax.fn` in every iterator and adapter, and what NumPy makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
from nvidia.dali import fn as dali_fn
from nvidia.dali import types

from dalijax import data_iterator, fn
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from numbered import read_files

N = 11  # records, in batches of 4
LONGEST = 4  # floats of a ragged sample
NONE = -9.0  # beyond its end
KERNEL = {"blocks": [1, 1, 1], "threads_per_block": [1, 1, 1]}


@fn.jax_function
@jax.jit
def by_jit(x, *, key):
    return x * 2 + jax.random.uniform(key, x.shape)


@fn.jax_function(ragged="group")
def by_group(x):
    return x[:, ::-1]


@fn.jax_function(ragged="pad")
def by_pad(x, *, lengths):
    return x.sum(1) + lengths[:, 0].astype(np.float32)


def of_sample(x, *, rng):
    return _array(x) + np.float32(rng.random())


def of_ragged_batch(xs):
    return [x[:1] + np.float32(x.shape[0]) for x in map(_array, xs)]


def _array(x):
    """NumPy's on the CPU, and JAX's on a GPU."""
    return x if isinstance(x, np.ndarray) else jax.dlpack.from_dlpack(x)


def halved(out0, in0):
    for k in range(in0.shape[0]):
        out0[k] = in0[k] / 2


def summed(out0, in0):
    total = in0[0]
    for k in range(1, in0.shape[0]):
        total += in0[k]
    out0[0] = total


def one_number(outs, ins):
    for k in range(len(outs[0])):
        outs[0][k][0] = 1


def all_functions(x, device):
    """Each function, on a uniform batch and a ragged one."""
    x = x.gpu() if device == "gpu" else x
    of_kernel = KERNEL if device == "gpu" else {}
    example = np.zeros(2, np.float32)
    count = dali_fn.random.uniform(range=(0.6, LONGEST + 0.4), shape=[1])
    rough = dali_fn.random.uniform(shape=dali_fn.cast(count, dtype=types.INT32))
    rough = rough.gpu() if device == "gpu" else rough
    return {
        "x": x,
        "rough": dali_fn.pad(rough, axes=[0], shape=[LONGEST], fill_value=NONE),
        "jit": by_jit(x),
        "pad": by_pad(rough),
        "group": fn.jax_function(lambda r: r[:, -1], ragged="group")(by_group(rough)),
        "samples": fn.dl_tensor_python_function(x, function=of_sample, batch_processing=False),
        "batch": fn.dl_tensor_python_function(
            rough, function=of_ragged_batch, batch_processing=True
        ),
        "numba": fn.numba_function(x, run_fn=halved, example=example, **of_kernel),
        "numba_sum": fn.numba_function(
            rough, run_fn=summed, setup_fn=one_number, example=example, **of_kernel
        ),
    }


def read(files, where):
    label = read_files(files[:N], pad_last_batch=True)[1]
    x = dali_fn.cast(dali_fn.cat(label, label + 1), dtype=types.FLOAT)
    return tuple(all_functions(x, where).values())


NAMES = ["x", "rough", "jit", "pad", "group", "samples", "batch", "numba", "numba_sum"]
over_files = data_iterator(read, NAMES, reader_name="reader")


def core(**arguments):
    return over_files.stream(2, batch_size=4, num_threads=2, **arguments)


def grains(**arguments):
    return iter(DALIIterDataset(over_files, num_epochs=2, pad="mask", batch_size=4, **arguments))


def transform(files, where):
    records = [np.array([k, k + 1], np.float32) for k in range(N)]
    made = DALITransform(
        lambda x: tuple(all_functions(x, where).values()),
        batch_size=4,
        output_map=NAMES,
        pad="mask",
    )
    return iter(grain.MapDataset.source(records).to_iter_dataset().pipe(made))


def clu(**arguments):
    return DALIDatasetIterator(over_files, num_epochs=2, batch_size=4, **arguments)


def tfs(**arguments):
    return iter(DALIDataset(over_files, batch_size=4, **arguments).repeat(2))


ADAPTERS: tuple[Callable[..., Any], ...] = (core, grains, transform, clu, tfs)


def check(make: Callable[..., Any], files: list[str], where: str) -> None:
    """Compares the batches with NumPy, and those after a resume at each position with them."""
    iterator, batches, states = make(files=files, where=where), [], []
    while True:
        states.append(json.loads(json.dumps(iterator.get_state())))
        try:
            batches.append({name: np.asarray(value) for name, value in next(iterator).items()})
        except StopIteration:
            break
    iterator.close()
    assert len(batches) == (3 if make is transform else 6)
    for batch in batches:
        _check_values(batch)
    assert len({batch["jit"].tobytes() for batch in batches}) == len(batches)
    for at, state in enumerate(states):
        other = make(files=files, where=where)
        other.set_state(state)
        got = [{name: np.asarray(value) for name, value in batch.items()} for batch in other]
        other.close()
        assert len(got) == len(batches) - at
        for ours, expected in zip(got, batches[at:], strict=True):
            assert ours.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(ours[name], value, err_msg=f"{name}, from {at} on")


def _check_values(batch: dict[str, np.ndarray]) -> None:
    """A batch against NumPy; the noise of `by_jit` and `of_sample` is in [0, 1)."""
    x, rough = batch["x"], batch["rough"]
    assert x.shape == (4, 2) and rough.shape == (4, LONGEST)
    kept = rough != NONE
    lengths, sums = kept.sum(1), np.where(kept, rough, 0).sum(1)
    noise = batch["jit"] - 2 * x
    assert ((noise >= -1e-5) & (noise < 1 + 1e-5)).all() and len(np.unique(noise)) > 4
    noise = batch["samples"] - x
    assert ((noise >= -1e-5) & (noise < 1 + 1e-5)).all()
    np.testing.assert_allclose(noise[:, 0], noise[:, 1], atol=1e-5)  # one number a sample
    assert len(np.unique(noise[:, 0])) == 4  # padding draws by itself
    expected = {
        "pad": sums + lengths,
        "group": rough[:, 0],
        "batch": (rough[:, 0] + lengths)[:, None],
        "numba": x / 2,
        "numba_sum": sums[:, None],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(batch[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
