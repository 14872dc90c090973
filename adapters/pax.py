"""Pax: DALI pipelines as praxis inputs, with states that paxml saves.

    from dalijax.adapters.pax import DALIInput, DALIInputSpecsProvider

    class Experiment(base_experiment.BaseExperiment):
        def datasets(self):
            own = {"iterator_fn": iterator_fn, "arguments": {"folder": "/data"}, "batch_size": 64}
            train = pax_fiddle.Config(DALIInput, name="train", is_training=True, **own)
            test = pax_fiddle.Config(
                DALIInput, name="test", reset_for_eval=True, eval_loop_num_batches=-1, **own
            )
            return [train, test]

        def get_input_specs_provider_params(self):
            return pax_fiddle.Config(DALIInputSpecsProvider, input_p=self.train_datasets()[0])

        def task(self):
            ...
            task.train.enable_input_checkpointing = True

Works with the released Pax (praxis and paxml 1.4.0: Python 3.10, jax 0.4.26).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..core.api import IteratorFunction, iterator_function
from ..core.arguments import whole_number
from ..core.arrays.dtypes import check_width
from ..core.environment.extras import extra
from ..core.errors import BatchError, StateError
from ..core.iterator.batch_stream import BatchStream
from ..core.pipeline.batch import Batch
from .process_files import file_of_any_process
from .stream_adapter import StreamAdapter

with extra("pax", "dalijax.adapters.pax, which requires Python 3.10,"):
    from etils import epath
    from praxis import base_hyperparams, base_input, py_utils

__all__ = ["DALIInput", "DALIInputSpecsProvider"]


def __dir__() -> list[str]:
    return sorted(__all__)


_log = logging.getLogger("dalijax")


def _are_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    try:
        return bool(first == second) and repr(first) == repr(second)  # repr: 1 differs from 1.0
    except ValueError:  # arrays have no single truth value
        return False


# Prevents two threads from opening two streams of an input. This is a module variable, because
# inputs are pickled, but locks can't be pickled.
_opening = threading.RLock()


# BaseInput is the first base class, because Pax's get_state and set_state use bytes.
class DALIInput(base_input.BaseInput, StreamAdapter):
    """An input of Pax over an iterator function, which reads this host's shard of the data.

    For training (``is_training``), or if ``reset_for_eval`` is False, the input is endless.
    Otherwise it returns one epoch, then raises StopIteration, and repeats the epoch after `reset`.
    Batches are full; padding has weight 0.

    Pipelines are built on demand, for example by the first batch or by `specs`. A state is the JSON
    text of the underlying iterator's state, as bytes.

    Attributes:
        iterator_fn: An iterator function, from `dalijax.data_iterator`. With several infeed hosts,
            its graph function must take ``shard_id`` and ``num_shards``, which receive
            ``infeed_host_index`` and ``num_infeed_hosts``.
        arguments: Keyword arguments of the graph function, of ``nvidia.dali.pipeline_def`` and of
            `dalijax.data_iterator`. The batch size of each host is a field of the input;
            ``input_random_seed`` (default 0) is the seed of host 0, and determines the seeds of
            the other hosts.
        weights: Name of the array of weights, float32 [batch]: 1 for a sample, 0 for padding.
        element: "numpy" for NumPy arrays (outputs of GPU pipelines are copied to the host), "jax"
            for jax.Arrays on the pipeline's device.

    Raises:
        TypeError: At creation, if an argument is unknown or has the wrong type.
        ValueError: At creation, if arguments are invalid or exclude each other, for the PARTIAL
            policy, and for eval_loop_num_batches=-1 with an endless input.
    """

    iterator_fn: Any = None
    arguments: dict[str, Any] | None = None
    weights: str = "eval_sample_weights"
    element: str = "numpy"
    _opened: Any = dataclasses.field(init=False, repr=False, default=None)
    _call: Any = dataclasses.field(init=False, repr=False, default=None)
    _mask: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element not in ("numpy", "jax"):
            raise ValueError(f"element must be 'numpy' or 'jax', not {self.element!r}")
        if self._endless and not self.is_training and self._loops == -1:
            raise ValueError(
                f"eval_loop_num_batches={self.eval_loop_num_batches} requires a finite input. Set "
                "reset_for_eval=True"
            )
        self._call = self._checked_call(iterator_function(self.iterator_fn))
        config = self.iterator_fn._prepared((), dict(self._call))[1]
        if config.last_batch_policy is LastBatchPolicy.PARTIAL:
            raise ValueError(
                "last_batch_policy='partial' returns a smaller last batch, but Pax requires "
                f"constant shapes. Use 'fill', whose padding has {self.weights} of 0, or 'drop'"
            )
        if self.element == "jax" and config.as_numpy:
            raise ValueError("element='jax' excludes as_numpy=True. Omit as_numpy")
        if not self._endless:
            self.iterator_fn._check_in_step(self._call, self.num_infeed_hosts)
        self._check_names(config.output_map)
        self._mask = config.mask or self.weights
        # If the length of epochs is unknown, there is no padding, and no mask can be computed.
        knows_epochs = config.reader_name or config.size > 0 or config.source is not None
        if config.mask is None and (knows_epochs or not self._endless):
            self._call["mask"] = self._mask
            if config.last_batch_policy is LastBatchPolicy.DROP:
                # A call with a mask must repeat the policy; the user did not ask for this mask.
                self._call["drop_remainder"] = True
        # At creation, because Pax drops the provider before it requests the first batch.
        self._opened = DALIInputSpecsProvider._stream_for(self)

    def _checked_call(self, iterator_fn: IteratorFunction) -> dict[str, Any]:
        """Returns the arguments of the iterator function, including arguments that Pax sets.

        Raises:
            ValueError: If ``arguments`` contains an argument that Pax determines, or arguments
                exclude each other.
        """
        arguments = self.arguments or {}
        if iterator_fn._is_placed(arguments):
            raise ValueError(
                "sharding, devices and pmap_compatible are determined by Pax's mesh. Omit them"
            )
        reserved = sorted({"batch_size", "shard_id", "num_shards"} & set(arguments))
        if reserved:
            raise ValueError(
                f"{reserved} in arguments: they are determined by batch_size, infeed_host_index "
                "and num_infeed_hosts of the input. Omit them from arguments"
            )
        if self.input_random_seed is not None and "seed" in arguments:
            raise ValueError("both input_random_seed and a seed in arguments are set. Set only one")
        seed = arguments.get("seed", self.input_random_seed)
        expected = "a whole number of samples, 1 or more"
        rows = whole_number("batch_size", self.batch_size, expected, 1)
        call = {**arguments, "batch_size": rows}
        if iterator_fn._has_source(arguments) and not self._endless:
            call["last_batch_padded"] = True
        return call | iterator_fn._shard_arguments(
            self.infeed_host_index, self.num_infeed_hosts, seed, call
        )

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises ValueError if a NestedMap rejects a name, or an output has the weights' name."""
        if self.weights in names:
            raise ValueError(
                f"weights={self.weights!r} is also the name of an output. Choose another name"
            )
        for name in (*names, self.weights):
            try:
                py_utils.NestedMap({name: 0})
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    f"{name!r} can't be a name in a NestedMap ({error}). Rename the output, or the "
                    "weights"
                ) from error

    @property
    def _endless(self) -> bool:
        return self.is_training or not self.reset_for_eval

    @property
    def _loops(self) -> int:
        """Number of batches of an evaluation; -1 for all batches (Pax also allows None and 0)."""
        return self.eval_loop_num_batches or -1

    @property
    def _configuration(self) -> tuple[Any, ...]:
        """The values that determine the stream; inputs with equal values can share a stream."""
        return self.iterator_fn, self.element, self._endless, self._call

    def __bool__(self) -> bool:
        return True  # paxml does not save the state of a falsy input

    @property
    def _stream(self) -> BatchStream:  # type: ignore[override] # opened on demand
        """The stream of batches, which the first access opens."""
        with _opening:
            if self._opened is None:
                numpy = self.element == "numpy"
                iterator_fn = self.iterator_fn._for_host(self._call) if numpy else self.iterator_fn
                self._opened = iterator_fn.stream(None if self._endless else 1, **self._call)
            return self._opened

    def get_next(self) -> py_utils.NestedMap:
        """Returns the next batch of this host, a NestedMap of arrays [batch, ...].

        Raises:
            StopIteration: At the end of an evaluation epoch, at each call until `reset`.
            TypeError: If an output has a dtype of 64 bits, which JAX would narrow to 32 bits.
            Exception: Any error of ``next()`` of `dalijax.DALIGenericIterator`.
        """
        stream = self._stream
        if not self._endless and self._loops > 0 and stream.step == 0:
            self._warn_if_short(stream)
        return self._nested(next(stream))

    def _nested(self, arrays: Batch) -> py_utils.NestedMap:
        """Returns a batch of the stream as a NestedMap, with weights instead of the mask."""
        batch = dict(arrays)
        valid = batch.pop(self._mask, None)
        rows = self._check_shapes(batch, valid)
        weights = np.ones(rows, np.float32) if valid is None else np.asarray(valid, np.float32)
        for name, array in batch.items():
            check_width(np.dtype(array.dtype), name)
        if self.element == "numpy":
            batch = {name: np.asarray(array) for name, array in batch.items()}
        return py_utils.NestedMap({**batch, self.weights: weights})

    def _check_shapes(self, batch: Mapping[str, Any], valid: Any) -> int:
        """Checks that all arrays have equally many rows (dimension 0), and returns this number.

        Args:
            batch: The arrays, or their specs, without the mask.
            valid: The mask, or its spec; None if there is no mask.

        Raises:
            ValueError: If `batch_map` returned an array that has a different number of rows, or the
                name of the weights.
        """
        if self.weights in batch:
            raise ValueError(
                f"batch_map returned an array named {self.weights!r}, which is the name of the "
                "weights. Rename the array, or pass another name as weights="
            )
        first = next(iter(batch.values())) if valid is None else valid
        rows: int = first.shape[0] if first.shape else self.batch_size
        for name, array in batch.items():
            if array.shape[:1] != (rows,):
                raise ValueError(
                    f"{name!r} has shape {array.shape}, but Pax requires arrays of {rows} rows. "
                    "Return an array [batch, ...] from batch_map, or omit it"
                )
        return rows

    def _warn_if_short(self, stream: BatchStream) -> None:
        """Warns if an evaluation requests more batches than an epoch has."""
        try:
            count = len(stream)
        except TypeError:
            return  # the length is unknown
        if self._loops > count:
            _log.warning(
                "eval_loop_num_batches=%d, but an epoch of input %r has only %d batches, so that "
                "Pax's evaluation ends with StopIteration. Set eval_loop_num_batches=-1",
                self._loops,
                self.name,
                count,
            )

    def specs(self) -> py_utils.NestedMap:
        """Returns a NestedMap with a jax.ShapeDtypeStruct of each array of this host's batch.

        Produces at most one batch, which the following `get_next` delivers.
        """
        specs = dict(self._stream.element_spec)
        valid = specs.pop(self._mask, None)
        rows = self._check_shapes(specs, valid)
        arrays = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()
        }
        arrays[self.weights] = jax.ShapeDtypeStruct((rows,), np.float32)
        return py_utils.NestedMap(arrays)

    def reset(self) -> None:
        """Moves back to the start of the first epoch."""
        super().reset()
        if self._opened is not None:
            self._opened.reset()

    def peek_padded(self) -> Any:
        """Returns the batch that get_next_padded() will return; None at the end.

        Peeking does not change the state, which describes the position after the last batch of
        get_next_padded().

        Raises:
            RuntimeError: If DALI failed to produce the batch, which then counts as delivered.
        """
        stream = self._stream
        try:
            batch = self._nested(stream.peek())
        except StopIteration:
            return None
        except BatchError:
            next(stream)  # raises the same error, and moves past the batch
            raise
        padding = self.batch_padding_size
        if not padding:
            return batch
        return jax.tree_util.tree_map(
            lambda array: np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)), batch
        )

    def restore(self, checkpoint_path: epath.PathLike) -> None:
        """Restores the position from a file.

        paxml names files ``process_0-of-2``. Over a source of `dalijax.sources`, files that a
        different number of hosts saved can be restored, too.

        Raises:
            FileNotFoundError: If there is no file.
            ValueError: If the file does not contain a state, or a state of different data; the
                position is unchanged.
        """
        path = epath.Path(checkpoint_path)
        if self.iterator_fn._has_source(self._call):
            path = file_of_any_process(path, path.parent.glob("process_*-of-*"))
        super().restore(path)

    def _get_state_internal(self) -> bytes:
        try:
            return json.dumps(self._stream.get_state()).encode()
        except StateError as error:
            if self.input_checkpointing_enabled:
                raise
            # Pax requests a state at each peek, and catches only NotImplementedError.
            raise NotImplementedError(str(error)) from error

    def _set_state_internal(self, state: bytes) -> None:
        self._stream.set_state(state)


class DALIInputSpecsProvider(base_input.DatasetInputSpecsProvider):
    """Provides the specs of a `DALIInput` to Pax, and its pipelines to the train input.

    A resumed run builds the pipelines twice unless ``specs`` are given, because Pax requests specs
    before it restores a state. An ``input_p`` of another class is handled by Pax's own provider.

    Attributes:
        input_p: The configuration of the train input.
        per_device: Whether specs describe one device's share of the padded batch, as pmap requires.
            If False, for SPMD, they describe this host's batch without padding.
        specs: A NestedMap of the jax.ShapeDtypeStructs of this host's batch. If given, no pipeline
            is built.

    Raises:
        ValueError: At creation, with ``per_device``, if the devices do not divide the batch.
    """

    per_device: bool = False
    specs: Any = None
    _input: Any = dataclasses.field(init=False, repr=False, default=None)
    _process: Any = dataclasses.field(init=False, repr=False, default=None)
    # The last provider. The reference is weak, so that a dropped provider frees unused pipelines.
    _last: ClassVar[weakref.ref[DALIInputSpecsProvider] | None] = None

    def __post_init__(self) -> None:
        specs, padding = self.specs, getattr(self.input_p, "batch_padding_size", 0) or 0
        if specs is None:
            dali_input = base_hyperparams.instantiate(self.input_p)
            if not isinstance(dali_input, DALIInput):
                super().__post_init__()
                return
            specs = dali_input.specs()
            self._input, self._process = dali_input, os.getpid()
            DALIInputSpecsProvider._last = weakref.ref(self)
        count = jax.local_device_count()

        def share(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            rows = spec.shape[0] + padding
            if rows % count:
                raise ValueError(
                    f"batch_size={spec.shape[0]} and batch_padding_size={padding} of this host are "
                    f"not divisible by its {count} devices, as pmap requires. Choose multiples"
                )
            return jax.ShapeDtypeStruct((rows // count, *spec.shape[1:]), spec.dtype)

        self._input_specs = jax.tree_util.tree_map(share, specs) if self.per_device else specs

    @classmethod
    def _stream_for(cls, other: DALIInput) -> BatchStream | None:
        """Returns the stream of the last provider to the first equal input in the same process.

        Returns None to all other inputs, and after Pax has dropped the provider.
        """
        provider = None if cls._last is None else cls._last()
        if provider is None or provider._process != os.getpid():
            return None
        own = provider._input
        if not _are_equal(other._configuration, own._configuration):
            return None
        stream, own._opened = own._opened, None
        return stream
