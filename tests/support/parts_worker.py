"""Worker process of test_parts.py: parts of Grain's records with different lengths."""

import jax

from processes import join, report

options = join()

import grain  # noqa: E402
import numpy as np  # noqa: E402
from grain.experimental import RepeatIterDataset  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from nvidia.dali import fn  # noqa: E402

from dalijax.adapters.grain import (  # noqa: E402
    DALIDataLoader,
    DALITransform,
    pack_records,
)

PROCESS, PROCESSES = options["process"], options["processes"]
LAST = PROCESS == PROCESSES - 1
MESH = Mesh(np.array(jax.devices()), ("d",))
SHARDING = NamedSharding(MESH, PartitionSpec("d"))
BATCH = 2 * PROCESSES
COUNT = options["count"]
TOTAL = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(MESH, PartitionSpec()))


def graph(x):
    return x + 0, fn.random.uniform(range=[0, 1])


def transform(**more):
    settings = {"pad": "mask", "sharding": SHARDING, "check_processes": 60, **more}
    return DALITransform(graph, batch_size=BATCH, output_map=["x", "u"], **settings)


def records(count=COUNT, start=0):
    return grain.MapDataset.source([{"x": np.int32(start + k)} for k in range(count)])


def sliced(count=COUNT):
    return records(count)[PROCESS::PROCESSES]


def arrays(batch):
    """Returns the rows of this process: x, random numbers and mask."""
    return [
        np.concatenate([np.ravel(s.data) for s in batch[k].addressable_shards]).tolist()
        for k in ("x", "u", "mask")
        if k in batch
    ]


def delivered(iterator, steps=None, together=True):
    """Returns this process's rows of each batch, or the error."""
    batches = []
    try:
        for batch in iterator:
            if together:
                float(TOTAL(batch["x"]))
            batches.append(arrays(batch))
            if len(batches) == steps:
                break
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return batches


def slices():
    return resumed(sliced().seed(7).pipe(transform()))


def resumed(ds):
    """Compares a whole run with resumes after each batch, in place and in a new iterator."""
    iterator, states = iter(ds), []
    whole = []
    while True:
        states.append(iterator.get_state())
        batch = next(iterator, None)
        if batch is None:
            break
        whole.append(arrays(batch))
    resumed = []
    for k, state in enumerate(states):
        again = iter(ds) if k % 2 else iterator
        again.set_state(state)
        resumed.append(delivered(again))
        assert next(again, None) is None
    return {"whole": whole, "resumed": resumed}


def slices_dropped():
    return delivered(sliced().pipe(transform(pad=None, drop_remainder=True)))


def slices_repeated():
    return delivered(sliced().repeat().pipe(transform(pad=None, drop_remainder=True)), 9)


def own_folders():
    own = records(14 if LAST else 20, 100 * PROCESS)
    drops = transform(pad=None, drop_remainder=True, own_records=True)
    return [delivered(own.pipe(t)) for t in (transform(own_records=True), drops)]


def kept(record):
    """Whether a filter of the last process keeps a record."""
    return record["x"] % 3 != 0 or not LAST


def filtered():
    """Filters after the slice, so that the number of records is unknown."""
    return unknown_length(sliced().filter(kept))


def holes():
    """Maps some records to None, which is known only after reading."""
    some = sliced().map(lambda record: record if kept(record) else None)
    drops = transform(pad=None, drop_remainder=True)
    return [delivered(some.pipe(transform())), delivered(some.pipe(drops), together=False)]


def unknown_length(ds):
    """Runs a dataset of unknown length: padded, resumed after each batch, and dropped."""
    drops = ds.pipe(transform(pad=None, drop_remainder=True))
    return [resumed(ds.pipe(transform())), resumed(drops)]


def iter_mapped():
    ds = sliced().seed(3).shuffle().to_iter_dataset().map(lambda record: record)
    return unknown_length(ds)


def iter_filtered():
    return unknown_length(sliced().to_iter_dataset().filter(kept))


def iter_far_apart():
    """Gives one record to one process, and all others to the other process."""
    ds = sliced().to_iter_dataset().filter(lambda record: not LAST or record["x"] == PROCESS)
    return [delivered(ds.pipe(transform())), delivered(ds.pipe(transform(pad="mask")), 2)]


def iter_packed():
    """Packs records: each element is a batch."""
    packed = sliced().batch(2, batch_fn=pack_records).to_iter_dataset()
    return unknown_length(packed)


def iter_repeated():
    ds = sliced().to_iter_dataset().filter(kept)
    ds = RepeatIterDataset(ds)
    transforms = (transform(), transform(pad=None, drop_remainder=True))
    return [delivered(ds.pipe(t), 9) for t in transforms]


def iter_nothing():
    ds = sliced().to_iter_dataset().filter(lambda record: not LAST)
    drops = transform(pad=None, drop_remainder=True)
    return [delivered(ds.pipe(t)) for t in (transform(), drops)]


def iter_raising():
    """Raises at a record of the last process: the batch fails, and later batches follow."""

    def read(record):
        if LAST and record["x"] == PROCESS + 2 * PROCESSES:
            raise ValueError("a record that is not to be read")
        return record

    iterator = iter(sliced().map(read).to_iter_dataset().pipe(transform()))
    batches, errors = [], 0
    while True:
        try:
            batch = next(iterator, None)
        except ValueError:
            errors += 1
            continue
        if batch is None:
            return [errors, batches]
        float(TOTAL(batch["x"]))
        batches.append(arrays(batch))


def lacks_a_record():
    return delivered(sliced(COUNT - 1 if LAST else COUNT).pipe(transform()))


def another_order():
    ds = records().seed(PROCESS).shuffle()[PROCESS::PROCESSES]
    return delivered(ds.pipe(transform(seed=0)))


def another_seed():
    return delivered(sliced().pipe(transform(seed=PROCESS)))


def nothing_to_pad():
    return delivered(records(1)[PROCESS::PROCESSES].pipe(transform()))


def loader(seed=0, count=COUNT, **more):
    sampler = grain.samplers.IndexSampler(count, num_epochs=1, shuffle=True, seed=seed)
    settings = {"pad": "mask", "sharding": SHARDING, "pipeline_fn": graph, **more}
    return DALIDataLoader(
        [{"x": np.int32(k)} for k in range(count)],
        sampler,
        batch_size=BATCH,
        output_map=["x", "u"],
        **settings,
    )


def loaders():
    options = grain.sharding.ShardOptions(PROCESS, PROCESSES)
    by_host = {"sharding": None, "shard_options": options}
    return [
        delivered(loader()),
        delivered(loader(seed=PROCESS)),
        delivered(loader(count=COUNT - LAST)),
        [len(list(loader(**by_host)))],
        str(_error(lambda: list(loader(seed=PROCESS, **by_host)))),
    ]


def _error(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return error


def restored_apart():
    ds = sliced().pipe(transform())
    iterator = iter(ds)
    next(iterator)
    state = iterator.get_state()
    next(iterator)
    again = iter(ds)
    again.set_state(state if LAST else iterator.get_state())
    refused = delivered(again, 1)
    again.set_state(state)
    return [refused, delivered(again, 1)]


def failing():
    """Fails once in the graph of the last process; the other processes don't wait for it."""
    fails = [LAST]

    def breaks(x):
        if fails and fails.pop():
            raise ValueError("no table in this process")
        return graph(x)

    settings = {"pad": "mask", "sharding": SHARDING, "output_map": ["x", "u"]}
    iterator = iter(sliced().pipe(DALITransform(breaks, batch_size=BATCH, **settings)))
    result = str(_error(lambda: next(iterator)))
    jax.experimental.multihost_utils.sync_global_devices("failed")
    return [result, delivered(iterator)]


def spec_alone():
    """Asks for the spec and prefetches in one process."""
    ds = sliced().pipe(transform())
    iterator = iter(ds)
    if LAST:
        assert grain.experimental.get_element_spec(ds)["x"].shape == (BATCH,)
        iterator.start_prefetch()
    return delivered(iterator)


def mesh_of_the_context():
    made_before = sliced().pipe(transform(sharding=PartitionSpec("d")))
    refused = str(_error(lambda: iter(made_before)))
    with jax.set_mesh(jax.make_mesh((PROCESSES,), ("d",))):
        iterator = iter(made_before)
        inside = iter(loader(sharding=PartitionSpec("d")))
    return [refused, delivered(iterator), delivered(inside)]


if __name__ == "__main__":
    report(options, globals())
