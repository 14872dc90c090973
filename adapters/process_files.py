"""Checkpoint files of processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.atomic_file import atomic_file
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


def write_text_atomically(path: epath.Path, text: str) -> None:
    """Writes a local or a remote file completely or not at all; an existing file is replaced.

    Any number of processes may write the same file. Links are replaced, not followed.

    Raises:
        OSError: If it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if "://" not in (name := os.fspath(path)):
        with atomic_file(name) as file:
            file.write(text.encode())
        return
    # Object stores have no links and no exclusive creation: nobody can guess the name.
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        new.write_text(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
