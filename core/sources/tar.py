"""Tars of samples (WebDataset), by number."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .byte_records import ByteRecords, Decode, as_json, as_text
from .index_of import index_of
from .order import Indices
from .paths import Path, Paths, home_expanded, path_list, path_text
from .sound_index import is_sound
from .source import Field, Values
from .tar_index import ABOUT, columns_of, extensions_of, index_tars, kinds_of, sample_key

_log = logging.getLogger("dalijax")

_DECODERS: Mapping[str, Decode] = {"text": as_text, "json": as_json}


class Tar(ByteRecords):
    """Samples of tars in WebDataset's format, by number: no buffer is needed to shuffle them.

    Members that follow one another and have the same name up to the first dot are a sample; the
    text after that dot is the extension. The headers are read once, and the index is stored.
    Concatenated tars (``cat a.tar b.tar``) are read to the end.

    The last part of an extension determines the kind of a field, as in WebDataset: ``cls``,
    ``cls2``, ``class``, ``count``, ``index``, ``inx`` and ``id`` are int32 scalars, which the
    index contains; ``txt``, ``text``, ``transcript``, ``json`` and ``jsn`` bypass the graph; all
    others are uint8 [bytes]. So ``label.cls`` is a number, and ``x.npy`` is bytes.

    Args:
        paths: A path or several, or URLs if fsspec is installed. ``*.tar`` and ``{000..127}.tar``
            are expanded.
        fields: The field of each extension, in lower case; ``"jpg;png"`` is either of them. As in
            WebDataset, ``__key__`` is the sample's name and ``__url__`` its tar.
        missing: "raise" or "skip" samples that lack a member.
        index_paths: Index files of DALI's ``wds2idx``. They are not needed and not read.
        cache_dir: Folder of stored indexes; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        identity: Text that replaces the digest of names, sizes and 64 samples in states.

    Attributes:
        fields: The names and kinds of the fields.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged or cut off, or has no samples, or samples lack a field.
    """

    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, str],
        *,
        missing: str = "raise",
        index_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        cache_dir: Path | None = None,
        identity: str | None = None,
    ):
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing must be 'raise' or 'skip', not {missing!r}")
        if index_paths is not None:
            warnings.warn(
                "Tar does not read index_paths: leave them out. It reads the headers of the tars "
                "once, and stores an index of its own (cache_dir=)",
                stacklevel=2,
            )
        tars = path_list(paths)
        named = dict(fields) if isinstance(fields, Mapping) else {}
        self._described = {named.pop(k): v for k, v in _DESCRIPTIONS.items() if k in named}
        if self._described:
            fields = named
        extensions = extensions_of(fields)
        if both := set(self._described) & set(extensions.values()):
            raise ValueError(f"fields has a name twice: {sorted(both)}")
        index = index_of(
            None if cache_dir is None else home_expanded(path_text(cache_dir)),
            "tar 4",
            tars,
            extensions,
            lambda: index_tars(tars, extensions),
            lambda index: is_sound(index, columns_of(extensions), ABOUT),
        )
        _check_complete(tars, fields, index.about, missing)
        kinds: dict[str, Field] = {}
        decoders: dict[str, Decode] = {}
        for name, kind in kinds_of(extensions).items():
            if kind == "number":
                kinds[name] = Field(index.arrays[f"{name}.value"].dtype)
            elif kind in _DECODERS:
                kinds[name], decoders[name] = Field(None), _DECODERS[kind]
            else:
                kinds[name] = Field(np.dtype(np.uint8), 1)
        kinds |= dict.fromkeys(self._described, Field(None))
        super().__init__(index, tars, kinds, decoders, identity)

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """See `dalijax.sources.Source`."""
        columns = super().read(indices, [name for name in names if name not in self._described])
        for name in names:
            if name in self._described:
                describe = self._described[name]
                columns[name] = [describe(self, index) for index in indices.tolist()]
        return columns

    def _key(self, index: int) -> str:
        number, start = self._place(index)
        return sample_key(self._files.file(number), start)

    def _url(self, index: int) -> str:
        return self._files.paths[self._place(index)[0]]

    def name(self, index: int) -> str:
        """The tar, and the sample's name in it."""
        try:
            return f"{self._url(index)}: {self._key(index)}"
        except (OSError, ValueError):
            return f"{self._url(index)}: the sample at byte {self._place(index)[1]:,}"


_DESCRIPTIONS: Mapping[str, Callable[[Tar, int], str]] = {"__key__": Tar._key, "__url__": Tar._url}


def _check_complete(
    tars: Sequence[str], fields: Mapping[str, str], about: Mapping[str, Any], missing: str
) -> None:
    """Raises ValueError if samples that lack a field can't be left out; the error has the cure."""
    count, reasons = about["incomplete"], "; ".join(about["reasons"])
    cure = "Leave them out by missing='skip'"
    if about["scattered"]:
        cure = (
            f"The members of {', '.join(about['scattered'])} do not follow one another. Pack the "
            "tar again, sorted by name: tar --sort=name -cf NEW.tar -C FOLDER ."
        )
    elif about["has_links"]:
        cure = (
            "A link has no content of its own. Pack the tar again: tar --dereference "
            "--hard-dereference --sort=name -cf NEW.tar -C FOLDER ."
        )
    elif set(fields.values()) <= set(about["extensions"]):
        right = {name: extension for extension, name in fields.items()}
        cure = f"fields= maps each extension to a field's name: did you mean {right}?"
    if count and missing == "raise":
        raise ValueError(f"{count:,} samples lack a member that fields= names: {reasons}. {cure}")
    if not about["first"][-1]:
        what = f": {reasons}. {cure}" if count else ""
        raise ValueError(f"no sample of {', '.join(tars[:3])} has all of {sorted(fields)}{what}")
    if about["scattered"] or about["has_links"]:
        _log.warning("missing='skip' leaves out %s samples: %s. %s", f"{count:,}", reasons, cure)
