"""Graphs that tests call functions in, and runs of them in plain DALI pipelines."""

import numpy as np
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def, types

BATCH = 4


def run(graph, runs=3, batch_size=BATCH, **call):
    """The outputs of some runs of a plain DALI pipeline: lists of arrays of the samples."""
    call = {"num_threads": 2, "device_id": None, "seed": 3, **call}
    pipeline = pipeline_def(graph, batch_size=batch_size, **call)()
    pipeline.build()
    return [[[np.array(one) for one in output] for output in pipeline.run()] for _ in range(runs)]


def uniform(shape=(6, 5, 3)):
    return dali_fn.random.uniform(shape=list(shape))


def ragged():
    rows = dali_fn.cast(dali_fn.random.uniform(range=(1, 9), shape=[1]), dtype=types.INT32)
    return dali_fn.random.uniform(shape=dali_fn.cat(rows, types.Constant([3], device="cpu")))


def check(graph, expected, **call):
    """Checks the outputs after the first output, which NumPy computes from it sample by sample."""
    for first, *others in run(graph, **call):
        for k, other in enumerate(others):
            for sample, got in zip(first, other, strict=True):
                want = expected[k](sample) if isinstance(expected, list) else expected(sample)
                np.testing.assert_allclose(got, want, rtol=1e-6, strict=True)


def layouts(graph):
    """The layouts of the outputs of a graph."""
    pipeline = pipeline_def(graph, batch_size=BATCH, num_threads=1, device_id=None)()
    pipeline.build()
    return [output.layout() for output in pipeline.run()]
