"""Fixes for errors of DALI, JAX and NumPy whose messages contain no fix."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from nvidia.dali import Pipeline, backend, fn, types
from nvidia.dali.data_node import DataNode

from ..arrays.dtypes import DALI_TYPES
from ..formats.file_kinds import file_fault
from ..formats.spread import spread
from ..messages import replacements
from ..messages.printable import printable, printable_repr
from ..state import reader_files
from ..state.operators import Operator, operators_of

# Libraries of arrays and images, by package. Their errors about a DataNode may not mention it.
_LIBRARIES = {
    "jax": "JAX",
    "jaxlib": "JAX",
    "numpy": "NumPy",
    "PIL": "Pillow",
    "cv2": "OpenCV",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
    "torchvision": "torchvision",
    "scipy": "SciPy",
    "keras": "Keras",
    "flax": "Flax",
    "einops": "einops",
}
# Errors of NumPy's functions in C, which have no frame.
_IN_C = re.compile(
    r"matmul: Input operand|only integers, slices|zero-dimensional arrays cannot|"
    r"setting an array element with a sequence"
)
# Packages of this package's functions for graphs.
_CORE = __name__.removesuffix("pipeline.advice")
_GRAPH_FUNCTIONS = tuple(f"{_CORE}{part}." for part in ("augment", "functions", "random"))
_FEW = 20  # names that an error lists
_NO_ARGUMENT = re.compile(r'Argument "(\w+)" is not defined for operator "(\w+)"')
_NO_BFLOAT16 = (
    "DALI does not support bfloat16: cast to types.FLOAT or FLOAT16 in the graph, and to bfloat16 "
    "in the training step or by batch_map"
)
_OMITTED = re.compile(r"Not all required arguments .*specify values for arguments: \"(\w+)\"")
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
        "Images need a dimension for the channels: images = fn.expand_dims(images, axes=2). To "
        "normalize patches, normalize the images before they are cut"
    ),
    "Found distinct layouts": (
        "Pass one of the results through fn.reinterpret(images, layout='HWC'), or layout='' for no "
        "layout. uint8 fields of images have the layout HWC"
    ),
    "Axis '.' is not present in the input layout": (
        "The layout of the input lacks this axis: pass numbers of dimensions, e.g. axes=[0, 1], or "
        "set the layout by fn.reinterpret(images, layout='HWC')"
    ),
    r"same size in bytes(?s:.*)Input shape:\s+(1 x ){4}1\n": (
        "An image and its mask, or two images of a window, differ in size. Omit such records"
    ),
    r"(?s)same size in bytes.*Requested shape:\s+(\d+ x )+3$": (
        "If the operator belongs to dalijax.augment: color_jitter takes RGB images of 3 channels, "
        "and grayscale, solarize, rand_augment, trivial_augment and auto_augment take them as "
        "uint8. For gray images, pass draw.sized(fn.cat(images, images, images, axis=2), images)"
    ),
    "must be batches of uniform shape": (
        "Give the samples one shape, e.g. by fn.resize, or pass ragged='pad' or ragged='group' to "
        "dalijax.fn.jax_function"
    ),
    "output layout is not a permutation of input layout": (
        "The images have another number of dimensions than the layout. To augment.normalize, pass "
        "layout='HWC' or 'CHW' for images, and layout='FHWC' or 'FCHW' for videos and for views "
        "that fn.stack has joined"
    ),
    "number of per-channel arguments should match": (
        "Pass one number, or a number for each channel of the images, as mean= and std="
    ),
    "Array indices must be scalar": (
        "An index is one number for each sample. To select pixels, multiply the images by a mask"
    ),
    "can't be placed out of bounds": (
        "The image is smaller than the window: resize or pad it first, or use "
        "augment.center_crop(images, size, resize=...)"
    ),
}


def definition_cure(error: Exception, arguments: Sequence[Any] = ()) -> str:
    """Returns the fix for an error that a graph function raised; "" if no fix is known.

    Args:
        error: The error.
        arguments: The arguments that the caller passed to the function.
    """
    text = str(error)
    if _is_own(error):
        return ""
    if match := _NO_ARGUMENT.search(text):
        return _argument_advice(*match.groups())
    if "no attribute 'BFLOAT16'" in text:
        return _NO_BFLOAT16
    if cure := _dtype_advice(error) or _device_advice(text) or _name_advice(error):
        return cure
    if cure := _value_advice(error, text) or _operand_advice(error) or _input_advice(text):
        return cure
    paths = [value for value in arguments if isinstance(value, (str, os.PathLike))]
    if paths and isinstance(error, TypeError) and ("str" in text or "Path" in text):
        return (
            f"The function got the path {printable(paths[0])!r}. If its parameters are fields of "
            f"records, pass source=dalijax.{replacements.source_call(paths[0])} instead"
        )
    return _python_advice(error, text)


def _is_own(error: Exception) -> bool:
    """Returns whether a function of this package for graphs raised an error, which has a fix."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_GRAPH_FUNCTIONS)


def _python_advice(error: Exception, text: str) -> str:
    """Returns the fix for Python, NumPy or JAX code that got a DataNode; "" for other errors."""
    package = "NumPy" if _IN_C.search(text) else _package_of(error)
    if not package and "conditional context" in text:
        return (
            "DALI converts only if statements, and, or and not, and only if you pass "
            "enable_conditionals=True when you create the iterator. Write other conditions (a if c "
            "else b, while, in, min) as if statements, or as arithmetic, e.g. mask * a + (1 - "
            "mask) * b"
        )
    if not package and "'method'" in text:  # the error of x.shape[0] or len(x.shape)
        return (
            "In a graph function, shape is a method of a DataNode, and uniform is a method of "
            "draw. Call x.shape(), the shape of each sample without the batch as another DataNode, "
            "or draw.uniform(0, 1)"
        )
    if "Ellipsis in indexing" in text:
        return "Write an index for each dimension of a sample instead, e.g. images[:, :, ::-1]"
    if re.search(r"\bDraw\b", text):
        return _NO_DRAW
    is_plain = isinstance(error, (AttributeError, KeyError, TypeError))
    is_about_node = is_plain and "DataNode" in text and "expected inputs of type" not in text
    if not package and not is_about_node:
        return ""
    caller = f"{package} was called with" if package else "Python code used"
    operator = _operator_advice(error)
    operators = f"{operator}, or other operators of DALI" if operator else "DALI's operators"
    return (
        f"In a graph function, {caller} a DataNode, which represents batches that do not exist "
        f"yet. Use {operators} (nvidia.dali.fn, arithmetic of DataNodes), or add a function "
        "of arrays to the graph: @dalijax.fn.jax_function for JAX, dalijax.fn.numba_function or "
        "dalijax.fn.dl_tensor_python_function for NumPy. Alternatively, change the batches that "
        "the iterator returns"
    )


def _operand_advice(error: Exception) -> str:
    """Returns the fix for arithmetic of a DataNode and a value that DALI rejects; "" otherwise."""
    accepted = (DataNode, bool, int, float, np.ndarray, np.generic, list, tuple)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name != "_arithm_op":  # private in DALI
            continue
        others = [x for x in frame.f_locals.get("inputs", ()) if not isinstance(x, accepted)]
        for operand in others:
            if isinstance(operand, jax.Array):
                return _NO_JAX
            if re.search(r"\bDraw\b", repr(operand)):
                return _NO_DRAW
            return (
                f"The other operand is {printable_repr(operand)}. Operands must be DataNodes, "
                "numbers or NumPy arrays"
            )
    return ""


def _input_advice(text: str) -> str:
    """Returns the fix for a wrong input of an operator; "" for other errors."""
    if match := re.search(r"Received input `\d+` of type '(\w+)'", text):
        cures = {"ndarray": _OBJECTS, "ArrayImpl": _NO_JAX, "tuple": _NO_TUPLE}
        return cures.get(match[1], "")
    if "inputs, but received" in text:
        return "Pass arguments of an operator by keyword, as in fn.resize(images, size=(224, 224))"
    return ""


_NO_DRAW = (
    "draw is neither a number nor a key of JAX. Its methods uniform(), normal(), coin_flip() and "
    "choice() return DataNodes: write draw.uniform(0, 1)"
)
_NO_TUPLE = "Pass the inputs of an operator one after the other, as in fn.stack(a, b)"
_NO_JAX = "DALI takes no jax.Array: convert it by np.asarray(array)"
_OBJECTS = (
    "NumPy's operators and functions convert a DataNode to an array of objects: write the DataNode "
    "first, as in images * array, or call DALI's operators"
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
    if not re.search("could not convert string|invalid literal for int", text):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        passed = frame.f_locals.get("kwargs")
        for name, value in passed.items() if isinstance(passed, Mapping) else ():
            if isinstance(value, str) and repr(value) in text:
                if "interp" in name or "filter" in name:
                    return f"Pass a type of nvidia.dali.types as {name}=, e.g. types.INTERP_LINEAR"
                if name.endswith("_type"):
                    return f"Pass a type of nvidia.dali.types as {name}=, e.g. types.RGB"
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
    if not isinstance(error, AttributeError):
        return ""
    owner, name = error.obj, str(error.name)
    if not isinstance(owner, ModuleType) or not owner.__name__.startswith("nvidia.dali"):
        return ""
    names = _public(owner)
    cure = replacements.suggest_name(name, names, replacements.OPERATORS)
    return cure or (f"It has {names}" if len(names) <= _FEW else "")


def _operator_advice(error: Exception) -> str:
    """Returns the operator for a method of arrays that a DataNode does not have, or ""."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, DataNode):
        return ""
    name = str(error.name)
    for module, prefix in ((fn, "fn"), (fn.reductions, "fn.reductions")):
        if name in _public(module):
            return f"{prefix}.{name}"
    return replacements.OPERATORS.get(replacements.plain(name), "")


def _public(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


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
    """Returns the library, such as "JAX", whose function failed with a DataNode; or ""."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _LIBRARIES and any(map(_has_node, frame.f_locals.values())):
            return _LIBRARIES[package]
    return ""


def _has_node(value: Any) -> bool:
    """Returns whether a value is a DataNode, or a list or tuple of DataNodes."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, DataNode) for item in values)


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
        objects = f"{_OBJECTS}. " * ("numpy.ndarray" in str(error))
        return (
            f"{name}: {error} {objects}A graph function returns outputs of DALI's operators in the "
            "order of output_map, separately and not in a list, e.g. return images, labels, or a "
            "dict of them by name. (To compute with JAX or NumPy in the graph, use "
            "dalijax.fn.jax_function or dalijax.fn.dl_tensor_python_function.)"
        )
    return ""


def run_cure(text: str) -> str:
    """Returns the fix for an operator that got arrays of a wrong shape or layout; "" otherwise.

    Args:
        text: DALI's error of the operator.
    """
    return next((cure for error, cure in _INPUT_CURES.items() if re.search(error, text)), "")


def omitted_cure(error: Exception) -> str:
    """Returns the fix for an operator that lacks an argument; "" for other errors."""
    omitted = _OMITTED.search(str(error))
    if not omitted:
        return ""
    return (
        f"Pass {omitted[1]}= to the operator. (dtype, ndim and layout of a DataNode are None "
        "before the graph runs. fn.cast_like copies a dtype.)"
    )


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
    if not re.search("No files found|Failed to open", str(error)):
        return ""
    roots = {str(arguments.get("file_root", "")) for _, _, arguments in operators_of(pipeline)}
    folders = " or ".join(sorted(filter(None, roots)))
    if not os.path.isdir(folders):
        return f"The folder {folders!r} (file_root) does not exist."
    return (
        f"The reader finds no files in {folders} (file_root). fn.readers.file expects a subfolder "
        "for each class, e.g. cat/1.jpg, and names that match file_filters. For other files, pass "
        "files=[...]."
    )


def run_message(error: RuntimeError) -> str:
    """Returns DALI's message about a failed run, without the false claim that no run can follow."""
    return str(error).replace("Current pipeline object is no longer valid.", "").strip()
