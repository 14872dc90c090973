"""Operators of graphs that call functions of the library in C, in DALI's threads without the GIL.

DALI's operator for functions that Numba has compiled calls functions by their addresses. Neither
Numba nor a compiler is needed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, ops, types
from nvidia.dali.data_node import DataNode

from ..threads.workers import Workers
from .library import LIBRARY

Form = tuple[Any, int]  # a type of DALI, and a number of dimensions
MOST_RESULTS = 6  # of DALI's operator


def called(
    library: ctypes.CDLL,
    function: str,
    shapes: str,
    inputs: Sequence[Any],
    forms: Sequence[Form],
    results: Sequence[Form],
    takes_batches: bool = False,
    name: str | None = None,
) -> list[DataNode]:
    """Returns the results of a function of the library, as outputs of an operator.

    Args:
        library: The library in C.
        function: The name of the function.
        shapes: The name of a function that computes the shapes of the results.
        inputs: The inputs, on the CPU.
        forms: The form of each input.
        results: The form of each result, at most `MOST_RESULTS`.
        takes_batches: Whether one call processes the whole batch.
        name: The name of the operator. Several results are named "name[0]", "name[1]" and so on.
    """

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    found: Any = _operator(function)(device="cpu")(
        *inputs,
        run_fn=address(function),
        setup_fn=address(shapes),
        in_types=[dtype for dtype, _ in forms],
        ins_ndim=[ndim for _, ndim in forms],
        out_types=[dtype for dtype, _ in results],
        outs_ndim=[ndim for _, ndim in results],
        batch_processing=takes_batches,
        name=name,
    )
    nodes = [*found] if isinstance(found, (list, tuple)) else [found]
    # Private in DALI: the nodes that are computed even if the graph's outputs do not need them.
    sinks, own = vars(Pipeline.current())["_sinks"], {id(node) for node in nodes}
    sinks[:] = [node for node in sinks if id(node) not in own]
    return nodes


@functools.cache
def _operator(name: str) -> Any:
    """Returns the class of DALI's operator for compiled functions, under another name."""
    # Internal in DALI. Its public class is the plugin, which imports Numba, and whose functions
    # must be those of Python.
    make: Any = ops.python_op_factory  # type: ignore[attr-defined]
    return make(name, "NumbaFunction", "NumbaFuncImpl", generated=False)


@functools.cache
def checked_library() -> ctypes.CDLL | str:
    """Returns the library in C after a check of its functions, or why it can't be used."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        _ = [library[name] for name in ("dalijax_resize_table_1", "dalijax_split_1")]
    except OSError as error:
        return (
            f"the library in C can't be loaded ({error}). Install dalijax where there is a C "
            "compiler"
        )
    except AttributeError as error:
        return f"the library in C belongs to another version ({error}). Reinstall dalijax"
    images = np.array([[[[9], [9]], [[9], [9]]], [[[0], [255]], [[255], [0]]]], np.uint8)

    def mean_of_second() -> DataNode:
        parts = split(library, types.Constant(images, device="cpu"), (types.UINT8, 3), 2)
        inputs = [parts[1], fn.zeros(shape=[1, 1, 0], dtype=types.UINT8)]
        form = types.UINT8, 3
        return called(
            library, "dalijax_resize_1", "dalijax_resize_1_shapes", inputs, [form] * 2, [form]
        )[0]

    try:
        mean = in_pipeline(mean_of_second)
        if mean.tolist() != [[[128]]]:
            raise ValueError(f"the mean of {images[1].ravel()} became {mean.ravel()}")
    except Exception as error:  # DALI does not document its operator
        return f"a check failed: {error}"
    return library


def split(
    library: ctypes.CDLL, x: DataNode, form: Form, parts: int, name: str | None = None
) -> list[DataNode]:
    """Splits an input along its first axis.

    Args:
        library: The library in C.
        x: The input, on the CPU, [parts, ...].
        form: The form of each part.
        parts: The number of parts, at most `MOST_RESULTS`.
        name: The name of the operator; see `called`.
    """
    dtype, ndim = form
    function = f"dalijax_split_{np.dtype(types.to_numpy_type(dtype)).itemsize}"
    forms = [(dtype, ndim + 1)]
    results = [form] * parts
    return called(library, function, "dalijax_split_shapes", [x], forms, results, True, name)


def in_pipeline(define: Callable[[], DataNode]) -> NDArray[Any]:
    """Returns the result of a graph for one sample, of a pipeline of its own.

    The pipeline is defined in another thread, because the caller defines a graph.
    """

    def run() -> NDArray[Any]:
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
        with pipeline:
            pipeline.set_outputs(define())
        pipeline.build()
        return np.array(pipeline.run()[0].at(0))

    workers = Workers(1, "dalijax-check")
    try:
        return workers.call(run).get(workers)
    finally:
        workers.end()
