"""Operations for an unchanged `grain.DataLoader`: `DALIBatch` and `RandomInputs`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ...core.arguments import knows_its_names
from ...core.config import OnError
from ...core.feeding.record_reader import RecordBatch, RecordPosition
from ...core.feeding.stream_engine import StreamEngine
from ...core.messages.printable import printable_repr
from ...core.pipeline.batch import writable
from ...core.random.seeds import DEFAULT_SEED
from .transform import DALITransform

__all__ = ["DALIBatch", "RandomInputs"]


class _BatchSize(int):
    """The batch size of a `DALIBatch`, which is invalid without its ``batch_fn``.

    Kauldron creates its own batch operation from ``batch_size`` and ``drop_remainder``. Its batches
    would contain encoded records, without an error.

    Attributes:
        has_function: Whether ``batch_fn`` was read, so that the operation was not replaced.
    """

    has_function = False

    def __le__(self, other: int) -> bool:  # Grain's batch() checks: batch_size <= 0
        if not self.has_function:
            raise TypeError(
                "DALIBatch was replaced by a batch operation without its batch_fn, which would not "
                "decode the records. Apply ds.pipe(DALITransform(...)) instead; in Kauldron, "
                "override _apply_batch of the data pipeline to do so"
            )
        return int(self) <= other

    def __reduce__(self) -> Any:
        return int, (int(self),)


class DALIBatch(grain.transforms.Batch):
    """Batches and decodes records as an operation of an unchanged ``grain.DataLoader``.

    Replaces ``grain.transforms.Batch``. The operation runs in the loader's process or in its
    workers (``worker_count``); workers use only the CPU. Grain does not tell an operation the step,
    so a graph with random operators could not resume and is rejected. Draw random numbers for each
    record with `RandomInputs`.

    Args:
        pipeline_fn: As for `DALITransform`.
        batch_size: Number of records in a batch.
        output_map: A name for each output of the graph; by default the keys of the dict that it
            returns.
        drop_remainder: Whether to drop an incomplete last batch.
        pad, on_error, element_spec, writable, **call: As for `DALITransform`; ``on_error="skip"``
            is not supported.
    """

    @knows_its_names
    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        batch_size: int,
        output_map: Sequence[str] = (),
        *,
        drop_remainder: bool = False,
        pad: str | None = None,
        on_error: OnError = "raise",
        element_spec: Any = None,
        **call: Any,
    ):
        if on_error == "skip":
            raise ValueError("on_error='skip': Grain's Batch can't skip a batch. Use 'mask'")
        if call.get("batch_map") is not None:
            raise ValueError(
                "batch_map requires a key that depends on the step, which an operation doesn't "
                "know in Grain. Use DALITransform or DALIDataLoader"
            )
        transform = DALITransform(
            pipeline_fn,
            batch_size=batch_size,
            output_map=output_map,
            drop_remainder=drop_remainder,
            pad=pad,
            prefetch=1,
            on_error=on_error,
            element_spec=element_spec,
            **call,
        )
        super().__init__(
            batch_size=_BatchSize(batch_size),
            drop_remainder=drop_remainder,
            batch_fn=_Decode(transform),
        )

    def __call__(self, ds: Any) -> None:
        """Rejects ``ds.pipe(DALIBatch(...))``.

        Raises:
            TypeError: Always, with the transform to use.
        """
        raise TypeError(
            "DALIBatch is an operation of grain.DataLoader. Write ds.pipe(DALITransform(...)) for "
            "a dataset"
        )

    def __getattribute__(self, name: str) -> Any:
        if name == "batch_fn":
            size = super().__getattribute__("batch_size")
            if isinstance(size, _BatchSize):  # not in a copy from another process
                size.has_function = True
        return super().__getattribute__(name)


class _OneBatch:
    """A reader of the single batch in the attribute ``batch``; see `RecordReader`."""

    def __init__(self) -> None:
        self.batch: RecordBatch | None = None

    def next_records(self) -> RecordBatch:
        """Returns the batch, once.

        Raises:
            StopIteration: If no batch was set since the last call.
        """
        batch, self.batch = self.batch, None
        if batch is None:
            raise StopIteration
        return batch

    def seek(self, position: RecordPosition) -> None:
        """Does nothing, because each batch is set independently of the position."""


class _Decode:
    """Decodes a list of records to a batch when it is called; is pickled without its pipeline."""

    def __init__(self, transform: DALITransform):
        self._transform = transform
        # Grain may call the operation from several threads, but there is only one pipeline.
        self._lock = threading.Lock()
        self._engine: StreamEngine | None = None
        self._reader = _OneBatch()

    def __call__(self, values: Sequence[Any]) -> dict[str, Any]:
        batch = RecordBatch(list(values), None, lambda row: f"record {row} of the batch")
        if self._transform.pad:
            batch = batch.padded(self._transform.batch_size)
        with self._lock:
            try:
                return self._decoded(batch)
            except BaseException:  # drops the pipeline, which may still contain rows of this batch
                if self._engine is not None:
                    self._engine.close()
                self._engine = None
                raise

    def _decoded(self, batch: RecordBatch) -> dict[str, Any]:
        """Returns the decoded batch; creates the pipeline at the first call.

        Raises:
            ValueError: If the graph has random operators.
        """
        if self._engine is None:
            self._engine = self._transform._engine(self._reader, DEFAULT_SEED, None)
        engine = self._engine
        self._reader.batch = batch
        with engine.lock:
            engine.restart()
            engine.prepare()
            drawing = engine.stateful()
            if drawing:
                raise ValueError(
                    f"the operators {drawing} draw random numbers, which DALIBatch can't restore. "
                    "Draw numbers for each record by RandomInputs, or use DALITransform or "
                    "DALIDataLoader"
                )
            return writable(engine.deliver(None).unwrap(), self._transform.writable)

    def __reduce__(self) -> Any:
        return _Decode, (self._transform,)


class RandomInputs(grain.transforms.RandomMap):
    """Adds random numbers to each record, as inputs of the graph.

    The numbers depend only on the record's index and the seed of the dataset or sampler, not on the
    batch or the step. In a `DALIDataLoader` or a slice of a dataset, they do not depend on the
    number of shards either. Apply the operation to a MapDataset
    (``ds.seed(1).random_map(RandomInputs(angle=(-10, 10)))``) or add it to a loader's operations::

        def graph(image, angle):
            return fn.rotate(fn.decoders.image(image), angle=angle, keep_size=True)

    Args:
        **draws: For each new key, the bounds (low, high) of a uniform float32, or a function that
            takes a numpy.random.Generator and returns the value.
    """

    def __init__(self, **draws: tuple[float, float] | Callable[[np.random.Generator], Any]):
        self._draws = draws

    def random_map(self, element: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns the record with its random numbers.

        Raises:
            TypeError: If the record is not a dict.
            ValueError: If the record already has one of the keys.
        """
        if not isinstance(element, Mapping):
            raise TypeError(
                f"RandomInputs requires records that are dicts, not {printable_repr(element)}"
            )
        duplicates = sorted(set(element) & set(self._draws))
        if duplicates:
            raise ValueError(f"the records already have {duplicates}. Rename the random inputs")
        drawn = {
            name: draw(rng) if callable(draw) else np.float32(rng.uniform(*draw))
            for name, draw in self._draws.items()
        }
        return {**element, **drawn}
