"""Commands of pages, in the folder and with the Python that the page runs in."""

import subprocess
import sys


def run(arguments):
    """Runs ``python`` with these arguments; a measurement takes a moment instead of a minute."""
    if "--seconds" in arguments:
        arguments[arguments.index("--seconds") + 1] = "0.2"
    subprocess.run([sys.executable, *arguments], check=True)
