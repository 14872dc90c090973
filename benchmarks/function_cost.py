"""Measures the cost of a function in the graph per batch, compared with DALI's form of it.

All variants take turns in one process, in a different order in each round. Values are medians over
the rounds of the time that a function adds to the pipeline. Before it is timed, each variant runs a
few batches, and garbage is collected. Ratios compare with DALI's forms in the same round; it takes
hundreds of rounds to distinguish 1.0 from 1.05. With a GPU, batches are on the GPU::

    python benchmarks/function_cost.py --match "^jax|batch" --rounds 301
"""

from __future__ import annotations

import functools
import importlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def
from nvidia.dali.plugin import jax as dax

import report
import turns
from dalijax import fn
from report import GPU

OURS = "dalijax's"
cuda: Any = importlib.import_module("numba.cuda") if GPU else None


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


def copy_rows_on_gpu(out: Any, x: Any) -> None:
    for row in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        out[row] = x[x.shape[0] - 1 - row]


def copy_images_on_gpu(out: Any, x: Any) -> None:
    row, column = cuda.blockIdx.x, cuda.threadIdx.x
    for channel in range(x.shape[2]):
        out[row, column, channel] = x[x.shape[0] - 1 - row, column, channel]


def kernel_options(shape: list[int]) -> dict[str, Any]:
    if len(shape) == 1:
        return {
            "run_fn": copy_rows_on_gpu,
            "blocks": [1, 1, 1],
            "threads_per_block": [8, 1, 1],
        }
    return {
        "run_fn": copy_images_on_gpu,
        "blocks": [shape[0], 1, 1],
        "threads_per_block": [shape[1], 1, 1],
    }


def dalis_numba_on_gpu(x: Any, shape: list[int]) -> Any:
    from nvidia.dali import types
    from nvidia.dali.plugin.numba.fn.experimental import numba_function

    # DALI 2.4 supports CUDA 13, but lacks a minimum version of Numba for it and raises an error.
    plugin: Any = importlib.import_module("nvidia.dali.plugin.numba")
    plugin.minimal_numba_version.setdefault(13, plugin.Version("0.61.2"))
    kinds = {"out_types": [types.FLOAT], "in_types": [types.FLOAT]}
    dims = {"outs_ndim": [len(shape)], "ins_ndim": [len(shape)]}
    return numba_function(x, device="gpu", **kinds, **dims, **kernel_options(shape))


def our_numba_on_gpu(x: Any, shape: list[int]) -> Any:
    options = kernel_options(shape)
    return fn.numba_function(x, in_types="float32", ins_ndim=len(shape), **options)


def our_numba(x: Any, ndim: int) -> Any:
    return fn.numba_function(x, run_fn=copy_rows, in_types="float32", ins_ndim=ndim)


def variants(shape: list[int]) -> dict[str, Callable[[Any], Any] | None]:
    """Returns functions of a DataNode by name."""
    compiled, ndim = jax.jit(flip), len(shape)
    by_name: dict[str, Callable[[Any], Any] | None] = {
        "none": None,
        "jax, jit: DALI's": lambda x: dax.fn.jax_function(compiled)(x),
        "jax, jit: dalijax's": lambda x: fn.jax_function(compiled)(x),
        "jax, not compiled: DALI's": lambda x: dax.fn.jax_function(flip)(x),
        "jax, not compiled: dalijax's": lambda x: fn.jax_function(flip)(x),
    }
    if GPU:
        import cupy

        def take_sample(x: Any) -> Any:
            return cupy.from_dlpack(x)[::-1].copy()

        def take_samples(xs: Any) -> Any:
            return [take_sample(x) for x in xs]

        # DALI passes capsules, and its stream does not wait for the stream that writes them.
        def waited(capsule: Any) -> Any:
            return waited_all([capsule])[0]

        def waited_all(capsules: Any) -> Any:
            taken = take_samples(capsules)
            cupy.cuda.get_current_stream().synchronize()
            return [array.__dlpack__() for array in taken]

        def take_capsule(x: Any) -> Any:
            return take_sample(x.__dlpack__())

        def take_capsules(xs: Any) -> Any:
            return [take_capsule(x) for x in xs]

        dalis, ours = dali_fn.dl_tensor_python_function, fn.dl_tensor_python_function
        for mode, batch, functions in (
            ("sample by sample", False, (take_sample, waited, take_sample, take_capsule)),
            ("batch", True, (take_samples, waited_all, take_samples, take_capsules)),
        ):
            for form, operator, function in zip(
                (
                    "DALI's python_function",
                    "DALI's dl_tensor_python_function",
                    OURS,
                    f"{OURS}, of capsules",
                ),
                (dali_fn.python_function, dalis, ours, ours),
                functions,
            ):
                by_name[f"CuPy, {mode}: {form}"] = functools.partial(
                    operator, device="gpu", function=function, batch_processing=batch
                )
        by_name["Numba: DALI's"] = lambda x: dalis_numba_on_gpu(x, shape)
        by_name["Numba: dalijax's"] = lambda x: our_numba_on_gpu(x, shape)
    else:
        by_name |= {
            "DLPack, identity of capsules: DALI's": lambda x: dali_fn.dl_tensor_python_function(
                x, function=lambda capsule: capsule, batch_processing=False
            ),
            "NumPy, sample by sample: DALI's python_function": lambda x: dali_fn.python_function(
                x, function=flip_sample, batch_processing=False
            ),
            "NumPy, sample by sample: dalijax's": lambda x: fn.dl_tensor_python_function(
                x, function=flip_sample, batch_processing=False
            ),
            "NumPy, batch: DALI's python_function": lambda x: dali_fn.python_function(
                x, function=flip_samples, batch_processing=True
            ),
            "NumPy, batch: dalijax's": lambda x: fn.dl_tensor_python_function(
                x, function=flip_samples, batch_processing=True
            ),
            "Numba: DALI's": lambda x: dalis_numba(x, ndim),
            "Numba: dalijax's": lambda x: our_numba(x, ndim),
        }
    return by_name


def built(function: Callable[[Any], Any] | None, shape: list[int], batch: int) -> tuple[Any, float]:
    """Returns a pipeline, and the seconds of building it a second time."""

    @pipeline_def(batch_size=batch, num_threads=4, device_id=0 if GPU else None)
    def graph() -> Any:
        x = dali_fn.constant(fdata=[0.5], shape=shape, device="gpu" if GPU else "cpu")
        return x if function is None else function(x)

    graph().build()
    begin = time.perf_counter()
    pipeline = graph()
    pipeline.build()
    return pipeline, time.perf_counter() - begin


def shares(name: str, over: dict[str, list[float]]) -> str:
    """Returns the ratio to the added time of DALI's forms: the median and the quartiles."""
    kind, _, form = name.partition(": ")
    if not form.startswith(OURS):
        return ""
    parts = [
        turns.share(over[name], values)
        for other, values in over.items()
        if other.startswith(f"{kind}: ") and OURS not in other
    ]
    return "; ".join(filter(None, parts))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--batches", type=int, default=8, help="batches per round")
    parser.add_argument("--match", default="", help="pattern of names of functions")
    arguments = parser.parse_args()
    report.heading()
    result: dict[str, Any] = {}
    for batch, shape in ((16, [8]), (32, [64, 64, 3]), (128, [224, 224, 3])):
        name = f"{batch}x{'x'.join(map(str, shape))} f32"
        chosen = {
            k: f for k, f in variants(shape).items() if f is None or re.search(arguments.match, k)
        }
        pipelines = {k: built(f, shape, batch) for k, f in chosen.items()}
        times = turns.time_pipelines(
            {k: pipeline for k, (pipeline, _) in pipelines.items()},
            arguments.rounds,
            arguments.batches,
        ).micros
        over = turns.over(times, "none")
        result[name] = {
            key: {
                "us": statistics.median(over[key]),
                "build_ms": pipelines[key][1] * 1e3,
                "rounds": values,
            }
            for key, values in times.items()
        }
        report.table(
            (
                f"{name}; without: {statistics.median(times['none']):.0f} us",
                "us per batch, more than without",
                "ratio to DALI's",
                "second build, ms",
            ),
            [
                (key, f"{row['us']:.0f}", shares(key, over), f"{row['build_ms']:.0f}")
                for key, row in result[name].items()
                if key != "none"
            ],
        )
    groups = {
        name: {k: v["us"] for k, v in values.items() if k != "none"}
        for name, values in result.items()
    }
    label = "us per batch, more than without the function"
    report.write(arguments.out, "function_cost", result, groups, label)


if __name__ == "__main__":
    main()
