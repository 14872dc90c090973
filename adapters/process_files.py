"""Checkpoint files that are named after the process and the number of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import StateError

__all__: list[str] = []

if TYPE_CHECKING:
    from etils import epath


def file_of_any_process(expected: epath.Path, others: Iterable[epath.Path]) -> epath.Path:
    """The file to restore from, for an iterator whose state is the same in all processes.

    Args:
        expected: This process's file, if as many processes saved as run now.
        others: The files that another number of processes saved; read if ``expected`` is missing.

    Raises:
        FileNotFoundError: If there is no file.
        StateError: If the files differ.
    """
    if expected.exists():
        return expected
    texts = {file: file.read_text() for file in sorted(others)}
    if not texts:
        raise FileNotFoundError(
            f"there is no {expected}, and no file of another number of processes: no iterator was "
            "saved there"
        )
    if len(set(texts.values())) > 1:
        states = {str(file): text for file, text in texts.items()}
        raise StateError(f"the processes' states are not of one step: {states}")
    return next(iter(texts))
