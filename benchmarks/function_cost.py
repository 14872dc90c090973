"""What a function in the graph costs for each batch, beside DALI's own form of it.

All variants take turns, round by round, in one process; figures are medians over the rounds of the
time of a batch over that of the same pipeline without a function. On a GPU the batches are there::

    python benchmarks/function_cost.py --json functions.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import nvidia.dali
from nvidia.dali import backend, pipeline_def
from nvidia.dali import fn as dali_fn
from nvidia.dali.plugin import jax as dax

from dalijax import fn

GPU = backend.GetCUDADeviceCount() > 0


def flip(x: Any) -> Any:
    return x[:, ::-1]


def flip_sample(x: Any) -> Any:
    return x[::-1]


def flip_samples(xs: Any) -> Any:
    return [x[::-1] for x in xs]


def copy_rows(out: Any, x: Any) -> None:
    for row in range(x.shape[0]):
        out[row] = x[x.shape[0] - 1 - row]


def dalis_numba(x: Any, ndim: int) -> Any:
    from nvidia.dali import types
    from nvidia.dali.plugin.numba.fn.experimental import numba_function

    return numba_function(
        x,
        run_fn=copy_rows,
        out_types=[types.FLOAT],
        in_types=[types.FLOAT],
        outs_ndim=[ndim],
        ins_ndim=[ndim],
    )


def our_numba(x: Any, ndim: int) -> Any:
    return fn.numba_function(x, run_fn=copy_rows, in_types="float32", ins_ndim=ndim)


def variants(shape: list[int]) -> dict[str, Callable[[Any], Any] | None]:
    """Functions of a DataNode."""
    compiled, ndim = jax.jit(flip), len(shape)
    made: dict[str, Callable[[Any], Any] | None] = {
        "none": None,
        "jax, jit: DALI's": lambda x: dax.fn.jax_function(compiled)(x),
        "jax, jit: dalijax's": lambda x: fn.jax_function(compiled)(x),
        "jax, not compiled: DALI's": lambda x: dax.fn.jax_function(flip)(x),
        "jax, not compiled: dalijax's": lambda x: fn.jax_function(flip)(x),
    }
    if not GPU:
        made |= {
            "DLPack, identity of capsules: DALI's": lambda x: dali_fn.dl_tensor_python_function(
                x, function=lambda one: one, batch_processing=False
            ),
            "NumPy, sample by sample: DALI's python_function": lambda x: dali_fn.python_function(
                x, function=flip_sample, batch_processing=False
            ),
            "DLPack, sample by sample: dalijax's": lambda x: fn.dl_tensor_python_function(
                x, function=flip_sample
            ),
            "NumPy, batch: DALI's python_function": lambda x: dali_fn.python_function(
                x, function=flip_samples, batch_processing=True
            ),
            "DLPack, batch: dalijax's": lambda x: fn.dl_tensor_python_function(
                x, function=flip_samples, batch_processing=True
            ),
            "Numba: DALI's": lambda x: dalis_numba(x, ndim),
            "Numba: dalijax's": lambda x: our_numba(x, ndim),
        }
    return made


def built(function: Callable[[Any], Any] | None, shape: list[int], batch: int) -> tuple[Any, float]:
    """A pipeline, and the seconds that building it a second time takes."""

    @pipeline_def(batch_size=batch, num_threads=4, device_id=0 if GPU else None)
    def graph() -> Any:
        x = dali_fn.constant(fdata=[0.5], shape=shape, device="gpu" if GPU else "cpu")
        return x if function is None else function(x)

    graph().build()
    begin = time.perf_counter()
    pipeline = graph()
    pipeline.build()
    return pipeline, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=30, help="batches of a round")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    arguments = parser.parse_args()
    where = jax.devices()[0].device_kind if GPU else f"{os.cpu_count()} CPU cores"
    print(f"{where}, jax {jax.__version__}, DALI {nvidia.dali.__version__}, NumPy {np.__version__}")
    result: dict[str, Any] = {}
    for batch, shape in ((16, [8]), (32, [64, 64, 3]), (128, [224, 224, 3])):
        name = f"{batch}x{'x'.join(map(str, shape))} f32"
        print(
            f"\n| {name}: us a batch over none | median | second build, ms |\n| --- | --- | --- |"
        )
        pipelines = {k: built(f, shape, batch) for k, f in variants(shape).items()}
        times: dict[str, list[float]] = {k: [] for k in pipelines}
        for pipeline, _ in pipelines.values():
            for _ in range(5):
                pipeline.run()
        for _ in range(arguments.rounds):
            for key, (pipeline, _) in pipelines.items():
                begin = time.perf_counter()
                for _ in range(arguments.batches):
                    pipeline.run()
                times[key].append((time.perf_counter() - begin) / arguments.batches * 1e6)
        result[name] = {}
        for key, own in times.items():
            over = statistics.median(a - b for a, b in zip(own, times["none"]))
            result[name][key] = {"us": over, "build_ms": pipelines[key][1] * 1e3}
            if key != "none":
                print(f"| {key} | {over:.0f} | {pipelines[key][1] * 1e3:.0f} |")
        print(f"(none: {statistics.median(times['none']):.0f} us)")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
