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
from .annotations import annotated
from .batches import take
from .contents import Contents, contents_of
from .page import frame, page
from .placing import shortened
from .sheet import sheet

SAMPLES = 32
_MOST_NAMES = 6  # names of outputs in a title
_LONGEST = 60  # the maximum number of characters of a name


@dataclasses.dataclass(frozen=True)
class Page:
    """A drawing of batches, which a notebook displays.

    Attributes:
        title: The title of the page.
        batches: The contents of each batch: outputs with their statistics and samples.
        failures: Messages of failures, with the names of files or records if they are known.
        samples: The maximum number of samples to draw per output.
        origin: The name of the iterator function, or the type of the data.
    """

    title: str
    batches: Sequence[Contents]
    failures: Sequence[str]
    samples: int
    origin: str = ""

    @functools.cached_property
    def html(self) -> str:
        """Returns the page as self-contained HTML."""
        about = f"{self.origin}, DALI {nvidia.dali.__version__}, JAX {jax.__version__}"
        return page(self.title, about, self.batches, self.failures, self.samples)

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
        return f"<Page of {self.title}; {len(self.failures)} failures>"


def _title(batches: Sequence[Contents]) -> str:
    """Returns the title of a page, such as "Batch of 8 records: image, boxes, labels"."""
    if not batches:
        return "No batches"
    names = [shortened(output.name, _LONGEST) for output in batches[0].outputs]
    if len(names) > _MOST_NAMES:
        names = [*names[:_MOST_NAMES], f"and {len(names) - _MOST_NAMES} more"]
    records = batches[0].count
    count = "Batch" if len(batches) == 1 else f"{len(batches)} batches"
    return f"{count} of {records:,} record{'s' * (records != 1)}: {', '.join(names) or 'empty'}"


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
    classes: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    boxes: str | None = None,
    format: str | None = None,
    masks: str | None = None,
    points: str | None = None,
    **call: Any,
) -> Page:
    """Draws batches: images, videos, sounds, text and numbers, with statistics of each output.

    An output of floats ``NAME`` [batch, steps, ...] with a mask ``NAME_mask``, bool [batch, steps],
    is a window: its numbers are plotted, and masked steps are gray. If a batch has several outputs
    of images or windows, those of a sample are drawn side by side.

    Masks, boxes with labels, and points are drawn over the images of a batch. They are recognized
    by their names and shapes; docs/seeing.md has a table. In doubt, such as with two images and
    one output of boxes, the page has the reason instead of the boxes.

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
        classes: The names of classes in the order of their numbers, such as ``source.classes``,
            for all outputs of labels and masks; or a dict of such names, by the name of an output.
        boxes: The name of the output of boxes.
        format: The four numbers of a box: "xyxy", "xywh", "cxcywh" or "yxyx", as in
            `Window.boxes`. By default "xyxy"; if a box then ends before it starts, no boxes are
            drawn.
        masks: The name of the output of masks.
        points: The name of the output of points.
        **call: Arguments of an iterator function, such as ``batch_size``.

    Returns:
        A `Page`, which a notebook displays, and which can be saved.

    Raises:
        TypeError: If ``data`` has no batches, or an argument in ``call`` is unknown.
        ValueError: If the batch has no output with a given name, if its shape does not fit, if a
            format is unknown, or if a number is less than 1.
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
    by_output, names = (classes, ()) if isinstance(classes, Mapping) else (None, classes or ())
    contents = [
        annotated(
            contents_of(
                batch,
                title,
                mask=batches_taken.mask if mask is None else mask,
                classes=by_output,
                device_axis=batches_taken.device_axis,
            ),
            {"boxes": boxes, "masks": masks, "points": points},
            format,
            names,
        )
        for title, batch in batches_taken.batches
    ]
    origin = shortened(getattr(data, "__name__", None) or type(data).__name__, _LONGEST)
    return Page(_title(contents), contents, batches_taken.failures, samples, origin)
