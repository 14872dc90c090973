"""Errors that callers meet, of whatever layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Difference(NamedTuple):
    """One thing that a state and the pipelines do not have in common.

    Attributes:
        name: A field of the fingerprint, a source's argument ("reader.files"), an operator
            ("operators.resize") or its argument ("operators.resize.size").
        before, after: What the state has, and what the pipelines have.
        fixed: Whether positions are counted in it, so that nothing can go on where it differs.
    """

    name: str
    before: str
    after: str
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


class StateError(ValueError):
    """A state that was refused; the iterator is as it was."""

    @classmethod
    def of_other_data(
        cls, differences: Sequence[Difference | str], allowed: bool = False
    ) -> StateError:
        """The error for a state of other data.

        Args:
            differences: What differs.
            allowed: Whether the caller may go on by naming what differs (``allow=``).
        """
        cure = "Make the iterator as it was when the state was saved, or start anew without it"
        known = [item for item in differences if isinstance(item, Difference)]
        fixed = sorted({item.name for item in known if item.fixed})
        names = sorted({item.name for item in known} - {*fixed})
        if allowed and fixed:
            cure += f". allow= can't waive {', '.join(fixed)}: positions are counted in them"
        elif allowed and names:
            cure += (
                f". To go on all the same, pass allow={names} to set_state(), or "
                f"allow_changes={names} to data_iterator"
            )
        lines = "\n  ".join(map(str, differences))
        return cls(
            "the state was saved by an iterator of other data; what differs (saved -> now):\n  "
            f"{lines}\n{cure}"
        )


class BatchError(RuntimeError):
    """DALI failed to produce a batch; it counts as delivered.

    Attributes:
        files: Those that it can't decode, where its reader says their names.
    """

    files: tuple[str, ...] = ()


class RecordError(RuntimeError):
    """Records that DALI can't decode; the batch is behind the iterator."""


class UnfitRecordError(RecordError, ValueError):
    """Records that are unlike the first one; the batch is behind the iterator."""
