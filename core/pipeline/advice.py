"""Cures for errors of DALI, JAX and NumPy that name none."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, backend, types
from nvidia.dali.data_node import DataNode

from ..dtypes import DALI_TYPES
from ..messages import replacements
from ..state.operators import operators_of

_ARRAYS = ("jax", "jaxlib", "numpy")
_NO_ARGUMENT = re.compile(r'Argument "(\w+)" is not defined for operator "(\w+)"')
_NO_BFLOAT16 = (
    "DALI has no bfloat16: cast to types.FLOAT or FLOAT16 in the graph, and to bfloat16 in "
    "the step, or in a dalijax.fn.jax_function that has a sharding"
)
_NO_DTYPE = "dtype={!r} is not a type of DALI: pass one of nvidia.dali.types, as types.FLOAT"
_PREFIXES = ("torch", "tf", "np", "numpy", "jnp", "jax")
# What DALI says of a dtype that it can't convert to one of its own.
_BAD_DTYPE = re.compile(
    r"generic\.item\(\)|int\(\) argument must be|invalid literal for int|can only hold one of|"
    r"Cannot convert|not a valid DALIDataType"
)


def of_definition(error: Exception, arguments: Sequence[Any] = ()) -> str:
    """Returns the cure for an error of a graph's function; "" if none is known.

    Args:
        error: The error.
        arguments: The arguments that the caller passed to the function.
    """
    text = str(error)
    if match := _NO_ARGUMENT.search(text):
        return _argument_advice(*match.groups())
    if "no attribute 'BFLOAT16'" in text:
        return _NO_BFLOAT16
    if cure := _dtype_advice(error) or _device_advice(text) or _name_advice(error):
        return cure
    if cure := _value_advice(error, text):
        return cure
    if isinstance(error, (RuntimeError, ValueError)):
        return ""
    paths = [value for value in arguments if isinstance(value, (str, os.PathLike))]
    if paths and ("str" in text or "Path" in text):
        return (
            f"The function got the path {os.fspath(paths[0])!r}. If its parameters are fields of "
            f"records, pass source=dalijax.{replacements.for_path(paths[0])} instead"
        )
    return _python_advice(error, text)


def _python_advice(error: Exception, text: str) -> str:
    """Returns the cure for Python, NumPy or JAX applied to outputs of DALI's operators."""
    if "conditional context" in text:
        return (
            "Pass enable_conditionals=True where the iterator is made, or choose by DALI's "
            "arithmetic, as by mask * a + (1 - mask) * b"
        )
    if "'method'" in text:  # of x.shape[0] or len(x.shape)
        return (
            "In a pipeline function, shape is a method of a DataNode: x.shape() is the shape of "
            "each sample, without the batch, as another DataNode"
        )
    package = _package_of(error)
    if not package and ("DataNode" not in text or "expected inputs of type" in text):
        return ""
    called = f"{package} was called with" if package else "this was done to"
    return (
        f"In a pipeline function {called} a DataNode, which stands for batches that do not exist "
        "yet. Use DALI's operators (nvidia.dali.fn, DALI's own arithmetic), or make a function "
        "of the arrays part of the graph: @dalijax.fn.jax_function for JAX, "
        "dalijax.fn.numba_function or dalijax.fn.dl_tensor_python_function for NumPy. Or apply it "
        "to the batches that the iterator gives"
    )


def _dtype_advice(error: Exception) -> str:
    """Returns the cure for a dtype of NumPy, JAX or Python in place of DALI's."""
    if not _BAD_DTYPE.search(str(error)):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not str(frame.f_globals.get("__name__", "")).startswith("nvidia.dali"):
            continue
        passed = frame.f_locals.get("kwargs")
        values = [frame.f_locals.get("dtype")]
        if isinstance(passed, Mapping):
            values += [value for name, value in passed.items() if "dtype" in name]
        for value in values:
            if value is not None and not isinstance(value, types.DALIDataType):
                return _instead_of(value)
    return ""


def _instead_of(value: Any) -> str:
    """DALI's type to pass instead of another library's dtype."""
    if str(value).partition(".")[0] in _PREFIXES:  # torch.float32 and its text
        value = str(value).rpartition(".")[2]
    try:
        # np.dtype makes a dtype of a class of objects, too, and knows float as float64.
        dtype = np.dtype(np.float32 if value in (float, "float") else value)
    except TypeError:
        return _NO_DTYPE.format(value)
    if dtype.name == "bfloat16":
        return f"dtype={value!r}: {_NO_BFLOAT16}"
    if dtype not in DALI_TYPES:
        return _NO_DTYPE.format(value)
    return (
        f"dtype={value!r} is not a type of DALI: pass types.{DALI_TYPES[dtype].name} "
        "(from nvidia.dali import types)"
    )


def _value_advice(error: Exception, text: str) -> str:
    """Names the argument of an operator that got a text in place of numbers."""
    if not isinstance(error, ValueError) or "could not convert string" not in text:
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        passed = frame.f_locals.get("kwargs")
        for name, value in passed.items() if isinstance(passed, Mapping) else ():
            if isinstance(value, str) and repr(value) in text:
                return f"Pass numbers, or an output of an operator, as {name}="
    return ""


def _device_advice(text: str) -> str:
    """Returns the cure for a device that an operator does not have, or whose input is elsewhere."""
    if match := re.search(r'Unsupported device type: "(\w*)"', text):
        return (
            f"device={match[1]!r} is not a device of DALI: pass device='mixed' to a decoder, "
            "which decodes on the GPU, and 'gpu' or 'cpu' to other operators"
        )
    decoder = re.search(r"gpu operator `nvidia.dali.fn.(decoders[.\w]*)` is stored", text)
    if decoder:
        return (
            f"device='gpu' of fn.{decoder[1]}: pass device='mixed', which takes encoded data on "
            "the CPU and decodes it on the GPU"
        )
    if "is stored on incompatible device" in text:
        return "Copy the input to the GPU by .gpu(), or leave device= out"
    return ""


def _name_advice(error: Exception) -> str:
    """Close names, for an attribute that a module of DALI does not have."""
    module = getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not isinstance(module, ModuleType):
        return ""
    if not module.__name__.startswith("nvidia.dali"):
        return ""
    names = [name for name in dir(module) if not name.startswith("_")]
    return replacements.for_name(str(error.name), names, replacements.OPERATORS)


def _argument_advice(name: str, schema: str) -> str:
    """Returns the arguments that an operator has, the most similar ones first."""
    try:
        known = backend.GetSchema(schema).GetArgumentNames()
    except (AttributeError, RuntimeError):  # not public
        return ""
    known = [one for one in known if not one.startswith("_")]
    close = difflib.get_close_matches(name, known, 3)
    meant = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{meant}Its arguments are {sorted(known)}"


def _package_of(error: Exception) -> str:
    """JAX or NumPy, where an error was raised within a function of theirs over a DataNode."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _ARRAYS and any(isinstance(x, DataNode) for x in frame.f_locals.values()):
            return "NumPy" if package == "numpy" else "JAX"
    return ""


def of_outputs(error: Exception, name: str) -> str:
    """Returns the cure for an error of a graph's outputs; "" if none is known."""
    if isinstance(error, NotImplementedError) and not str(error):  # of Pipeline.define_graph
        return (
            f"{name} returns no outputs: end it with a return of them, one for each name of "
            "output_map, as in: return images, labels"
        )
    if "does not match any of the allowed layouts" in str(error) and "dimensions 1 " in str(error):
        return (
            f"{name}: {error}\nThe input has one dimension, like the bytes of a file: decode it "
            "first, as in images = fn.decoders.image(data)"
        )
    if "Illegal output type" in str(error) or "contains a nested" in str(error):
        return (
            f"{name}: {error} A pipeline function returns DALI's outputs in the order of "
            "output_map, one by one, as in: return images, labels. (What JAX and NumPy are to "
            "compute belongs in dalijax.fn.jax_function and its like.)"
        )
    return ""


def of_workers(error: Exception) -> str:
    """Returns the cure for workers of ``fn.external_source`` that do not start, or ""."""
    if "Workers initialization failed" not in str(error):
        return ""
    return (
        "The workers of fn.external_source(parallel=True) are new processes (py_start_method="
        "'spawn'), which import the program's file first. Its code must be in a function under\n\n"
        "    if __name__ == '__main__':\n"
        "        main()  # makes the iterator\n\n"
        "Otherwise the workers' own error is above."
    )


FORKED = (
    "fn.external_source(parallel=True) forks its workers from a process that has JAX, whose "
    "threads they lack: they may hang. Pass py_start_method='spawn' to pipeline_def, and start the "
    "program under if __name__ == '__main__'; or decorate the plain function with "
    "dalijax.data_iterator, which spawns them"
)


def is_of_dali(error: BaseException) -> bool:
    """Returns whether DALI raised an error, and not a function of the caller's that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("nvidia.dali")


def of_readers(error: Exception, pipeline: Pipeline) -> str:
    """Returns the cure for a reader that finds no files; "" for other errors."""
    if "No files found" not in str(error):
        return ""
    roots = {str(arguments.get("file_root", "")) for _, _, arguments in operators_of(pipeline)}
    folders = " or ".join(sorted(filter(None, roots)))
    return (
        f"No file in {folders} (file_root) has the name and the place that the reader expects. "
        "fn.readers.file reads one subfolder for each class, as in cat/1.jpg, and files whose "
        "names fit file_filters. For other files pass files=[...]."
    )


def of_run(error: RuntimeError) -> str:
    """Returns DALI's message of a failed run, without its end, which is not true here."""
    return str(error).replace("Current pipeline object is no longer valid.", "").strip()
