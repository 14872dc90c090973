"""Runs a page's commands, in the folder and with the Python interpreter of the page."""

import subprocess
import sys


def run(arguments):
    """Runs ``python`` with these arguments, with shorter measurements."""
    if "--seconds" in arguments:
        arguments[arguments.index("--seconds") + 1] = "0.2"
    subprocess.run([sys.executable, *arguments], check=True)
