"""Draws batches as a page of self-contained HTML without scripts.

The template ``page.html`` contains all elements. Jinja escapes each value that it inserts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from ...messages.printable import printable_lines
from .contents import Contents, Figures, Output
from .drawing import pixels_of, png_uri, waveforms_of
from .layouts import SOUNDS
from .placing import captions

with extra("show", "dalijax.show"):
    import jinja2
    from markupsafe import Markup

_SMALL, _LARGE = 8, 14  # rem, the least height of images, without and with annotations
_LEAST = 9  # rem, the least width of a record
_TEXT, _SOUND = 2.5, 3  # width of a record without images, and of a sound, relative to this height

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    # Returns a plain str, because autoescape trusts objects that have a method `__html__`.
    finalize=lambda value: printable_lines(str(value)),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def page(
    title: str, about: str, batches: Sequence[Contents], failures: Sequence[str], samples: int
) -> str:
    """Returns the HTML of a page that draws batches.

    Args:
        title: The heading of the page.
        about: A line of text below the heading.
        batches: The contents of each batch.
        failures: The messages of failures.
        samples: Maximum number of samples to draw per output.
    """
    return _ENVIRONMENT.get_template("page.html").render(
        title=title,
        about=about,
        failures=failures,
        batches=[_section(contents, samples) for contents in batches],
    )


def frame(text: str) -> str:
    """Returns the HTML of an iframe with a page.

    The iframe isolates the page's styles in notebooks. Its sandbox forbids scripts and access to
    the notebook.
    """
    element = Markup(
        '<iframe sandbox="" srcdoc="{}" style="width:100%;height:40rem;border:0" title="batches">'
        "</iframe>"
    )
    return str(element.format(text))


def _section(contents: Contents, samples: int) -> dict[str, Any]:
    """Returns the records and the outputs of a batch, and the least width of a record in rem."""
    records = _records(contents, samples)
    ratios = [sum(panel["ratio"] for panel in record["panels"]) for record in records]
    has_annotations = any(output.annotations for output in contents.outputs)
    unit = _LARGE if has_annotations else _SMALL
    return {
        "contents": contents,
        "records": records,
        "unit": unit,
        "width": round(max(_LEAST, unit * (max(ratios, default=0) or _TEXT) + 1), 1),
        "outputs": [
            (output, _facts(output, samples), _bars(output.figures) if output.figures else "")
            for output in contents.outputs
        ],
    }


def _facts(output: Output, samples: int) -> list[tuple[str, str]]:
    """Returns the properties of an output, some of which may be empty, by their names."""
    facts = [("shape", str(list(output.shape))), ("dtype", output.dtype)]
    facts += [("device", output.device), ("sharding", output.sharding)]
    figures = output.figures
    if figures is not None:
        facts += [("range", f"{figures.least:.6g} to {figures.most:.6g}")]
        facts += [("mean, deviation", f"{figures.mean:.4g}, {figures.deviation:.4g}")]
        facts += [("NaNs, infinities", f"{figures.nans:,}, {figures.infinities:,}")]
    facts += [("layout", output.layout)]
    if output.brightness is not None:
        facts += [("drawn", output.brightness.rule)]
    count = len(output.samples)
    return [*facts, ("samples", f"{min(samples, count)} of {count} here")]


def _records(contents: Contents, samples: int) -> list[dict[str, Any]]:
    """Returns the panels, one for each output that is drawn, and the caption of each sample."""
    return [
        {
            "is_padding": contents.is_padding(row),
            "panels": [
                _panel(output, row) for output in contents.drawn if row < len(output.samples)
            ],
            "caption": "\n".join(captions(contents, row)),
        }
        for row in range(min(samples, contents.count))
    ]


def _panel(output: Output, row: int) -> dict[str, Any]:
    """Returns the images of a sample; for a sound, with the outline of each channel."""
    pixels = pixels_of(output, row)
    ratios = [picture.shape[1] / picture.shape[0] for picture in pixels]
    is_sound = output.layout in SOUNDS
    outlines = [_outline(columns) for columns in waveforms_of(output, row)] if is_sound else []
    return {
        "name": output.name,
        "kind": "sound" if is_sound else "frames",
        "pictures": [(*picture.shape[:2], png_uri(picture)) for picture in pixels],
        "ratio": _SOUND if is_sound else round(sum(ratios), 3) or 1,
        "frame": round(max(ratios, default=1), 3),
        "outlines": outlines,
        "text": "" if pixels else output.caption(row),
    }


def _outline(columns: NDArray[np.float64]) -> str:
    """Returns the path of an envelope, [columns, 2], in an SVG that is 100 wide.

    The outline follows the maxima from left to right, and the minima from right to left.
    """
    offsets = np.arange(len(columns)) * 100 / len(columns)
    above = [f"{x:.2f},{-high:.3f}" for x, (_, high) in zip(offsets, columns)]
    below = [f"{x:.2f},{-low:.3f}" for x, (low, _) in zip(offsets[::-1], columns[::-1])]
    return f"M{' '.join([*above, *below])}Z"


def _bars(figures: Figures) -> str:
    """Returns the path of the bars of a histogram, in an SVG of 260 x 92."""
    width = 240 / len(figures.counts)
    heights = 70 * figures.counts / max(1, figures.counts.max())
    return "".join(
        f"M{10 + k * width:.2f} 74v{-height:.2f}h{0.85 * width:.2f}v{height:.2f}z"
        for k, height in enumerate(heights)
    )
