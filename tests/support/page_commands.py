"""Runs a page's commands in the folder of the page."""

import runpy
import subprocess
import sys
from unittest import mock

from full import FULL


def run(arguments):
    """Runs ``python -m MODULE ...``, with shorter measurements.

    A new process would import JAX and DALI again, which takes longer than most commands;
    `make test-full` starts a new process for each command.
    """
    if "--seconds" in arguments:
        arguments[arguments.index("--seconds") + 1] = "0.2"
    option, module, *others = arguments
    if FULL or option != "-m":
        subprocess.run([sys.executable, *arguments], check=True)
        return
    with mock.patch("sys.argv", [module, *others]):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
