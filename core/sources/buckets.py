"""`Buckets`: images in batches of one size and aspect ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..arguments import knows_its_names, whole_number
from ..formats.paths import Path
from ..messages.printable import printable_repr
from ..order.buckets import bucket_table, nearest_buckets
from ..order.packing import Table
from ..order.samples import BucketPlan, SamplePlan, Tables
from .image_sizes import read_lengths
from .planned import PlannedSource
from .source import Source

BUCKET = "bucket"  # the parameter of a graph function that receives the Bucket


class Buckets(PlannedSource):
    """Images in buckets of aspect ratios and sizes, as diffusion models train on them.

    All images of a batch have the size of one bucket. The graph function gets a parameter
    ``bucket``, a `dalijax.Bucket`::

        source = sources.Buckets(
            sources.Files("train"), buckets=[(512, 512), (448, 576), (576, 448)]
        )

        @data_iterator(source=source, mask=True)
        def train(data, label, *, bucket):
            images = fn.decoders.image(data, device="mixed")
            return {"image": bucket.crop(images, flip=0.5), "label": label}

    An image belongs to the bucket with the nearest logarithm of the aspect ratio. Of several
    buckets with this ratio, it belongs to the largest that it fills without being enlarged, or else
    to the smallest.

    Each epoch has each record once, and shuffles the batches of all buckets. A bucket's last batch
    follows ``last_batch_policy``: "fill" repeats its last image, and requires a mask, which marks
    the repetitions, or ``last_batch_padded=True``; "drop" leaves the batch out; "partial" delivers
    a smaller batch. ``len()`` counts the batches of all buckets.

    The batches depend only on the seed, the epoch, the batch size and the sizes of the images.
    States, `seek_step`, other devices and processes work as for other sources, but a state can't be
    restored with another batch size.

    The sizes are read once from the first 16 KiB of the images, or from whole images if these bytes
    do not suffice. They are stored, like the index of a `Tar`, if the source detects changes of its
    files, and no map returns the images.

    Args:
        source: A source, or a `Mixture`. Map and select its records before.
        field: The field of the images: encoded, arrays, or paths of kind
            ``Field(np.uint8, 1, is_path=True)``.
        buckets: Height and width of each bucket, in pixels.
        cache_dir: Directory for the stored sizes; None: the default.

    Attributes:
        fields: Names and kinds of the fields of the source.
        buckets: The height and width of each bucket.
        counts: The number of images in each bucket, by its height and width.
        num_unreadable: Number of records that no batch contains, because their sizes can't be read.

    Raises:
        TypeError: If ``source`` is not a source.
        ValueError: If ``buckets`` has no or invalid sizes, the source lacks the field, or the size
            of no image can be read.
    """

    @knows_its_names
    def __init__(
        self,
        source: Source,
        field: str = "data",
        *,
        buckets: Iterable[Sequence[int]],
        cache_dir: Path | None = None,
    ):
        super().__init__(source)
        self.field = field
        self.buckets = _checked(buckets)
        sizes, _, is_known = read_lengths(source, field, None, cache_dir)
        found = nearest_buckets(np.maximum(sizes, 1), self.buckets)
        self.bucket_of = np.where(is_known, found, np.int32(-1))
        counts = np.bincount(found[is_known], minlength=len(self.buckets))
        self.counts = dict(zip(self.buckets, counts.tolist()))
        self.num_unreadable = int((~is_known).sum())
        self.num_shapes = len(self.buckets)
        self._digest = self._digest_of(sizes)

    def __repr__(self) -> str:
        return f"Buckets({self._source!r}, {self.field!r}, buckets={list(self.buckets)})"

    def identity(self) -> str:
        """Returns a text that identifies the records and the buckets; see `Source`."""
        return f"{super().identity()}, buckets {list(self.buckets)}, sizes {self._digest}"

    def plan(
        self, seed: int, shuffle: bool, batch_size: int, policy: LastBatchPolicy, padded: bool
    ) -> SamplePlan:
        """Returns the plan of the batches; see `PlannedSource`."""
        if policy is LastBatchPolicy.FILL and not padded:
            raise ValueError(
                "the last batch of each bucket repeats an image, and without a mask the "
                "repetitions would be trained on. Pass mask=True, drop_remainder=True to leave "
                "these batches out, or last_batch_policy='partial' for smaller batches"
            )
        drops = policy is LastBatchPolicy.DROP

        def table(epoch: int) -> Table:
            buckets = self.bucket_of[self._records_of_epoch(seed, shuffle, epoch)]
            return bucket_table(buckets, batch_size, drops, epoch, seed, shuffle)

        num_batches = None
        if not hasattr(self, "order"):  # each epoch has each record once
            num_batches = sum(
                count // batch_size if drops else -(-count // batch_size)
                for count in self.counts.values()
            )
        tables = Tables(table, num_batches)
        return BucketPlan(len(self), batch_size, policy, True, tables=tables)


def _checked(buckets: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Returns the sizes of buckets, without repetitions.

    Raises:
        ValueError: If a bucket is not a pair of positive integers, or there are none.
    """
    values = [*buckets]
    pairs = [(*value,) if isinstance(value, Iterable) else () for value in values]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            "buckets must be a list of sizes (height, width), such as [(512, 512), (448, 576)], "
            f"not {printable_repr(values)}"
        )
    expected = "a number of pixels, 1 or more"
    checked = [
        (
            whole_number("the height of a bucket", height, expected, 1),
            whole_number("the width of a bucket", width, expected, 1),
        )
        for height, width in pairs
    ]
    return tuple(dict.fromkeys(checked))
