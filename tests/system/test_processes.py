"""Several processes through jax.distributed on loopback: each builds only its own shards."""

import itertools
import pathlib

import numpy as np
import pytest
from shared import shared

from full import FULL, in_full
from oracle import Case
from processes import PROCESSES, started

WORKER = pathlib.Path(__file__).parents[1] / "support" / "process_worker.py"
SOURCE_WORKER = pathlib.Path(__file__).parents[1] / "support" / "source_worker.py"
FUNCTION_WORKER = pathlib.Path(__file__).parents[1] / "support" / "function_worker.py"
DEVICES = 4

CONFIGS = [
    # name, order, shape, spec, data shards, pipelines of each process
    ("rows", range(8), (8, 1), ["a"], 8, (4, 4)),
    ("replicas", range(8), (4, 2), ["a"], 4, (2, 2)),
    ("reversed", range(7, -1, -1), (4, 2), ["a"], 4, (2, 2)),
    ("over processes", (0, 4, 1, 5, 2, 6, 3, 7), (4, 2), ["a"], 4, (4, 4)),
    ("two axes", (3, 0, 6, 5, 1, 7, 2, 4), (4, 2), [["b", "a"]], 8, (4, 4)),
    ("whole", range(8), (4, 2), [], 1, (1, 1)),
]


def configs():
    """Yields every layout with two policies; `make test-full` runs all four."""
    for k, (policy, pad) in enumerate(itertools.product(("FILL", "DROP"), (False, True))):
        for number, (name, order, shape, spec, shards, pipelines) in enumerate(CONFIGS):
            if FULL or (k + number) % 2 == 0:
                yield {
                    "name": f"{name} {policy} {pad}".replace(" ", "_"),
                    "order": list(order),
                    "shape": list(shape),
                    "spec": spec,
                    "policy": policy,
                    "pad": pad,
                    "n": 3 * shards + 1,
                    "batch": 2 * shards,
                    "steps": 8,
                    "save": 2,
                    "shards": shards,
                    "pipelines": pipelines,
                }


def run(tmp_path, files, resume):
    options = {
        "files": files,
        "devices": DEVICES,
        "states": str(tmp_path),
        "configs": list(configs()),
        "resume": resume,
    }
    return started(WORKER, tmp_path, options)


def expected(config):
    """Returns rows and mask of each batch, and 'stop' at the end of an epoch."""
    case = Case(
        config["n"],
        config["shards"],
        config["batch"] // config["shards"],
        config["policy"],
        config["pad"],
        False,
    )
    events = []
    for number, streams in case.epochs(9):
        for own in zip(*streams):
            rows = [s[0] for piece in own for s in piece]
            mask = [m for piece in own for m in case.mask(piece, number)]
            events.append((rows, mask))
        events.append("stop")
    return events


def holders(config):
    """Returns the row range of each device, from the mesh alone."""
    grid = np.array(config["order"]).reshape(config["shape"])
    spec = config["spec"]
    for index, device in np.ndenumerate(grid):
        where = 0
        axes = spec[0] if spec and isinstance(spec[0], list) else spec[:1]
        for axis in axes:
            k = "ab".index(axis)
            where = where * grid.shape[k] + index[k]
        yield int(device), where


@pytest.fixture(scope="module")
def reports(tmp_path_factory, jpegs_many):
    folder = tmp_path_factory.mktemp("processes")
    return shared(
        tmp_path_factory,
        "processes",
        lambda: [run(folder, jpegs_many, resumes) for resumes in (False, True)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("index", range(24 if FULL else 12))
def test_two_processes_of_four_devices(reports, index):
    whole, resumed = reports
    config = list(configs())[index]
    want = expected(config)
    per_shard = config["batch"] // config["shards"]
    assert [r[index]["pipelines"] for r in whole] == list(config["pipelines"])
    assert all(r[index]["shape"] == [config["batch"], 1] for r in whole)
    for step in range(config["steps"]):
        events = [r[index]["events"][step] for r in whole]
        if want[step] == "stop":
            assert events == ["stop", "stop"]
            continue
        rows, mask = want[step]
        seen = set()
        for event in events:
            assert event["sum"] == sum(rows)
            for device, (start, values) in event["x"].items():
                where = dict(holders(config))[int(device)] * per_shard
                assert start == where, (config["name"], step, device)
                assert [v[0] for v in values] == rows[where : where + per_shard]
                assert event["mask"][device][1] == mask[where : where + per_shard]
                seen.add(int(device))
        assert seen == set(range(PROCESSES * DEVICES))
    # Saved in one run, resumed in another: batches, random numbers, masks and ends.
    for before, after in zip(whole, resumed, strict=True):
        rest = before[index]["events"][config["save"] :]
        assert after[index]["events"][: len(rest)] == rest


@pytest.mark.slow
@pytest.mark.parametrize("devices,steps", (in_full(1, 60), (2, 200 if FULL else 60)))
def test_batch_map_next_to_a_step(tmp_path, jpegs_many, devices, steps):
    """Each process checks its rows; all processes must start collectives in the same order.

    A process is slower by 0.35 s at one batch in ten; threads that take batches are refused.
    """
    options = {"files": jpegs_many[:24], "devices": devices, "steps": steps, "slow": 0.1}
    first, second = started(FUNCTION_WORKER, tmp_path, options)
    assert first == second and len(first) >= steps


@pytest.mark.slow
def test_a_source_that_raises_stop_iteration(tmp_path, jpegs_many):
    """Each process has a pipeline of unknown size, which ends at StopIteration."""
    reports = started(SOURCE_WORKER, tmp_path, {"files": jpegs_many})
    starts = [10, 20, 30]
    numbers = [number for report in reports for rows in report["host"] for number in rows[0]]
    assert sorted(numbers) == list(range(8))
    for process, report in enumerate(reports):
        own = [100 * process + start for start in starts]
        assert report["epochs"] == [[[[start, start + 1]] for start in own]] * 2
        assert report["sums"] == [[2 * (2 * start + 1) + 200 for start in starts]] * 2
        assert report["pipelines"] == 1
        assert "a batch of 1 samples instead of 2. Over several processes" in report["short"]
        shard = f"for shard {process} of 2"
        assert process == 0 or shard in report["forgotten"]
        assert "reads shard 0 of 1 in the pipeline" in report["forgotten"]
        assert report["sliced"] == [[[process, 2 + process]], [[4 + process, 6 + process]]]
        assert report["own"] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
        assert "is not sliced" in report["unsliced"]
        # In the first process a part looks like its slice, and it waits for the other process.
        absent = "process 1 has not reached the number of batches of <lambda> within 2 s"
        assert ("is not sliced" if process else absent) in report["part"]
        for numbers, labels, states in report["host"]:
            assert labels == [number + 50 for number in numbers]
            assert states == [3.0 * number for number in numbers] and len(numbers) == 2
        assert [text[:45] for text in report["warned"]] == [
            "several processes, but no sharding over them,"
        ]
