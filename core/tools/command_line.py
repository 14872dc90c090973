"""Arguments that the commands share: ``module:name``, ``--arg NAME=VALUE`` and ``--source``."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..api import IteratorFunction
from ..messages.printable import printable, printable_repr, printable_text
from ..messages.redacted_errors import redacted_error
from ..messages.replacements import source_call


def add_arguments(parser: argparse.ArgumentParser, target: str, batch_size: bool) -> None:
    """Adds ``target``, ``--batch-size``, ``--arg`` and ``--source`` to a command.

    Args:
        parser: Parser of the command.
        target: Help text of the argument ``target``.
        batch_size: Whether ``--batch-size`` is required.
    """
    parser.add_argument("target", metavar="module:name", help=target)
    parser.add_argument("--batch-size", type=int, required=batch_size)
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        type=argument,
        metavar="NAME=VALUE",
        help="an argument of the function: a Python literal, or a string (without quotes); may be "
        "repeated",
    )
    parser.add_argument(
        "--source",
        metavar="PATH",
        help="the directory that sources.Files reads for the function; or module:name, a source or "
        "a function that returns a source",
    )


def arguments_of(options: argparse.Namespace, open_folder: Callable[[str], Any]) -> dict[str, Any]:
    """Returns the arguments that ``--arg`` and ``--source`` pass to the iterator function, by name.

    Args:
        options: The parsed options of the command.
        open_folder: Creates a source from a directory.

    Raises:
        SystemExit: If the source can't be opened.
    """
    call = dict(options.arg)
    if options.source is not None:
        call["source"] = _source(options.source, open_folder)
    return call


def _source(text: str, open_folder: Callable[[str], Any]) -> Any:
    if ":" in text and "://" not in text and not os.path.exists(text):
        source = load(text)
        return source() if inspect.isroutine(source) else source
    try:
        return open_folder(text)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(
            f"--source {printable(text)}: {error}. For another source pass module:name, where the "
            f"module has name = {source_call(text)}"
        ) from None


def load(text: str) -> Any:
    """Returns the object ``module:name``; the module may also be in the current directory.

    Raises:
        SystemExit: If the object can't be loaded; the message explains what to write.
    """
    module, _, name = text.partition(":")
    if not name:
        raise SystemExit(f"{printable_repr(text)} names no function: write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"{printable_repr(text)} can't be loaded from {os.getcwd()}: "
            f"{printable_text(str(error))}"
        ) from redacted_error(error)
    return target


def check_complete(iterator_fn: IteratorFunction, call: Mapping[str, Any]) -> None:
    """Ends the command if a required argument of the iterator function is missing.

    Raises:
        SystemExit: If an argument is missing; the message explains what to pass.
    """
    if iterator_fn._has_source(call):  # the fields of the source are arguments, too
        return
    supplied = {"hw_decoder_load", "shard_id", "num_shards", *call}
    parameters = inspect.signature(iterator_fn.pipeline_fn).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    if missing := [p.name for p in named if p.default is p.empty and p.name not in supplied]:
        passed = " ".join(f"--arg {name}=VALUE" for name in missing)
        raise SystemExit(
            f"{iterator_fn.__name__}() needs more arguments: pass {passed}, or --source PATH "
            "if they are fields of records"
        )


def write(text: str, file: Any = None) -> None:
    """Writes a line to an open file; by default to the standard output."""
    (file or sys.stdout).write(text + "\n")


def argument(text: str) -> tuple[str, Any]:
    """Returns the name and the value of ``NAME=VALUE``.

    The value is a Python literal; if it can't be parsed, it is a string.

    Raises:
        argparse.ArgumentTypeError: If the text has no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("write NAME=VALUE")  # the text may be a secret
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
