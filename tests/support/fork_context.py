"""Starts processes as forks of a process that has imported Grain, JAX, DALI and dalijax.

A spawned process imports them for three seconds. A fork inherits only what the server has, which
has imported the libraries and used none, and it unpickles its function and arguments in the same
way.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

# The server skips what is not installed.
MODULES = ["grain._src.python.dataset.transformations.process_prefetch"]
MODULES += ["dalijax.adapters.grain", "dalijax", "cloudpickle"]
_get_context = multiprocessing.get_context


def fork_context() -> ForkServerContext:
    """Returns the context of multiprocessing that starts such forks."""
    context = _get_context("forkserver")
    context.set_forkserver_preload(MODULES)  # the server starts with the first process
    return context


def get_context(method: str | None = None) -> multiprocessing.context.BaseContext:
    """Returns `fork_context` instead of the context of spawned processes."""
    return fork_context() if method == "spawn" else _get_context(method)
