"""Worker process of tests/sources/test_mixture_stages.py."""

from processes import join, leave

options = join()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from staged_mixtures import SEED, WEIGHTS, parts, stream  # noqa: E402

from dalijax.errors import ProcessError  # noqa: E402
from dalijax.sources import Mixture  # noqa: E402

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))


def rows(iterator, batches):
    """Returns the values of this process's rows, by the number of the row in all batches."""
    held = {}
    for number in range(batches):
        batch = next(iterator)["x"]
        for shard in batch.addressable_shards:
            first = number * len(batch) + shard.index[0].start
            held |= {first + k: v for k, v in enumerate(np.asarray(shard.data).tolist())}
    return held


def run():
    a, b, c = parts()
    begun = Mixture([(a, 3), (b, 1)])
    iterator = stream(begun, 24, sharding=SHARDING, seed=SEED)
    report = {"before": rows(iterator, 10), "state": iterator.get_state()}
    iterator.close()
    iterator = stream(begun.then(240, [(b, 1), (c, 2)]), 8, sharding=SHARDING)
    iterator.set_state(report["state"])
    report |= {"after": rows(iterator, 30), "last": iterator.get_state()}
    iterator.close()
    iterator = stream(Mixture([*zip((a, b, c), WEIGHTS)]), 24, sharding=SHARDING)
    iterator.set_state(options["state"])
    report["moved"] = rows(iterator, 20)
    iterator.close()
    weights = (3, [(0, 1), (401, 4 + options["process"])])
    try:
        next(stream(Mixture([*zip((a, b), weights)]), 24, sharding=SHARDING))
    except ProcessError as error:
        report["error"] = str(error)
    return report


leave(options, run())
