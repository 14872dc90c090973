"""`show`: draws batches on a page or a contact sheet."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import nvidia.dali

from ...api import IteratorFunction
from ...arguments import whole_number
from ...formats.atomic_file import write_output
from ...messages.printable import printable_repr
from .batches import take
from .contents import Contents, contents_of
from .page import frame, page
from .sheet import sheet

SAMPLES = 32
_LONGEST = 200  # the maximum number of characters of a title


@dataclasses.dataclass(frozen=True)
class Page:
    """A drawing of batches, which a notebook displays.

    Attributes:
        title: The title of the page.
        batches: The contents of each batch: outputs with their statistics and samples.
        failures: Messages of failures, with the names of files or records if they are known.
        samples: The maximum number of samples to draw per output.
    """

    title: str
    batches: Sequence[Contents]
    failures: Sequence[str]
    samples: int

    @functools.cached_property
    def html(self) -> str:
        """Returns the page as self-contained HTML."""
        versions = f"DALI {nvidia.dali.__version__}, jax {jax.__version__}"
        return page(self.title, versions, self.batches, self.failures, self.samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page (.html) or a picture (.png).

        Raises:
            ValueError: If the suffix is neither .html nor .png.
        """
        path = Path(path)
        check_suffix(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            content = io.BytesIO()
            sheet(self.batches, self.failures, self.samples).save(content, "PNG")
            write_output(path, content.getvalue())
        else:
            write_output(path, self.html.encode())

    def _repr_html_(self) -> str:
        return frame(self.html)

    def __repr__(self) -> str:
        return f"<Page of {self.title}: {len(self.batches)} batches, {len(self.failures)} failures>"


def _title(data: Any) -> str:
    """Returns the title of a page for the argument of `show`."""
    if isinstance(data, (Mapping, tuple)) or hasattr(data, "shape"):
        return "A batch"
    name: str = getattr(data, "__name__", None) or repr(data)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]} ..."


def check_suffix(path: Path) -> None:
    """Raises a ValueError unless a path ends in .html or .png."""
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"{str(path)!r} must end in .html, for a page, or .png, for a sheet")


def show(
    data: Any,
    *,
    batches: int = 1,
    samples: int = SAMPLES,
    mask: str | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    **call: Any,
) -> Page:
    """Draws batches: images, videos, sounds, text and numbers, with statistics of each output.

    An output of floats ``NAME`` [batch, steps, ...] with a mask ``NAME_mask``, bool [batch, steps],
    is a window: its numbers are plotted, and masked steps are gray. If a batch has several outputs
    of images or windows, each row of the drawing shows the outputs of a sample.

    Args:
        data: One of these: an iterator function of `dalijax.data_iterator`, with its arguments in
            ``call``; an iterator of dalijax, which keeps its position (a single batch is peeked,
            after several batches the iterator's state is restored); a dataset of Grain or tf.data
            or a `DALIDataset`, of which a new iterator is created; a source of `dalijax.sources`,
            whose records are drawn as they are stored; a batch.
        batches: The number of batches.
        samples: The maximum number of samples to draw per output. Statistics are of all samples.
        mask: The name of the output that marks valid samples, a bool array of shape [batch]; by
            default the iterator's mask, or "mask".
        classes: The names of classes, in the order of their numbers, by the name of an output.
        **call: Arguments of an iterator function, such as ``batch_size``.

    Returns:
        A `Page`, which a notebook displays, and which can be saved.

    Raises:
        TypeError: If ``data`` has no batches, or an argument in ``call`` is unknown.
        ValueError: If the batch has no output with a given name, or a number is less than 1.
        Exception: An error of the iterator function. Errors of batches are drawn instead.
    """
    batches = whole_number("batches", batches, "a whole number of batches, 1 or more", 1)
    samples = whole_number("samples", samples, "a whole number of samples, 1 or more", 1)
    is_function = isinstance(data, IteratorFunction)
    if not is_function and call:
        raise TypeError(
            f"{[*call]} are arguments of an iterator function (the result of "
            f"dalijax.data_iterator), not of {printable_repr(data)}: omit them, or pass the "
            "function"
        )
    if is_function and mask is not None:
        call["mask"] = mask
    batches_taken = take(data, batches, call, samples)
    contents = [
        contents_of(
            batch,
            title,
            mask=batches_taken.mask if mask is None else mask,
            classes=classes,
            device_axis=batches_taken.device_axis,
        )
        for title, batch in batches_taken.batches
    ]
    return Page(_title(data), contents, batches_taken.failures, samples)
