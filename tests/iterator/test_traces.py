"""Traces of `jax.profiler`: waiting, placing and functions of an iterator, by step."""

import collections
import warnings

import grain
import jax
import numpy as np
import pytest
from nvidia.dali import fn as dali_fn
from nvidia.dali import types
from shardings import rows_over

from dalijax import data_iterator, fn, sources
from dalijax.adapters.grain import DALITransform

BATCH = 4


def events(folder):
    """Returns this package's events by name, in order: (start, end) in ns and the arguments."""
    (path,) = folder.rglob("*.xplane.pb")
    found = collections.defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jaxlib's own types, whose error would abort the process
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name.startswith("dalijax."):
                        end = event.start_ns + event.duration_ns
                        found[event.name].append((event.start_ns, end, dict(event.stats)))
    return {name: sorted(one, key=lambda e: e[:2]) for name, one in found.items()}


def within(inner, outer):
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def number_and_function(number):
    return number, fn.jax_function(lambda x: x + 1)(number)


@pytest.fixture
def source():
    return sources.Arrays({"number": np.arange(8, dtype=np.int32)[:, None]})


def test_a_trace_has_each_step(source, tmp_path):
    make = data_iterator(number_and_function, ["x", "y"], source=source, auto_reset=True)
    iterator = make(batch_size=BATCH, num_threads=1, device_id=None)
    next(iterator)
    with jax.profiler.trace(tmp_path):
        batches = [next(iterator)]
        for _ in range(3):  # more than DALI had prepared before
            with pytest.raises(StopIteration):
                next(iterator)
            batches += [next(iterator), next(iterator)]
    seen = events(tmp_path)
    ends = [(0, 2), (1, 2), (2, 2)]
    steps = [(e["epoch"], e["step"]) for *_, e in seen["dalijax.next"]]
    assert steps == [(0, 1), (0, 2), *((e, k) for e in (1, 2) for k in range(3)), (3, 0), (3, 1)]
    with_batch = [e for e in seen["dalijax.next"] if (e[2]["epoch"], e[2]["step"]) not in ends]
    for name in ("dalijax.wait", "dalijax.place"):
        assert len(seen[name]) == len(batches) == 7
        assert all(within(*pair) for pair in zip(seen[name], with_batch, strict=True))
    # DALI calls it ahead, in its own thread.
    assert {e["function"] for *_, e in seen["dalijax.function"]} == {
        "number_and_function.<locals>.<lambda>"
    }


def test_a_trace_has_batch_map(source, tmp_path):
    def centered(batch, key):
        return {"x": batch["x"] - batch["x"].mean()}

    def graph(number):
        return dali_fn.cast(number, dtype=types.FLOAT)

    make = data_iterator(graph, ["x"], source=source, sharding=rows_over(2), batch_map=centered)
    iterator = make(batch_size=BATCH, num_threads=1)
    with jax.profiler.trace(tmp_path):
        next(iterator)
    seen = events(tmp_path)
    ((*_, arguments),) = seen["dalijax.batch_map"]
    assert arguments["function"] == "centered"
    assert within(seen["dalijax.batch_map"][0], seen["dalijax.next"][0])


def test_a_trace_has_the_steps_of_a_grain_transform(tmp_path):
    ds = grain.MapDataset.source([{"x": np.int32(k)} for k in range(12)])
    made = DALITransform(
        lambda x: x + 0, batch_size=BATCH, output_map=["x"], num_threads=1, device_id=None
    )
    iterator = iter(ds.pipe(made))
    next(iterator)
    with jax.profiler.trace(tmp_path):
        next(iterator)
    seen = events(tmp_path)
    assert [e["step"] for *_, e in seen["dalijax.next"]] == [1]
    assert within(seen["dalijax.wait"][0], seen["dalijax.next"][0])
