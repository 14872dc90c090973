"""Draws batches as a page of self-contained HTML without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...messages.printable import printable_lines
from .contents import Contents, Figures, Output, is_drawn
from .drawing import pixels_of, png_uri, waveforms_of
from .layouts import SOUNDS, VIDEOS

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1f23; --quiet: #5c6570; --card: #f4f5f7;
  --line: #d9dde2; --mark: #2b6cb0; --bad: #b3261e; --bad-back: #fdecea; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e6e8eb; --quiet: #9aa4b0;
  --card: #1f2429; --line: #343b43; --mark: #79b0ee; --bad: #ff9d94; --bad-back: #3b1f1d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1500px; background: var(--back);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; } p { margin: .3rem 0; } .quiet { color: var(--quiet); }
.output { border: 1px solid var(--line); border-radius: 8px; padding: .9rem; margin: .8rem 0; }
.about { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: flex-start; }
.about > div { flex: 1 1 20rem; min-width: 0; }
dl { display: flex; flex-wrap: wrap; gap: .15rem 1.4rem; margin: .4rem 0; font-size: .86rem; }
dt { color: var(--quiet); display: inline; margin-right: .35rem; }
dd { margin: 0; display: inline; font-variant-numeric: tabular-nums; }
dd.bad { color: var(--bad); font-weight: 600; }
.histogram { flex: 0 1 260px; width: 100%; max-width: 300px; height: auto; color: var(--mark); }
.histogram text { fill: var(--quiet); font: 11px system-ui, sans-serif; }
.samples { display: grid; gap: .6rem; margin-top: .7rem;
  grid-template-columns: repeat(auto-fill, minmax(min(8.5rem, 45%), 1fr)); }
.samples.wide { grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
.samples.video { grid-template-columns: minmax(0, 1fr); }
figure { margin: 0; padding: .35rem; background: var(--card); border-radius: 5px; min-width: 0; }
.drawn { position: relative; }
figure img { display: block; width: 100%; height: auto; border-radius: 2px; }
figure img.small { image-rendering: pixelated; }
.frames { display: flex; gap: 3px; } .frames img { flex: 1 1 0; min-width: 0; max-width: 11rem; }
.strip { display: flex; flex-wrap: wrap; gap: .5rem; font-size: .78rem; }
.strip img { flex: none; width: auto; height: 8rem; max-width: none; }
.strip .frames { flex-wrap: wrap; }
.sound img { width: 100%; height: 6rem; }
.waveform { display: block; width: 100%; height: 3.5rem; color: var(--mark); margin-bottom: 3px; }
figcaption { font-size: .78rem; line-height: 1.35; margin-top: .3rem; white-space: pre-wrap;
  max-height: 11rem; overflow: auto; }
.padding .drawn::after { content: ""; position: absolute; inset: 0; pointer-events: none;
  background: repeating-linear-gradient(45deg, #c026a0c0 0 3px, transparent 3px 11px); }
figure.padding { background: repeating-linear-gradient(45deg, #c026a030 0 3px,
  var(--card) 3px 11px); }
.padding figcaption::after { content: " (padding)"; color: var(--quiet); }
.failures { color: var(--bad); background: var(--bad-back); border-radius: 8px;
  padding: .7rem 1rem; margin: .8rem 0; }
.failures li { white-space: pre-wrap; }
"""
_SMALL = 100  # pixels; images up to this size are enlarged without smoothing


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
    parts = [
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_escaped(title)}</h1><p class='quiet'>{_escaped(about)}</p>",
    ]
    if failures:
        items = "".join(f"<li>{_escaped(text)}</li>" for text in failures)
        parts.append(f"<div class='failures'><strong>Failed</strong><ul>{items}</ul></div>")
    for contents in batches:
        parts.append(f"<section><h2>{_escaped(contents.title)}</h2>")
        if contents.valid is not None and not contents.valid.all():
            count = int((~contents.valid).sum())
            parts.append(
                f"<p class='quiet'>{count} of {len(contents.valid)} samples are padding by the "
                "mask: they are hatched.</p>"
            )
        parts.append(_strips(contents, samples))
        parts += [_output(contents, output, samples) for output in contents.outputs]
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>\n"])


def _escaped(text: str) -> str:
    """Returns a text with HTML's special characters and control characters escaped."""
    return html.escape(printable_lines(text))


def frame(text: str) -> str:
    """Returns the HTML of an iframe with a page, which isolates the page's styles in notebooks."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" style="width:100%;height:40rem;border:0" '
        'title="batches"></iframe>'
    )


def _output(contents: Contents, output: Output, samples: int) -> str:
    """Returns the HTML of an output: properties, histogram and samples."""
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
    shown = min(samples, len(output.samples))
    facts += [("samples", f"{shown} of {len(output.samples)} here")]
    bad = figures is not None and figures.nans + figures.infinities > 0
    entries = "".join(
        f"<div><dt>{name}</dt><dd{' class=bad' if bad and name.startswith('NaN') else ''}>"
        f"{_escaped(value)}</dd></div>"
        for name, value in facts
        if value
    )
    kind = "samples"
    if output.layout in SOUNDS or output.layout == "text":
        kind = "samples wide"
    elif output.layout in VIDEOS:
        kind = "samples video"
    histogram = "" if figures is None else _histogram(figures)
    about = (
        f"<div class='about'><div><h3>{_escaped(output.name)}</h3>"
        f"<dl>{entries}</dl></div>{histogram}</div>"
    )
    if output in contents.strip:
        return f"<div class='output'>{about}</div>"
    cells = "".join(_figure(contents, output, row) for row in range(shown))
    return f"<div class='output'>{about}<div class='{kind}'>{cells}</div></div>"


def _strips(contents: Contents, samples: int) -> str:
    """Returns the HTML with the images and windows of each sample in a row; "" without them."""
    if not (strip := contents.strip):
        return ""
    count = min(samples, len(strip[0].samples))
    cells = []
    for row in range(count):
        panels = []
        for output in strip:
            pictures = [_picture(pixels) for pixels in pixels_of(output, row)]
            drawn = "".join(pictures) or f"no picture that Pillow reads: {output.caption(row)}"
            name = f"<span class='quiet'>{_escaped(output.name)}</span>"
            panels.append(f"<div>{name}<div class='frames'>{drawn}</div></div>")
        drawn = f"<div class='drawn strip'>{''.join(panels)}</div>"
        cells.append(_captioned(contents, row, drawn, contents.caption(row, with_numbers=True)))
    return f"<div class='output'><div class='samples video'>{''.join(cells)}</div></div>"


def _figure(contents: Contents, output: Output, row: int) -> str:
    """Returns the HTML of a sample of an output: its images and its caption."""
    drawn, caption = "", [output.caption(row)]
    if is_drawn(output):
        caption = contents.caption(row)
        pictures = [_picture(pixels) for pixels in pixels_of(output, row)]
        if output.layout in SOUNDS:  # each channel's spectrogram below its waveform
            pairs = zip(map(_waveform, waveforms_of(output, row)), pictures)
            drawn = f"<div class='drawn sound'>{''.join(map(''.join, pairs))}</div>"
        elif pictures:
            drawn = f"<div class='drawn frames'>{''.join(pictures)}</div>"
        else:
            caption = [f"no picture that Pillow reads: {output.caption(row)}", *caption]
    return _captioned(contents, row, drawn, caption)


def _captioned(contents: Contents, row: int, drawn: str, caption: Sequence[str]) -> str:
    text = _escaped("\n".join(caption))
    padding = " class='padding'" if contents.is_padding(row) else ""
    return f"<figure{padding}>{drawn}<figcaption>{text}</figcaption></figure>"


def _picture(pixels: NDArray[np.uint8]) -> str:
    height, width = pixels.shape[:2]
    small = " class='small'" if max(height, width) <= _SMALL else ""
    return f"<img{small} width='{width}' height='{height}' alt='' src='{png_uri(pixels)}'>"


def _waveform(columns: NDArray[np.float64]) -> str:
    """Returns the SVG of an envelope, [columns, 2], as a filled outline.

    The outline follows the maxima from left to right, and the minima from right to left.
    """
    above = [f"{x},{-high:.3f}" for x, (_, high) in enumerate(columns)]
    below = [f"{x},{-low:.3f}" for x, (low, _) in reversed([*enumerate(columns)])]
    return (
        f"<svg class='waveform' viewBox='0 -1.05 {len(columns)} 2.1' preserveAspectRatio='none'>"
        f"<path d='M{' '.join([*above, *below])}Z' fill='currentColor' stroke='currentColor' "
        "stroke-width='0.02' vector-effect='non-scaling-stroke'/></svg>"
    )


def _histogram(figures: Figures) -> str:
    """Returns the SVG of a histogram, with the minimum and maximum below."""
    heights = 70 * figures.counts / max(1, figures.counts.max())
    width = 240 / len(heights)
    bars = "".join(
        f"<rect x='{10 + k * width:.2f}' y='{74 - h:.2f}' width='{0.85 * width:.2f}' "
        f"height='{h:.2f}'/>"
        for k, h in enumerate(heights)
    )
    return (
        "<svg class='histogram' viewBox='0 0 260 92' role='img' aria-label='histogram'>"
        f"<g fill='currentColor'>{bars}</g><line x1='10' x2='250' y1='74.5' y2='74.5' "
        "stroke='currentColor' stroke-width='0.6'/>"
        f"<text x='10' y='88'>{figures.least:.4g}</text>"
        f"<text x='250' y='88' text-anchor='end'>{figures.most:.4g}</text></svg>"
    )
