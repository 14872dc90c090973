"""The manifest of a packed data set: its shards with their checksums, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...formats.atomic_file import atomic_file
from ...messages.printable import printable

NAME = "manifest.jsonl"
_CHUNK = 1 << 20


class Manifest:
    """The manifest of a folder of shards, which lists the finished shards.

    The first line contains the plan, and each following line describes a finished shard.

    Args:
        folder: The folder of the manifest and of the shards.
        plan: The values that determine the contents of the shards, such as the options.

    Attributes:
        path: Path of the manifest.
        entries: The descriptions of the finished shards, by name.

    Raises:
        OSError: If the manifest can't be read or written.
        ValueError: If the folder has shards of another plan.
    """

    def __init__(self, folder: str, plan: Mapping[str, Any]):
        self.path = os.path.join(folder, NAME)
        self._folder, self._plan = folder, plan
        lines = _read(self.path)
        if lines and (differences := _differences(lines[0], plan)):
            raise ValueError(
                f"{printable(folder)} was begun with other data or options: "
                f"{'; '.join(differences)}. Pass the same again, or another output, or delete it"
            )
        self.entries = {entry["name"]: entry for entry in lines[1:] if "sha256" in entry}
        self._write(list(self.entries.values()))  # without a line that was cut off

    def verified(self, name: str) -> bool:
        """Returns whether a shard is listed, and its file has the listed size and checksum."""
        entry = self.entries.get(name)
        path = os.path.join(self._folder, name)
        if entry is None or not os.path.isfile(path) or os.path.getsize(path) != entry["bytes"]:
            return False
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest() == entry["sha256"]

    def add(self, entry: Mapping[str, Any]) -> None:
        """Appends the description of a finished shard."""
        self.entries[entry["name"]] = dict(entry)
        with open(self.path, "ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Rewrites the manifest with the named shards in this order; returns their entries."""
        entries = [self.entries[name] for name in names]
        self._write(entries)
        return entries

    def _write(self, entries: Sequence[Mapping[str, Any]]) -> None:
        with atomic_file(self.path) as file:
            file.writelines(map(_line, [self._plan, *entries]))


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True).encode() + b"\n"


def _read(path: str) -> list[dict[str, Any]]:
    """Returns the undamaged lines of a manifest.

    The result is empty if there is no manifest, or its first line, the plan, is damaged.
    """
    if not os.path.exists(path):
        return []
    parsed: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                entry = json.loads(line)
            except ValueError:
                if number == 0:
                    return []
                continue
            if isinstance(entry, dict):
                parsed.append(entry)
    return parsed


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {old.get(key)!r:.80}, and is {new.get(key)!r:.80}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
