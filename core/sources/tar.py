"""Tars of samples (WebDataset), by number."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from .byte_records import ByteRecords, Decode, as_json, as_text
from .index import kept
from .indexed_paths import content_key, path_list
from .source import Field
from .tar_index import extensions_of, fits, index_tars, sample_name

# As WebDataset reads them.
_DECODERS: Mapping[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), as_text),
    **dict.fromkeys(("json", "jsn"), as_json),
}


class Tar(ByteRecords):
    """Samples of tars as WebDataset packs them, by number: no buffer shuffles them.

    Members that follow one another and have the same name up to the first dot are a sample, and
    what follows the dot says which. DALI's index files (``wds2idx``) are used where they lie
    beside the tars and fit; else the headers are walked once, and the index is kept.

    Args:
        paths: Paths, or URLs where fsspec is installed.
        fields: The field of each extension that is wanted; ``"jpg;png"`` is either of them.
            ``cls`` and the like are int32 scalars, which the index holds; ``txt`` and ``json``
            pass the graph by; others are uint8 [bytes].
        missing: What becomes of samples that lack one of them: "raise" or "skip".
        index_paths: DALI's index files of the tars, in the same order.
        cache_dir: Where indexes are kept; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        identity: What stands for the digest of names, sizes and 64 samples in states.

    Attributes:
        fields: The names and kinds of the fields.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged or cut off, has no samples, or samples lack a field.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Mapping[str, str],
        *,
        missing: str = "raise",
        index_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        identity: str | None = None,
    ):
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing must be 'raise' or 'skip', not {missing!r}")
        tars = path_list(paths)
        indexes = path_list(index_paths) if index_paths is not None else None
        if indexes is not None and len(indexes) != len(tars):
            raise ValueError(f"there are {len(tars)} tars and {len(indexes)} index_paths")
        extensions = extensions_of(fields)
        index = kept(
            None if cache_dir is None else os.fspath(cache_dir),
            content_key("tar 1", tars, extensions),
            lambda: index_tars(tars, indexes, extensions),
            lambda index: fits(tars, index),
        )
        count, reasons = index.about["incomplete"], "; ".join(index.about["reasons"])
        if missing == "raise" and count:
            raise ValueError(
                f"{count:,} samples lack a member that fields= wants: {reasons}. Leave them out by "
                "missing='skip'"
            )
        if not index.about["first"][-1]:
            raise ValueError(
                f"no sample of {', '.join(tars[:3])} has all of {sorted(fields)}"
                + f": {reasons}" * bool(reasons)
            )
        kinds: dict[str, Field] = {}
        decoders: dict[str, Decode] = {}
        for wanted, name in fields.items():
            decode = next((_DECODERS[e] for e in wanted.lower().split(";") if e in _DECODERS), None)
            if f"{name}.value" in index.arrays:
                kinds[name] = Field(index.arrays[f"{name}.value"].dtype)
            elif decode is not None:
                kinds[name], decoders[name] = Field(None), decode
            else:
                kinds[name] = Field(np.dtype(np.uint8), 1)
        super().__init__(index, tars, kinds, decoders, identity)

    def name(self, index: int) -> str:
        """The tar, and the sample's name in it."""
        number, start = self._place(index)
        try:
            return sample_name(self._files.file(number), start)
        except OSError:
            return f"{self._files.paths[number]}: the sample at byte {start:,}"
