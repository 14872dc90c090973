"""`numba_function`: functions that Numba compiles, as operators of a graph."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import nvidia.dali
from nvidia.dali import types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline, do_not_convert

from ..arguments import knows_its_names, qualified_name
from ..arrays.dtypes import dali_type
from ..environment.extras import version_of
from ..state.envelope import digest
from . import checks
from .notes import note

# The packages whose versions must fit DALI's Numba operator.
_PACKAGES = ("numba", "numba-cuda", "numpy")
_MOST = 6  # the maximum number of inputs, and of outputs


@do_not_convert
@knows_its_names
def numba_function(
    *inputs: DataNode,
    run_fn: Callable[..., None],
    out_types: Any = None,
    in_types: Any = None,
    outs_ndim: int | Sequence[int] | None = None,
    ins_ndim: int | Sequence[int] | None = None,
    setup_fn: Callable[..., None] | None = None,
    batch_processing: bool = False,
    blocks: Sequence[int] | None = None,
    threads_per_block: Sequence[int] | None = None,
    bytes_per_sample_hint: int | Sequence[int] | None = None,
    preserve: bool = False,
    seed: int = -1,
    device: str | None = None,
    name: str | None = None,
    example: Any = None,
    stateful: bool | None = None,
) -> Any:
    """Runs a function that Numba compiles, on up to six inputs, into up to six outputs.

    It has the arguments of ``nvidia.dali.plugin.numba.fn.experimental.numba_function``, whose
    operator runs it. Compiled functions are cached, so new pipelines do not compile them again.
    ``setup_fn`` gets the shapes of all inputs (DALI 2.4 passes only as many as there are outputs).

    Args:
        *inputs: One to six batches.
        run_fn: ``run_fn(out0, ..., in0, ...)`` writes into the outputs. It is called with arrays
            for each sample, in DALI's threads; with ``batch_processing`` once, with lists of
            arrays. On a GPU it is a CUDA kernel (numba.cuda). It must not raise: Numba writes the
            error to stderr, and the batch is delivered with uninitialized memory.
        out_types, in_types: The dtypes of the elements, in NumPy's, JAX's or DALI's form, or their
            names: a common dtype, or a sequence. By default output i has the dtype of input i.
        outs_ndim, ins_ndim: The numbers of dimensions of a sample: a common number, or a sequence.
            By default output i has as many dimensions as input i.
        setup_fn: ``setup_fn(outs, ins)`` writes the shapes of the outputs: ``outs[i][k]`` is the
            shape of sample k of output i, and ``ins[i][k]`` that of input i. By default output i
            has the shape of input i.
        batch_processing: Whether run_fn is called once for the whole batch; only on the CPU.
        blocks, threads_per_block: The grid and the blocks on a GPU, three numbers each.
        bytes_per_sample_hint: The bytes to preallocate for each sample of the outputs.
        preserve, seed, name: As for any operator of DALI.
        device: "cpu" or "gpu"; the device of the inputs by default.
        example: A sample of the input, or a list with a sample of each input. It determines
            in_types and ins_ndim unless they are given.
        stateful: Whether the function keeps state, as numpy.random does, so that iterators can't
            resume. None: dalijax checks whether values that the function reaches have changed.

    Returns:
        A DataNode, or a tuple of DataNodes if there are several outputs.

    Raises:
        ImportError: If Numba is not installed.
        RuntimeError: If no pipeline is being defined, or if Numba, numba-cuda, NumPy and DALI are
            incompatible; the message has their versions.
        ValueError: If numbers, types or dimensions don't match the inputs.
        TypeError: If Numba or DALI doesn't support a type.
        numba.core.errors.NumbaError: If Numba can't compile the function.
    """
    checks.require_pipeline("fn.numba_function")
    device_type = checks.device_of(inputs, device)
    run_fn = getattr(run_fn, "py_func", run_fn)  # the function that @njit decorates
    setup_fn = getattr(setup_fn, "py_func", setup_fn)
    for user_function in (run_fn, setup_fn):
        if user_function is not None and not inspect.isfunction(user_function):
            raise TypeError(
                f"{user_function!r} is a {type(user_function).__name__}: Numba compiles plain "
                "functions. Turn bound arguments into variables of an enclosing function"
            )
    note(run_fn, stateful)
    if example is not None:
        samples = list(example) if isinstance(example, (list, tuple)) else [example]
        arrays = [np.asarray(array) for array in samples]
        in_types = [array.dtype for array in arrays] if in_types is None else in_types
        ins_ndim = [array.ndim for array in arrays] if ins_ndim is None else ins_ndim
    if in_types is None or ins_ndim is None:
        raise ValueError(
            "in_types and ins_ndim are missing: pass them, or example=, a sample of each input"
        )
    ins = _for_each(ins_ndim, len(inputs))
    input_types = [_dali_type(in_type, "in_types") for in_type in _for_each(in_types, len(inputs))]
    outputs = _outputs(run_fn, len(inputs), out_types, outs_ndim)
    output_types = [
        _dali_type(out_type, "out_types")
        for out_type in _filled("out_types", out_types, input_types, outputs)
    ]
    outs = _filled("outs_ndim", outs_ndim, ins, outputs)
    _check_counts(len(inputs), input_types, ins, output_types, outs)
    _check_kernel(device_type, batch_processing, blocks, threads_per_block)
    if setup_fn is None:
        if outs != ins[: len(outs)]:
            raise ValueError(
                f"the outputs, with outs_ndim={outs}, can't have the shapes of the inputs, with "
                f"ins_ndim={ins}. Pass setup_fn, which determines the shapes"
            )
        # Without setup_fn DALI also takes the outputs' types from the inputs, and would write
        # beyond the memory of the outputs.
        if (len(outs), output_types) != (len(ins), input_types):
            setup_fn = _shapes_of_inputs
    operator_arguments = checks.arguments(seed, bytes_per_sample_hint, name)
    try:
        operator = _operator_class()(
            run_fn=run_fn,
            out_types=output_types,
            in_types=input_types,
            outs_ndim=outs,
            ins_ndim=ins,
            setup_fn=setup_fn,
            device=device_type,
            batch_processing=batch_processing,
            blocks=list(blocks or ()),
            threads_per_block=list(threads_per_block or ()),
            preserve=preserve,
            **operator_arguments,
        )
    except NotImplementedError:  # from Numba, about the function
        raise
    except (AttributeError, ImportError, RuntimeError) as error:
        raise _misfit(error) from error
    except Exception as error:
        _say_arguments(error, input_types, ins)
        raise
    return checks.nodes_of(operator(*inputs), qualified_name(run_fn))


def _shapes_of_inputs(outs: Any, ins: Any) -> None:
    """Sets the shape of each output to the shape of the input at its index; compiled by Numba."""
    for number in range(len(outs)):
        for sample in range(len(outs[number])):
            for axis in range(len(outs[number][sample])):
                outs[number][sample][axis] = ins[number][sample][axis]


def _dali_type(value: Any, name: str) -> types.DALIDataType:
    dtype = dali_type(value, name)
    if dtype == types.DALIDataType.FLOAT16:
        raise TypeError(
            "float16 is not supported by Numba: cast the inputs to float32 by fn.cast, and the "
            "outputs back to float16"
        )
    return dtype


def _for_each(value: Any, count: int) -> list[Any]:
    """Returns a list with a value for each input or output; a single value is repeated."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _outputs(run_fn: Callable[..., None], inputs: int, kinds: Any, ndims: Any) -> int:
    """Returns the number of outputs of a function.

    This is the length of ``kinds`` or ``ndims`` if either is a list. Otherwise it is the number of
    the function's parameters without a default, minus the number of inputs.
    """
    for values in (kinds, ndims):
        if isinstance(values, (list, tuple)):
            return len(values)
    parameters = inspect.signature(run_fn).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters) - inputs


def _filled(name: str, values: Any, defaults: Sequence[Any], count: int) -> list[Any]:
    """Returns a value for each output: ``values`` if given, otherwise the inputs' ``defaults``.

    Raises:
        ValueError: If ``values`` is None, and there are more outputs than inputs.
    """
    if values is not None:
        return _for_each(values, count)
    if count > len(defaults):
        raise ValueError(
            f"{name} is missing. Pass it, because there are more outputs ({count}) than inputs "
            f"({len(defaults)})"
        )
    return list(defaults[:count])


def _check_counts(
    inputs: int, input_types: list[Any], ins: list[int], output_types: list[Any], outs: list[int]
) -> None:
    """Raises ValueError unless DALI's operator for Numba can take the inputs and outputs.

    It takes one to six inputs and outputs, each with a type and a positive number of dimensions.
    """
    counts = {"inputs": inputs, "in_types": len(input_types), "ins_ndim": len(ins)}
    if len(set(counts.values())) > 1:
        raise ValueError(f"pass a type and a number of dimensions for each input, not {counts}")
    if len(output_types) != len(outs):
        raise ValueError(
            f"out_types has {len(output_types)} types, but outs_ndim {len(outs)} numbers. Pass a "
            "type and a number of dimensions for each output"
        )
    if not outs:
        raise ValueError(
            f"run_fn must take outputs and {inputs} inputs, as in run_fn(output, input), and write "
            "into the outputs: output[:] = 2 * input[:]"
        )
    if not 1 <= inputs <= _MOST or not 1 <= len(outs) <= _MOST:
        raise ValueError(
            f"{inputs} inputs and {len(outs)} outputs: DALI's operator for Numba takes 1 to "
            f"{_MOST} of each. Combine some by fn.cat or fn.stack, or use two functions"
        )
    if min(*ins, *outs) < 1:
        raise ValueError(
            f"ins_ndim={ins} and outs_ndim={outs}: DALI's operator for Numba requires arrays with "
            "at least 1 dimension. Convert scalars to arrays by fn.reshape(x, shape=[1])"
        )


def _check_kernel(
    device_type: str, batch: bool, blocks: Sequence[int] | None, threads: Sequence[int] | None
) -> None:
    """Raises ValueError if the arguments of a function on a GPU do not describe a CUDA kernel."""
    if device_type == "cpu":
        return
    if batch:
        raise ValueError(
            "batch_processing is for the CPU: on a GPU the kernel runs for each sample. Omit it"
        )
    for name, sizes in (("blocks", blocks), ("threads_per_block", threads)):
        if sizes is None or len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"{name} must be three positive numbers on a GPU, not {sizes!r}")


def _misfit(error: Exception) -> Exception:
    """Returns an ImportError if Numba is missing, otherwise a RuntimeError with the versions."""
    try:
        importlib.import_module("numba")
    except ModuleNotFoundError:
        return ImportError('fn.numba_function needs Numba: pip install "dalijax[numba]"')
    except ImportError:  # such as "Numba needs NumPy 2.4 or less"
        pass
    versions = [f"{name} {version}" for name in _PACKAGES if (version := version_of(name))]
    return RuntimeError(
        f"{', '.join(versions)} and DALI {nvidia.dali.__version__} are incompatible: {error}. Try "
        "another version of one of them; functions on a GPU need numba-cuda"
    )


def _say_arguments(error: Exception, input_types: Sequence[Any], ins: Sequence[int]) -> None:
    """Adds the types and dimensions of the inputs to an error of Numba's compiler."""
    if hasattr(error, "add_context"):
        kinds = ", ".join(
            f"{dali_type.name} of {n} dimensions" for dali_type, n in zip(input_types, ins)
        )
        error.add_context(
            f"fn.numba_function was compiled for samples of {kinds}, according to in_types, "
            "ins_ndim or example=. An example is one sample of each input, without the batch"
        )


def _outside(function: Callable[..., Any]) -> tuple[Any, ...] | None:
    """Returns a cache key for a function: its code, and the values that it reads from outside.

    These values are globals, closure variables and defaults, which Numba compiles as constants.
    Returns None if a value has no key.
    """
    variables = inspect.getclosurevars(function)
    defaults = getattr(function, "__defaults__", None)
    values = {**variables.globals, **variables.nonlocals, "": defaults}
    parts = [_constant(value) for _, value in sorted(values.items())]
    if None in parts:
        return None
    return function.__code__, tuple(sorted(values)), tuple(parts)


def _constant(value: Any) -> Any:
    """Returns a cache key for a constant; None if the constant may change under the same key."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, digest(np.ascontiguousarray(value).tobytes())
    if isinstance(value, tuple):
        parts = tuple(_constant(part) for part in value)
        return None if None in parts else parts
    if inspect.ismodule(value) and value.__name__.split(".")[0] in ("math", "numba", "numpy"):
        return value.__name__
    return None


@functools.cache
def _operator_class() -> Any:
    """Returns a subclass of DALI's Numba operator that compiles equal functions once."""
    dalis: Any = importlib.import_module("nvidia.dali.plugin.numba")
    # DALI 2.4 is built for CUDA 13 too, but its list of Numba versions by toolkit ends at 12.
    dalis.minimal_numba_version.setdefault(13, dalis.Version("0.61.2"))
    compiled: dict[Any, Any] = {}

    def once(function: Any, options: tuple[Any, ...], compile_it: Callable[[], Any]) -> Any:
        """Returns the compiled function: from the cache if possible, else by ``compile_it()``."""
        constants = _outside(function)
        if constants is None:
            return compile_it()
        if (constants, options) not in compiled:
            compiled[constants, options] = compile_it()
        return compiled[constants, options]

    class NumbaFunction(dalis.NumbaFunction):  # type: ignore[misc]
        def _get_run_fn_cpu(
            self,
            run_fn: Any,
            out_types: Any,
            in_types: Any,
            outs_ndim: Any,
            ins_ndim: Any,
            batch_processing: bool,
        ) -> Any:
            types = (*out_types, *in_types, len(out_types))
            options = (*types, *outs_ndim, *ins_ndim, batch_processing)
            arguments = (run_fn, out_types, in_types, outs_ndim, ins_ndim, batch_processing)
            return once(run_fn, options, functools.partial(super()._get_run_fn_cpu, *arguments))

        def _get_run_fn_gpu(self, run_fn: Any, types: Any, dims: Any) -> Any:
            options = ("gpu", Pipeline.current().device_id, *types, *dims)
            compile_it = functools.partial(super()._get_run_fn_gpu, run_fn, types, dims)
            return once(run_fn, options, compile_it)

        def _get_setup_fn_cpu(self, setup_fn: Any) -> Any:
            if setup_fn is None:
                return None
            self._setup = once(setup_fn, ("setup",), lambda: self._compiled_setup(setup_fn))
            return self._setup.address

        def _compiled_setup(self, setup_fn: Any) -> Any:
            # DALI's own code, but with views of all inputs. It is private, like all methods of this
            # class.
            view, compiled_fn = dalis._get_shape_view, dalis.njit(setup_fn)

            @dalis.cfunc(self._setup_fn_sig(), nopython=True)  # type: ignore[untyped-decorator]
            def setup(outs: Any, out_ndims: Any, n: Any, ins: Any, in_ndims: Any, m: Any, k: Any):  # type: ignore[no-untyped-def]
                compiled_fn(view(outs, out_ndims, n, k), view(ins, in_ndims, m, k))

            return setup

    return NumbaFunction
