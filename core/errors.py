"""Exceptions of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .messages.printable import printable, printable_lines


class Difference(NamedTuple):
    """A difference between a state and the iterator that restores it.

    Attributes:
        name: A field of the fingerprint, an argument of the reader ("reader.files"), an operator
            ("operators.resize") or its argument ("operators.resize.size").
        before, after: The value in the state, and in the iterator.
        fixed: Whether positions depend on the value, so that the difference can't be ignored.
    """

    name: str
    before: str
    after: str
    fixed: bool = False

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.before} -> {self.after}")  # on one line


class _Printable(Exception):
    """Escapes control characters in the message, because file names may be untrusted."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class StateError(_Printable, ValueError):
    """A state was rejected; the iterator is unchanged."""


class ProcessError(_Printable, RuntimeError):
    """The iterators of several processes differ, or a process is missing; no position changed."""


class BatchError(_Printable, RuntimeError):
    """DALI failed to produce a batch; the batch counts as delivered.

    Attributes:
        files: Names of the bad files or records, if known.
        unexplained: Whether an operator failed for the batch, rather than for single records.
    """

    files: tuple[str, ...] = ()
    unexplained = False


class RecordError(_Printable, RuntimeError):
    """DALI can't decode some records; the iterator has moved past the batch.

    Attributes:
        files: Names of the bad records, as far as they are known.
        unexplained: Whether an operator failed for the batch, rather than for single records.
    """

    files: tuple[str, ...] = ()
    unexplained = False


class GraphError(BatchError, RecordError):
    """The graph fails for every record.

    It is raised for ``on_error="skip"`` and ``"mask"``, too.
    """


class BatchMapError(_Printable, RuntimeError):
    """A function of ``batch_map`` failed; the batch is still the next one."""


class EpochError(RuntimeError):
    """``on_error="skip"`` skipped every batch of an epoch."""


class UnfitRecordError(RecordError, ValueError):
    """Some records differ in form from the first; the iterator has moved past the batch."""


class RaggedError(ValueError):
    """The samples of an output differ in shape.

    Attributes:
        name: The output.
        pipeline: The number of the pipeline.
        rows: Two rows of its batch with different shapes.
        shapes: Their shapes.
    """

    def __init__(
        self,
        name: str,
        pipeline: int,
        rows: tuple[int, int],
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        records: Sequence[str] = (),
    ):
        self.name, self.pipeline, self.rows, self.shapes = name, pipeline, rows, shapes
        descriptions = [f"{shape} ({printable(record)})" for shape, record in zip(shapes, records)]
        first, second = descriptions or map(str, shapes)
        super().__init__(
            f"output {name!r} is ragged: its samples have shapes {first} and "
            f"{second}, which do not fit into an array. Make the shapes equal in the pipeline, "
            "e.g. by fn.resize or fn.crop for images, or by fn.pad for sequences"
            + " (and decode files, e.g. by fn.decoders.image)"
            * (len(shapes[1]) == 1)
        )

    def named(self, records: Sequence[str] | Mapping[int, str]) -> RaggedError:
        """Returns the error with the records of the two rows.

        Args:
            records: Names of records by row of the pipeline's batch; the two rows are enough.
        """
        names = [records[row] for row in self.rows]
        return RaggedError(self.name, self.pipeline, self.rows, self.shapes, names)


# Tracebacks name the module from which users import them.
for _public in (
    BatchError,
    BatchMapError,
    EpochError,
    GraphError,
    ProcessError,
    RaggedError,
    RecordError,
    StateError,
    UnfitRecordError,
):
    _public.__module__ = "dalijax.errors"
