"""`jax_function`: JAX functions of batches as operators of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, qualified_name
from . import checks
from .batch_function import BatchFunction, OneDeviceFunction
from .dali_operators import jax_operator
from .dlpack_function import batch_operator
from .jax_callbacks import on_cpu, on_gpu
from .notes import note
from .ragged import by_groups, padded


@do_not_convert
@knows_its_names
def jax_function(
    function: Callable[..., Any] | None = None,
    num_outputs: int = 1,
    output_layouts: str | Sequence[str] | None = None,
    sharding: jax.sharding.Sharding | None = None,
    device: str | None = None,
    preserve: bool = True,
    *,
    ragged: str | None = None,
    align: int = 1,
    stateful: bool | None = None,
) -> Callable[..., Any]:
    """Converts a function of jax.Arrays to an operator of graphs.

    It has the arguments of ``nvidia.dali.plugin.jax.fn.jax_function``, in the same order, and uses
    the same operator. It is a decorator, with or without arguments::

        @fn.jax_function
        @jax.jit
        @jax.vmap
        def flip(image):
            return image[:, ::-1, :]

    On a GPU the outputs are kept alive for as many batches as DALI prefetches, since DALI drops
    its references to them before it has read them. The consumer must wait for the pipeline's
    outputs. All iterators of dalijax do, but ``Pipeline.run(cuda_stream)`` doesn't.

    Args:
        function: Takes one array of shape [batch, ...] per input, and returns ``num_outputs``
            outputs: jax or NumPy arrays of shape [batch, ...]. Its arguments must not be used after
            it has returned, nor its outputs be donated. A keyword-only parameter ``key`` without a
            default (or with None) gets a jax.random.key of the batch, derived from the pipeline's
            seed and the batch's number; over a source, from the seed, the epoch and the batch's
            first record. A state restores it. (jax.vmap maps keyword arguments: map a function
            inside.)
        num_outputs: The number of outputs: 0 (the function returns None), 1 (an array), or the
            length of the returned tuple.
        output_layouts: The layouts of the outputs without the batch dimension, such as "HWC": a
            common layout, or a list for the first outputs. By default output i has the layout of
            input i if it has as many dimensions; with ``ragged``, outputs have no layout.
        sharding: A jax.sharding.Sharding over one device per process, as in DALI; dimension 0 is
            the batch. The function then gets global arrays, and DALI calls it in a thread of its
            own. For functions of a batch over several devices, pass ``batch_map`` to
            `dalijax.data_iterator`.
        device: "cpu" or "gpu"; the device of the inputs by default.
        preserve: If False, the function isn't run if its outputs are unused.
        ragged: How to handle samples of different shapes. "pad" pads them with zeros at their ends,
            and passes ``lengths`` as a keyword argument: int32 of shape [batch, dimensions] for one
            input, a tuple of these arrays for several inputs. "group" calls the function once for
            the samples of each shape, each time with another ``key``, and returns the outputs in
            the order of the samples. With None, different shapes raise an error.
        align: With "pad", each padded extent is a multiple of this number, so that jit compiles for
            fewer shapes.
        stateful: True if the function keeps state, so that iterators can't resume. False if no
            output depends on state that the function keeps. None: dalijax checks whether values
            that the function reaches have changed.

    Returns:
        A function that takes DataNodes, and returns a DataNode, or a tuple of DataNodes if
        num_outputs is not 1. Without ``function``, a decorator that returns this function.

    Raises:
        ValueError: If an argument is invalid. At run time, if the function returns another number
            of outputs or samples, or an output whose dimensions don't match its layout.
        TypeError: In the graph, if the function doesn't take the inputs or keyword arguments. At
            run time, for dtypes that DALI doesn't have (bfloat16), and for 64-bit inputs that JAX
            would narrow.
        RuntimeError: If no pipeline is being defined, or if JAX is older than DALI's plugin
            requires.
    """
    if ragged not in ("pad", "group", None):
        raise ValueError(f"ragged must be 'pad', 'group' or None, not {ragged!r}")
    if num_outputs < 0 or align < 1:
        raise ValueError(
            f"num_outputs must be 0 or more and align 1 or more, not {num_outputs} and {align}"
        )
    if ragged and sharding is not None:
        raise ValueError("ragged with sharding: global arrays have one shape. Use fn.pad before")
    if function is None:
        return functools.partial(
            jax_function,
            num_outputs=num_outputs,
            output_layouts=output_layouts,
            sharding=sharding,
            device=device,
            preserve=preserve,
            ragged=ragged,
            align=align,
            stateful=stateful,
        )
    called = function
    layouts = _layouts(output_layouts, num_outputs)

    @do_not_convert
    @functools.wraps(called)
    def operator(*inputs: DataNode) -> Any:
        pipeline = checks.require_pipeline(f"{qualified_name(called)}() of fn.jax_function")
        watched = note(called, stateful)
        keyed = checks.wants(called, "key")
        device_type = checks.device_of(inputs, device)
        if not inputs and (ragged or not (num_outputs or keyed)):
            raise ValueError(
                f"{qualified_name(called)}() has no inputs, but "
                + (f"ragged={ragged!r} requires samples" if ragged else "DALI would not call it")
                + ". Pass it an input"
            )
        keywords = ["key"] * keyed + ["lengths"] * (ragged == "pad")
        checks.check_signature(called, len(inputs), keywords, "key")
        nodes = list(inputs)
        if keyed:
            nodes.append(checks.key_words(device_type))
        arguments = (called, num_outputs, layouts, device_type, keyed, len(inputs))
        if ragged:
            batched = BatchFunction(*arguments)
            fitted = padded(batched, align) if ragged == "pad" else by_groups(batched)
            return batch_operator(
                watched(fitted), nodes, num_outputs, layouts, device_type, preserve
            )
        if sharding is None:
            body = BatchFunction(*arguments)
        else:
            body = OneDeviceFunction(sharding, *arguments)
        callback = watched((on_cpu if device_type == "cpu" else on_gpu)(body, pipeline))
        run = jax_operator()(
            function=callback if num_outputs else checks.logged(body.name, callback),
            device=device_type,
            num_outputs=num_outputs,
            preserve=preserve,
            **checks.layout_argument(layouts),
        )
        return checks.nodes_of(run(*nodes), body.name)

    return operator


def _layouts(layouts: str | Sequence[str] | None, num_outputs: int) -> list[str] | None:
    """Returns a layout for each output, "" for outputs after the end of a list; None for None.

    Raises:
        ValueError: If there are more layouts than outputs.
    """
    if layouts is None:
        return None
    if isinstance(layouts, str):
        return [layouts] * num_outputs
    if len(layouts) > num_outputs:
        raise ValueError(
            f"output_layouts={list(layouts)} has more layouts than there are outputs "
            f"({num_outputs}). Pass at most one per output"
        )
    return [*layouts, *[""] * (num_outputs - len(layouts))]
