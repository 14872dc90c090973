"""Worker process of test_processes.py: `batch_map` over processes next to a training step."""

import random
import time

import jax

from processes import join, leave

options = join()

import grain  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from nvidia.dali import fn as dali_fn  # noqa: E402
from nvidia.dali import types  # noqa: E402

from dalijax import data_iterator, sources  # noqa: E402
from dalijax.adapters.clu import DALIDatasetIterator  # noqa: E402
from dalijax.adapters.grain import DALIIterDataset  # noqa: E402
from numbered import read_files  # noqa: E402

STEPS, SAVED = options["steps"], 31
SLOW = 0.35  # seconds by which process 1 is slower for some batches
SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))


def centered(batch, key):
    # Both need rows of other processes, and all processes have the same key.
    x = batch["x"]
    drawn = jax.random.uniform(key)
    return {**batch, "own": x - x.mean(), "flipped": jnp.flip(x, 0), "drawn": drawn}


def summed(batch, key):
    return {**batch, "summed": batch["flipped"] + batch["x"].sum()}


@jax.jit
def step(weight, x):
    return weight + x.mean() + 0 * jnp.flip(x, 0).sum()


def graph(files, shard_id=0, num_shards=1):
    label = read_files(
        files,
        shard_id=shard_id,
        num_shards=num_shards,
        random_shuffle=True,
        pad_last_batch=True,
        stick_to_shard=True,
    )[1]
    return dali_fn.cast(label, dtype=types.FLOAT)


def of_numbers(number):
    return dali_fn.cast(number, dtype=types.FLOAT)


SETTINGS = {"sharding": SHARDING, "batch_map": [centered, summed]}
over_files = data_iterator(graph, ["x"], reader_name="reader", **SETTINGS)
numbers = sources.Arrays({"number": np.arange(24, dtype=np.int32)[:, None]})
over_source = data_iterator(of_numbers, ["x"], source=numbers, **SETTINGS)


def check(batch):
    """Compares this process's rows with NumPy."""
    x = np.asarray(process_allgather(batch["x"], tiled=True))
    wanted = {"own": x - x.mean(), "flipped": x[::-1], "summed": x[::-1] + x.sum()}
    for name, value in wanted.items():
        for shard in batch[name].addressable_shards:
            np.testing.assert_allclose(
                np.asarray(shard.data), value[shard.index], rtol=1e-5, atol=1e-4, err_msg=name
            )
    return x, float(batch["drawn"])


def refused(call):
    """Checks that a thread which takes batches for this thread raises an error that names it."""
    try:
        call()
    except RuntimeError as error:
        return "batch_map: centered, summed must run in the same order" in str(error)
    return False


def check_other_threads(iterator_fn, **call):
    call |= {"batch_size": 8, "num_threads": 1}
    peeks = DALIDatasetIterator(iterator_fn, num_epochs=1, element="jax", **call)
    assert refused(lambda: peeks.peek_async().result())
    first = check(next(peeks))  # which is not lost
    peeks.close()
    again = iterator_fn(**call)
    assert np.array_equal(check(next(again))[0], first[0])
    again.close()
    ds = DALIIterDataset(iterator_fn, pad="mask", **call)
    ahead = iter(grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2))
    assert refused(lambda: next(ahead))
    ahead.close()


def main():
    pauses = random.Random(options["process"])
    call = {"files": options["files"], "batch_size": 8, "num_threads": 1}
    iterator = over_files(**call, auto_reset=True)
    if options["process"]:  # in one process alone: it computes nothing
        assert iterator.element_spec["drawn"].shape == ()
    weight, batches, state = jnp.zeros(()), [], None
    while len(batches) < STEPS:
        for batch in iterator:
            time.sleep(pauses.random() * 0.003)  # the processes are not in step
            if options["process"] and pauses.random() < options["slow"]:
                time.sleep(SLOW)
            weight = step(weight, batch["x"])
            batches.append(batch)
            if len(batches) == SAVED:
                state = iterator.get_state()
    rows, drawn = zip(*(check(batch) for batch in batches))
    np.testing.assert_allclose(float(weight), sum(x.mean() for x in rows), rtol=1e-4)
    assert len(set(drawn)) == len(drawn)
    resumed = over_files(**call)
    resumed.set_state(state)
    x, number = check(next(resumed))
    np.testing.assert_array_equal(x, rows[SAVED])
    assert number == drawn[SAVED]
    resumed.close()
    iterator.close()
    check_other_threads(over_files, files=options["files"])
    check_other_threads(over_source)
    leave(options, [[x.ravel().tolist(), number] for x, number in zip(rows, drawn)])


main()
