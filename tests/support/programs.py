"""Python programs in processes of their own."""

import signal
import subprocess
import sys


def run_python(*arguments, code=0, timeout=300, **options):
    """Runs Python to its end, which must be of this exit code; has ``stdout`` and ``stderr``."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def start_python(*arguments, **options):
    """Starts Python, with pipes of text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True, **pipes, **options)


def kill_python(process):
    """Kills a program as ``kill -9`` does; its exit code, another one if it ended before."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode
