"""Draws the diagrams of docs/index.md and docs/how-it-works.md, as SVG of boxes and arrows::

    python docs/drawings/diagrams.py

Boxes have a background color, and the text outside of them is gray, so that light and dark pages
can show the same drawing.
"""

from __future__ import annotations

import html
from pathlib import Path

from legible import width_of

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
GRAY = "#7b828c"
GROUNDS = {  # the colors of the background and of the text
    "ask": ("#e8eef2", "#1d2730"),
    "act": ("#00796b", "#ffffff"),
    "soft": ("#cfe6e2", "#12332e"),
    "plain": ("#dde1e6", "#1d2730"),
}
LINE = 20  # height of a line of text
MARGIN = 4  # around text
CODE = {"family": "monospace", "weight": "bold"}


class Diagram:
    """A canvas for boxes and arrows. Coordinates are pixels; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width = width
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="15"><title>{html.escape(title)}</title>'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{GRAY}"/></marker>'
            "</defs>"
        )
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = GRAY,
        anchor: str = "middle",
        room: float | None = None,
    ) -> None:
        """Draws a line of text. Text in `backticks` is bold and monospaced.

        Raises:
            ValueError: If the text is wider than ``room``, by default the room in the diagram.
        """
        pieces = text.split("`")
        width = sum(
            width_of(piece, 14, **CODE) if number % 2 else width_of(piece, 15)
            for number, piece in enumerate(pieces)
        )
        if room is None:
            room = self._width - x if anchor == "start" else 2 * min(x, self._width - x)
        if width > room - MARGIN:
            raise ValueError(f"{text!r} is {width:.0f} pixels wide, but there are {room:.0f}")
        spans = "".join(
            f'<tspan font-family="ui-monospace, monospace" font-size="14" font-weight="600">'
            f"{html.escape(piece)}</tspan>"
            if number % 2
            else html.escape(piece)
            for number, piece in enumerate(pieces)
        )
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{spans}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """Draws a box with centered lines of text."""
        ground, color = GROUNDS[kind]
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{ground}"/>'
        )
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line, color, room=width)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws a line through the points, with an arrowhead at the last point."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{GRAY}" stroke-width="1.6" '
            'marker-end="url(#tip)"/>'
        )

    def save(self, name: str) -> None:
        """Writes the drawing to docs/pictures."""
        text = self._head + "\n".join(["", *self._parts, "</svg>"]) + "\n"
        (PICTURES / f"{name}.svg").write_text(text)


def decision() -> None:
    """Draws the decision tree of the APIs."""
    questions = [
        (["Does Grain read the records?"], ["`DALITransform`", "of `adapters.grain`"]),
        (
            ["Does CLU, T5X, tf.data or Pax", "ask for the batches?"],
            ["its adapter, with an", "iterator function as below"],
        ),
        (["Do you have pipelines", "of `pipeline_def`?"], ["`DALIGenericIterator`"]),
        (
            ["Do you need a DALI reader,", "for example for COCO?"],
            ["`@data_iterator`", "with `reader_name=`"],
        ),
    ]
    diagram = Diagram(560, 500, "Which API should I use?")
    for number, (question, answer) in enumerate(questions):
        y = 5 + 100 * number
        diagram.box(5, y, 265, 62, "ask", *question)
        diagram.arrow((270, y + 31), (343, y + 31))
        diagram.text(305, y + 24, "yes")
        diagram.box(345, y, 210, 62, "soft", *answer)
        diagram.arrow((137, y + 62), (137, y + 98))
        diagram.text(155, y + 86, "no")
    diagram.box(
        5,
        405,
        550,
        88,
        "act",
        "`@data_iterator`, called with `source=`",
        *(
            "files, tars, TFRecords, arrays, HuggingFace data sets;",
            "resumes with other devices, processes and batch sizes",
        ),
    )
    diagram.save("decision")


def layers() -> None:
    """Draws the layers, from the public modules down to pure functions."""
    rows = [
        (
            "soft",
            "public modules",
            "`dalijax`, `.sources`, `.augment`, `.fn`, `.errors`, `.show`",
        ),
        ("soft", "adapters", "Grain, CLU, T5X, tf.data, Pax, Prometheus"),
        ("plain", "core/tools", "show, profile and tune: they use public iterators"),
        ("plain", "core/api", "data_iterator, which combines the parts below"),
        ("act", "core/iterator, feeding", "iterators; engines for readers and for fed records"),
        ("act", "core/sources, functions, augment", "independent of each other"),
        ("plain", "core/pipeline", "builds and runs DALI pipelines; outputs as arrays"),
        ("plain", "core/state", "positions, fingerprints, and states as JSON"),
        ("plain", "core/formats", "tar, TFRecord, protobuf, headers of images and sounds"),
        ("ask", "core/order, random, placement", "pure functions; they do not call DALI"),
    ]
    diagram = Diagram(560, 76 * len(rows) - 10, "The layers: modules import only lower layers")
    for number, (kind, name, what) in enumerate(rows):
        y = 4 + 76 * number
        diagram.box(5, y, 550, 54, kind, name, what)
        if number + 1 < len(rows):
            diagram.arrow((280, y + 54), (280, y + 74))
    diagram.save("layers")


def steps(name: str, title: str, rows: list[tuple[str, str, tuple[str, ...]]]) -> None:
    """Draws boxes from top to bottom, with an explanation next to each."""
    diagram = Diagram(560, 92 * len(rows) - 24, title)
    for number, (kind, box, beside) in enumerate(rows):
        y = 4 + 92 * number
        diagram.box(5, y, 205, 60, kind, *box.split("\n"))
        top = y + 35 - LINE * (len(beside) - 1) / 2
        for line, text in enumerate(beside):
            diagram.text(228, top + LINE * line, text, anchor="start")
        if number + 1 < len(rows):
            diagram.arrow((107, y + 60), (107, y + 90))
    diagram.save(name)


def batch() -> None:
    """Draws the steps of a batch."""
    rows = [
        ("ask", "position", ("epoch and sample of the next batch",)),
        (
            "plain",
            "order",
            ("the indices of the records: a function of", "seed, epoch and position"),
        ),
        (
            "plain",
            "rows of each shard",
            ("each pipeline receives its slice of the", "batch"),
        ),
        (
            "act",
            "DALI's threads",
            ("read, decode and augment, on CPU or", "GPU; two batches ahead of the consumer"),
        ),
        (
            "act",
            "arrays",
            ("DALI's buffers as `jax.Array`s, through", "DLPack, without a copy if possible"),
        ),
        (
            "plain",
            "placement",
            ("one global array over the mesh, made of", "the arrays of its devices"),
        ),
        ("plain", "last steps", ("`batch_map`, and the mask",)),
        ("soft", "`next(iterator)`", ("your step; now the position advances",)),
    ]
    steps("batch", "The steps of a batch", rows)


def state() -> None:
    """Draws the steps of a state."""
    rows = [
        (
            "soft",
            "`get_state()`",
            ("the position after the last batch that", "`next()` delivered"),
        ),
        (
            "plain",
            "fingerprint",
            ("sizes, policy, seed, operators, and the", "identity of the data"),
        ),
        (
            "plain",
            "JSON",
            ("one dict of 0.5 to 2 kB; the same for all", "APIs except Grain's transform"),
        ),
        (
            "ask",
            "your checkpoint",
            ("Orbax, CLU, T5X, `tf.train.Checkpoint`,", "or your own file"),
        ),
        ("plain", "validation", ("complete, of this version, undamaged;", "nothing is unpickled")),
        (
            "plain",
            "comparison",
            ("an error lists all differences, as", "saved -> now, and changes nothing"),
        ),
        (
            "act",
            "pipelines",
            ("are built at the position, without", "decoding earlier batches"),
        ),
        ("soft", "`next(iterator)`", ("the batch that would have been next",)),
    ]
    steps("state", "The steps of a state", rows)


if __name__ == "__main__":
    decision()
    layers()
    batch()
    state()
