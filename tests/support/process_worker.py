"""Worker process of test_processes.py: delivers batches, saves, resumes, reports."""

import json
import pathlib

import jax

from processes import join, leave

options = join()

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from dalijax import LastBatchPolicy, data_iterator  # noqa: E402
from numbered import graph  # noqa: E402


def pieces(array):
    """Returns the rows of this process: {device: [start, values]}."""
    out = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        out[str(jax.devices().index(shard.device))] = [start, np.asarray(shard.data).tolist()]
    return out


def main():
    report = []
    for config in options["configs"]:
        devices = np.array([jax.devices()[i] for i in config["order"]])
        mesh = Mesh(devices.reshape(config["shape"]), ("a", "b"))
        spec = PartitionSpec(*[tuple(p) if isinstance(p, list) else p for p in config["spec"]])
        sharding = NamedSharding(mesh, spec)
        iterator_fn = data_iterator(
            graph,
            ["x", "u"],
            reader_name="reader",
            sharding=sharding,
            mask="mask",
            last_batch_policy=LastBatchPolicy[config["policy"]],
        )
        iterator = iterator_fn(
            options["files"],
            padded=config["pad"],
            count=config["n"],
            batch_size=config["batch"],
            num_threads=1,
        )
        states = pathlib.Path(options["states"]) / f"{config['name']}-{options['process']}.json"
        if options["resume"]:
            iterator.set_state(json.loads(states.read_text()))
        events = []
        for step in range(config["steps"]):
            if not options["resume"] and step == config["save"]:
                states.write_text(json.dumps(iterator.get_state()))
            try:
                batch = next(iterator)
                # A computation over all processes, which fails if the arrays disagree.
                total = jax.jit(lambda x: x.sum())(batch["x"])
                events.append({k: pieces(v) for k, v in batch.items()} | {"sum": int(total)})
            except StopIteration:
                events.append("stop")
                iterator.reset()
        report.append(
            {
                "events": events,
                "pipelines": len(iterator._engine.prepare().pipelines),
                "shape": list(iterator.element_spec["x"].shape),
            }
        )
        iterator.close()
    leave(options, report)


main()
