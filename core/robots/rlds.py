"""`RLDS`: steps of robot episodes in TFRecord files, with random access."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..formats.byte_files import Stamp
from ..formats.cached_index import cached_index
from ..formats.field import Field, array_field
from ..formats.index import Index
from ..formats.paths import Path, Paths, path_list
from ..formats.shared_index import shared_columns
from ..messages.printable import printable_repr
from ..order.shuffle import Indices
from ..remote.storage import Storage, open_storage
from ..sources.base import SizeTables
from ..sources.byte_records import ByteRecords
from ..sources.field_names import (
    check_fields,
    is_pair,
    numbered_names,
    suggest_swapped,
    whole_numbers,
)
from ..sources.selection import selected_records
from ..sources.source import Values
from .episode_columns import EpisodeFeatures, is_of_steps
from .episode_index import (
    has_content,
    index_episodes,
    is_valid,
    select_episodes,
    text_of,
)
from .episode_ranges import episode_ranges
from .rlds_features import IMAGE, NUMBER, TEXT, described

_log = logging.getLogger("dalijax")

_EXAMPLE = (
    "{'image': 'steps/observation/image', 'action': ('steps/action', range(16)), "
    "'before': ('steps/observation/image', -1), 'path': 'episode_metadata/file_path'}"
)


_STEP, _EPISODE = "__step__", "__episode__"  # features that no file contains


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of an episode that a field contains.

    Attributes:
        feature: The feature, e.g. "steps/action".
        offsets: The steps of the field, relative to the record's step, e.g. (-1,).
        is_window: Whether the field is an array of the values at all offsets.
        is_mask: Whether the field is the mask of a window.
    """

    feature: str
    offsets: tuple[int, ...]
    is_window: bool
    is_mask: bool = False


class RLDS(ByteRecords):
    """Steps of episodes in RLDS's format (TFDS, Open X-Embodiment, DROID), with random access.

    A record is a step of an episode, so a shuffle is uniform over all steps. Each record of the
    files is a tf.train.Example with an episode. The files are read once, and an index is stored. It
    contains the positions of the images, and the numbers and texts, of the features in ``fields``.
    ``python -m dalijax.sources index`` stores the positions of all features next to the files.

    Each value of ``fields`` is one of these:

    - ``"steps/observation/image"``: the value of this step.
    - ``("steps/observation/image", -1)``: the value of another step, here the previous step. Beyond
      an end of the episode, it is the value of the first or the last step.
    - ``("steps/action", range(16))``: a window [16, ...] of numbers, from this step on. The field
      ``NAME_mask`` is added, bool [16], True for steps inside the episode. Beyond an end, the
      window repeats the first or the last step. Images and texts differ in size, so each step of
      their window has its own field, ``NAME_0``, ``NAME_1``, ...
    - ``"episode_metadata/file_path"``: a value of the episode.
    - ``"__step__"``: the number of the step in its episode, int32 from 0.
    - ``"__episode__"``: the number of the episode in all files, int32 from 0.

    Images are encoded, as uint8 arrays of their bytes. Numbers have the dtypes and shapes of TFDS's
    ``features.json``, which is next to the files or in the parent folder. 64-bit floats become
    float32, because the files contain 32 bits, and 64-bit integers become int32 if all of them fit.
    Without ``features.json``, a single number per step is a scalar, and several numbers are an
    array. Numbers that the graph does not take bypass it, like texts.

    Args:
        paths: A path or several, or URLs. Patterns such as ``*.tfrecord*`` are expanded.
        fields: Maps the name of each field to a feature, or to a feature and steps.
        cache_dir: Directory of stored indexes; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        identity: A string that replaces the digest of names, sizes, values and 64 steps in states.
        storage_options: Credentials and settings of remote files; see docs/sources.md.
        read_ahead: Number of bytes of remote files that are requested before they are needed.
        cache: A folder on a local disk that stores the bytes that were read from remote files, for
            later epochs and runs; see docs/sources.md.
        cache_bytes: Largest size of this folder, such as ``"200GB"``; None: all but a tenth of the
            disk.
        verify: Whether to verify the checksum of each episode when it is indexed. An episode with a
            wrong checksum becomes a single bad record. False accepts damaged episodes.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is cut off, has no steps, or all episodes are damaged; or if an
            episode lacks a feature or has lists of different lengths.
    """

    @knows_its_names
    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, Any],
        *,
        cache_dir: Path | None = None,
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_ahead: int | str = "128MB",
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
        verify: bool = True,
    ):
        parts = _parts(fields)
        storage = open_storage(storage_options, read_ahead, cache, cache_bytes)
        files = path_list(paths, storage)
        self._open = functools.partial(_indexed, files, storage, cache_dir, verify)
        stored = {part.feature for part in parts.values()} - {_STEP, _EPISODE}
        features, index = self._open(sorted(stored))
        self._all_parts = _with_masks(parts, index)
        super().__init__(
            index,
            files,
            {name: _field(part, index) for name, part in self._all_parts.items()},
            {},
            identity,
            index_again=functools.partial(index_episodes, features=features),
            storage=storage,
            has_content=functools.partial(has_content, features),
        )
        self._given_identity = identity
        self._first_steps = np.array(index.arrays["episode.first"])
        self._selected: NDArray[Any] | None = None
        _report_png(index, parts)

    def __len__(self) -> int:
        return int(self._first_records[-1]) if self._selected is None else len(self._selected)

    def __repr__(self) -> str:
        text = super().__repr__().removesuffix(" records)")
        return f"{text} steps of {len(self._first_steps) - 1:,} episodes)"

    @property
    def episode(self) -> NDArray[np.int64]:
        """The number of the episode of each record, int64 [records]."""
        return self._episodes(self._steps(np.arange(len(self))))

    @property
    def first(self) -> NDArray[np.int64]:
        """The number of records before each episode, and in total, int64 [episodes + 1]."""
        if self._selected is None:
            return self._first_steps.copy()
        return np.searchsorted(self._selected, self._first_steps).astype(np.int64)

    def column(self, feature: str) -> NDArray[Any]:
        """Returns the values of a feature for statistics and filters, without reading images.

        Args:
            feature: A feature of numbers or texts, ``"__step__"`` or ``"__episode__"``. If no field
                uses it, the files are read again the first time.

        Returns:
            An array with a row for each record, or for each episode if it is a feature of episodes.
            Numbers are memory-mapped, unless steps were selected; texts are an array of objects.

        Raises:
            ValueError: If the feature contains images, the files lack it, or a record is damaged.
            OSError: If the files have changed.
        """
        index = self._index
        if feature in (_STEP, _EPISODE):
            return self._numbers(feature, np.arange(len(self)))
        if feature not in index.about["kinds"]:
            _, index = self._open([feature])
            if index.about["stamps"] != self._index.about["stamps"]:
                raise OSError(
                    f"{self!r}: a file was changed after the source was opened. Reopen the source"
                )
        kind = index.about["kinds"][feature]
        if kind == IMAGE:
            raise ValueError(
                f"{feature!r} contains images, which stay in the files. Read them by read()"
            )
        self._check_intact(np.arange(len(self)), [])
        rows = index.arrays[f"{feature}.value"]
        if self._selected is not None and is_of_steps(feature):
            rows = rows[self._selected]
        if kind == NUMBER:
            return rows
        texts = text_of(index.arrays, np.arange(len(index.arrays["text.ends"]) - 1))
        return np.array(texts, object)[rows]

    def select(self, steps: Any) -> RLDS:
        """Returns a source with some of the records, over the same index.

        Args:
            steps: A boolean for each record, or increasing numbers of records.

        Raises:
            TypeError: If ``steps`` are neither booleans nor integers.
            ValueError: If no record is left, or ``steps`` are not increasing numbers of records.
        """
        chosen = selected_records(steps, len(self))
        other = copy.copy(self)
        if len(chosen) < len(self):
            is_small = int(self._first_records[-1]) <= 1 << 32
            other._selected = self._steps(chosen).astype(np.uint32 if is_small else np.int64)
            other._identity, other._sizes = None, SizeTables()
            if self._given_identity is not None:
                digest = hashlib.blake2b(other._selected.tobytes(), digest_size=16).hexdigest()
                other._identity = f"{self._given_identity}, steps {digest}"
        return other

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        arrays, columns = self._index.arrays, dict[str, Values]()
        kinds = self._index.about["kinds"]
        for name in names:
            part = self._all_parts[name]
            if part.is_mask:
                rows, low, high = self._steps_and_bounds(part, indices)
                columns[name] = (rows >= low) & (rows <= high)
            elif part.feature in (_STEP, _EPISODE):
                columns[name] = self._numbers(part.feature, indices)
            elif kinds[part.feature] == TEXT:
                numbers = arrays[f"{part.feature}.value"][self._rows(name, indices)]
                columns[name] = text_of(arrays, numbers)
        stored = [name for name in names if name not in columns]
        return {**columns, **super().read(indices, stored)}

    def name(self, index: int) -> str:
        """Returns a record's file, the number of its episode in the file, and that of its step."""
        step = int(self._steps(np.array([index]))[0])
        episode = int(self._episodes(np.array([step]))[0])
        number = int(np.searchsorted(self._first_records, step, side="right")) - 1
        first = self._index.about["episodes"][number]
        return (
            f"{self._files.name(number)}: episode {episode - first}, "
            f"step {step - int(self._first_steps[episode])}"
        )

    def _are_damaged(self, indices: Indices) -> NDArray[np.bool_]:
        damaged = self._index.arrays["episode.damaged"]
        return np.asarray(damaged[self._episodes(self._steps(indices))])

    def _damaged(self, index: int) -> ValueError:
        number = int(self._episodes(self._steps(np.array([index])))[0])
        return ValueError(
            f"{super()._damaged(index)}. To leave it out: source.select(source.episode != {number})"
        )

    def _column(self, name: str) -> str:
        return self._all_parts[name].feature

    def _rows(self, name: str, indices: Indices) -> Indices:
        """Returns the rows of the index: [records], or [records, offsets] for a window."""
        part = self._all_parts[name]
        kind = self._index.about["kinds"][part.feature]
        if not is_of_steps(part.feature) and kind != IMAGE:
            return self._episodes(self._steps(indices))
        if part.offsets == (0,) and not part.is_window:
            return self._steps(indices)
        rows, low, high = self._steps_and_bounds(part, indices)
        return np.clip(rows, low, high)

    def _steps_and_bounds(self, part: _Part, indices: Indices) -> tuple[Indices, Indices, Indices]:
        """Returns the steps of a part for some records, and the bounds of their episodes.

        Returns:
            The steps, which may be outside the episode, and the first and the last step of the
            episode, as numbers among the steps of all files. Three arrays int64 [records]; for a
            window, the steps are [records, offsets], and the bounds are [records, 1].
        """
        steps = self._steps(indices)
        episodes = self._episodes(steps)
        ends = self._first_steps[episodes], self._first_steps[episodes + 1] - 1
        if not part.is_window:
            return steps + part.offsets[0], *ends
        return steps[:, None] + np.array(part.offsets), ends[0][:, None], ends[1][:, None]

    def _steps(self, indices: Indices) -> Indices:
        """Returns the number of each record's step among the steps of all files."""
        if self._selected is None:
            return indices
        return self._selected[indices].astype(np.int64)

    def _numbers(self, feature: str, indices: Indices) -> NDArray[np.int32]:
        """Returns the values of "__step__" or "__episode__" of some records."""
        steps = self._steps(indices)
        episodes = self._episodes(steps)
        numbers = episodes if feature == _EPISODE else steps - self._first_steps[episodes]
        return numbers.astype(np.int32)

    def _episodes(self, steps: Indices) -> Indices:
        """Returns the number of each step's episode among the episodes of all files."""
        return np.searchsorted(self._first_steps, steps, side="right") - 1

    def _content(self) -> tuple[Any, ...]:
        parts = sorted((name, repr(part)) for name, part in self._all_parts.items())
        selected = b"" if self._selected is None else self._selected.tobytes()
        return (*super()._content(), repr(parts), selected)


def _indexed(
    files: Sequence[str],
    storage: Storage,
    cache_dir: Path | None,
    verify: bool,
    names: Sequence[str],
) -> tuple[EpisodeFeatures, Index]:
    """Returns the wanted features with their descriptions, and their index.

    Args:
        files: The files.
        storage: Access to remote files.
        cache_dir: Directory of stored indexes.
        verify: Whether to verify the checksums of episodes.
        names: The wanted features.
    """
    specs = described(files, names, storage)
    features = EpisodeFeatures(tuple(names), specs, storage, verify)
    index = cached_index(
        cache_dir,
        "rlds 2",
        files,
        [*names, sorted((name, repr(spec)) for name, spec in specs.items()), verify],
        lambda: index_episodes(files, features),
        lambda index: is_valid(index, features),
        storage,
        functools.partial(_from_shared, files, features),
    )
    return features, index


def _from_shared(
    files: Sequence[str], features: EpisodeFeatures, stamps: Sequence[Stamp]
) -> Index | None:
    """Returns the index of files from the shared indexes of their folders, or None without them.

    Args:
        files: The files.
        features: The wanted features.
        stamps: The stamps of the files.
    """
    storage = features.storage
    table = shared_columns(
        "rlds",
        files,
        stamps,
        features.needed,
        storage,
        lambda few: episode_ranges(few, storage, features.verify),
    )
    return None if table is None else select_episodes(table, files, stamps, features)


def _parts(fields: Any) -> dict[str, _Part]:
    """Returns the part of an episode that each field contains, from the user's ``fields=``.

    Raises:
        TypeError: If a name or a value has a wrong type.
        ValueError: If there is no field, a window is empty, a feature without steps has offsets, or
            names and features are swapped.
    """
    check_fields(fields, "features", _EXAMPLE)
    parts: dict[str, _Part] = {}
    for name, value in fields.items():
        has_steps = is_pair(value)
        feature, offsets = value if has_steps else (value, 0)
        if not isinstance(feature, str) or not feature:
            raise TypeError(
                f"fields[{name!r}] must be a feature, or a pair of a feature and steps, as in "
                f"{_EXAMPLE}, not {printable_repr(value, 120)}"
            )
        if has_steps and feature in (_STEP, _EPISODE):
            raise ValueError(
                f"fields[{name!r}] has steps, but {feature!r} is of this step. Pass {feature!r} "
                "alone"
            )
        if has_steps and not is_of_steps(feature):
            raise ValueError(
                f"fields[{name!r}] has steps, but {feature!r} is a feature of the episode. Pass "
                f"{feature!r} alone"
            )
        steps = whole_numbers(name, offsets, "steps", "an integer such as -1, or range(16)")
        parts[name] = _Part(feature, steps, not isinstance(offsets, (int, np.integer)))
    names = {name: part.feature for name, part in parts.items()}
    if any("/" in k for k in names) and not any("/" in v or v[:2] == "__" for v in names.values()):
        raise ValueError(suggest_swapped(names, "features"))
    return parts


def _with_masks(parts: Mapping[str, _Part], index: Index) -> dict[str, _Part]:
    """Returns the parts of the fields, and of a field ``NAME_mask`` for each window.

    Images and texts of a window differ in size, so each has its own field.

    Raises:
        ValueError: If a mask, or an image or text of a window, has the name of another field.
    """
    with_masks: dict[str, _Part] = {}
    masks: dict[str, _Part] = {}
    for name, part in parts.items():
        if not part.is_window or index.about["kinds"][part.feature] == NUMBER:
            with_masks[name] = part
        else:
            names = numbered_names(name, part.offsets, parts)
            with_masks |= {k: _Part(part.feature, (step,), False) for k, step in names.items()}
        if not part.is_window:
            continue
        mask = f"{name}_mask"
        if mask in parts:
            raise ValueError(
                f"fields has {mask!r}, which is the mask of the window {name!r}. Rename the field"
            )
        masks[mask] = dataclasses.replace(part, is_mask=True)
    return with_masks | masks


def _field(part: _Part, index: Index) -> Field:
    """Returns the kind of the field that contains a part."""
    if part.feature in (_STEP, _EPISODE):
        return Field(np.dtype(np.int32), bypass=True)
    kind = index.about["kinds"][part.feature]
    if part.is_mask:
        return Field(np.dtype(np.bool_), 1, bypass=True)
    if kind == TEXT:
        return Field(None)
    if kind == IMAGE:
        return Field(np.dtype(np.uint8), 1)
    values = index.arrays[f"{part.feature}.value"]
    steps = (len(part.offsets),) if part.is_window else ()
    return array_field(values.dtype, (*steps, *values.shape[1:]), bypass=True)


def _report_png(index: Index, parts: Mapping[str, _Part]) -> None:
    """Logs the fields of PNG images, which a GPU's JPEG engines do not decode."""
    names = [name for name, part in parts.items() if part.feature in index.about["png"]]
    if names:
        _log.warning(
            "the fields %s are PNG images, which no JPEG engine of a GPU decodes: DALI decodes "
            "them on the CPU. Store cameras as JPEGs if this limits the speed",
            names,
        )
