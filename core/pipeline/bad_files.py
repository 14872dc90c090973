"""Finds the files that broke a reader's batch: reads it again, and decodes each file alone."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.tensors import TensorListCPU

from ..errors import BatchError
from ..printable import printable
from ..state.random_state import for_operators
from .bad_record import failing, runs_alone
from .calls import calls
from .dali_pipeline import operators
from .pipeline_source import Define, PipelineSource
from .runner import Outputs, Runner

# Where DALI's own decoder, on the CPU, tells which sample another one of its operators refused.
_DECODES_IMAGES = re.compile(
    r"operator `nvidia\.dali\.fn\.(experimental\.)?(decoders\.image|peek_)"
)
_READER = re.compile(r"_module: .*\bfn\.readers\b")  # as DALI prints an operator
_MOST_FILES = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row of a reader's batch.

    Attributes:
        file: Its source by DALI: a path, and within an archive the place in it.
        data: Its first output, where that is on the CPU.
    """

    file: str
    data: np.ndarray | None


def name_files(
    error: BatchError,
    source: PipelineSource,
    reader: str | None,
    data: Sequence[bytes],
    to_drop: int,
) -> BatchError:
    """Adds the files of a failed batch to its error, as far as DALI names them.

    The reader is built twice, and its shuffle buffer filled again.

    Args:
        error: The error.
        source: Where the pipelines come from.
        reader: Name of their reader; None for the only one that they have.
        data: A checkpoint of each pipeline, before the batch.
        to_drop: Number of batches from there to it.
    """
    try:
        with calls, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = zip(source.definitions(), data)
            read = [read_alone(define, reader, checkpoint, to_drop) for define, checkpoint in pairs]
            samples = [one for samples_read in read for one in samples_read if one.file]
            bad = _undecodable(samples) if _DECODES_IMAGES.search(str(error)) else []
    except Exception:  # the error itself is what must be said
        return error
    files = tuple(dict.fromkeys(samples[i].file for i in bad))
    every = list(dict.fromkeys(one.file for one in samples))
    if files:
        more = " and perhaps more" if len(bad) == _MOST_FILES else ""
        what = f"What can't be decoded: {', '.join(map(printable, files))}{more}"
    elif every:
        more = f" and {len(every) - _MOST_FILES} more" if len(every) > _MOST_FILES else ""
        what = f"The batch is of {', '.join(map(printable, every[:_MOST_FILES]))}{more}"
    else:
        return error
    named = type(error)(f"{error}\n{what}")
    named.files, named.__cause__ = files, error.__cause__
    named.unexplained = error.unexplained
    return named


def read_alone(define: Define, reader: str | None, checkpoint: bytes, to_drop: int) -> list[Sample]:
    """The samples of one batch of a graph's reader; nothing else of the graph is run.

    Args:
        define: Defines the graph, at a checkpoint or at its start.
        reader: The reader's name; None for the only one that it has.
        checkpoint: DALI's checkpoint of the whole graph.
        to_drop: Number of batches behind it.
    """
    start = _alone(define(None), reader)
    if start is None:
        return []
    start.build()
    there = _alone(define(for_operators(checkpoint, start.checkpoint())), reader)
    if there is None:
        return []
    there.build()
    runner = Runner([there], to_drop, gradual=True)
    try:
        return runner.take(_samples)
    finally:
        runner.close()


def _alone(pipeline: Pipeline, reader: str | None) -> Pipeline | None:
    """A pipeline that is not built, with the outputs of its reader alone; None without one."""
    named = {one.name: one for one in operators(pipeline)}
    readers = [one for one in named.values() if _READER.search(str(one.spec))]
    chosen = named.get(reader) if reader is not None else None
    if reader is None and len(readers) == 1:
        chosen = readers[0]
    if chosen is None:
        return None
    pipeline._sinks = []  # operators without outputs, which would run, too
    pipeline.set_outputs(*chosen.outputs)
    return pipeline


def _samples(outputs: Sequence[Outputs]) -> list[Sample]:
    tensors: Any = outputs[0][0]
    on_cpu = isinstance(tensors, TensorListCPU)
    return [Sample(one.source_info(), np.array(one) if on_cpu else None) for one in iter(tensors)]


def _undecodable(samples: Sequence[Sample]) -> list[int]:
    """The first samples that fail by themselves."""
    if any(one.data is None or one.data.dtype != np.uint8 for one in samples):
        return []
    return failing(
        len(samples), lambda rows: _decodes([samples[i].data for i in rows]), most=_MOST_FILES
    )


def _decodes(images: Sequence[Any]) -> bool:
    """Whether DALI decodes these files' contents."""
    batches = iter([images])
    pipeline = Pipeline(len(images), num_threads=2, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        data = fn.external_source(lambda: next(batches))
        pipeline.set_outputs(fn.decoders.image(data))
    pipeline.build()
    return runs_alone(Runner([pipeline]))
