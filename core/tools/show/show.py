"""`show`: batches as a page or a contact sheet."""

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
from ...atomic_file import write_output
from ...config import whole_number
from .batches import take
from .contents import Contents, contents_of
from .page import frame, page
from .sheet import sheet

SAMPLES = 32
_LONGEST = 200  # characters of a title


@dataclasses.dataclass(frozen=True)
class Page:
    """Batches to look at, which a notebook displays.

    Attributes:
        title: What they are batches of.
        batches: What each of them has: outputs with their figures and samples.
        failures: What failed, with the names of files or records where they are known.
        samples: The most samples of an output that are drawn.
    """

    title: str
    batches: Sequence[Contents]
    failures: Sequence[str]
    samples: int

    @functools.cached_property
    def html(self) -> str:
        """The page: HTML that refers to nothing outside of itself."""
        versions = f"DALI {nvidia.dali.__version__}, jax {jax.__version__}"
        return page(self.title, versions, self.batches, self.failures, self.samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page (.html) or a contact sheet (.png).

        Raises:
            ValueError: For another suffix.
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
    if isinstance(data, (Mapping, tuple)) or hasattr(data, "shape"):
        return "A batch"
    name: str = getattr(data, "__name__", None) or repr(data)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]} ..."


def check_suffix(path: Path) -> None:
    """Raises ValueError where a path names neither a page nor a picture."""
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
    """Draws batches: pictures, videos, sounds, text, numbers, and the figures of each output.

    Args:
        data: What `dalijax.data_iterator` returned, with its arguments in ``call``; an iterator
            of this package or its adapters, which stays where it stands: one batch is peeked, for
            several its state is set back; a dataset of Grain or tf.data, a `DALIDataset`, of which
            a new iterator is taken; one of `dalijax.sources`, whose records are drawn as they are
            stored; or a batch.
        batches: Number of batches.
        samples: The most samples of an output that are drawn. Figures are of all.
        mask: The output that says which samples are no padding, of shape [batch], bool; by default
            the iterator's, or the output "mask".
        classes: Names of the classes that the numbers of an output stand for, by its name.
        **call: Arguments of an iterator function: batch_size and its own.

    Returns:
        A `Page`, to be displayed by a notebook or saved.

    Raises:
        TypeError: If ``data`` is nothing that has batches, or one of ``call`` belongs to nobody.
        ValueError: If a name is no output of the batch, or a number is less than 1.
        Exception: What an iterator function raises when it is called; what a batch raises is drawn.
    """
    batches = whole_number("batches", batches, "a whole number of batches, 1 or more", 1)
    samples = whole_number("samples", samples, "a whole number of samples, 1 or more", 1)
    is_function = isinstance(data, IteratorFunction)
    if not is_function and call:
        raise TypeError(
            f"{[*call]} are for an iterator function, what dalijax.data_iterator returned, and not "
            f"for {data!r:.80}: leave them out, or pass the function"
        )
    if is_function and mask is not None:
        call["mask"] = mask
    taken = take(data, batches, call, samples)
    contents = [
        contents_of(
            batch,
            title,
            mask=taken.mask if mask is None else mask,
            classes=classes,
            device_axis=taken.device_axis,
        )
        for title, batch in taken.batches
    ]
    return Page(_title(data), contents, taken.failures, samples)
