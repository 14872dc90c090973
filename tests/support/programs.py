"""Runs Python programs in new processes."""

import signal
import subprocess
import sys


def run_python(*arguments, code=0, timeout=300, **options):
    """Runs Python until it exits, and checks the exit code; returns ``stdout`` and ``stderr``."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def start_python(*arguments, **options):
    """Starts Python with text pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True, **pipes, **options)


def kill_python(process):
    """Kills a program like ``kill -9``; returns the exit code, which shows earlier exits."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode
