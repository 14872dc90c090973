"""Fixes for errors of DALI, JAX and NumPy whose messages contain no fix."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, backend, types
from nvidia.dali.data_node import DataNode

from ..dtypes import DALI_TYPES
from ..formats.file_kinds import file_fault
from ..formats.spread import spread
from ..messages import replacements
from ..messages.printable import printable
from ..state import reader_files
from ..state.operators import Operator, operators_of

_ARRAYS = ("jax", "jaxlib", "numpy")
_NO_ARGUMENT = re.compile(r'Argument "(\w+)" is not defined for operator "(\w+)"')
_NO_BFLOAT16 = (
    "DALI does not support bfloat16: cast to types.FLOAT or FLOAT16 in the graph, and to bfloat16 "
    "in the training step or by batch_map"
)
_NO_DTYPE = "dtype={!r} is not a type of DALI: pass a type of nvidia.dali.types, e.g. types.FLOAT"
_MOST_FILES = 64  # files of a reader that are looked at
_PREFIXES = ("torch", "tf", "np", "numpy", "jnp", "jax")
# DALI's messages about values that it can't convert to its types.
_BAD_DTYPE = re.compile(
    r"generic\.item\(\)|int\(\) argument must be|invalid literal for int|can only hold one of|"
    r"Cannot convert|not a valid DALIDataType"
)

# Patterns of DALI's errors about the shape or the layout of an input, each with its fix.
_INPUT_CURES = {
    "dimensions 1 does not match any of the allowed layouts": (
        "The input has one dimension, like the bytes of a file: decode it first, as in images = "
        "fn.decoders.image(data)"
    ),
    "dimensions 2 does not match any of the allowed layouts": (
        "Images need a dimension for the channels: images = fn.expand_dims(images, axes=2)"
    ),
    "Found distinct layouts": (
        "Pass one of the results through fn.reinterpret(images, layout='HWC'), or layout='' for no "
        "layout. uint8 fields of images have the layout HWC"
    ),
    "Axis '.' is not present in the input layout": (
        "The layout of the input lacks this axis: pass numbers of dimensions, e.g. axes=[0, 1], or "
        "set the layout by fn.reinterpret(images, layout='HWC')"
    ),
    r"(?s)same size in bytes.*Requested shape:\s+(\d+ x )+3$": (
        "If the operator belongs to dalijax.augment: color_jitter takes RGB images of 3 channels, "
        "and rand_augment, trivial_augment and auto_augment take them as uint8. For gray images, "
        "pass draw.sized(fn.cat(images, images, images, axis=2), images)"
    ),
}


def definition_cure(error: Exception, arguments: Sequence[Any] = ()) -> str:
    """Returns the fix for an error that a graph function raised; "" if no fix is known.

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
            f"records, pass source=dalijax.{replacements.source_call(paths[0])} instead"
        )
    return _python_advice(error, text)


def _python_advice(error: Exception, text: str) -> str:
    """Returns the fix for Python, NumPy or JAX code that got a DataNode; "" for other errors."""
    if "conditional context" in text:
        return (
            "Pass enable_conditionals=True when you create the iterator, or replace the condition "
            "by arithmetic, e.g. mask * a + (1 - mask) * b"
        )
    if "'method'" in text:  # the error of x.shape[0] or len(x.shape)
        return (
            "In a pipeline function, shape is a method of a DataNode: x.shape() is the shape of "
            "each sample, without the batch, as another DataNode"
        )
    package = _package_of(error)
    if not package and ("DataNode" not in text or "expected inputs of type" in text):
        return ""
    caller = f"{package} was called with" if package else "Python code used"
    return (
        f"In a graph function, {caller} a DataNode, which represents batches that do not exist "
        "yet. Use DALI's operators (nvidia.dali.fn, arithmetic of DataNodes), or add a function "
        "of arrays to the graph: @dalijax.fn.jax_function for JAX, dalijax.fn.numba_function or "
        "dalijax.fn.dl_tensor_python_function for NumPy. Alternatively, change the batches that "
        "the iterator returns"
    )


def _dtype_advice(error: Exception) -> str:
    """Returns the fix for another library's dtype that was passed to DALI; "" if there is none."""
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
                return _type_advice(value)
    return ""


def _type_advice(value: Any) -> str:
    """Returns the fix for another library's dtype, which names the type of DALI to pass."""
    if str(value).partition(".")[0] in _PREFIXES:  # torch.float32, or this text
        value = str(value).rpartition(".")[2]
    try:
        # np.dtype converts any class to a dtype, and float to float64.
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
    """Returns the fix for an operator's argument that got text, not numbers; "" otherwise."""
    if not isinstance(error, ValueError) or "could not convert string" not in text:
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        passed = frame.f_locals.get("kwargs")
        for name, value in passed.items() if isinstance(passed, Mapping) else ():
            if isinstance(value, str) and repr(value) in text:
                return f"Pass numbers, or an output of an operator, as {name}="
    return ""


def _device_advice(text: str) -> str:
    """Returns the fix for a wrong device of an operator or an input; "" for other errors."""
    if match := re.search(r'Unsupported device type: "(\w*)"', text):
        return (
            f"device={match[1]!r} is not a device of DALI: pass device='mixed' to a decoder, "
            "which decodes on the GPU, or 'gpu' or 'cpu' to other operators"
        )
    decoder = re.search(r"gpu operator `nvidia.dali.fn.(decoders[.\w]*)` is stored", text)
    if decoder:
        return (
            f"fn.{decoder[1]} has device='gpu': pass device='mixed', which takes encoded data on "
            "the CPU and decodes it on the GPU"
        )
    if "is stored on incompatible device" in text:
        return "Copy the input to the GPU by .gpu(), or omit device="
    return ""


def _name_advice(error: Exception) -> str:
    """Returns similar names for an attribute that a module of DALI does not have, or ""."""
    module = getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not isinstance(module, ModuleType):
        return ""
    if not module.__name__.startswith("nvidia.dali"):
        return ""
    names = [name for name in dir(module) if not name.startswith("_")]
    return replacements.suggest_name(str(error.name), names, replacements.OPERATORS)


def _argument_advice(name: str, schema: str) -> str:
    """Returns a text about the arguments of an operator: names similar to ``name``, then all."""
    try:
        names = backend.GetSchema(schema).GetArgumentNames()
    except (AttributeError, RuntimeError):  # private in DALI
        return ""
    public = [argument for argument in names if not argument.startswith("_")]
    close = difflib.get_close_matches(name, public, 3)
    suggestion = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{suggestion}Its arguments are {sorted(public)}"


def _package_of(error: Exception) -> str:
    """Returns the package, "JAX" or "NumPy", whose function failed with a DataNode; or ""."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _ARRAYS and any(isinstance(x, DataNode) for x in frame.f_locals.values()):
            return "NumPy" if package == "numpy" else "JAX"
    return ""


def outputs_cure(error: Exception, name: str) -> str:
    """Returns the fix for an error about a graph's outputs; "" if no fix is known.

    Args:
        error: The error.
        name: Name of the graph function.
    """
    if isinstance(error, NotImplementedError) and not str(error):  # raised by Pipeline.define_graph
        return (
            f"{name} returns no outputs: return an output for each name in output_map, e.g. "
            "return images, labels"
        )
    if cure := run_cure(str(error)):
        return f"{name}: {error}\n{cure}"
    if "Illegal output type" in str(error) or "contains a nested" in str(error):
        return (
            f"{name}: {error} A graph function returns outputs of DALI's operators in the order of "
            "output_map, separately and not in a list, e.g. return images, labels, or a dict of "
            "them by name. (To compute with JAX or NumPy in the graph, use "
            "dalijax.fn.jax_function or dalijax.fn.dl_tensor_python_function.)"
        )
    return ""


def run_cure(text: str) -> str:
    """Returns the fix for an operator that got arrays of a wrong shape or layout; "" otherwise.

    Args:
        text: DALI's error of the operator.
    """
    return next((cure for error, cure in _INPUT_CURES.items() if re.search(error, text)), "")


def workers_cure(error: Exception) -> str:
    """Returns the fix if workers of ``fn.external_source`` do not start; "" for other errors."""
    if "Workers initialization failed" not in str(error):
        return ""
    return (
        "The workers of fn.external_source(parallel=True) are new processes (py_start_method="
        "'spawn'), which first import the program's main file. Create the iterator in a function "
        "that only the main process calls:\n\n"
        "    if __name__ == '__main__':\n"
        "        main()  # creates the iterator\n\n"
        "If the program does so already, the error of the worker is printed above."
    )


FORKED = (
    "fn.external_source(parallel=True) forks its workers from a process with JAX's threads, which "
    "do not exist in the workers: they may hang. Pass py_start_method='spawn' to pipeline_def, and "
    "start the program under if __name__ == '__main__'; or decorate the plain function with "
    "dalijax.data_iterator, which spawns the workers"
)


def is_raised_by_dali(error: BaseException) -> bool:
    """Returns whether DALI raised an error, and not a user's function that DALI called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("nvidia.dali")


def pointer_cure(operators: Iterable[Operator]) -> str:
    """Returns the fix if a file of a graph's readers is a git-lfs pointer; otherwise "".

    Looks at 64 evenly spread files of each reader.
    """
    for kind, _, arguments in operators:
        reader = reader_files.reader_of(kind)
        files = reader_files.listed_files(reader, arguments) if reader else []
        for number in spread(len(files), _MOST_FILES).tolist():
            if fault := file_fault(files[number]):
                return f"{printable(files[number])} can't be read: {fault}"
    return ""


def readers_cure(error: Exception, pipeline: Pipeline) -> str:
    """Returns the fix for a reader that finds no files, or git-lfs pointers; "" otherwise."""
    if "readers." in str(error) and (cure := pointer_cure(operators_of(pipeline))):
        return f"{cure}."
    if "No files found" not in str(error):
        return ""
    roots = {str(arguments.get("file_root", "")) for _, _, arguments in operators_of(pipeline)}
    folders = " or ".join(sorted(filter(None, roots)))
    return (
        f"The reader finds no files in {folders} (file_root). fn.readers.file expects a subfolder "
        "for each class, e.g. cat/1.jpg, and names that match file_filters. For other files, pass "
        "files=[...]."
    )


def run_message(error: RuntimeError) -> str:
    """Returns DALI's message about a failed run, without the false claim that no run can follow."""
    return str(error).replace("Current pipeline object is no longer valid.", "").strip()
