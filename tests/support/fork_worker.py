"""A program whose forked children inherit its iterator: ``python fork_worker.py WHICH``."""

import multiprocessing
import os
import sys
import warnings

import grain
import numpy as np
from nvidia.dali import fn

import dalijax
from dalijax.adapters.grain import DALITransform

WHICH = ("iterator", "transform")
WHAT = ("hold", "drop", "close", "use", "state", "anew")


def read():
    return fn.external_source(lambda info: np.full(4, info.idx_in_epoch), batch=False)


def opened(which):
    if which == "iterator":
        return dalijax.data_iterator(read, ["x"], as_numpy=True)(batch_size=2, device_id=None)
    transform = DALITransform(lambda x: x, batch_size=2, output_map=["x"], device_id=None)
    return iter(grain.MapDataset.source([np.zeros(4)]).repeat().pipe(transform))


def child(which, what):
    """Uses the parent's iterator in a child; returns the child's exit code."""
    global iterator
    if what == "drop":
        del iterator
    elif what == "close":
        iterator.close()
    elif what == "anew":
        assert next(opened(which))["x"].shape == (2, 4)
    elif what in ("use", "state"):
        call = iterator.__next__ if what == "use" else lambda: iterator.set_state(state)
        try:
            call()
        except RuntimeError as error:
            assert "forked" in str(error) and "'spawn'" in str(error), error
        else:
            raise AssertionError("a parent's pipelines can't run here")
    return 3


def forked(which, what):
    """Forks and returns the child's exit code."""
    if which == "transform":
        # It ends like a child of multiprocessing: a normal exit would wait for JAX's threads.
        process = multiprocessing.get_context("fork").Process(
            target=lambda: sys.exit(child(which, what))
        )
        process.start()
        process.join()
        return process.exitcode
    if (pid := os.fork()) == 0:
        sys.exit(child(which, what))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    which = sys.argv[1]
    warnings.simplefilter("error", UserWarning)
    iterator = opened(which)
    next(iterator)
    state = iterator.get_state()
    kept = next(iterator)  # arrays in DALI's memory
    for step, what in enumerate(WHAT, 2):
        code = forked(which, what)
        assert code == 3, (what, code)
        after = next(iterator)["x"][0, 0]  # the parent is unaffected
        assert after == (2 * step if which == "iterator" else 0), (what, after)
        sys.stdout.write(f"{what} as it must be\n")
        sys.stdout.flush()  # or a child would print it, too
