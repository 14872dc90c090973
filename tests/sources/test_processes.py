"""States that resume on other devices and processes, and runs that are killed and resumed."""

import itertools
import json
import pathlib
import random

import pytest
from elastic_graphs import GRAPHS, IMAGES, MORE, SEED, SOURCES, iterator_function, rows_of, write

from full import FULL
from processes import forked, started
from range_server import serving

WORKER = pathlib.Path(__file__).parents[1] / "support" / "elastic_worker.py"
STEPS = 5 if FULL else 4
QUICK = 15  # number of pairs in quick runs: each source with two graphs, and rand_augment

# Devices of each process in the mesh; None: NumPy arrays of each process's rows.
LAYOUTS = {
    1: (
        {"devices": 1},
        {"devices": 2, "turned": True},
        {"devices": 4, "copies": 2},
        {"devices": 8},
        {"devices": 8, "copies": 2, "turned": True},
        None,
    ),
    2: (
        {"devices": 1},
        {"devices": 2, "copies": 2},
        {"devices": 2, "copies": 2, "turned": True},
        {"devices": 4},
        {"devices": 4, "copies": 4},
        None,
    ),
    4: (
        {"devices": 1},
        {"devices": 1, "copies": 2, "turned": True},
        {"devices": 2, "turned": True},
        {"devices": 2, "copies": 2},
        None,
    ),
}


def chosen_pairs(count):
    """Pairs of (processes, mesh) with a source and a graph, for all numbers of processes.

    All sources are combined with all graphs, but the quick pairs have rand_augment once: its
    pipeline takes a second to build in each process.
    """
    of_numbers = []
    for before, after in itertools.product(LAYOUTS, LAYOUTS):
        meshes = list(itertools.product(LAYOUTS[before], LAYOUTS[after]))
        distinct = [((before, a), (after, b)) for a, b in meshes if (before, a) != (after, b)]
        of_numbers.append(random.Random(0).sample(distinct, -(-count // 9)))
    pairs = list(itertools.chain(*zip(*of_numbers)))[:count]
    kinds = [(source, graph) for graph in GRAPHS for source in SOURCES]
    if count == QUICK:
        kinds = [kind for kind in kinds if "rand_augment" not in kind] + [("Tar", "rand_augment")]
    kinds = itertools.islice(itertools.cycle(kinds), count)
    return [(*pair, *kind) for pair, kind in zip(pairs, kinds, strict=True)]


def jobs_of(pairs, folder):
    """Returns the jobs before and after each pair's state, with different batch sizes."""
    jobs = []
    for k, (before, after, source, graph) in enumerate(pairs):
        both = {"source": source, "graph": graph, "state": str(folder / f"{k}.json")}
        sizes = ((8, 8), (8, 16), (16, 8))[k % 3]
        saved = {"resume": False, "steps": 1 + k % 4, "batch": sizes[0], "mesh": before[1]}
        going_on = {"resume": True, "steps": STEPS, "batch": sizes[1], "mesh": after[1]}
        jobs.append((both | saved, both | going_on))
    return jobs


def uninterrupted(folder, source, graph):
    """Returns the records of a few epochs in order, from an iterator on one device."""
    count = IMAGES + (MORE if "Mixture" in source else 0)
    iterator = iterator_function(folder, source, graph)(
        batch_size=count, seed=SEED, mask="mask", auto_reset=True, as_numpy=True, num_threads=1
    )
    epochs = [rows_of(batch)[:count] for _ in range(5) for batch in iterator]
    iterator.close()
    labels = [[row[0] for row in epoch] for epoch in epochs]
    assert labels[0] != labels[1] and len(labels) == 5
    if "Mixture" not in source:  # whose components have their own epochs
        assert all(sorted(epoch) == list(range(IMAGES)) for epoch in labels)
    return epochs


def batches_from(epochs, sample, batch_size, steps):
    """Returns the batches after some samples, where padding repeats the last record of an epoch."""
    count, batches = len(epochs[0]), []
    epoch, position = divmod(sample, count)
    for _ in range(steps):
        rows = range(position, position + batch_size)
        batches.append([[*epochs[epoch][min(p, count - 1)][:3], p < count] for p in rows])
        position += batch_size
        if position >= count:
            epoch, position = epoch + 1, 0
    return batches, epoch * count + position


def merge_processes(reports):
    """Merges the batches of all processes, which must agree on common rows."""
    for pieces in zip(*reports, strict=True):
        rows = {}
        for piece in pieces:
            for k, row in piece.items():
                assert rows.setdefault(int(k), row) == row
        yield [rows[k] for k in sorted(rows)]


def run_jobs(folder, processes, jobs):
    """Runs jobs on some processes with 8 devices in all; returns their batches and states."""
    options = {"devices": 8 // processes, "jobs": jobs, "train": None, "files": str(folder)}
    reports = started(WORKER, folder, options, processes, timeout=1200)
    done = []
    for own in zip(*reports, strict=True):
        assert len({report["state"] for report in own}) == 1
        done.append(list(merge_processes([report["batches"] for report in own])))
    return done


def test_the_chosen_pairs_have_everything():
    for count in (QUICK, 60):
        pairs = chosen_pairs(count)
        assert len({json.dumps(pair) for pair in pairs}) == count
        numbers = {(before[0], after[0]) for before, after, *_ in pairs}
        assert numbers == set(itertools.product(LAYOUTS, LAYOUTS))
        kinds, quick = {pair[2:] for pair in pairs}, set(GRAPHS) - {"rand_augment"}
        assert kinds >= set(itertools.product(SOURCES, GRAPHS if count == 60 else quick))
        assert {graph for _, graph in kinds} == set(GRAPHS)
    meshes = [(p, mesh) for p in LAYOUTS for mesh in LAYOUTS[p]]
    for side in range(2):
        assert all(mesh in [pair[side] for pair in pairs] for mesh in meshes)


@pytest.mark.slow
def test_states_resume_on_other_devices_and_processes(tmp_path):
    """Each pair saves with some processes and resumes with others: ids, draws and pixels."""
    write(tmp_path)
    with serving(tmp_path) as (url, _):
        (tmp_path / "url").write_text(url)
        resume(tmp_path)


def resume(tmp_path):
    """Saves states in some layouts and resumes them in others."""
    pairs = chosen_pairs(60 if FULL else QUICK)
    jobs, wrong = jobs_of(pairs, tmp_path), []
    epochs = {key: uninterrupted(tmp_path, *key) for key in {(p[2], p[3]) for p in pairs}}
    behind = [0] * len(pairs)  # samples of the stream after the state
    for side, processes in itertools.product(range(2), LAYOUTS):
        numbers = [k for k, pair in enumerate(pairs) if pair[side][0] == processes]
        done = run_jobs(tmp_path, processes, [jobs[k][side] for k in numbers])
        for k, batches in zip(numbers, done, strict=True):
            job = jobs[k][side]
            want, behind[k] = batches_from(
                epochs[pairs[k][2:]], behind[k], job["batch"], job["steps"]
            )
            wrong += [
                (pairs[k], side, step) for step, batch in enumerate(batches) if batch != want[step]
            ]
            assert len(batches) == len(want) == job["steps"]
    assert not wrong, f"{len(wrong)} batches are wrong: {wrong}"


def notes_of(folder, processes, last):
    """Returns the valid rows of a run's batches, up to a sample of the stream."""
    every = []
    for process in range(processes):
        lines = (folder / f"notes{process}").read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        every.append([rows for sample, rows in whole if sample <= last])
    return [row for batch in merge_processes(every) for row in batch if row[3]]


def kill_after(saves, running):
    """Kills all processes in the middle of a step, after some saves."""
    lines = []
    for line in running[0].stdout:
        lines.append(line)
        if line.endswith(f"saved {saves}\n"):
            break
    assert lines and lines[-1].endswith(f"saved {saves}\n"), "".join(lines[-40:])
    for process in running:
        process.kill()  # SIGKILL: no further save


@pytest.mark.slow
def test_a_run_killed_twice_has_each_sample_of_the_epoch_once(tmp_path):
    """On two processes, then four, then one: unsaved samples are delivered again."""
    write(tmp_path)
    state, seen = tmp_path / "state.json", []
    job = {"source": "Files", "graph": "augment", "state": str(state)}
    job |= {"notes": str(tmp_path / "notes{}"), "resume": False}
    options = {"devices": 2, "files": str(tmp_path), "jobs": []}
    for processes, devices, batch, saves in ((2, 2, 4, 2), (4, 1, 8, 1), (1, 2, 2, 0)):
        job |= {"mesh": {"devices": devices}, "batch": batch, "saves": saves}
        running = forked(WORKER, tmp_path, options | {"train": job}, processes, piped=True)
        try:
            if saves:
                kill_after(saves, running)
        finally:
            results = [process.result(1 if saves else 240) for process in running]
        for code, out, err in results:
            assert (code == 0) == (saves == 0), out[-2000:] + err[-4000:]
        last = json.loads(state.read_text())["sample"] if saves else 2 * IMAGES
        assert last < IMAGES or not saves
        seen += notes_of(tmp_path, processes, last)
        job["resume"] = True
    assert seen == uninterrupted(tmp_path, "Files", "augment")[0]
    assert sorted(row[0] for row in seen) == list(range(IMAGES))
