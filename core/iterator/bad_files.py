"""Finds the files that broke a reader's batch: reads the batch again and decodes its files."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.tensors import TensorListCPU

from ..errors import BatchError
from ..formats.file_kinds import pointer_fault
from ..formats.media import UNSUPPORTED, MediaInput, media_fault
from ..messages.printable import printable
from ..pipeline.calls import calls
from ..pipeline.failing_rows import failing_rows, runs_alone
from ..pipeline.pipeline_factory import Define, PipelineFactory
from ..pipeline.runner import Outputs, Runner
from ..state.operators import operators
from ..state.random_state import for_operators

# Operators whose failures the CPU decoder can reproduce for single files.
_DECODES_IMAGES = re.compile(
    r"operator `nvidia\.dali\.fn\.(experimental\.)?(decoders\.image|peek_)"
)
_DECODES_SOUNDS = re.compile(r"operator `nvidia\.dali\.fn\.(decoders\.audio|audio_decoder)")
# The device of a decoder of videos, and the file that it can't decode.
_BAD_VIDEO = re.compile(
    r'in (CPU|MIXED) operator .*create video decoder for "([^"\n]+)"', re.DOTALL
)
# Matches DALI's description of an operator that is a reader.
_READER = re.compile(r"_module: .*\bfn\.readers\b")
_MOST_FILES = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """A row of a reader's batch.

    Attributes:
        file: DALI's source info: the path of a file, or of an archive with the location in it.
        data: The row of the reader's first output; None if the output is not on the CPU.
    """

    file: str
    data: np.ndarray | None


def name_files(
    error: BatchError,
    factory: PipelineFactory,
    reader: str | None,
    data: Sequence[bytes],
    to_drop: int,
) -> BatchError:
    """Returns the error of a failed batch with the names of its files, if they can be found.

    The error lists the files that can't be decoded, with the reason for the first file if its
    header shows the reason. Otherwise, the error lists the first files of the batch. To
    read the batch again, the reader of each pipeline is built twice, and its shuffle buffer is
    filled again.

    Args:
        error: The error.
        factory: The factory of the pipelines.
        reader: Name of the reader; None: the only reader.
        data: DALI's checkpoint of each pipeline, from before the batch.
        to_drop: Number of batches between the checkpoint and the batch.
    """
    try:
        with calls, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = zip(factory.definitions(), data)
            read = [read_alone(define, reader, checkpoint, to_drop) for define, checkpoint in pairs]
            samples = [sample for samples_read in read for sample in samples_read if sample.file]
            bad = _undecodable(samples, str(error))
    except Exception:  # must not replace the error of the batch
        return error
    files = tuple(dict.fromkeys(samples[i].file for i in bad))
    all_files = list(dict.fromkeys(sample.file for sample in samples))
    if files:
        suffix = " and perhaps more" if len(bad) == _MOST_FILES else ""
        reason = next((f": {reason}" for reason in bad.values() if reason), "")
        names = ", ".join(map(printable, files))
        description = f"Files that can't be decoded: {names}{suffix}{reason}"
    elif all_files:
        suffix = f" and {len(all_files) - _MOST_FILES} more" if len(all_files) > _MOST_FILES else ""
        description = (
            f"The batch contains {', '.join(map(printable, all_files[:_MOST_FILES]))}{suffix}"
        )
    else:
        return error
    return with_description(error, description, files)


def with_description(error: BatchError, description: str, files: Sequence[str] = ()) -> BatchError:
    """Returns the error of a failed batch with a description, unless the description is empty.

    Args:
        error: The error.
        description: A text to append to its message.
        files: The files that can't be decoded.
    """
    if not description:
        return error
    named = type(error)(f"{error}\n{description}")
    named.files, named.__cause__ = tuple(files), error.__cause__
    named.unexplained = error.unexplained
    return named


def name_codec(error: BatchError) -> BatchError:
    """Returns the error of a failed batch with the codec of its video, if DALI can't decode it.

    Graphs that decode videos have no checkpoints at which the batch could be read again.
    """
    found = _BAD_VIDEO.search(str(error))
    if found is None:
        return error
    use = MediaInput("video", is_path=True, devices=(found[1].lower(),))
    fault = media_fault(os.fsencode(found[2]), use)
    if not fault.startswith(UNSUPPORTED):
        return error
    return with_description(error, f"{printable(found[2])}: {fault}", [found[2]])


def read_alone(define: Define, reader: str | None, checkpoint: bytes, to_drop: int) -> list[Sample]:
    """Reads one batch by a graph's reader, without the graph's other operators; returns its rows.

    Returns no rows if the reader is not found.

    Args:
        define: A function that defines the graph at a checkpoint, or at its start for None.
        reader: Name of the reader; None: the only reader.
        checkpoint: DALI's checkpoint of the whole graph.
        to_drop: Number of batches between the checkpoint and the batch.
    """
    start = _alone(define(None), reader)
    if start is None:
        return []
    start.build()
    at_batch = _alone(define(for_operators(checkpoint, start.checkpoint())), reader)
    if at_batch is None:
        return []
    at_batch.build()
    runner = Runner([at_batch], to_drop, gradual=True)
    try:
        return runner.take(_samples)
    finally:
        runner.close()


def _alone(pipeline: Pipeline, reader: str | None) -> Pipeline | None:
    """Makes a reader's outputs the only outputs of an unbuilt pipeline, and returns the pipeline.

    Returns None if the reader is not found, or several readers are found and none is named.
    """
    named = {operator.name: operator for operator in operators(pipeline)}
    readers = [operator for operator in named.values() if _READER.search(str(operator.spec))]
    chosen = named.get(reader) if reader is not None else None
    if reader is None and len(readers) == 1:
        chosen = readers[0]
    if chosen is None:
        return None
    # Private in DALI: the operators without outputs, which would also run.
    pipeline._sinks = []
    pipeline.set_outputs(*chosen.outputs)
    return pipeline


def _samples(outputs: Sequence[Outputs]) -> list[Sample]:
    tensors: Any = outputs[0][0]
    on_cpu = isinstance(tensors, TensorListCPU)
    return [
        Sample(tensor.source_info(), np.array(tensor) if on_cpu else None)
        for tensor in iter(tensors)
    ]


def _undecodable(samples: Sequence[Sample], text: str) -> dict[int, str]:
    """Returns the indices of the first few samples that can't be decoded, with the reasons.

    A reason is "" if the header does not show it. Returns no index if the samples are not encoded
    data (uint8) on the CPU.

    Args:
        samples: The samples of the batch.
        text: DALI's error.
    """
    files = [sample.data for sample in samples]
    if any(data is None or data.dtype != np.uint8 for data in files):
        return {}
    if _DECODES_IMAGES.search(text):
        rows = failing_rows(
            len(files), lambda rows: _decodes([files[i] for i in rows]), _MOST_FILES
        )
        return {row: pointer_fault(files[row]) for row in rows}
    if _DECODES_SOUNDS.search(text):
        use = MediaInput("sound")
        faults = enumerate(pointer_fault(data) or media_fault(data, use) for data in files)
        return dict(itertools.islice((item for item in faults if item[1]), _MOST_FILES))
    return {}


def _decodes(images: Sequence[Any]) -> bool:
    """Returns whether DALI decodes a batch of encoded images on the CPU without an error."""
    batches = iter([images])
    pipeline = Pipeline(len(images), num_threads=2, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        data = fn.external_source(lambda: next(batches))
        pipeline.set_outputs(fn.decoders.image(data))
    pipeline.build()
    return runs_alone(Runner([pipeline]))
