"""`MultiImage`: records with several images, such as the pages of a document."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from ..arguments import knows_its_names, whole_number
from ..formats.field import Field
from ..formats.image_size import look_at
from ..formats.paths import Path
from ..messages.printable import printable_text
from ..order.packing import RowLayout, Table
from ..order.shuffle import Indices
from ..random.hashing import Bits, fold
from ..remote.range_cache import Lease
from .image_sizes import read_lengths
from .rows import RowSource
from .source import Order, Source, Values, announce, order_of, read_records, record_count
from .values import leaf

_MOST_TRIED = 64  # images that may be damaged


class MultiImage(RowSource):
    """Records with several images. DALI decodes only the images that exist.

    A row of a batch is a record. The graph function processes single images, each with the other
    fields of its record, and gets a parameter ``pack``::

        pages = sources.Records(documents, kinds={"images": sources.Field(None)})
        source = sources.MultiImage(pages, "images", images=8)

        @data_iterator(source=source, mask=True)
        def train(images, label, *, draw, pack):
            image = fn.decoders.image(images, device="mixed")
            image = augment.random_resized_crop(image, 224, draw=draw)
            return {"images": pack.per_image(image), "label": pack.per_row(label)}

    The batch has the images [rows, images, 224, 224, 3], with zeros where a record has fewer, the
    labels [rows], and ``num_images``, int32 [rows]. Text and other values that bypass the graph
    have one value per row. Random numbers are drawn for each image. If an image of a record is bad,
    the whole record is. With ``on_error="mask"``, its row is blank if an image can't be decoded.

    The images of all records are counted once, at construction, by reading the records; no batch
    contains records that can't be read. The counts are stored, like the index of a `Tar`, if the
    source detects changes of its files, and no map returns the images.

    Args:
        source: A source, or a `Mixture`.
        field: The field of the images, of kind ``Field(None)``: a list of encoded images, or of
            arrays of one dtype, in each record. It may be empty.
        images: The largest number of images of a record, 2 or more.
        cache_dir: Directory for the stored counts; None: the default.

    Attributes:
        fields: Names and kinds of the fields of the source; ``field`` has the kind of one image.

    Raises:
        TypeError: If ``source`` is not a source, or the field does not contain lists.
        ValueError: If a number is out of range, the source lacks the field, no record has an image,
            or a record has more than ``images``.
    """

    row_fields = ("num_images",)

    @knows_its_names
    def __init__(self, source: Source, field: str, *, images: int, cache_dir: Path | None = None):
        super().__init__(source)
        self.most = whole_number("images", images, "a number of images, 2 or more", 2)
        self.length = 1  # a row is one record
        self.field = field
        kind = source.fields.get(field)
        if kind is not None and kind.dtype is not None:
            raise TypeError(
                f"the field {field!r} must contain lists of images, but it is {kind}. Declare its "
                "kind as Field(None), e.g. by kinds= of Records or fields= of source.map"
            )
        _, counts, is_known = read_lengths(source, None, field, cache_dir)
        if (counts > self.most).any():
            record = int(np.argmax(counts))
            raise ValueError(
                f"{printable_text(source.name(record))} has {counts[record]:,} images, more than "
                f"images={self.most}. Pass a larger number, or cut the lists by source.map"
            )
        self._counts, self._is_known = counts, is_known
        if not hasattr(source, "order"):  # each epoch has each record once
            self.num_rows = int(is_known.sum())
        if not counts.any():
            raise ValueError(f"no record has an image in {field!r}. Pass the field of the images")
        self._example = self._find_example()
        self.fields = {**source.fields, field: Field(self._example.dtype, self._example.ndim)}
        self._digest = self._digest_of(counts, is_known)

    def _find_example(self) -> NDArray[Any]:
        """Returns the image to decode in place of the images of records without images.

        If there are such records, damaged images are passed over, since they would be blamed.
        """
        images = map(self._first_image, np.flatnonzero(self._counts)[:_MOST_TRIED].tolist())
        first = next(images)
        is_encoded = first.dtype == np.uint8 and first.ndim == 1
        if self._counts.all() or not is_encoded or _can_decode(first):
            return first
        return next(filter(_can_decode, images), first)

    def _first_image(self, record: int) -> NDArray[Any]:
        """Returns the first image of a record of the source."""
        records = np.array([record])
        columns, errors = read_records(self._source, records, [self.field], fold(0, 0, records))
        if errors:  # it was read before
            raise errors[0]
        return leaf(columns[self.field][0][0])

    def __len__(self) -> int:
        return len(self._source) * self.most  # some of these places of images are not used

    def __repr__(self) -> str:
        return f"MultiImage({self._source!r}, {self.field!r}, images={self.most})"

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        return f"{super().identity()}, at most {self.most} images, counts {self._digest}"

    def has_images(self, indices: Indices) -> NDArray[np.bool_]:
        """Returns whether the record of each image has images."""
        return self._counts[indices // self.most] > 0

    @property
    def order(self) -> Any:
        """The order of the images; each record has ``images`` places."""
        return self._order

    def _order(self, seed: int, shuffle: bool) -> Order:
        order_of_records = order_of(self._source, seed, shuffle)

        def order(samples: Indices) -> tuple[Indices, Indices]:
            positions, numbers = np.divmod(samples, self.most)
            records, epochs = order_of_records(positions)
            return records * self.most + numbers, epochs

        return order

    @property
    def _record_count(self) -> int:
        return record_count(self._source) * self.most

    def row_table(self, seed: int, shuffle: bool, epoch: int) -> Table:
        """Returns the rows of an epoch: the images of each record."""
        records = self._records_of_epoch(seed, shuffle, epoch)
        (positions,) = np.nonzero(self._is_known[records])
        counts = np.maximum(self._counts[records[positions]], 1).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        numbers = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return Table(np.repeat(positions * self.most, counts) + numbers, starts)

    def row_values(
        self, layout: RowLayout, records: Indices, valid: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Returns the numbers of images of rows, 0 for rows that are not valid."""
        counts = self._counts[records // self.most] * self.mask_of_records(layout, valid)
        return {"num_images": self.column_of_rows(layout, counts)}

    def mask_of_records(self, layout: RowLayout, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the mask of images: False for all images of a row if one can't be used."""
        if layout.is_blank:
            return valid
        rows, _ = layout.places
        return ~layout.by_row(~valid).any(axis=1)[rows]

    def column_of_rows(self, layout: RowLayout, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the value of each row: that of its first image."""
        first: NDArray[Any] = layout.by_row(values)[:, 0]
        return first

    def _numbers_in_source(self, indices: Indices) -> Indices:
        return indices // self.most

    def _read_keyed(
        self, indices: Indices, names: Sequence[str], keys: Bits | None
    ) -> tuple[dict[str, Values], dict[int, Exception]]:
        records, numbers = np.divmod(indices, self.most)
        unique, first, inverse = np.unique(records, return_index=True, return_inverse=True)
        if not names:
            return {}, {}
        keys = None if keys is None else keys[first]
        columns, errors = read_records(self._source, unique, names, keys)
        places = inverse.tolist()
        values: dict[str, Values] = {}
        for name, column in columns.items():
            if name == self.field:
                images = zip(places, numbers.tolist())
                values[name] = [self._image(column[place], number) for place, number in images]
            elif isinstance(column, np.ndarray):
                values[name] = column[inverse]
            else:
                values[name] = [column[place] for place in places]
        return values, {row: errors[place] for row, place in enumerate(places) if place in errors}

    def _image(self, images: Any, number: int) -> Any:
        """Returns an image of a record; another record's image if the record has none.

        Stand-ins may have fewer images than the record that they replace.
        """
        if images is None:  # the record can't be read
            return None
        return leaf(images[number % len(images)]) if len(images) else self._example

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        if name == self.field:
            return Source.sizes(self, indices, name, data)
        return super().sizes(indices, name, data)

    def name(self, index: int) -> str:
        """Returns the name of a record, and the number of the image."""
        record, number = divmod(index, self.most)
        return f"{self._source.name(record)}, image {number}"

    def _record_names(self, indices: Indices) -> list[str]:
        return [self.name(index) for index in indices.tolist()]

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        records, first = np.unique(indices // self.most, return_index=True)
        return announce(self._source, records, names, turns[first], freed)


def _can_decode(image: NDArray[np.uint8]) -> bool:
    """Returns whether DALI decodes an encoded image, on a CPU."""
    if look_at(image).fault:  # would crash some decoders
        return False
    pipeline = Pipeline(1, 1, None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(source=lambda: [image], dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded))
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True
