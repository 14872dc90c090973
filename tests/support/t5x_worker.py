"""One of two processes of test_t5x.py: trains on global arrays of T5X's function, and resumes."""

import dataclasses
import pathlib
import sys

import jax

from processes import join, leave

options = join()
sys.path.insert(0, options["packages"])

import numpy as np  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from dalijax import data_iterator  # noqa: E402
from dalijax.adapters.t5x import get_dataset_fn  # noqa: E402
from numbered import graph  # noqa: E402


@dataclasses.dataclass
class DatasetConfig:
    batch_size: int = 8
    seed: int | None = None


@dataclasses.dataclass
class Partitioner:
    mesh: Mesh
    data_partition_spec: PartitionSpec


numbers = data_iterator(graph, ["x", "u"], reader_name="reader")


def main():
    process = jax.process_index()
    mesh = Mesh(np.array(jax.devices()).reshape(options["shape"]), ("data", "model"))
    partitioner = Partitioner(mesh, PartitionSpec("data"))

    def train(seed, **more):
        make = get_dataset_fn(numbers, files=options["files"], stick=True, num_threads=1, **more)
        return make(DatasetConfig(seed=seed), process, 2)

    report = {"rows": [], "sums": [], "resumed": []}
    try:
        train(1)
    except ValueError as error:
        report["refused"] = str(error)

    @jax.jit
    def step(total, batch):  # over the rows of both processes
        return total * 0.5 + (batch["x"][:, 0] * batch["u"]).sum()

    # Both processes have the only shard: equal draws show that they use the same seed.
    drawn = train(None, partitioner=Partitioner(mesh, PartitionSpec()))
    report["drawn"] = np.asarray(next(drawn)["u"].addressable_data(0)).tolist()
    iterator = train(1, partitioner=partitioner)
    iterator.peek_async().result()
    checkpoint = str(pathlib.Path(options["folder"]) / f"checkpoint_0-{process}")
    iterator.save(checkpoint)
    other = train(1, partitioner=partitioner)
    other.restore(checkpoint)
    for batches, sums in ((iterator, report["sums"]), (other, report["resumed"])):
        total = jax.numpy.float32(0)
        for _ in range(6):
            batch = next(batches)
            total = step(total, batch)
            sums.append(float(total))
            if batches is iterator:
                pieces = [np.asarray(s.data) for s in batch["x"].addressable_shards]
                report["rows"].append(np.concatenate(pieces).ravel().tolist())
    leave(options, report)


main()
