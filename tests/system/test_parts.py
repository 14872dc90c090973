"""Parts of Grain's records, one per process, with different numbers of batches."""

import itertools
import math
import pathlib

import pytest
from shared import shared

from processes import started

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).parents[1] / "support" / "parts_worker.py"
COUNT = 21
# For three processes: 5, 4 and 4 records.
COUNTS = {2: COUNT, 3: 13}
SCENARIOS = [
    *("slices", "slices_dropped", "slices_repeated", "own_folders", "filtered", "lacks_a_record"),
    *("another_order", "another_seed", "nothing_to_pad", "loaders", "holes"),
    *("iter_mapped", "iter_filtered", "iter_far_apart", "iter_packed", "iter_repeated"),
    *("iter_nothing", "iter_raising", "failing"),
    *("restored_apart", "spec_alone", "mesh_of_the_context"),
]
# Datasets of unknown length: process and number of processes -> records.
UNKNOWN = {
    "filtered": lambda p, n: [x for x in range(p, COUNTS[n], n) if x % 3 or p < n - 1],
    "iter_filtered": lambda p, n: [x for x in range(p, COUNTS[n], n) if x % 3 or p < n - 1],
    "iter_mapped": lambda p, n: list(range(p, COUNTS[n], n)),
    "iter_packed": lambda p, n: list(range(p, COUNTS[n], n)),
}


def run(folder, processes, scenarios):
    options = {"scenarios": scenarios, "count": COUNTS[processes]}
    reports = started(WORKER, folder, options, processes, timeout=400)
    return {name: [report[name] for report in reports] for name in scenarios}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return shared(tmp_path_factory, "parts", lambda: run(folder, 2, SCENARIOS))


@pytest.fixture(scope="module")
def seen_by_three(tmp_path_factory):
    scenarios = ["slices", "slices_dropped", "lacks_a_record", "failing", *UNKNOWN]
    folder = tmp_path_factory.mktemp("three")
    return shared(tmp_path_factory, "parts_of_three", lambda: run(folder, 3, scenarios))


def counted(batches):
    """Returns the unmasked records of one process."""
    return [x for xs, _, mask in batches for x, ok in zip(xs, mask) if ok]


def same_error(errors):
    assert len(set(errors)) == 1 and isinstance(errors[0], str), errors
    return errors[0]


@pytest.mark.parametrize("processes", (2, 3))
def test_slices_of_unequal_length_have_as_many_batches(request, processes):
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")["slices"]
    count = COUNTS[processes]
    longest = math.ceil(math.ceil(count / processes) / 2)
    shortest = math.floor(count / processes)
    assert math.ceil(shortest / 2) < longest  # otherwise there would be no difference
    for process, report in enumerate(reports):
        whole = report["whole"]
        assert len(whole) == longest
        assert counted(whole) == list(range(process, count, processes))
        # Padding is at the end, and repeats records of this process.
        for xs, us, mask in whole:
            assert mask == sorted(mask, reverse=True) and len(us) == 2
            assert all(x % processes == process for x in xs)
    assert sum(len(counted(report["whole"])) for report in reports) == count


@pytest.mark.parametrize("processes", (2, 3))
def test_they_resume_after_each_batch(request, processes):
    """Equal bit for bit: records, random numbers, masks, the padding and the end."""
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")["slices"]
    for report in reports:
        whole = report["whole"]
        assert report["resumed"] == [whole[k:] for k in range(len(whole) + 1)]


@pytest.mark.parametrize("processes", (2, 3))
def test_or_as_few_as_the_smallest(request, processes):
    fixture = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")
    count = COUNTS[processes]
    for process, batches in enumerate(fixture["slices_dropped"]):
        fewest = count // processes // 2
        records = [x for xs, _ in batches for x in xs]
        assert records == list(range(process, count, processes))[: 2 * fewest]


def test_repeated_slices_continue(seen):
    for process, batches in enumerate(seen["slices_repeated"]):
        own = list(range(process, COUNT, 2))
        assert [x for xs, _ in batches for x in xs] == (own * 2)[:18]


def test_a_folder_for_each_process(seen):
    for process, (padded, dropped) in enumerate(seen["own_folders"]):
        own = [100 * process + k for k in range((20, 14)[process])]
        assert len(padded) == 10 and counted(padded) == own
        assert [x for xs, _ in dropped for x in xs] == own[:14]


@pytest.mark.parametrize("processes", (2, 3))
@pytest.mark.parametrize("name", UNKNOWN)
def test_records_of_unknown_number(request, name, processes):
    """Every process has the same number of batches, padded or as few as the smallest part."""
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")[name]
    own = [UNKNOWN[name](process, processes) for process in range(processes)]
    most = max(math.ceil(len(records) / 2) for records in own)
    fewest = min(len(records) // 2 for records in own)
    assert fewest < most
    for (padded, dropped), records in zip(reports, own):
        assert len(padded["whole"]) == most and len(dropped["whole"]) == fewest
        in_order = sorted if name == "iter_mapped" else list
        assert in_order(counted(padded["whole"])) == records
        given = [x for xs, _ in dropped["whole"] for x in xs]
        assert given == counted(padded["whole"])[: 2 * fewest]
        for seen in (padded, dropped):  # bit for bit, with padding and end
            whole = seen["whole"]
            assert seen["resumed"] == [whole[k:] for k in range(len(whole) + 1)]


def test_a_process_with_far_fewer_records(seen):
    """The other process does not wait for it, nor for the end, when it stops early."""
    first, second = seen["iter_far_apart"]
    for k, count in enumerate((6, 2)):
        assert len(first[k]) == len(second[k]) == count
        assert counted(first[k]) == list(range(0, COUNT, 2))[: 2 * count]
        assert counted(second[k]) == [1]


def test_a_map_that_removes_records(seen):
    """Grain's length counts them: padding covers them, and dropping raises in the process."""
    (padded, _), (fewer, error) = seen["holes"]
    assert len(padded) == len(fewer) == 6
    assert counted(fewer) == UNKNOWN["filtered"](1, 2)
    assert "this process has 3 batches, but 5 were expected in every process" in error
    assert "Filter the records by filter()" in error


def test_repeated_iter_datasets_continue(seen):
    for process, batches in enumerate(seen["iter_repeated"]):
        own = UNKNOWN["filtered"](process, 2)
        for every in batches:
            assert [x for xs, *_ in every for x in xs] == (own * 3)[:18]


def test_a_process_without_records(seen):
    padded, dropped = zip(*seen["iter_nothing"])
    assert (
        "processes [1] have no batch of records, but each process needs a record to pad with"
        in (same_error(padded))
    )
    assert "each process needs a whole batch" in same_error(dropped)


def test_a_record_that_is_not_read_raises_in_its_process_alone(seen):
    for process, (errors, batches) in enumerate(seen["iter_raising"]):
        own = [x for x in range(process, COUNT, 2) if x != 5]
        assert errors == process and len(batches) == 6 and counted(batches) == own


@pytest.mark.parametrize(
    "name,text",
    [
        ("lacks_a_record", "of 21 records, process 1 has"),
        ("another_order", "ShuffleMap seed"),
        ("another_seed", "seed: process 0 has 0, process 1 has 1"),
        (
            "nothing_to_pad",
            "processes [1] have no batch of records, but each process needs a record",
        ),
    ],
)
def test_other_differences_raise_in_every_process(seen, name, text):
    assert text in same_error(seen[name])


def test_three_processes_of_which_one_lacks_a_record(seen_by_three):
    error = same_error(seen_by_three["lacks_a_record"])
    assert "records: processes 0, 1 have" in error and "process 2 has" in error


def test_loaders(seen):
    reports = seen["loaders"]
    records = [counted(own[0]) for own in reports]
    assert sorted(itertools.chain(*records)) == list(range(COUNT))
    assert {len(own[0]) for own in reports} == {6}
    assert "sampler: process 0 has IndexSampler" in same_error([own[1] for own in reports])
    text = same_error([own[2] for own in reports])
    assert "number of records: process 0 has 21, process 1 has 20" in text
    assert [own[3] for own in reports] == [[6], [6]]
    assert "sampler: process 0 has IndexSampler" in same_error([own[4] for own in reports])


def test_positions_are_compared_after_a_restore(seen):
    first, second = seen["restored_apart"]
    assert "position: process 0 has step 2, process 1 has step 1" in same_error(
        [first[0], second[0]]
    )
    for own, report in zip((first, second), seen["slices"]):
        assert [xs for xs, _, _ in own[1]] == [xs for xs, _, _ in report["whole"][1:2]]


@pytest.mark.parametrize("processes", (2, 3))
def test_a_process_that_fails_tells_the_others(request, processes):
    """They don't wait for it, and all continue together when it returns."""
    fixture = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")
    *others, last = fixture["failing"]
    assert "no table in this process" in last[0]
    for result, _ in others:
        assert f"process {processes - 1} did not reach the next batch of breaks" in result
        assert f"process {processes - 1} raised ValueError: " in result
        assert "no table in this process" in result
    for (_, batches), whole in zip(fixture["failing"], fixture["slices"]):
        assert counted(batches) == counted(whole["whole"])


def test_one_process_may_ask_for_the_spec_alone(seen):
    for own, report in zip(seen["spec_alone"], seen["slices"]):
        assert counted(own) == counted(report["whole"])


def test_a_partition_spec_is_of_the_mesh_that_is_set(seen):
    for own, report in zip(seen["mesh_of_the_context"], seen["slices"]):
        refused, batches, of_loader = own
        assert "no mesh is set in this thread" in refused and "jax.set_mesh(mesh)" in refused
        assert counted(batches) == counted(report["whole"]) and len(of_loader) == 6
