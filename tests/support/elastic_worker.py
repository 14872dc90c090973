"""Worker process of tests/sources/test_processes.py."""

import json
import pathlib
import sys
import types

import jax

from processes import join

options = join()

from elastic_graphs import SEED, held_rows, iterator_function, sharding  # noqa: E402

from dalijax.adapters.grain import DALIIterDataset  # noqa: E402

PROCESS, PROCESSES = options["process"], options["processes"]


def iterator_of(job):
    """Returns an iterator over a mesh, or over this host's rows with Grain."""
    make = iterator_function(options["files"], job["source"], job["graph"])
    call = {"num_threads": 1, "batch_size": job["batch"]}
    if not job["resume"]:
        call["seed"] = SEED  # otherwise the state decides
    if job["mesh"] is not None:
        return make(sharding=sharding(**job["mesh"]), mask="mask", auto_reset=True, **call)
    call["batch_size"] //= PROCESSES
    rows = types.SimpleNamespace(shard_index=PROCESS, shard_count=PROCESSES, drop_remainder=False)
    return iter(DALIIterDataset(make, num_epochs=None, pad="mask", shard_options=rows, **call))


def run(job):
    """Delivers batches from a state, or from the beginning of the stream."""
    iterator, state = iterator_of(job), pathlib.Path(job["state"])
    if job["resume"]:
        iterator.set_state(json.loads(state.read_text()))
    batches = []
    while len(batches) < job["steps"]:
        if (batch := next(iterator, None)) is not None:  # end of an epoch
            batches.append(held_rows(batch, PROCESS))
    saved = json.dumps(iterator.get_state())
    if not job["resume"] and PROCESS == 0:
        state.write_text(saved)
    iterator.close()
    return {"batches": batches, "state": saved}


def train(job):
    """Steps until the process is killed, or through the rest of the epoch.

    Each process writes its rows before a step that waits for all processes. Process 0 then saves
    the state, ``saves`` times.
    """
    iterator, state = iterator_of(job), pathlib.Path(job["state"])
    if job["resume"]:
        iterator.set_state(json.loads(state.read_text()))
    step = jax.jit(lambda image, mask: (image.mean((1, 2, 3)) * mask).sum())
    with pathlib.Path(job["notes"].format(PROCESS)).open("w") as notes:
        while iterator.epoch == 0 or job["saves"]:
            for number, batch in enumerate(iterator, 1):
                saved = iterator.get_state()
                print(
                    json.dumps([saved["sample"], held_rows(batch, PROCESS)]), file=notes, flush=True
                )
                step(batch["image"], batch["mask"]).block_until_ready()
                if PROCESS == 0 and number <= job["saves"] and not iterator.epoch:
                    new = state.with_suffix(".new")
                    new.write_text(json.dumps(saved))
                    new.replace(state)
                    sys.stdout.write(f"saved {number}\n")
                    sys.stdout.flush()


def main():
    report = [run(job) for job in options["jobs"]]
    pathlib.Path(options["report"]).write_text(json.dumps(report))
    if options["train"]:
        train(options["train"])
    if PROCESSES > 1:
        jax.distributed.shutdown()


main()
