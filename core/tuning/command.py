"""The command ``python -m dalijax.tune``."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
import nvidia.dali

from ..iterator.data_iterator import IteratorFunction
from .tune import Tuned, tune


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Those of the command line by default.
    """
    given = _parser().parse_args(arguments)
    call = dict(_argument(text) for text in given.arg)
    found = tune(
        _loaded(given.iterator_fn),
        batch_size=given.batch_size,
        seconds=given.seconds,
        max_seconds=given.max_seconds,
        num_threads=given.threads,
        hw_decoder_load=given.hw_decoder_load,
        prefetch_queue_depth=given.prefetch,
        batch_sizes=given.batch_sizes or (),
        progress=_show,
        **call,
    )
    _write(_told(found))
    if given.json:
        given.json.write_text(json.dumps(_plain(found), indent=1))
    if given.plot:
        try:
            found.save_plot(given.plot)
            _write(f"\nThe rates of all settings: {given.plot}")
        except ImportError:
            _write("\nThe plot needs matplotlib: pip install matplotlib")


def _write(text: str, file: Any = None) -> None:
    (file or sys.stdout).write(text + "\n")


def _numbers(text: str) -> list[Any]:
    return [ast.literal_eval(one) for one in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dalijax.tune",
        description="Measures a pipeline with other settings, and says which are fastest here.",
    )
    parser.add_argument("iterator_fn", help="module:function, what dalijax.data_iterator returned")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the function, a Python literal or else a text; may be repeated",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long it measures")
    parser.add_argument(
        "--max-seconds", type=float, help="after as long begin nothing new; twice --seconds"
    )
    parser.add_argument("--threads", type=_numbers, help="num_threads to try: 1,2,4,8")
    parser.add_argument("--hw-decoder-load", type=_numbers, help="loads to try: 0,0.65,0.9")
    parser.add_argument("--prefetch", type=_numbers, help="prefetch_queue_depth to try: 2,3,4")
    parser.add_argument("--batch-sizes", type=_numbers, help="batch sizes to try, too: 128,256")
    parser.add_argument("--plot", type=pathlib.Path, help="a picture to write, .png say")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all measurements")
    return parser


def _loaded(text: str) -> IteratorFunction:
    module, _, name = text.partition(":")
    if not name:
        raise SystemExit(f"{text!r} names no function: write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{text!r} can't be loaded: {error}") from error
    if not isinstance(found, IteratorFunction):
        raise SystemExit(f"{text!r} is {found!r}: decorate it with dalijax.data_iterator")
    return found


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--arg {text!r}: write NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _show(done: int, total: int, what: str) -> None:
    width = 30
    bar = "#" * (width * done // total)
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r[{bar:<{width}}] {done}/{total} {what:<32}{end}")
    sys.stderr.flush()


def _told(found: Tuned) -> str:
    device = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{device}, {cores} cores, DALI {nvidia.dali.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}\n",
        found.table(),
        *(f"\nnot measured: {failure}" for failure in found.failures),
        f"\n{found.rate:,.0f} samples/s, {found.rate / found.before:.2f} of the settings before:\n",
        f"    {found.line}",
    ]
    if not found.clear:
        lines.append(
            "\nThe machine was too noisy to tell some settings apart, which stay as they were: try "
            "again with nothing else running, and with more --seconds."
        )
    return "\n".join(lines)


def _plain(found: Tuned) -> dict[str, Any]:
    measured = {
        name: [[v, own] for v, own in rates.items()] for name, rates in found.measured.items()
    }
    return {
        "settings": found.settings,
        "rate": found.rate,
        "before": found.before,
        "clear": found.clear,
        "measured": measured,
        "failures": found.failures,
    }
