"""Worker process of test_processes.py: a pipeline over a source that raises StopIteration."""

import jax

from processes import join, leave

options = join()

import warnings  # noqa: E402

import grain  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from nvidia.dali import fn  # noqa: E402

from dalijax import data_iterator  # noqa: E402
from dalijax.adapters.grain import DALITransform  # noqa: E402
from dalijax.sources import Arrays, Field  # noqa: E402

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))


class Batches:
    """Batches of two samples of a shard; the last batch has the given size."""

    def __init__(self, shard, last):
        self.sizes, self.shard = [2, 2, last], shard

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == len(self.sizes):
            raise StopIteration
        self.at += 1
        start = 100 * self.shard + 10 * self.at
        return np.arange(start, start + self.sizes[self.at - 1], dtype=np.int32)[:, None]


@data_iterator(output_map=["x"], sharding=SHARDING)
def sources(last=2, shard_id=0, num_shards=1):
    return fn.external_source(Batches(shard_id, last), cycle="raise", dtype=None)


@data_iterator(output_map=["x"], sharding=SHARDING, reader_name="reader")
def forgotten(shard_id=0, num_shards=1):
    return fn.readers.file(files=options["files"], name="reader")[1]


def by_grain(step=1, process=0, **more):
    """Returns this process's numbers in global batches of Grain's records, sliced or not."""
    records = grain.MapDataset.source([{"x": np.int32(k)} for k in range(8)])
    records = records[process::step] if step > 1 else records[: 8 - more.pop("kept_back", 0)]
    transform = DALITransform(
        lambda x: x, batch_size=4, output_map=["x"], drop_remainder=True, sharding=SHARDING, **more
    )
    return [rows(batch) for batch in records.pipe(transform)]


def on_host():
    """Returns this process's rows of global arrays, and of values that stay on the host."""
    source = Arrays({"x": np.arange(8), "state": np.arange(8) * 3.0, "label": np.arange(8) + 50})
    make = data_iterator(
        lambda x, label: {"x": x, "label": label},
        sharding={"x": SHARDING, "label": None, "state": None},
    )
    source.fields = {**source.fields, "state": Field(np.float64, bypass=True)}
    return [
        [*rows(batch), batch["label"].tolist(), batch["state"].tolist()]
        for batch in make(source=source, batch_size=4, seed=1)
    ]


def without_sharding():
    """Returns the warnings for a source that each process reads whole."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        iterator = data_iterator(lambda x: x, ["x"], source=Arrays({"x": np.arange(8)}))
        next(iterator(batch_size=4))
    return [str(one.message) for one in warned if one.category is RuntimeWarning]


def rows(batch):
    return [np.asarray(piece.data).ravel().tolist() for piece in batch["x"].addressable_shards]


def main():
    call = {"batch_size": 4, "num_threads": 1}
    iterator = sources(**call)
    report = {"epochs": [], "sums": []}
    for _ in range(2):
        batches = list(iterator)
        report["epochs"].append([rows(batch) for batch in batches])
        report["sums"].append([int(jax.jit(lambda x: x.sum())(batch["x"])) for batch in batches])
        iterator.reset()
    report["pipelines"] = len(iterator._shards)
    short = sources(1, **call)
    next(short), next(short)
    report["sliced"] = by_grain(jax.process_count(), jax.process_index())
    report["own"] = by_grain(own_records=True)
    report["host"] = on_host()
    report["warned"] = without_sharding()
    wrong_calls = {
        "short": lambda: next(short),
        "forgotten": lambda: forgotten(**call),
        "unsliced": by_grain,
        "part": lambda: by_grain(kept_back=5, check_processes=2),
    }
    for name, wrong in wrong_calls.items():
        try:
            wrong()
        except (ValueError, RuntimeError) as error:
            report[name] = str(error)
    leave(options, report)


main()
