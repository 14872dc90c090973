"""Runs a task of a packer in a process: ``python -m packers.worker``.

The task is JSON in the standard input, and the result is a line of JSON in the standard output.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import logging
import sys
import time
from typing import Any

import numpy as np

from packers.protocol import Job, Packer, Packing


def statistics(packing: Packing) -> dict[str, Any]:
    """Returns the share of padding, and the number of images that are not exactly once in a row."""
    count = len(packing.complete)
    tokens = np.bincount(packing.images, packing.tokens, count)
    rows = np.bincount(packing.images, minlength=count)
    used = np.bincount(packing.rows, packing.tokens, len(packing.widths))
    if (used > packing.widths).any():
        raise RuntimeError("a row has more tokens than its width")
    total = int(packing.widths.sum())
    return {
        "images": count,
        "rows": len(packing.widths),
        "padding": 1 - float(packing.tokens.sum()) / total,
        "slots per image": total / count,
        "lost": int((rows == 0).sum()),
        "split": int(((rows > 1) & (tokens == packing.complete)).sum()),
        "repeated": int((tokens > packing.complete).sum()),
        "cut": int(((rows > 0) & (tokens < packing.complete)).sum()),
    }


def measure(packer: Packer, rounds: int) -> dict[str, Any]:
    """Packs an epoch in several rounds.

    Returns:
        The CPU seconds of each round, of packing alone, and the statistics of the rows.
    """
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        packer.without()
        between = time.process_time()
        result = packer.work()
        seconds.append((time.process_time() - between) - (between - start))
    return {"seconds": seconds, **statistics(packer.packing(result))}


def deliver(packer: Packer, states: list[str], skip: int, count: int | None) -> dict[str, Any]:
    """Delivers batches from a state, or after reading and skipping some batches.

    Returns:
        The batches, the state after them, and the number of images read and the CPU seconds until
        the first batch.
    """
    start = time.process_time()
    if packer.stateful and states:
        packer.load(states)
        skip = 0
    iterator = itertools.islice(packer.batches(), skip, None if count is None else skip + count)
    first = list(itertools.islice(iterator, 1))
    reads, seconds = packer.reads, time.process_time() - start
    batches = [*first, *iterator]
    return {
        "batches": batches,
        "state": packer.state() if packer.stateful else None,
        "reads": reads,
        "seconds": seconds,
    }


def main() -> None:
    logging.disable(logging.WARNING)
    task = json.load(sys.stdin)
    module = importlib.import_module(f"packers.{task['module']}")
    packer_class = getattr(module, task["class"])
    packers = [packer_class(Job(**job), **task["options"]) for job in task["jobs"]]
    packer = packers[0]
    if task["task"] == "measure":
        result = {"packings": [measure(packer, task["rounds"]) for packer in packers]}
    elif task["task"] == "deliver":
        result = deliver(packer, task["states"], task["skip"], task["count"])
    else:
        result = {"error": packer.elastic()}
    packer.close()
    versions = {name: importlib.metadata.version(name) for name in packer.packages}
    print(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()
