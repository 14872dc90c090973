"""Exceptions of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .messages.printable import printable_lines, printable_text


class Difference(NamedTuple):
    """A difference between a state and the iterator that restores it.

    Attributes:
        name: A field of the fingerprint, an argument of the reader ("reader.files"), an operator
            ("operators.resize") or its argument ("operators.resize.size").
        before, after: The texts of the value in the state, and of the value in the iterator.
        fixed: Whether positions depend on the value, so that the difference can't be ignored.
    """

    name: str
    before: str
    after: str
    fixed: bool = False

    def __str__(self) -> str:
        return printable_text(f"{self.name}: {self.before} -> {self.after}")  # on one line


class _Printable(Exception):
    """Base class that escapes control characters in messages: file names may be untrusted.

    Secrets in URLs are removed, because a message may contain the text of any other error.
    """

    def __init__(self, *args: object):
        super().__init__(*(printable_lines(arg) if isinstance(arg, str) else arg for arg in args))


class StateError(_Printable, ValueError):
    """A state was rejected; the iterator is unchanged.

    Messages and what to do:

    - ``the state was saved by an iterator of different data``: the lines below name each value that
      differs, such as ``operators.resize.size: 16 -> 24``. Create the iterator with its original
      arguments. ``set_state(state, allow=...)`` permits some differences.
    - ``the state is damaged``: restore an undamaged copy.
    - ``not a state of dalijax``: pass the result of `get_state`. For a file:
      ``set_state(json.load(open(path)))``.
    - ``Restore the state in an iterator of the kind that saved it``: the state belongs to another
      API, such as a reader instead of a source.
    - ``the graph draws random numbers by``: a source's states contain no states of DALI's random
      operators. Draw numbers with the argument ``draw`` instead.
    - ``changes at each read, so that no state can restore its batches``: draw random numbers in the
      graph, by ``draw`` or `dalijax.augment`, instead of in ``__getitem__`` or ``read``.
    - ``can't be rebuilt, so set_state() can't restore them``: pass the function of a pipeline to
      `dalijax.data_iterator`, instead of a pipeline object.
    """


class ProcessError(_Printable, RuntimeError):
    """The iterators of several processes differ, or a process is missing; no position changed.

    Messages and what to do:

    - ``differ between the processes, so that records would be repeated or lost``: the lines below
      list each value by process. Pass the same source and arguments in every process, and restore
      the same state. ``check_processes=False`` disables the check.
    - ``have no batch of records, but each process needs``: distribute the records of Grain to every
      process, or use fewer processes.
    - ``its dataset yields fewer records than its length``: filter the records by ``filter()``, or
      pass ``pad="mask"``.
    """


class BatchError(_Printable, RuntimeError):
    """DALI failed to produce a batch; the batch counts as delivered.

    The message names the files that ``can't be decoded``, or the operator that failed, and contains
    DALI's own message after ``DALI says:``. Remove or repair the files, or pass
    ``on_error="mask"`` to mask them, or ``"skip"`` to skip the batch.

    Attributes:
        files: Names of the bad files or records, if known.
        unexplained: Whether an operator failed for the batch, rather than for single records.
    """

    files: tuple[str, ...] = ()
    unexplained = False


class RecordError(_Printable, RuntimeError):
    """DALI can't decode some records; the iterator has moved past the batch.

    The message names the records of Grain that ``can't be decoded``. Remove or repair them, or pass
    ``on_error="mask"``.

    Attributes:
        files: Names of the bad records, if known.
        unexplained: Whether an operator failed for the batch, rather than for single records.
    """

    files: tuple[str, ...] = ()
    unexplained = False


class GraphError(BatchError, RecordError):
    """The graph fails for every record.

    The message tells that an operator failed ``for every record``, or that the first ``batches
    failed. The last one`` is then quoted. Correct the operator's arguments: the files are not the
    cause. This error is also raised with ``on_error="skip"`` and ``"mask"``.
    """


class BatchMapError(_Printable, RuntimeError):
    """A function of ``batch_map`` failed; ``The batch is still the next one``.

    The message names the function and its error. Create the iterator with a corrected function, and
    restore the state to continue with the same batch.
    """


class EpochError(RuntimeError):
    """Every batch of an epoch, or 64 batches in a row, failed and were skipped.

    The message tells that ``on_error='skip' skipped all of them``, and contains the error of the
    last batch. Correct the cause of this error.
    """


class UnfitRecordError(RecordError, ValueError):
    """Some records differ in form from the first; the iterator has moved past the batch.

    The message compares the keys, dtypes or numbers of dimensions with those ``of the first
    record``. Convert all records to one form with Grain's ``map``.
    """


class RaggedError(ValueError):
    """The samples of an output differ in shape.

    ``its samples have shapes``: make the shapes equal in the graph, with ``fn.resize`` or
    ``fn.crop`` for images, or with ``dalijax.fn.pad_rows`` for boxes and sequences.

    Attributes:
        name: Name of the output.
        pipeline: Index of the pipeline.
        rows: Indices of two rows of the pipeline's batch with different shapes.
        shapes: Shapes of the samples in these rows.
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
        descriptions = [
            f"{shape} ({printable_text(record)})" for shape, record in zip(shapes, records)
        ]
        first, second = descriptions or map(str, shapes)
        super().__init__(
            f"output {name!r} is ragged: its samples have shapes {first} and "
            f"{second}, which do not fit into an array. Make the shapes equal in the pipeline, "
            "e.g. by fn.resize or fn.crop for images, or by dalijax.fn.pad_rows for sequences"
            + " (and decode files, e.g. by fn.decoders.image)"
            * (len(shapes[1]) == 1)
        )

    def named(self, records: Sequence[str] | Mapping[int, str]) -> RaggedError:
        """Returns a copy of the error whose message names the records of the two rows.

        Args:
            records: Names of records by row of the pipeline's batch, at least of the two rows.
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
