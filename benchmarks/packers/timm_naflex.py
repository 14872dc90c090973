"""timm's NaFlex loader: batches of one sequence length, with a budget of tokens per batch.

``NaFlexMapDatasetWrapper`` chooses a sequence length for each batch, resizes each image to the
largest grid of at most this number of patches, and pads it to this number: a row is one image.
Small images are enlarged, as by timm's transforms. A patch is one pixel here, so that a token is
one float32. ``DataLoader`` has no state; a resumed run reads the batches again and skips them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from timm.data.naflex_dataset import NaFlexMapDatasetWrapper
from timm.data.naflex_transforms import get_image_size_for_seq

from packers import protocol
from packers.protocol import Packing, Row

PATCH = 16


class Images:
    """Sizes and numbers of images; counts the images that were read."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def __len__(self) -> int:
        return len(self._packer.lengths)

    def __getitem__(self, number: int) -> Any:
        self._packer.reads += 1
        return (tuple(self._packer.sizes[number].tolist()), number), number


class Resize:
    """Makes an image of the grid's size, whose pixels contain the image's number + 1."""

    def __init__(self, max_seq_len: int, patch_size: Any) -> None:
        self._tokens = max_seq_len

    def __call__(self, image: Any) -> Any:
        size, number = image
        height, width = get_image_size_for_seq(size, PATCH, self._tokens)[1]
        return torch.full((1, height // PATCH, width // PATCH), float(number + 1))


class Packer(protocol.Packer):
    """The wrapper with one sequence length, or with several."""

    stateful = False
    packages = ("timm", "torch")

    def __init__(self, job: protocol.Job, **options: Any) -> None:
        super().__init__(job, **options)
        self.sizes = np.load(job.sizes)[: job.images]
        self._wrapper = self.wrapper()

    def wrapper(self) -> Any:
        """Returns the wrapper, at the start of the epoch."""
        with contextlib.redirect_stdout(io.StringIO()):
            return NaFlexMapDatasetWrapper(
                Images(self),
                patch_size=1,
                seq_lens=tuple(self.job.tokens // part for part in self.options["parts"]),
                max_tokens_per_batch=self.job.rows * self.job.row,
                transform_factory=Resize,
                seed=self.job.seed,
                epoch=0,
                distributed=self.job.processes > 1,
                rank=self.job.process,
                world_size=self.job.processes,
                batch_divisor=1,
            )

    def work(self) -> Any:
        return self.wrapper()._prepare_epoch_batches(0)

    def packing(self, result: Any) -> Packing:
        images, tokens, widths, complete = [], [], [], self.lengths.astype(np.int64)
        for batch, numbers in self.loaded():
            valid = batch["patch_valid"].numpy().sum(1)
            values = batch["patches"].numpy()[:, 0, 0].astype(np.int64) - 1
            if values.tolist() != numbers.tolist():
                raise RuntimeError("the patches don't belong to the labels")
            images.append(values)
            tokens.append(valid)
            widths.append(np.full(len(values), batch["seq_len"]))
            complete[values] = valid  # the image was resized to the batch's sequence length
        image = np.concatenate(images)
        widths, tokens = np.concatenate(widths), np.concatenate(tokens)
        return Packing(image, np.arange(len(image)), tokens, widths, complete)

    def loaded(self) -> Iterator[Any]:
        """Yields the batches of PyTorch's DataLoader, as `create_naflex_loader` makes it."""
        loader = torch.utils.data.DataLoader(self._wrapper, batch_size=None)
        if hasattr(loader, "state_dict"):
            raise RuntimeError("DataLoader has a state; use it")
        yield from loader

    def batches(self) -> Iterator[list[Row]]:
        for _, numbers in self.loaded():
            yield [[(number, int(self.lengths[number]))] for number in numbers.tolist()]
