"""Worker process of tests/sources/test_planned_processes.py."""

import jax

from processes import join, leave

options = join()

import planned_graphs  # noqa: E402


def run(name):
    loop = planned_graphs.iterator(name, jax.devices(), seed=5)
    before = [planned_graphs.rows_of(next(loop)) for _ in range(3)]
    state = loop.get_state()
    after = [planned_graphs.rows_of(next(loop)) for _ in range(9)]
    loop.close()
    return {"before": before, "state": state, "after": after}


leave(options, {name: run(name) for name in options["names"]})
