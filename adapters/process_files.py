"""Finds and writes the files with the states of the iterators of several processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import StateError
from ..core.formats.atomic_file import atomic_file

__all__: list[str] = []

if TYPE_CHECKING:
    from etils import epath


def file_of_any_process(expected: epath.Path, alternatives: Iterable[epath.Path]) -> epath.Path:
    """Returns the file to restore from, for an iterator with equal states in all processes.

    Args:
        expected: The file that this process has saved if the number of processes is unchanged.
        alternatives: Files that another number of processes has saved, used if ``expected`` is
            missing. Their contents must be equal.

    Raises:
        FileNotFoundError: If neither ``expected`` nor an alternative exists.
        StateError: If the alternatives differ.
    """
    if expected.exists():
        return expected
    texts = {file: file.read_text() for file in sorted(alternatives)}
    if not texts:
        raise FileNotFoundError(
            f"there is neither {expected} nor a file of another number of processes, so no "
            "iterator was saved there. Check the path"
        )
    if len(set(texts.values())) > 1:
        states = {str(file): text for file, text in texts.items()}
        raise StateError(f"the processes saved states of different steps: {states}")
    return next(iter(texts))


def write_text_atomically(path: epath.Path, text: str) -> None:
    """Writes a text to a local or remote file atomically; replaces an existing file.

    Creates missing folders. Several processes may write the same file. A link at ``path`` is
    replaced, not followed.

    Raises:
        OSError: If the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if "://" not in (name := os.fspath(path)):
        with atomic_file(name) as file:
            file.write(text.encode())
        return
    # Object stores can't create a file exclusively, so a random name avoids conflicts.
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        new.write_text(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
