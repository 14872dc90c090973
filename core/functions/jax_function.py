"""`jax_function`: JAX functions of batches as operators of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..pipeline.arrays import check_width
from ..pipeline.deferred import defer, is_deferring
from . import checks as callbacks
from .dali_operators import jax_operator
from .dlpack_function import batch_operator
from .global_function import GlobalFunction, OnOneDevice
from .jax_callbacks import Body, on_cpu, on_device, on_gpu
from .ragged import by_groups, padded
from .statefulness import note

_RAGGED = (None, "pad", "group")


@do_not_convert
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
    """Makes a function of jax.Arrays one of DALI's batches, for use in a pipeline function.

    On a GPU its outputs stay in memory for as many batches as DALI prepares ahead, since DALI
    drops them before it has read them; it must be waited for where its outputs are taken, as by
    all iterators here, not by ``Pipeline.run(cuda_stream)``.

    With the names and the order of ``nvidia.dali.plugin.jax.fn.jax_function``, whose operator
    runs it, and as a decorator with and without arguments::

        @fn.jax_function
        @jax.jit
        @jax.vmap
        def flip(image):
            return image[:, ::-1, :]

    Args:
        function: Takes arrays of shape [batch, ...], one for each input, and returns as many
            outputs as ``num_outputs``: jax or NumPy arrays of shape [batch, ...]. Its
            arguments must not be used after it has returned, nor what it returned be donated.
            Where it has a keyword-only parameter ``key`` without a default (or of None), that is a
            jax.random.key of the batch, made of the pipeline's seed and the batch's number; it is
            resumed with the state. (jax.vmap maps keyword arguments: map a function inside.)
        num_outputs: Number of its outputs: 0 (it returns None), 1 (an array), or a tuple's.
        output_layouts: Layouts of the outputs without the batch, "HWC" say: one for all, or one
            for each of the first ones. Left out, that of the i-th input is the i-th
            output's, where they have the same number of dimensions; with ``ragged`` there is
            none.
        sharding: A jax.sharding.Sharding whose dimension 0 is the batch: the function gets
            global arrays. In the graph of an iterator with ``sharding=`` it is the last step: it is
            called once for each batch, in the thread that takes it, so that in several
            processes it has the same place among that thread's computations (which must then
            be the main one); no operator may use its outputs, but other such functions may.
            Those are arrays of any shape and dtype of JAX (``device`` and ``output_layouts`` say
            nothing of them). In other pipelines DALI calls it in a
            thread of its own, for one device in each process.
        device: "cpu" or "gpu"; left out, where the inputs are.
        preserve: False: the function is not run where nobody uses its outputs.
        ragged: What to do with samples of different shapes. "pad": they are filled up with
            zeros at their ends, and the function gets ``lengths``, int32 of shape [batch,
            dimensions] for one input, a tuple of them for several, as a keyword argument.
            "group": it is called once for the samples of each shape, with a ``key`` of
            its own, and what it returns is put in order again. None: they are an error.
        align: With "pad": extents are rounded up to a multiple of it, so that jit does not
            compile for each batch anew.
        stateful: Whether it keeps state, so that iterators can't be resumed; None: what
            can be seen of it.

    Returns:
        A function of the pipeline's DataNodes that returns a DataNode, or a tuple of several or
        none.

    Raises:
        ValueError: For arguments that are wrong. When the function is run: if it returns
            another number of outputs, or of samples, or dimensions than its layout.
        TypeError: In the graph: for another number of inputs than it takes, or of keyword
            arguments. When it is run: for dtypes that DALI does not have (bfloat16), and for
            inputs of 64 bits where JAX would narrow them.
        RuntimeError: Outside of a pipeline function, and where JAX is older than DALI's plugin
            wants.
    """
    if ragged not in _RAGGED:
        raise ValueError(f"ragged must be 'pad', 'group' or None, not {ragged!r}")
    if num_outputs < 0 or align < 1:
        raise ValueError(f"num_outputs={num_outputs} and align={align}: 0 and 1 are the least")
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
        pipeline = callbacks.require_pipeline(f"{callbacks.name_of(called)}() of fn.jax_function")
        note(called, stateful)
        keyed = callbacks.wants(called, "key")
        if sharding is not None and is_deferring():
            callbacks.check_signature(called, len(inputs), ["key"] * keyed, "key")
            deferred = GlobalFunction(called, num_outputs, sharding, keyed, preserve)
            outputs = defer(deferred, inputs, callbacks.key_words() if keyed else None)
            return outputs[0] if num_outputs == 1 else outputs
        where = callbacks.device_of(inputs, device)
        if not inputs and (ragged or not (num_outputs or keyed)):
            raise ValueError(
                f"{callbacks.name_of(called)}() has no inputs with ragged={ragged!r} and "
                f"num_outputs={num_outputs}: DALI would not call it, or have no samples for it. "
                "Give it an input"
            )
        callbacks.check_signature(
            called,
            len(inputs),
            ["key"] * keyed + ["lengths"] * (ragged == "pad"),
            "key",
        )
        own = _Called(called, num_outputs, layouts, where, keyed, len(inputs))
        nodes, extra = list(inputs), []
        if keyed:
            extra.append(callbacks.key_words())
        body: Body = own
        if sharding is not None:
            body = OnOneDevice(own, sharding)
        nodes += [node.gpu() if where == "gpu" else node for node in extra]
        if ragged:
            fitted = padded(own, align) if ragged == "pad" else by_groups(own)
            return batch_operator(fitted, nodes, num_outputs, layouts, where, preserve)
        callback = on_cpu(body, pipeline) if where == "cpu" else on_gpu(body, pipeline)
        made = jax_operator()(
            function=callback if num_outputs else callbacks.logged(own.name, callback),
            device=where,
            num_outputs=num_outputs,
            preserve=preserve,
            **callbacks.layout_argument(layouts),
        )
        return callbacks.nodes_of(made(*nodes))

    return operator


def _layouts(given: str | Sequence[str] | None, num_outputs: int) -> list[str] | None:
    """A layout for each output, of one for all or of some for the first ones."""
    if given is None:
        return None
    if isinstance(given, str):
        return [given] * num_outputs
    if len(given) > num_outputs:
        raise ValueError(f"output_layouts={list(given)}, and there are {num_outputs} outputs")
    return [*given, *[""] * (num_outputs - len(given))]


class _Called:
    """A user's function with what is known of its arguments and its results.

    Attributes:
        name: Its name, for messages.
        inputs: Number of its inputs.
        num_outputs: Number of its outputs.
        keyed: Whether it wants a key, whose words are then the input behind them.
        where: "cpu" or "gpu".
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_outputs: int,
        layouts: str | Sequence[str] | None,
        where: str,
        keyed: bool,
        inputs: int,
    ):
        self.name = callbacks.name_of(function)
        self.inputs = inputs
        self.keyed = keyed
        self.where = where
        self._function = function
        self.num_outputs = num_outputs
        self._layouts = layouts
        self._last: Any = None  # of what shapes, dtypes and places the last outputs were
        # A compiled function takes NumPy views, which are made ten times faster than
        # jax.Arrays; where the default device is no CPU they would be moved there.
        self.takes_views = (
            where == "cpu"
            and isinstance(function, jax.stages.Wrapped)
            and jax.default_backend() == "cpu"
        )

    def key(self, words: Any) -> jax.Array:
        """The key of a batch, of its first sample's words: of NumPy's, a key on no device."""
        if self.where == "cpu" or isinstance(words, np.ndarray):
            return callbacks.jax_key(callbacks.key_of(np.asarray(words)))
        return _key_of_words(words)

    def __call__(self, arrays: Sequence[Any], batch: int | None, **more: Any) -> tuple[Any, ...]:
        """The outputs for arrays of a batch, checked; those of one GPU's are put there."""
        devices = arrays[0].devices() if arrays and self.where == "gpu" else ()
        outputs = self._checked(self._function(*arrays, **more), batch)
        if len(devices) != 1:
            return outputs
        return tuple(on_device(self.name, k, one, *devices) for k, one in enumerate(outputs))

    def _checked(self, made: Any, batch: int | None) -> tuple[Any, ...]:
        outputs = callbacks.results(self.name, made, self.num_outputs)
        for number, array in enumerate(outputs):
            layout = callbacks.layout_of(self._layouts, number)
            callbacks.check_output(self.name, number, array, batch, layout)
        return outputs

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """The outputs of a pipeline's batch, checked. The words of the key are the last array."""
        more = {"key": self.key(arrays.pop())} if self.keyed else {}
        made = self._function(*arrays, **more)
        outputs = made if type(made) is tuple else (made,)
        batch = arrays[0].shape[0] if arrays else None
        try:
            alike = [(batch, type(o), o.shape, o.dtype, o.sharding) for o in outputs]
        except AttributeError:  # no jax.Array
            alike = None
        # The checks cost 8 to 33 us beside an H200. Outputs like the last ones, which passed them
        # and were where they belong, need none.
        if alike and alike == self._last:
            return outputs
        checked = self._checked(made, batch)
        placed = tuple(on_device(self.name, k, one, device) for k, one in enumerate(checked))
        stayed = all(one is other for one, other in zip(placed, checked))
        self._last = alike if stayed else None
        return placed

    def arrays(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Batches that were made of samples on the CPU, as what the function gets."""
        for number, batch in enumerate(batches):
            check_width(batch.dtype, f"{number} of {self.name}()", "input")
        if self.takes_views:
            return list(batches)
        cpu = jax.local_devices(backend="cpu")[0]
        return [jax.device_put(one, cpu) for one in batches]


@jax.jit
def _key_of_words(words: jax.Array) -> jax.Array:
    data = jax.lax.bitcast_convert_type(words[0].reshape(2, 4), np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")
