"""`Packed`: images at their own resolution, as rows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names, whole_number
from ..formats.paths import Path
from ..messages.printable import printable_text
from ..order.grids import grids
from ..order.packing import WINDOW, RowLayout, Table, packed_table, places_of_tokens
from ..order.shuffle import Indices
from .image_sizes import read_lengths
from .rows import RowSource
from .source import Source


class Packed(RowSource):
    """Images at their own resolution and aspect ratio, cut into patches and packed into rows.

    A batch has ``batch_size`` rows of ``length`` tokens, as NaViT and NaFlex encoders take them.
    The graph function gets a parameter ``pack``, a `dalijax.Pack`::

        source = sources.Packed(sources.Files("train"), length=1024, images=16, patch=16)

        @data_iterator(source=source, mask=True)
        def train(data, label, *, pack):
            images = fn.decoders.image(data, device="mixed")
            return {"patches": pack.patches(images), "label": pack.per_image(label)}

    A batch also contains these arrays:

    - ``grids``, int32 [rows, images, 2]: height and width of each image in patches; 0 where the row
      has fewer images.
    - ``segment_ids``, int32 [rows, length]: the number of the token's image in its row, from 1; 0
      for padding.
    - ``positions``, int32 [rows, length, 2]: the place (y, x) of a patch in the grid of its image;
      (-1, k) for token k of the text; 0 for padding. Without a field of images, k alone, int32
      [rows, length], and no ``grids``.
    - the mask, if there is one, bool [rows, images]: whether the row has this image. It is False
      for bad records, too.

    An image is resized to a whole number of patches, and made smaller if it has more than
    ``tokens``. Each epoch has each record once, except records whose sizes can't be read. The rows
    depend only on the seed, the epoch and the sizes of the images, so that states, `seek_step` and
    several processes work as for other sources; the number of batches differs a little between
    epochs. The last batch of an epoch ends with blank rows, or is dropped.

    A bad record leaves its place empty if ``on_error`` is "mask": segment ids, patches and text are
    0. Further token fields that the graph packs by `Pack.tokens`, such as targets, must be shifted
    in the records.

    The sizes are read once from the first 16 KiB of the images, or from whole images if these bytes
    do not suffice. They are stored, like the index of a `Tar`, if the source detects changes of its
    files, and no map returns the images or the text; the text of a map is read at each start.

    Args:
        source: A source, or a `Mixture`. Map and select its records before they are packed.
        field: The field of the images: encoded, arrays, or paths of kind
            ``Field(np.uint8, 1, is_path=True)``. None: the images are not cut into patches, so that
            only the text takes tokens; use `Pack.per_image` for the images.
        length: Number of tokens in a row.
        images: The largest number of images in a row. Small numbers leave tokens of rows with small
            images unused, and large numbers leave places of `Pack.per_image` empty.
        patch: Height and width of a patch, in pixels.
        tokens: The largest number of patches of an image; None: ``length``.
        text: A field of integers of one dimension, such as token ids, that follow the patches of
            their image; None: no text.
        enlarge: Whether small images are enlarged to ``tokens`` patches, as `augment.patches` does.
        cache_dir: Directory for the stored sizes; None: the default.

    Attributes:
        fields: Names and kinds of the fields of the source.
        grids: Height and width of each record's image in patches, int32 [records, 2].
        lengths: The number of tokens of each record, int32 [records]; 0 if it is in no row.
        num_unreadable: Number of records that no row contains, because their sizes can't be read.

    Raises:
        TypeError: If ``source`` is not a source.
        ValueError: If a number is out of range, the source lacks a field, there is neither a field
            of images nor a text, the size of no image can be read, or a text does not fit into a
            row, or is empty without a field of images.
    """

    row_fields: tuple[str, ...] = ("grids", "positions", "segment_ids")

    @knows_its_names
    def __init__(
        self,
        source: Source,
        field: str | None = "data",
        *,
        length: int,
        images: int,
        patch: int = 16,
        tokens: int | None = None,
        text: str | None = None,
        enlarge: bool = False,
        cache_dir: Path | None = None,
    ):
        super().__init__(source)
        self.length = whole_number("length", length, "a number of tokens, 1 or more", 1)
        self.most = whole_number("images", images, "a number of images, 1 or more", 1)
        self.patch = whole_number("patch", patch, "a number of pixels, 1 or more", 1)
        limit = self.length if tokens is None else tokens
        limit = whole_number("tokens", limit, "a number of patches, 1 or more", 1)
        self.field, self.text = field, text
        if field is None:
            self.row_fields = self.row_fields[1:]
        if field is None and text is None:
            raise ValueError("pass field=, the field of the images, or text=, a field of token ids")
        kind = source.fields.get(text or "")
        if kind is not None and (kind.dtype is None or kind.ndim != 1):
            raise ValueError(
                "text must be a field of numbers of one dimension, such as token ids, not "
                f"{text!r}: {kind}"
            )
        sizes, texts, is_known = read_lengths(source, field, text, cache_dir)
        fewest = 0 if field is None else 1  # patches
        if (texts + fewest > self.length).any():
            record = int(np.argmax(texts))
            raise ValueError(
                f"{printable_text(source.name(record))} has {texts[record]:,} tokens of text, "
                f"which do not fit into a row of {self.length:,}"
                f"{' with a patch' * fewest}. Use longer rows, or cut the text by source.map"
            )
        if field is None and (empty := is_known & (texts == 0)).any():
            record = int(np.argmax(empty))
            raise ValueError(
                f"{printable_text(source.name(record))} has no token, so that no row would contain "
                "it. Add a token such as the end of the text by source.map, or select the others"
            )
        found = np.zeros(sizes.shape, np.int64)
        if field is not None:
            budget = np.minimum(limit, self.length - texts)
            found = grids(np.maximum(sizes, 1), self.patch, budget, bool(enlarge))
        self.grids = found.astype(np.int32)
        self._texts = texts
        self.lengths = np.where(is_known, found.prod(axis=1) + texts, 0).astype(np.int32)
        self.num_unreadable = int((~is_known).sum())
        self._digest = self._digest_of(self.grids, self.lengths)

    def __repr__(self) -> str:
        text = "" if self.text is None else f", text={self.text!r}"
        return (
            f"Packed({self._source!r}, {self.field!r}, length={self.length}, images={self.most}, "
            f"patch={self.patch}{text})"
        )

    def identity(self) -> str:
        """Returns a text that identifies the records and the rows; see `dalijax.sources.Source`."""
        return (
            f"{super().identity()}, packed {self.length} {self.most} {self.patch} in windows of "
            f"{WINDOW}, lengths {self._digest}"
        )

    def row_table(self, seed: int, shuffle: bool, epoch: int) -> Table:
        """Returns the rows of an epoch."""
        lengths = self.lengths[self._records_of_epoch(seed, shuffle, epoch)]
        return packed_table(lengths, self.length, self.most, epoch, seed, shuffle)

    def row_values(
        self, layout: RowLayout, records: Indices, valid: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Returns the grids of the images of rows, and segment ids and positions of the tokens."""
        places, segment_ids = places_of_tokens(
            layout, self.grids[records], self._texts[records], valid, self.length
        )
        if self.field is None:
            return {"positions": places[..., 1], "segment_ids": segment_ids}
        shapes = layout.by_row(self.grids[records] * valid[:, np.newaxis])
        return {"grids": shapes, "positions": places, "segment_ids": segment_ids}
