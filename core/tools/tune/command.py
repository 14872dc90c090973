"""The command ``python -m dalijax.tune``, which searches for the fastest settings."""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import nvidia.dali

from ...api import IteratorFunction
from ...sources.files import Files
from ..command_line import add_arguments, arguments_of, check_complete, load, write
from .tune import Tuned, figure_class, tune


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures an iterator function, and prints its fastest settings.

    Args:
        arguments: The arguments; by default the arguments of the command line.

    Raises:
        SystemExit: If the arguments are invalid, or Ctrl-C was pressed.
    """
    options = _parser().parse_args(arguments)
    if options.plot:  # checked now, instead of after all measurements
        try:
            figure_class()
        except ImportError as error:
            raise SystemExit(str(error)) from error
    call = arguments_of(options, Files)
    iterator_fn = load(options.target)
    if not isinstance(iterator_fn, IteratorFunction):
        raise SystemExit(
            f"{options.target!r} is {iterator_fn!r}. Decorate it with dalijax.data_iterator"
        )
    check_complete(iterator_fn, call)
    tuned = tune(
        iterator_fn,
        batch_size=options.batch_size,
        seconds=options.seconds,
        max_seconds=options.max_seconds,
        num_threads=options.threads,
        hw_decoder_load=options.hw_decoder_load,
        prefetch_queue_depth=options.prefetch,
        batch_sizes=options.batch_sizes or (),
        **call,
    )
    write(_report(tuned))
    if options.plot:
        tuned.save_plot(options.plot)
        write(f"\nThe rates of all settings: {options.plot}")
    if tuned.interrupted:
        raise SystemExit(130)  # as shells report Ctrl-C


def _numbers(text: str) -> list[Any]:
    return [ast.literal_eval(item) for item in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dalijax.tune",
        description="Measures a pipeline with several settings, and prints the fastest settings.",
    )
    add_arguments(
        parser, "an iterator function (the result of dalijax.data_iterator)", batch_size=True
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate duration")
    parser.add_argument(
        "--max-seconds",
        type=float,
        help="time after which no measurement begins; twice --seconds by default",
    )
    parser.add_argument("--threads", type=_numbers, help="num_threads to try: 1,2,4,8")
    parser.add_argument("--hw-decoder-load", type=_numbers, help="loads to try: 0,0.65,0.9")
    parser.add_argument("--prefetch", type=_numbers, help="prefetch_queue_depth to try: 2,3,4")
    parser.add_argument("--batch-sizes", type=_numbers, help="further batch sizes to try: 128,256")
    parser.add_argument("--plot", type=pathlib.Path, help="file for a plot of the rates, e.g. .png")
    return parser


def _report(tuned: Tuned) -> str:
    """Returns the text that the command prints."""
    device = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{device}, {cores} cores, DALI {nvidia.dali.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}\n",
        tuned.table(),
        *(f"\nnot measured: {failure}" for failure in tuned.failures),
        f"\n{tuned.summary}\n",
        f"    {tuned.line}",
    ]
    if tuned.unchanged:
        lines.append(
            f"\nUnchanged: {', '.join(tuned.unchanged)}. The machine was too noisy to compare "
            "their values, or the time was over. Run it again with more --seconds, and without "
            "other programs."
        )
    return "\n".join(lines)
