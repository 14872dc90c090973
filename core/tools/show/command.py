"""The command ``python -m dalijax.show``, which draws batches."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...api import IteratorFunction
from ...sources.files import Files
from ..command_line import add_arguments, arguments_of, check_complete, load, write
from .show import SAMPLES, check_suffix, show

_ANNOTATIONS = {
    "boxes": "the output of boxes",
    "format": "the format of boxes: xyxy, xywh, cxcywh or yxyx",
    "masks": "the output of masks",
    "points": "the output of points",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws batches, and writes the page or the contact sheet.

    Args:
        arguments: The arguments; by default the arguments of the command line.

    Raises:
        SystemExit: If no batch can be shown; the message contains the reason.
    """
    options = _parser().parse_args(arguments)
    call = arguments_of(options, Files)
    if options.batch_size is not None:
        call["batch_size"] = options.batch_size
    target = load(options.target)
    if isinstance(target, IteratorFunction):
        check_complete(target, call)
        if options.batch_size is None:
            raise SystemExit("pass --batch-size")
    elif inspect.isroutine(target):
        target, call = target(**call), {}
    try:
        page = show(
            target,
            batches=options.batches,
            samples=options.samples,
            mask=options.mask,
            classes={name: names.split(",") for name, names in options.classes},
            **{name: getattr(options, name) for name in _ANNOTATIONS},
            **call,
        )
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    page.save(options.out)
    for failure in page.failures:
        write(f"failed: {failure}", sys.stderr)
    if not page.batches:
        raise SystemExit(f"{options.target} returned no batch; {options.out} contains the reasons")
    names = ", ".join(output.name for output in page.batches[0].outputs)
    count = len(page.batches)
    write(f"{count} batch{'es' * (count != 1)} of {names}: {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dalijax.show",
        description="Draws batches as a page (.html) or a contact sheet (.png).",
    )
    add_arguments(
        parser,
        "an iterator function (the result of dalijax.data_iterator), an iterator, a dataset or a "
        "source, or a function that returns any of these",
        batch_size=False,
    )
    parser.add_argument("--batches", type=int, default=1, help="number of batches; 1")
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLES,
        help=f"maximum number of samples per output; {SAMPLES}",
    )
    parser.add_argument("--mask", help="the output that is False for padding")
    for name, text in _ANNOTATIONS.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument(
        "--classes",
        action="append",
        default=[],
        type=_pair,
        metavar="OUTPUT=A,B,C",
        help="names of the classes in an output of class numbers",
    )
    parser.add_argument(
        "--out", type=_out, default=Path("batch.html"), help="batch.html; .png for a sheet"
    )
    return parser


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write OUTPUT=VALUE")
    return name, value


def _out(text: str) -> Path:
    try:
        check_suffix(path := Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path
