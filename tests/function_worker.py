"""One of several processes of test_processes.py: a function of global arrays beside a step."""

import json
import random
import sys
import time

import jax

options = json.loads(sys.argv[1])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", options["devices"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{options['port']}", options["processes"], options["process"])

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from nvidia.dali import fn as dali_fn  # noqa: E402
from nvidia.dali import types  # noqa: E402

from dalijax import data_iterator, fn  # noqa: E402

STEPS, SAVED = 60, 31
SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))


@fn.jax_function(sharding=SHARDING, num_outputs=2)
@jax.jit
def centred(x):
    return x - x.mean(), jnp.flip(x, 0)  # both of other processes' rows, too


@fn.jax_function(sharding=SHARDING)
@jax.jit
def summed(x, y):
    return x + y.sum()


@jax.jit
def step(weight, x):
    return weight + x.mean() + 0 * jnp.flip(x, 0).sum()


def graph(files, shard_id=0, num_shards=1):
    label = dali_fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        name="reader",
        shard_id=shard_id,
        num_shards=num_shards,
        random_shuffle=True,
    )[1]
    x = dali_fn.cast(label, dtype=types.FLOAT)
    own, flipped = centred(x)
    return x, own, flipped, summed(flipped, x)


def check(batch):
    """Compares this process's rows with NumPy."""
    x = np.asarray(process_allgather(batch["x"], tiled=True))
    wanted = {"own": x - x.mean(), "flipped": x[::-1], "summed": x[::-1] + x.sum()}
    for name, value in wanted.items():
        for shard in batch[name].addressable_shards:
            np.testing.assert_allclose(
                np.asarray(shard.data), value[shard.index], rtol=1e-5, atol=1e-4, err_msg=name
            )
    return x


def main():
    pauses = random.Random(options["process"])
    made = data_iterator(
        graph,
        ["x", "own", "flipped", "summed"],
        reader_name="reader",
        sharding=SHARDING,
        auto_reset=True,
    )
    iterator = made(options["files"], batch_size=8, num_threads=1)
    weight, batches, state = jnp.zeros(()), [], None
    while len(batches) < STEPS:
        for batch in iterator:
            time.sleep(pauses.random() * 0.003)  # the processes are not in step
            weight = step(weight, batch["x"])
            batches.append(batch)
            if len(batches) == SAVED:
                state = iterator.get_state()
    rows = [check(batch) for batch in batches]
    np.testing.assert_allclose(float(weight), sum(x.mean() for x in rows), rtol=1e-4)
    resumed = made(options["files"], batch_size=8, num_threads=1)
    resumed.set_state(state)
    np.testing.assert_array_equal(check(next(resumed)), rows[SAVED])
    resumed.close()
    iterator.close()
    with open(options["report"], "w") as file:
        json.dump([x.ravel().tolist() for x in rows], file)
    jax.distributed.shutdown()


main()
