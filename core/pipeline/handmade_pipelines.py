"""`HandmadePipelineFactory`: builds pipelines that the caller created, and rebuilds them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvidia.dali import Pipeline

from ..random.seeds import DEFAULT_SEED
from ..state.operators import serialized_operators
from .calls import calls
from .dali_pipeline import at_checkpoint, build_pipeline, can_checkpoint
from .output_notes import OutputNotes, note_outputs, notes_of, set_notes
from .pipeline_factory import PipelineFactory


class HandmadePipelineFactory(PipelineFactory):
    """A factory that builds the caller's pipelines at first, and later rebuilds them.

    Pipelines with ``checkpoint=`` start at the position that the checkpoint contains. Pipelines
    are rebuilt from DALI's serialization, which does not contain Python functions and sources of
    ``fn.external_source``. Pipelines that the caller created without enable_checkpointing are
    rebuilt immediately, with enable_checkpointing.

    Args:
        pipelines: A Pipeline or a list of Pipelines, all with the same batch size.

    Raises:
        TypeError: If an element is not a `nvidia.dali.Pipeline`.
        ValueError: If there is no pipeline, or their batch sizes differ.
    """

    def __init__(self, pipelines: Pipeline | Sequence[Pipeline]):
        if callable(pipelines) or not isinstance(pipelines, (Pipeline, Iterable)):
            kind = ", a function" if callable(pipelines) else ""
            raise TypeError(
                f"pipelines must be a nvidia.dali.Pipeline or a list of them, not {pipelines!r}"
                f"{kind}. Decorate a graph function with dalijax.data_iterator and call it, or "
                "pass the result of calling a nvidia.dali.pipeline_def, pipe(batch_size=...)"
            )
        handmade = [pipelines] if isinstance(pipelines, Pipeline) else list(pipelines)
        if not handmade:
            raise ValueError("pipelines is empty. Pass a Pipeline or a list of them")
        for pipeline in handmade:
            if not isinstance(pipeline, Pipeline):
                raise TypeError(f"pipelines must contain nvidia.dali.Pipeline, not {pipeline!r}")
        sizes = [pipeline.max_batch_size for pipeline in handmade]
        if len(set(sizes)) > 1:
            raise ValueError(f"all pipelines must have the same batch_size, not {sizes}")
        super().__init__("a pipeline" if len(handmade) == 1 else f"{len(handmade)} pipelines")
        self.rebuildable = self.owned = False
        self._handmade = handmade  # the caller's pipelines, until they are built
        self._arguments: list[dict[str, Any]] = []
        self._notes = OutputNotes()  # equal for all pipelines

    def build(self, checkpoints: Sequence[bytes] | None = None) -> list[Pipeline]:
        """Builds and returns the caller's pipelines at the first call, and then new copies."""
        if self._handmade:
            pipelines, self._handmade = self._handmade, []
            for pipeline in pipelines:
                note_outputs(pipeline, self.name)
                build_pipeline(pipeline)
            self._notes = notes_of(pipelines[0])
            # Private in DALI: without the checkpoint the position is unknown, and counts as the
            # start, as in DALI's own iterator.
            restored = [p for p in pipelines if p.is_restored_from_checkpoint]
            passed = [getattr(pipeline, "_checkpoint", None) for pipeline in restored]
            self.restored = [checkpoint for checkpoint in passed if checkpoint]
            self._keep_definitions(pipelines)
            self._add(pipelines)
            if all(can_checkpoint(pipeline) for pipeline in pipelines):
                return pipelines
            if not self.rebuildable:
                self._unresumable = "pass enable_checkpointing=True to the pipelines"
                return pipelines
        if not self.rebuildable:
            raise RuntimeError(
                "these pipelines can't be rebuilt, because DALI does not serialize Python "
                "functions and sources of fn.external_source. Use dalijax.data_iterator, which "
                "builds pipelines from their function"
            )
        self.owned = True
        chosen: Sequence[bytes | None] = checkpoints or [None] * len(self.serialized)
        with calls:
            return [
                at_checkpoint(functools.partial(self._rebuilt, arguments, definition), checkpoint)
                for arguments, definition, checkpoint in zip(
                    self._arguments, self.serialized, chosen, strict=True
                )
            ]

    def _keep_definitions(self, pipelines: Sequence[Pipeline]) -> None:
        """Stores the arguments and the serialization of pipelines, if DALI can serialize them."""
        try:
            self.serialized = [pipeline.serialize() for pipeline in pipelines]
        except (RuntimeError, NotImplementedError):  # Python functions, or deserialized already
            return
        kinds = {kind for text in self.serialized for kind, _, _ in serialized_operators(text)}
        self.rebuildable = "external_source" not in kinds
        self._arguments = [
            {
                "batch_size": pipeline.max_batch_size,
                "num_threads": pipeline.num_threads,
                "device_id": pipeline.device_id,
                "seed": DEFAULT_SEED if pipeline.seed is None else pipeline.seed,
                "exec_pipelined": pipeline.exec_pipelined,
                "exec_async": pipeline.exec_async,
                "exec_dynamic": pipeline.exec_dynamic,
                "prefetch_queue_depth": {
                    "cpu_size": pipeline.cpu_queue_size,
                    "gpu_size": pipeline.gpu_queue_size,
                }
                if pipeline.exec_separated
                else pipeline.prefetch_queue_depth,
            }
            for pipeline in pipelines
        ]

    def _rebuilt(
        self, arguments: Mapping[str, Any], definition: bytes, checkpoint: bytes | None
    ) -> Pipeline:
        pipeline = Pipeline(**arguments, enable_checkpointing=True, checkpoint=checkpoint)
        pipeline.deserialize_and_build(definition)
        set_notes(pipeline, self._notes)
        return pipeline
