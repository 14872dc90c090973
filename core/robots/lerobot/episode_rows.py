"""Reads the rows of episodes from LeRobot's parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays.dtypes import out_of_range
from ...environment.extras import extra
from .dataset import IMAGE, TEXT, VIDEO, Episode, Feature

Column = NDArray[Any] | list[bytes]


class EpisodeRows:
    """Reads the rows of episodes from parquet files.

    Keeps the row groups that were read last in memory, because the next episode may be in the same
    groups.

    Args:
        features: The features to read, by name.

    Raises:
        ImportError: If pyarrow is not installed.
    """

    def __init__(self, features: Mapping[str, Feature]):
        with extra("lerobot", "pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq

        self._arrow, self._parquet = pa, pq
        self._features = {name: f for name, f in features.items() if f.dtype != VIDEO}
        self._path = ""
        self._file: Any = None
        self._numbers: NDArray[Any] = np.zeros(0)  # episode of each row of the file
        # The first row of each row group, and the number of rows.
        self._group_starts: NDArray[Any] = np.zeros(1)
        self._groups: tuple[int, int] = (0, 0)
        self._table: Any = None

    def read(self, episode: Episode) -> dict[str, Column]:
        """Reads the steps of an episode, and returns a column for each feature.

        Returns:
            For each feature that is not a video, an array [length, ...] of numbers, or a list with
            the bytes of each text (UTF-8) or encoded image.

        Raises:
            OSError: If the file can't be read.
            ValueError: If the rows are missing, or not as info.json describes them.
        """
        try:
            table = self._rows(episode)
        except self._arrow.ArrowException as error:
            raise ValueError(f"it is not a readable parquet file: {error}") from error
        columns: dict[str, Column] = {}
        for name, feature in self._features.items():
            if name not in table.column_names:
                raise ValueError(f"it has no column {name!r}, which meta/info.json describes")
            try:
                columns[name] = self._column(table[name], feature)
            except (ValueError, TypeError, self._arrow.ArrowException) as error:
                raise ValueError(f"the column {name!r} {error}") from error
        return columns

    def _rows(self, episode: Episode) -> Any:
        """Returns the rows of an episode as a pyarrow table."""
        if self._path != episode.data:
            self._path, self._table = "", None
            self._file = self._parquet.ParquetFile(episode.data)
            metadata = self._file.metadata
            sizes = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
            self._group_starts = np.cumsum([0, *sizes])
            if "episode_index" not in self._file.schema_arrow.names:
                raise ValueError("it has no column 'episode_index'")
            self._numbers = self._file.read(["episode_index"])["episode_index"].to_numpy()
            self._path = episode.data
        rows = np.flatnonzero(self._numbers == episode.number)
        if len(rows) != episode.length:
            raise ValueError(
                f"it has {len(rows):,} rows of the episode, but meta has {episode.length:,} steps"
            )
        if len(rows) and rows[-1] - rows[0] >= len(rows):
            raise ValueError("the rows of the episode are not adjacent")
        if not len(rows):
            return self._file.schema_arrow.empty_table()
        low = int(np.searchsorted(self._group_starts, rows[0], side="right")) - 1
        high = int(np.searchsorted(self._group_starts, rows[-1], side="right"))
        if self._table is None or self._groups != (low, high):
            names = [name for name in self._file.schema_arrow.names if name in self._features]
            self._table = self._file.read_row_groups(list(range(low, high)), names)
            self._groups = low, high
        return self._table.slice(int(rows[0] - self._group_starts[low]), len(rows))

    def _column(self, column: Any, feature: Feature) -> Column:
        """Returns the values of a pyarrow column; see `read`.

        Raises:
            ValueError: If the column does not match the feature.
        """
        if column.null_count:
            raise ValueError("has rows without a value")
        if feature.dtype == IMAGE:
            images = column.combine_chunks()
            if not self._arrow.types.is_struct(images.type):
                raise ValueError(f"contains {images.type} instead of images")
            data = images.field("bytes").to_pylist()
            if None in data:
                raise ValueError("has images without bytes. Store the images in the parquet file")
            return data
        values, lengths = _flattened(column, self._arrow)
        shape = feature.shape or ((1,) if lengths else ())
        if lengths != [{size} for size in shape] and len(column):
            sizes = [sorted(sizes) for sizes in lengths]
            raise ValueError(f"has lists of the lengths {sizes}, but info.json has {feature.shape}")
        if feature.dtype == TEXT:
            if not self._arrow.types.is_string(values.type):
                raise ValueError(f"contains {values.type} instead of strings")
            return [text.encode() for text in values.to_pylist()]
        array = values.to_numpy(zero_copy_only=False)
        return _cast(array, np.dtype(feature.dtype)).reshape(len(column), *feature.shape)


def _flattened(column: Any, arrow: Any) -> tuple[Any, list[set[int]]]:
    """Flattens the nested lists of a pyarrow column.

    Returns:
        The values, and for each level of nesting the set of the lengths of its lists.

    Raises:
        ValueError: If a list has a missing value.
    """
    array = column.combine_chunks()
    lengths = []
    while True:
        if isinstance(array, arrow.ExtensionArray):  # e.g. Array2D of Hugging Face's datasets
            array = array.storage
        if arrow.types.is_fixed_size_list(array.type):
            lengths.append({array.type.list_size})
        elif arrow.types.is_list(array.type) or arrow.types.is_large_list(array.type):
            lengths.append(set(array.value_lengths().unique().to_pylist()))
        else:
            break
        array = array.flatten()
    if array.null_count:
        raise ValueError("has lists without a value")
    return array, lengths


def _cast(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns values in the dtype that info.json has.

    Raises:
        ValueError: If integers, floats or bools are mixed up, or an integer does not fit into the
            dtype, or into int64.
    """
    kinds: Sequence[str] = ("iu", "f", "b")
    kind = next(kind for kind in kinds if dtype.kind in kind)
    if values.dtype.kind not in kind:
        raise ValueError(f"contains {values.dtype}, but info.json has {dtype}")
    if dtype.kind in "iu":
        # Records have signed integers of 64 bits.
        limit = np.dtype(np.int64) if dtype == np.uint64 else dtype
        outside = out_of_range(values, limit)
        if outside.any():
            raise ValueError(f"has the number {values[np.argmax(outside)]}, not of {limit}")
    return values.astype(dtype)
