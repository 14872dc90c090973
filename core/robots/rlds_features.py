"""Features of RLDS data sets, as TFDS describes them in the file features.json."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..formats.byte_files import WAITING_THREADS, is_remote
from ..formats.file_kinds import pointer_fault
from ..formats.shared_index import folder_of
from ..messages.printable import printable, printable_text
from ..remote.storage import Storage
from ..threads.workers import call_each

_log = logging.getLogger("dalijax")

STEPS = "steps"  # the feature of TFDS that contains the features of each step
IMAGE, TEXT, NUMBER, RAGGED, ENCODED = "image", "text", "number", "ragged", "encoded"
_FILE = "features.json"
_TEXT_DTYPES = ("string", "object", "str")
# A tf.train.Example stores floats with 32 bits, so that float64 would only take more memory. NumPy
# has no bfloat16.
_STORED = {"float64": "float32", "bfloat16": "float32"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """The description of a feature in features.json.

    Attributes:
        kind: IMAGE, TEXT or NUMBER; ENCODED for tensors that are stored as bytes; RAGGED for values
        whose length may differ between steps, which can't be read.
        dtype: NumPy's name of the dtype of a NUMBER; the encoding of an ENCODED, e.g. "zlib".
        shape: The shape of a value; None for images, and for shapes that are not fixed.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None


def parsed(content: bytes | str) -> dict[str, Spec]:
    """Returns the description of each feature in the content of a features.json, by name.

    Features of kinds that `Spec` does not have are omitted.

    Raises:
        ValueError: If the content is not a description of features.
    """
    tree = json.loads(content)
    if not isinstance(tree, dict) or "featuresDict" not in tree:
        raise ValueError("it has no featuresDict")
    return dict(_specs(tree, "", False))


def _specs(node: Mapping[str, Any], name: str, in_steps: bool) -> Iterator[tuple[str, Spec]]:
    """Yields the name and the description of each feature below a node of a features.json.

    Args:
        node: The node.
        name: The name of the node's feature, e.g. "steps/observation"; "" for the root.
        in_steps: Whether the feature has a value for each step.
    """
    if "featuresDict" in node:
        for key, child in node["featuresDict"].get("features", {}).items():
            yield from _specs(child, f"{name}/{key}" if name else key, in_steps)
    elif "sequence" in node:
        child = node["sequence"].get("feature", {})
        if name == STEPS:
            yield from _specs(child, name, True)
        elif in_steps:  # TFDS stores it as ragged, even if its length is fixed
            yield name, Spec(RAGGED)
    elif "image" in node:
        yield name, Spec(IMAGE)
    elif "text" in node:
        yield name, Spec(TEXT, shape=())
    elif "classLabel" in node:
        yield name, Spec(NUMBER, "int64", ())
    elif "tensor" in node or "boundingBox" in node:
        yield name, _tensor(node.get("tensor") or node["boundingBox"], in_steps)


def _tensor(node: Mapping[str, Any], in_steps: bool) -> Spec:
    """Returns the description of a feature that is a tensor; see `_specs`."""
    dimensions = tuple(int(length) for length in node.get("shape", {}).get("dimensions", ()))
    dtype = node.get("dtype", "float32")
    if node.get("encoding", "none") not in ("none", ""):
        return Spec(ENCODED, node["encoding"])
    shape = None if any(length < 0 for length in dimensions) else dimensions
    if in_steps and shape is None:
        return Spec(RAGGED)
    if dtype in _TEXT_DTYPES:
        return Spec(TEXT, shape=shape)
    return Spec(NUMBER, str(np.dtype(_STORED.get(dtype, dtype))), shape)


def described(paths: Sequence[str], names: Collection[str], storage: Storage) -> dict[str, Spec]:
    """Returns the descriptions of features in the features.json next to some files, by name.

    If a folder of the files has no features.json, that of the parent folder is read. Features
    that are not described are omitted.

    Args:
        paths: The files.
        names: The wanted features.
        storage: Access to remote files.

    Raises:
        OSError: If a features.json exists, but can't be read.
        ValueError: If a features.json is damaged, or two of them differ.
    """
    folders = dict.fromkeys(map(folder_of, paths))
    found = call_each(
        lambda folder: _in_folder(folder, storage),
        [folder for folder in folders if folder],
        WAITING_THREADS if any(map(is_remote, paths)) else 1,
        "dalijax-open",
    )
    specs: dict[str, Spec] = {}
    origins: dict[str, str] = {}
    for path, features in filter(None, found):
        for name in features.keys() & set(names):
            origin = origins.setdefault(name, path)
            if specs.setdefault(name, features[name]) != features[name]:
                raise ValueError(
                    f"{printable(origin)} and {printable(path)} describe {name!r} differently. "
                    "Create a source for each data set, and combine them by a Mixture"
                )
    return specs


def _in_folder(folder: str, storage: Storage) -> tuple[str, dict[str, Spec]] | None:
    """Returns the path and the features of the features.json of a folder, or else of its parent.

    Returns None if neither folder has the file.

    Raises:
        OSError: If a features.json exists, but can't be read.
        ValueError: If a features.json is damaged.
    """
    parent = folder[: folder.rstrip("/").rfind("/") + 1]
    for where in (folder, parent):
        path = f"{where}{_FILE}"
        content = _content(path, storage) if where and not where.endswith("//") else None
        if content is None:
            continue
        try:
            return path, parsed(content)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = pointer_fault(content) or error
            raise ValueError(
                f"{printable(path)} is not a description of features by TFDS: {reason}. Repair "
                "it, or move it to another folder to infer shapes and dtypes from the records"
            ) from error
    return None


def _content(path: str, storage: Storage) -> bytes | None:
    """Returns the content of a file; None if it does not exist or its server denies access."""
    try:
        if is_remote(path):
            return bytes(storage.contents([path], opens=True)[0])
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except PermissionError as error:  # S3 answers 403 for missing files if lists are not allowed
        if not is_remote(path):
            raise
        _log.warning(
            "%s can't be read, so that shapes and dtypes are inferred from the records. %s",
            printable(path),
            printable_text(str(error)),
        )
        return None
