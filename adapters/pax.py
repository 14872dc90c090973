"""Pax: a DALI pipeline as a praxis input, with states that paxml saves.

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

It works on the released Pax (praxis and paxml 1.4.0: Python 3.10, jax 0.4.26).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..core.api import IteratorFunction, iterator_function
from ..core.config import whole_number
from ..core.dtypes import check_width
from ..core.environment.extras import extra
from ..core.errors import BatchError, StateError
from ..core.iterator.epoch_stream import BatchStream
from ..core.iterator.iterator import DALIGenericIterator
from ..core.pipeline.batch import Batch
from ..core.stats import InputStats
from .process_files import file_of_any_process

with extra("pax", "dalijax.adapters.pax, which wants Python 3.10,"):
    from etils import epath
    from praxis import base_hyperparams, base_input, py_utils

__all__ = ["DALIInput", "DALIInputSpecsProvider"]


def __dir__() -> list[str]:
    return sorted(__all__)


_log = logging.getLogger("dalijax")


class _Opened:
    """A stream that was opened for its specs, for the input that is made next.

    It belongs to the provider, and pipelines that no input took go with it.
    """

    def __init__(self, data: DALIInput):
        self._wanted = data._wanted
        self._process = os.getpid()
        self._stream: BatchStream | None = data._opened()

    def taken(self, wanted: tuple[Any, ...]) -> BatchStream | None:
        """The stream, once, for an input of the same configuration in the same process."""
        if os.getpid() != self._process or not _same(wanted, self._wanted):
            return None
        stream, self._stream = self._stream, None
        return stream


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    try:
        return bool(one == other) and repr(one) == repr(other)  # 1 is no 1.0
    except ValueError:  # arrays, which do not say whether they are equal
        return False


_handed_over: list[weakref.ref[_Opened]] = []  # one at most
# Of the module, since inputs are pickled: two threads must not open two streams of an input.
_opening = threading.RLock()


class DALIInput(base_input.BaseInput):
    """The batches of an iterator function, from this host's shard of the data.

    For training (``is_training``), or if ``reset_for_eval`` is False, it never ends. With
    ``reset_for_eval`` it gives one epoch, then StopIteration, and the same again after `reset`.
    Batches are whole; padding has weights of 0.

    Pipelines are built when the first batch is requested, or the state once batches were
    delivered. States are those of the iterator underneath, as JSON in bytes.

    Attributes:
        iterator_fn: An iterator function, from `dalijax.data_iterator`. With several infeed hosts
            its function takes ``shard_id`` and ``num_shards``, which are ``infeed_host_index`` and
            ``num_infeed_hosts``.
        arguments: Its arguments by keyword: of the graph function, of
            ``nvidia.dali.pipeline_def`` and of `dalijax.data_iterator`. The batch size of each host
            is a field of the input; ``input_random_seed`` (default 0) is the seed of host 0, from
            which the seeds of the others follow.
        weights: Name of the weights, float32 of shape [batch]: 1 for a sample, 0 for padding.
        element: "numpy" for NumPy arrays (outputs of GPU pipelines are copied to the host), "jax"
            for jax.Arrays on the pipeline's device.

    Raises:
        TypeError, ValueError: When it is made: for arguments that are wrong or exclude one
            another, the PARTIAL policy, and eval_loop_num_batches=-1 of an input without an end.
    """

    iterator_fn: Any = None
    arguments: dict[str, Any] | None = None
    weights: str = "eval_sample_weights"
    element: str = "numpy"
    _stream: Any = dataclasses.field(init=False, repr=False, default=None)
    _call: Any = dataclasses.field(init=False, repr=False, default=None)
    _mask: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element not in ("numpy", "jax"):
            raise ValueError(f"element must be 'numpy' or 'jax', not {self.element!r}")
        if self._endless and not self.is_training and self._loops == -1:
            raise ValueError(
                f"eval_loop_num_batches={self.eval_loop_num_batches} wants an input that ends: set "
                "reset_for_eval=True"
            )
        self._call = self._checked_call(iterator_function(self.iterator_fn))
        config = self.iterator_fn._prepared((), dict(self._call))[1]
        if config.last_batch_policy is LastBatchPolicy.PARTIAL:
            raise ValueError(
                "LastBatchPolicy.PARTIAL gives a smaller last batch, and Pax wants one shape: use "
                f"FILL, whose padding has {self.weights} of 0, or DROP"
            )
        if self.element == "jax" and config.as_numpy:
            raise ValueError("element='jax' with as_numpy=True: leave as_numpy out")
        if not self._endless:
            self.iterator_fn._check_in_step(self._call, self.num_infeed_hosts)
        self._check_names(config.output_map)
        self._mask = config.mask or self.weights
        # Without an epoch there is no padding, and nothing to tell a mask.
        knows_epochs = config.reader_name or config.size > 0 or config.source is not None
        if config.mask is None and (knows_epochs or not self._endless):
            self._call["mask"] = self._mask
        # Now, since Pax drops the provider before it asks for the first batch.
        handed_over = _handed_over[0]() if _handed_over else None
        if handed_over is not None:
            self._stream = handed_over.taken(self._wanted)

    def _checked_call(self, iterator_fn: IteratorFunction) -> dict[str, Any]:
        """The arguments of the iterator function."""
        arguments = self.arguments or {}
        if iterator_fn._is_placed(arguments):
            raise ValueError(
                "sharding, devices and pmap_compatible are Pax's to say, by its mesh: leave them "
                "out here"
            )
        set_here = sorted({"batch_size", "shard_id", "num_shards"} & set(arguments))
        if set_here:
            raise ValueError(
                f"{set_here} of arguments: batch_size, infeed_host_index and num_infeed_hosts "
                "of the input say them"
            )
        if self.input_random_seed is not None and "seed" in arguments:
            raise ValueError("input_random_seed and the seed of arguments: give one of them")
        seed = arguments.get("seed", self.input_random_seed)
        what = "a whole number of samples, 1 or more"
        rows = whole_number("batch_size", self.batch_size, what, 1)
        call = {**arguments, "batch_size": rows}
        if iterator_fn._has_source(arguments) and not self._endless:
            call["last_batch_padded"] = True
        return call | iterator_fn._of_shard(
            self.infeed_host_index, self.num_infeed_hosts, seed, call
        )

    def _check_names(self, names: Sequence[str]) -> None:
        if self.weights in names:
            raise ValueError(
                f"weights={self.weights!r} is the name of an output: give the weights another one"
            )
        for name in (*names, self.weights):
            try:
                py_utils.NestedMap({name: 0})
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    f"{name!r} can't be a name in a NestedMap ({error}): give the output, or the "
                    "weights, another one"
                ) from error

    @property
    def _endless(self) -> bool:
        return self.is_training or not self.reset_for_eval

    @property
    def _loops(self) -> int:
        """Batches of an evaluation; -1 for all, which Pax also means by None and 0."""
        return self.eval_loop_num_batches or -1

    @property
    def _wanted(self) -> tuple[Any, ...]:
        """The configuration that determines the stream."""
        return self.iterator_fn, self.element, self._endless, self._call

    def __bool__(self) -> bool:
        return True  # paxml saves no state of a false input

    def _opened(self) -> BatchStream:
        """The stream, opened at the first use."""
        with _opening:
            if self._stream is None:
                numpy = self.element == "numpy"
                iterator_fn = self.iterator_fn._for_host(self._call) if numpy else self.iterator_fn
                self._stream = iterator_fn.stream(None if self._endless else 1, **self._call)
            return self._stream

    def get_next(self) -> py_utils.NestedMap:
        """The next batch of this host, a NestedMap of arrays of shape [batch, ...].

        Raises:
            StopIteration: At the end of an evaluation's epoch, on each call until `reset`.
            TypeError: For outputs of 64 bits, which JAX would narrow when they are placed.
            Exception: What the core's ``next()`` raises.
        """
        stream = self._opened()
        if not self._endless and self._loops > 0 and stream._iterator.step == 0:
            self._warn_of(stream)
        return self._nested(next(stream))

    def _nested(self, arrays: Batch) -> py_utils.NestedMap:
        """A batch of the stream in the form that Pax takes."""
        batch = dict(arrays)
        valid = batch.pop(self._mask, None)
        rows = len(next(iter(batch.values())))
        weights = np.ones(rows, np.float32) if valid is None else np.asarray(valid, np.float32)
        for name, array in batch.items():
            check_width(np.dtype(array.dtype), name)
        if self.element == "numpy":
            batch = {name: np.asarray(array) for name, array in batch.items()}
        return py_utils.NestedMap({**batch, self.weights: weights})

    def _warn_of(self, stream: BatchStream) -> None:
        try:
            count = len(stream)
        except TypeError:
            return  # only the source knows
        if self._loops > count:
            _log.warning(
                "eval_loop_num_batches=%d, but the epoch of input %r has %d batches, and Pax's "
                "evaluation stops with StopIteration behind them: set eval_loop_num_batches=-1",
                self._loops,
                self.name,
                count,
            )

    def specs(self) -> py_utils.NestedMap:
        """jax.ShapeDtypeStruct of each array of this host's batch; takes no batch."""
        specs = self._opened().element_spec
        arrays = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for name, spec in specs.items()
            if name != self._mask
        }
        rows = next(iter(specs.values())).shape[0]
        arrays[self.weights] = jax.ShapeDtypeStruct((rows,), np.float32)
        return py_utils.NestedMap(arrays)

    def reset(self) -> None:
        """Returns to the start of the first epoch."""
        super().reset()
        if self._stream is not None:
            self._stream.reset()

    def seek_step(self, step: int) -> None:
        """Moves to a global step, for loops that save only their step; see `BatchStream`.

        Args:
            step: The number of batches before it, from 0.

        Raises:
            ValueError: If there is no such step, or the batches before it are not known.
        """
        self._opened().seek_step(step)
        self._peek = self._state_before_peek = None

    def peek_padded(self) -> Any:
        """The batch that get_next_padded() will return; None at the end.

        The stream keeps the batch, so that its position is the input's whole position.

        Raises:
            RuntimeError: If DALI failed to produce the batch, which then counts as delivered.
        """
        stream = self._opened()
        try:
            batch = self._nested(stream.peek())
        except StopIteration:
            return None
        except BatchError:
            next(stream)  # raises it, too
            raise
        padding = self.batch_padding_size
        if not padding:
            return batch
        return jax.tree_util.tree_map(
            lambda array: np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)), batch
        )

    def restore(self, checkpoint_path: epath.PathLike) -> None:
        """Continues at the position in a file.

        paxml's files are ``process_0-of-2``: over a source another number of hosts may have saved
        them.

        Raises:
            FileNotFoundError: If there is no file.
            ValueError: If it is no state, or one of other data; nothing has changed.
        """
        path = epath.Path(checkpoint_path)
        if self.iterator_fn._has_source(self._call):
            path = file_of_any_process(path, path.parent.glob("process_*-of-*"))
        super().restore(path)

    def _get_state_internal(self) -> bytes:
        try:
            return json.dumps(self._opened().get_state()).encode()
        except StateError as error:
            if self.input_checkpointing_enabled:
                raise
            # Pax gets a state with each peek, and catches this exception alone.
            raise NotImplementedError(str(error)) from error

    def _set_state_internal(self, state: bytes) -> None:
        self._opened().set_state(state)

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules batches, without waiting for them."""
        self._opened().start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; ``get_next()`` then raises ValueError."""
        self._opened().close()

    @property
    def _core(self) -> DALIGenericIterator:
        """The iterator underneath, which `dalijax.profile` measures."""
        return self._opened()._iterator

    def watch(self) -> InputStats:
        """Counts batches from now on; see `dalijax.InputStats`."""
        return self._opened().watch()


class DALIInputSpecsProvider(base_input.DatasetInputSpecsProvider):
    """The specs of a `DALIInput`, whose pipelines the train input then goes on with.

    A run that resumes builds them twice, unless ``specs`` are given, since Pax gets specs before it
    restores a state. An ``input_p`` of another class is treated as by Pax.

    Attributes:
        input_p: The configuration of the train input.
        per_device: True for pmap, whose specs are of one device's share of the padded batch; False
            for SPMD.
        specs: NestedMap of jax.ShapeDtypeStruct of this host's batch, if known: no pipeline is
            built for them.

    Raises:
        ValueError: When it is made, if the devices do not divide the batch with ``per_device``.
    """

    per_device: bool = False
    specs: Any = None
    _mine: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        specs, padding = self.specs, getattr(self.input_p, "batch_padding_size", 0) or 0
        if specs is None:
            dali_input = base_hyperparams.instantiate(self.input_p)
            if not isinstance(dali_input, DALIInput):
                super().__post_init__()
                return
            specs = dali_input.specs()
            self._mine = _Opened(dali_input)
            dali_input._stream = None  # it is the next input's
            _handed_over[:] = [weakref.ref(self._mine)]
        count = jax.local_device_count()

        def share(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            rows = spec.shape[0] + padding
            if rows % count:
                raise ValueError(
                    f"batch_size={spec.shape[0]} and batch_padding_size={padding} of this host are "
                    f"not divisible by its {count} devices, which pmap wants: choose others"
                )
            return jax.ShapeDtypeStruct((rows // count, *spec.shape[1:]), spec.dtype)

        self._input_specs = jax.tree_util.tree_map(share, specs) if self.per_device else specs
