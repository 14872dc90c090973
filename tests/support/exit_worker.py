"""A program that ends with an open iterator at module level, and a table of its exits.

python exit_worker.py HOW END           ends once

python exit_worker.py table [N [HOW]]   ends N times in each way; fails unless all exits are right

HOW may be followed by some of the exits: mp:normal,exit
"""

import collections
import contextlib
import gc
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import absl.flags
import grain
import jax
import numpy as np
from nvidia.dali import fn

import dalijax
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset, DALITransform

IMAGE = np.zeros((128, 128, 3), np.uint8)  # DALI needs about 0.04 s per batch
HOWS = (
    *("none", "thread", "device_put", "mp", "own_thread", "iterator", "dataset", "peek"),
    *("functions", "stalled", "stalled_and_closed"),
)
# How the program ends, and its exit code. After Ctrl-C, Python ends by the signal.
ENDS = {"normal": 0, "exception": 1, "exit": 7, "ctrl-c": -signal.SIGINT}
# The part of the output that is ours. Grain's iterators and pools print errors, too, with and
# without DALI, if they are freed after their modules.
ROOT = pathlib.Path(__file__).parents[1]
OURS = re.compile(
    rf"nvidia.dali|(dalijax|{re.escape(str(ROOT))})/(core|adapters)/|terminate called|Fatal Python"
)
HANGS = 120  # seconds, on a busy machine


def graph(x):
    """Gives DALI work for each batch, so that a thread waits in DALI when the program ends."""
    return fn.gaussian_blur(x, sigma=3.0, window_size=31)


def read():
    return fn.gaussian_blur(
        fn.external_source(lambda info: IMAGE, batch=False), sigma=3.0, window_size=31
    )


def python_graph():
    return fn.python_function(read(), function=lambda image: image + 1)


class Stalled(dalijax.sources.Records):
    """A source that stalls after the first batches, like a disk that does not respond."""

    def read(self, indices, names):
        if max(indices) >= 40:
            threading.Event().wait()
        return super().read(indices, names)


def opened(how):
    """Opens an iterator and takes something from it."""
    if how == "functions":
        iterator = dalijax.data_iterator(python_graph, ["x"], as_numpy=True)(
            batch_size=8, device_id=None
        )
        in_thread(iterator)
        in_thread(iterator)
        return iterator
    if how.startswith("stalled"):
        make = dalijax.data_iterator(lambda x: x + 0, ["x"], shuffle=False, as_numpy=True)
        source = Stalled([{"x": np.array([k])} for k in range(64)])
        iterator = make(source=source, batch_size=8, device_id=None, prefetch_queue_depth=1)
        in_thread(iterator)
        if how == "stalled_and_closed":
            iterator.close()  # next() in the thread must then raise
        return iterator
    if how == "dataset":
        source = dalijax.sources.Arrays({"x": np.arange(64)})
        make = dalijax.data_iterator(lambda x: x + 0, ["x"], source=source)
        iterator = iter(DALIIterDataset(make, batch_size=8, device_id=None))
        next(iterator)
        return iterator
    if how in ("iterator", "peek"):
        iterator_fn = dalijax.data_iterator(read, ["x"], as_numpy=True)
        call = {"batch_size": 8, "device_id": None}
        if how == "iterator":
            iterator = iterator_fn(**call)
            in_thread(iterator)
        else:
            iterator = DALIDatasetIterator(iterator_fn, **call)
            next(iterator)
            iterator.peek_async()
        return iterator
    transform = DALITransform(graph, batch_size=8, output_map=["x"], device_id=None)
    ds = grain.MapDataset.source([IMAGE]).repeat().pipe(transform)
    if how == "thread":
        ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
    elif how == "device_put":
        ds = grain.experimental.device_put(ds, jax.devices()[0])
    elif how == "mp":
        absl.flags.FLAGS.mark_as_parsed()
        ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    iterator = iter(ds)
    if how == "own_thread":
        in_thread(iterator)
    else:
        next(iterator)
    return iterator


def in_thread(iterator):
    """Takes batches in an endless thread; returns after the first batch."""
    begun = threading.Event()

    def take():
        with contextlib.suppress(ValueError):  # the iterator was closed
            for _ in iterator:
                begun.set()

    threading.Thread(target=take, daemon=True).start()
    begun.wait()


def end(how):
    if how == "exception":
        raise ValueError("the user's own")
    if how == "exit":
        sys.exit(ENDS[how])
    if how == "ctrl-c":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        while True:  # arrives between two instructions
            pass


def ended(code, output, ending):
    """Describes an error at the end of a run; "" without an error."""
    if code is None:
        return f"hangs: {output[-2000:]}"
    if code != ENDS[ending]:
        return f"ended with {code}: {output[-2000:]}"
    return f"said: {output[-2000:]}" if OURS.search(output) else ""


def run(how, ending):
    """Runs and ends a new process; describes an error at its end."""
    program = subprocess.Popen(
        [sys.executable, __file__, how, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its worker processes can be ended, too
    )
    try:
        output, _ = program.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        return ended(None, program.communicate()[0], ending)
    return ended(program.returncode, output, ending)


def table(times, hows):
    """Prints a table of many runs, each in a forked child that has imported all modules.

    Returns:
        In a child, how it must run and end; in the parent, the errors.
    """
    lines = ["| | " + " | ".join(ENDS) + " |", "|---" * (len(ENDS) + 1) + "|"]
    wrong = []
    gc.freeze()  # or each child would visit, and copy, the objects of all modules as it ends
    for how, _, some in (how.partition(":") for how in hows):
        cells = []
        for ending in ENDS:
            if some and ending not in some.split(","):
                cells.append("")
                continue
            began, seen = time.monotonic(), []
            for _ in range(times):
                with tempfile.TemporaryFile() as output:
                    pid = os.fork()
                    if pid == 0:
                        os.setsid()
                        os.dup2(output.fileno(), 1)
                        os.dup2(output.fileno(), 2)
                        return how, ending
                    code = waited(pid)
                    output.seek(0)
                    seen.append(ended(code, output.read().decode(), ending))
            wrong += [f"{how}, {ending}: {one}" for one in seen if one]
            counts = collections.Counter(one.split(":")[0] or "right" for one in seen)
            cells.append(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
            cells[-1] += f" ({(time.monotonic() - began) / times:.1f} s)"
        lines.append(f"| {how} | " + " | ".join(cells) + " |")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()  # or a child would print it, too
        lines.clear()
    return "\n".join(wrong[:20])


def waited(pid):
    """Returns the exit code of a child; None if it hung."""
    end = time.monotonic() + HANGS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.05)


def main(arguments):
    if arguments[0] == "table":
        times = int(arguments[1]) if len(arguments) > 1 else 50
        made = table(times, arguments[2:] or HOWS)
        if isinstance(made, str):
            sys.exit(made or 0)
        arguments = made
    return arguments


if __name__ == "__main__":
    how, ending = main(sys.argv[1:])
    iterator = opened(how)
    end(ending)
