"""Checks that all text of a picture can be read."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox

TOLERANCE = 1  # pixels


class _Recorder(RendererAgg):
    """A renderer that records which texts of a figure are drawn."""

    texts: dict[Text, None]  # in the order of drawing

    def draw_text(self, *args: Any, mtext: Any = None, **kwargs: Any) -> None:
        self.texts[mtext] = None


def check(figure: Figure) -> None:
    """Raises a ValueError if a text of a figure is cut off, or overlaps another text."""
    recorder = _Recorder(figure.bbox.width, figure.bbox.height, figure.dpi)
    recorder.texts = {}
    figure.draw(recorder)
    boxes = {text: text.get_window_extent(recorder) for text in recorder.texts}
    room = figure.bbox.padded(TOLERANCE)
    for text, box in boxes.items():
        if not all(room.contains(*corner) for corner in (box.p0, box.p1)):
            raise ValueError(f"{text.get_text()!r} is cut off: shorten it, or enlarge the figure")
    for (text, box), (other, other_box) in itertools.combinations(boxes.items(), 2):
        shared = Bbox.intersection(box, other_box)
        if shared is not None and min(shared.width, shared.height) > TOLERANCE:
            raise ValueError(f"{text.get_text()!r} and {other.get_text()!r} overlap")


def save(figure: Figure, path: str | pathlib.Path, **options: Any) -> None:
    """Checks a figure, and saves it.

    Args:
        figure: The figure.
        path: The file to write.
        **options: Arguments of `Figure.savefig`.

    Raises:
        ValueError: If a text is cut off, or overlaps another text.
    """
    check(figure)
    figure.savefig(path, **options)


def width_of(text: str, size: float, **font: Any) -> float:
    """Returns the width of a line in DejaVu, which is wider than most fonts of browsers.

    Args:
        text: The text.
        size: Size of the font; the width has the same unit.
        **font: Arguments of `FontProperties`.
    """
    properties = FontProperties(size=size, **font)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0]
