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
from typing import Any

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from praxis import base_hyperparams, base_input, py_utils

from ..core.decorator import IteratorFunction, iterator_function
from ..core.fingerprint import StateError
from ..core.pipelines import DEFAULT_SEED
from ..core.stats import InputStats
from ..core.stream import BatchStream

__all__ = ["DALIInput", "DALIInputSpecsProvider"]

_log = logging.getLogger("dalijax")


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A stream that was opened to learn specs, for the input that will ask for it."""

    iterator_fn: IteratorFunction
    num_epochs: int | None
    call: dict[str, Any]
    stream: BatchStream

    def serves(
        self, iterator_fn: IteratorFunction, num_epochs: int | None, call: dict[str, Any]
    ) -> bool:
        """Whether a stream of these arguments would be the same."""
        mine, theirs = self.iterator_fn, iterator_fn
        try:
            return bool(
                mine.pipeline_fn is theirs.pipeline_fn
                and mine.config == theirs.config
                and (self.num_epochs, self.call) == (num_epochs, call)
            )
        except ValueError:  # arrays, which do not say whether they are equal
            return False


_opened: list[_Opened] = []  # one at most


class DALIInput(base_input.BaseInput):
    """The batches of an iterator function, of this host's shard of the data.

    For training (``is_training``), and wherever ``reset_for_eval`` is False, it never ends, epoch
    after epoch. With ``reset_for_eval`` it is one epoch, StopIteration, and the
    same again after `reset`. Batches are whole; a padded one has weights of 0.

    Pipelines are built when the first batch, or its state once some were delivered, is asked
    for. States are `get_state` of the core's iterator as JSON, in bytes.

    Attributes:
        iterator_fn: What `dalijax.data_iterator` returned. Its function takes ``shard_id`` and
            ``num_shards`` where there are several infeed hosts: they are ``infeed_host_index``
            and ``num_infeed_hosts``.
        arguments: Its arguments by keyword: of the graph function, of
            ``nvidia.dali.pipeline_def`` and of `dalijax.data_iterator`. batch_size is a
            field of its own, for each host; ``input_random_seed``, where given, is the seed of
            host 0, and that of host i is i more.
        weights: Name of the weights, float32 of shape [batch]: 1 for a sample, 0 for padding.
        element: "numpy": leaves are NumPy arrays, of GPU pipelines copied to the host; "jax":
            jax.Arrays on the device of the pipeline.

    Raises:
        TypeError, ValueError: When it is made, for arguments that are wrong or exclude one
            another, for the PARTIAL policy, and for eval_loop_num_batches=-1 of an input that
            never ends.
    """

    iterator_fn: Any = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "eval_sample_weights"
    element: str = "numpy"
    _stream: Any = dataclasses.field(init=False, repr=False, default=None)
    _fitted: Any = dataclasses.field(init=False, repr=False, default=None)
    _call: Any = dataclasses.field(init=False, repr=False, default=None)
    _mask: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element not in ("numpy", "jax"):
            raise ValueError(f"element must be 'numpy' or 'jax', not {self.element!r}")
        if self._endless and not self.is_training and self.eval_loop_num_batches == -1:
            raise ValueError(
                "eval_loop_num_batches=-1 wants an input that ends: set reset_for_eval=True"
            )
        given = iterator_function(self.iterator_fn).without_auto_reset()
        if given.is_placed(self.arguments):
            raise ValueError(
                "sharding and devices are Pax's to say, by its mesh: leave them out here"
            )
        set_here = sorted({"batch_size", "shard_id", "num_shards"} & set(self.arguments))
        if set_here:
            raise ValueError(
                f"{set_here} of arguments: batch_size, infeed_host_index and num_infeed_hosts "
                "of the input say them"
            )
        if self.input_random_seed is not None and "seed" in self.arguments:
            raise ValueError("input_random_seed and the seed of arguments: give one of them")
        call = given.for_host(self.arguments) if self.element == "numpy" else self.arguments
        seed = self.arguments.get("seed", self.input_random_seed) or DEFAULT_SEED
        call = {**call, "batch_size": self.batch_size}
        call |= given.of_shard(self.infeed_host_index, self.num_infeed_hosts, seed)
        config = given.prepared((), dict(call))[1]
        if config.last_batch_policy is LastBatchPolicy.PARTIAL:
            raise ValueError(
                "LastBatchPolicy.PARTIAL gives a smaller last batch, and Pax wants one shape: use "
                f"FILL, whose padding has {self.weights} of 0, or DROP"
            )
        if self.weights in config.output_map:
            raise ValueError(
                f"weights={self.weights!r} is the name of an output: give the weights another one"
            )
        self._mask = config.mask or self.weights
        if config.mask is None:
            call["mask"] = self._mask
        self._fitted, self._call = given, call

    @property
    def _endless(self) -> bool:
        return self.is_training or not self.reset_for_eval

    def __bool__(self) -> bool:
        return True  # paxml skips the states of an input that is false

    def _opened(self) -> BatchStream:
        """The stream, opened at the first use."""
        if self._stream is None:
            epochs = None if self._endless else 1
            wanted = (self._fitted, epochs, self._call)
            if _opened and _opened[0].serves(*wanted):
                self._stream = _opened.pop().stream
                return self._stream
            self._stream = self._fitted.stream(epochs, **self._call)
        return self._stream

    def hand_over(self) -> None:
        """Leaves the stream, at its start, to the next input of the same configuration."""
        while _opened:
            _opened.pop().stream.close()
        epochs = None if self._endless else 1
        _opened.append(_Opened(self._fitted, epochs, self._call, self._opened()))
        self._stream = None

    def get_next(self) -> py_utils.NestedMap:
        """The next batch of this host, a NestedMap of arrays of shape [batch, ...].

        Raises:
            StopIteration: At the end of an evaluation's epoch, on each call until `reset`.
            Exception: What the core's ``next()`` raises.
        """
        stream = self._opened()
        first = stream.iterator.step == 0 and not self._endless
        batch = dict(next(stream))
        if first and self.eval_loop_num_batches > len(stream):
            _log.warning(
                "eval_loop_num_batches=%d, but the epoch of input %r has %d batches, and Pax stops "
                "with StopIteration behind them: set eval_loop_num_batches=-1",
                self.eval_loop_num_batches,
                self.name,
                len(stream),
            )
        weights = np.asarray(batch.pop(self._mask)).astype(np.float32)
        if self.element == "numpy":
            batch = {name: np.asarray(array) for name, array in batch.items()}
        return py_utils.NestedMap({**batch, self.weights: weights})

    def specs(self) -> py_utils.NestedMap:
        """jax.ShapeDtypeStruct of each array of this host's batch; nothing is taken by it."""
        specs = self._opened().element_spec
        made = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for name, spec in specs.items()
            if name != self._mask
        }
        made[self.weights] = jax.ShapeDtypeStruct(specs[self._mask].shape, np.float32)
        return py_utils.NestedMap(made)

    def reset(self) -> None:
        """Goes back to the start of the first epoch."""
        super().reset()
        if self._stream is not None:
            self._stream.reset()

    def _get_state_internal(self) -> bytes:
        try:
            return json.dumps(self._opened().get_state()).encode()
        except StateError as error:
            if self.input_checkpointing_enabled:
                raise
            # Pax asks for a state with each peek, and takes only this as an answer.
            raise NotImplementedError(str(error)) from error

    def _set_state_internal(self, state: bytes) -> None:
        self._opened().set_state(state)

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs; waits for none."""
        self._opened().start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; ``get_next()`` then raises ValueError."""
        self._opened().close()

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; see `dalijax.core.stats.InputStats`."""
        return self._opened().watch()


class DALIInputSpecsProvider(base_input.DatasetInputSpecsProvider):
    """The specs of a `DALIInput`, whose pipelines the train input then goes on with.

    A run that resumes builds them twice, since Pax asks for specs before it restores a state,
    unless ``specs`` are given.

    Attributes:
        input_p: The configuration of the train input.
        per_device: True for pmap, whose specs are those of one device's share of the batch;
            False for SPMD.
        specs: NestedMap of jax.ShapeDtypeStruct of this host's batch, where they are known;
            nothing is built then.

    Raises:
        ValueError: When it is made, if the devices do not divide the batch with ``per_device``.
    """

    per_device: bool = False
    specs: Any = None

    def __post_init__(self) -> None:
        specs = self.specs
        if specs is None:
            made = base_hyperparams.instantiate(self.input_p)
            specs = made.specs()
            made.hand_over()
        count = jax.local_device_count() if self.per_device else 1

        def share(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if spec.shape[0] % count:
                raise ValueError(
                    f"batch_size={spec.shape[0]} of this host is not divisible by its {count} "
                    "devices, which pmap wants: choose one that is"
                )
            return jax.ShapeDtypeStruct((spec.shape[0] // count, *spec.shape[1:]), spec.dtype)

        self._input_specs = jax.tree_util.tree_map(share, specs)
