"""Iterators that differ between processes: each process raises an error, and none hangs."""

import itertools
import pathlib

import numpy as np
import pytest
from shared import shared

from processes import forked, started

pytestmark = pytest.mark.slow

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
PROCESSES = 2

# The words of the errors; each scenario is a function of agreement_worker.py.
DIFFERENT = {
    "source_lacks_a_record": [
        "number of records: process 0 has 21, process 1 has 20",
        "batches per epoch: process 0 has 6, process 1 has 5",
    ],
    "source_in_another_order": ["records (names, sizes, bytes): process 0 has"],
    "source_seed": ["seed: process 0 has 0, process 1 has 1"],
    "source_batch": ["global batch: process 0 has 4, process 1 has 8"],
    "source_policy": ["last batch: process 0 has FILL, process 1 has DROP"],
    "source_padding": ["padding: process 0 has unpadded, process 1 has padded"],
    "source_shuffle": ["shuffle: process 0 has False, process 1 has True"],
    "source_graph": ["operators."],
    "source_mesh": ["sharding: process 0 has ('d',) over the devices [0] [2048]"],
    "source_spec": ["sharding of x: process 0 has ('d',) over the devices [0] [2048]"],
    "source_epochs": ["epochs: process 0 has no end, process 1 has 1"],
    "source_batch_map": ["operators."],
    "auto_reset": ["auto_reset: process 0 has False, process 1 has True"],
    "source_of_a_host": ["number of records: process 0 has 21, process 1 has 20"],
    "reader_lacks_a_file": ["number of records: process 0 has 13, process 1 has 12"],
    "reader_in_another_order": ["reader.files: process 0 has 13 files"],
    "reader_seed": ["seed: process 0 has 0, process 1 has 1"],
    "reader_batch": ["global batch: process 0 has 4, process 1 has 8"],
    "reader_policy": ["last batch: process 0 has FILL, process 1 has DROP"],
    "reader_padding": ["padding: process 0 has unpadded, process 1 has padded"],
    "reader_graph": ["operators."],
    "reader_mesh": ["sharding: process 0 has ('d',) over the devices [0] [2048]"],
    "reader_of_a_folder_for_each_host": ["number of records: process 0 has 20, process 1 has 14"],
    "of_a_host_reader": ["number of records: process 0 has 12, process 1 has 11"],
}
OTHERS = [
    *("agree", "reader_of_equal_folders", "restored_apart", "sought_apart"),
    *("made_in_another_order", "in_threads", "alone", "unchecked", "never_comes"),
    *("mesh_of_the_context", "skipping", "skipped_apart", "moved_alone", "interrupted"),
    *("numpy_of_clu", "differing_sources", "moved_after_the_end", "stream_moved_alone"),
    *("peeked_alone", "refused_move", "same_part"),
]
THREE = [
    *("agree", "source_lacks_a_record", "reader_seed", "made_in_another_order", "in_threads"),
    *("interrupted", "moved_alone"),
]


def run(folder, processes, scenarios):
    files = [folder / f"file{k:04}.bin" for k in range(20 * processes)]
    for file in files:
        file.write_bytes(b"x")
    different = sorted({*DIFFERENT, "differing_sources"} & {*scenarios})
    options = {"files": list(map(str, files)), "scenarios": scenarios, "different": different}
    reports = started(SUPPORT / "agreement_worker.py", folder, options, processes, timeout=400)
    return {name: [report[name] for report in reports] for name in scenarios}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder, scenarios = tmp_path_factory.mktemp("two"), [*DIFFERENT, *OTHERS]
    return shared(tmp_path_factory, "agreement", lambda: run(folder, PROCESSES, scenarios))


@pytest.fixture(scope="module")
def seen_by_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return shared(tmp_path_factory, "agreement_of_three", lambda: run(folder, 3, THREE))


def merge_processes(pieces):
    """Merges the records of each batch from all processes."""
    return [list(itertools.chain(*own)) for own in zip(*pieces, strict=True)]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_raises_the_same_error_in_every_process(seen, name):
    first, second = seen[name]
    assert first == second and "the iterators of" in first
    for text in DIFFERENT[name]:
        assert text in first
    assert "check_processes=False" in first
    named = [line.strip().partition(":")[0] for line in first.splitlines() if "process 0" in line]
    assert "position" not in named and "function" not in named


@pytest.mark.parametrize("processes", (2, 3))
def test_processes_that_agree_deliver_the_batches_of_one_process(request, processes):
    from dalijax import data_iterator, sources

    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")["agree"]
    function = data_iterator(lambda x: x + 0, ["x"], mask="mask", as_numpy=True)
    for place, seed in ((0, 0), (2, 3)):
        source = sources.Arrays({"x": np.arange(21, dtype=np.int32)})
        iterator = function(source=source, batch_size=2 * processes, seed=seed)
        want = [batch["x"][batch["mask"]].tolist() for batch in iterator]
        assert merge_processes([report[place] for report in reports]) == want
    labels = sorted(itertools.chain(*merge_processes([report[1] for report in reports])))
    assert labels == list(range(13))


def test_three_processes_of_which_one_differs(seen_by_three):
    for name, text in (
        ("source_lacks_a_record", "number of records: processes 0, 1 have 21, process 2 has 20"),
        ("reader_seed", "seed: processes 0, 1 have 0, process 2 has 1"),
    ):
        errors = seen_by_three[name]
        assert len(set(errors)) == 1 and text in errors[0]


@pytest.mark.parametrize("processes", (2, 3))
def test_iterators_are_compared_by_their_configuration(request, processes):
    """The order in which a process creates them or takes their first batches is irrelevant."""
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")
    for place, ids in enumerate((range(21), range(21, 42))):
        batches = merge_processes([own[place] for own in reports["made_in_another_order"]])
        assert sorted(itertools.chain(*batches)) == list(ids)
    assert all(len(own) == 3 and all(own) for own in reports["in_threads"])


def test_a_reader_with_files_of_its_own_for_each_shard(seen):
    batches = merge_processes(seen["reader_of_equal_folders"])
    assert sorted(itertools.chain(*batches)) == list(range(4 * PROCESSES))


def test_positions_are_compared_after_a_restore_and_a_seek(seen):
    first, second = seen["restored_apart"]
    assert first[:2] == second[:2]
    assert "position: process 0 has epoch 0, sample 12, process 1 has epoch 0, sample 8" in first[0]
    assert "Restore the same state" in first[0]
    assert "position: process 0 has epoch 0, step 3, process 1 has epoch 0, step 2" in first[1]
    # The same state in every process: the refusal had no effect.
    source, reader = ([own[2][k] for own in (first, second)] for k in range(2))
    agreed = seen["agree"]
    assert source == [own[0][2:3] for own in agreed] and reader == [own[1][2:3] for own in agreed]
    first, second = seen["sought_apart"]
    assert first[0] == second[0] and "epoch 1, sample 21, process 1 has epoch 1" in first[0]
    assert isinstance(first[1], list) and isinstance(second[1], list)


def test_positions_are_compared_after_a_skip_and_a_reset(seen):
    first, second = seen["skipped_apart"]
    agreed = [own[:2] for own in seen["agree"]]
    for place, position in ((0, "epoch 0, sample 8"), (1, "epoch 0, step 2")):
        assert first[place] == second[place] and f"process 0 has {position}" in first[place]
    for own, whole in zip((first, second), agreed):
        assert own[2] == [batches[2:3] for batches in whole]


def test_sources_are_compared_by_their_whole_identities(seen):
    for name, errors in seen["differing_sources"][0].items():
        assert errors == seen["differing_sources"][1][name]
        assert "records (names, sizes, bytes): process 0 has" in errors, name


@pytest.mark.parametrize("processes", (2, 3))
def test_a_process_that_moves_alone_stops_all(request, processes):
    """No process waits for the timeout, which is 60 s."""
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")
    *others, last = reports["moved_alone"]
    moved_to = {
        "seek": "epoch 1, step 2",
        "seek_step": "epoch 0, step 3",
        "skip": "epoch 0, step 3",
        "reset": "epoch 0, step 0",
        "set_state": "epoch 0, step 0",
    }
    for way, position in moved_to.items():
        text = f"process {processes - 1} moved the iterator"
        for own in others:
            for error in own[way][0]:
                assert text in error and f"to {position}, by seek()" in error, way
                assert "2 batches after the processes were compared" in error
        name = "read" if way == "set_state" else "numbers"
        for error in last[way][0]:
            assert f"did not reach the next batch of {name}" in error
            assert "raised ProcessError: process" in error
        first = [own[name == "read"][:1] for own in reports["agree"]]
        assert [own[way][1] for own in reports["moved_alone"]] == first


def test_a_stream_that_moves_alone_stops_all(seen):
    first, second = seen["stream_moved_alone"]
    for way, position in (("reset", "epoch 0, step 0"), ("skip", "epoch 1"), ("skip nothing", "")):
        assert f"process 1 moved the iterator numbers to {position}" in first[way][0], way
        assert "did not reach the next batch of numbers" in second[way][0]
        assert [own[way][1] for own in (first, second)] == [own[0][:1] for own in seen["agree"]]


def test_moves_of_single_processes_that_change_nothing_are_allowed(seen):
    """A peek into the next epoch, and moves that are refused."""
    for own, agreed in zip(seen["peeked_alone"], seen["agree"]):
        assert own[0] == agreed[0] and isinstance(own[1], list) and len(own[1]) == len(own[0])
    assert seen["refused_move"] == [own[0] for own in seen["agree"]]


def test_processes_with_the_same_part_are_refused(seen):
    for text in seen["same_part"]:
        assert "the same rows in several processes (process 0 part 0, process 1 part 0)" in text


def test_processes_that_move_after_an_epoch_do_not_differ(seen):
    for own in seen["moved_after_the_end"]:
        assert all(isinstance(batches, list) for batches in own)
    first = [batches[0] for batches in zip(*seen["moved_after_the_end"])]
    assert first[0] == seen["agree"][0][0]


@pytest.mark.parametrize("processes", (2, 3))
def test_a_process_that_is_interrupted_tells_the_others(request, processes):
    """They don't wait for it, and all continue together when it returns."""
    reports = request.getfixturevalue("seen" if processes == 2 else "seen_by_three")
    *others, last = reports["interrupted"]
    for result, _ in others:
        assert f"process {processes - 1} did not reach the next batch of numbers" in result
        assert f"process {processes - 1} raised KeyboardInterrupt" in result
    assert last[0] == "interrupted"
    assert [own[1] for own in reports["interrupted"]] == [own[0] for own in reports["agree"]]


@pytest.mark.parametrize("way", ["raises", "returns"])
def test_a_program_that_ends_tells_the_others(tmp_path, way):
    """It may end before it has created an iterator."""
    options = {"files": [], "scenarios": ["ending"], "way": way}
    running = forked(SUPPORT / "agreement_worker.py", tmp_path, options)
    (_, *texts), _ = [process.result(60) for process in running]
    said = "".join(texts)
    assert "process 1 did not reach the next batch of numbers" in said
    assert "the program of process 1 ended" in said


def test_one_process_may_peek_and_prefetch_alone(seen):
    assert seen["alone"] == [own[0] for own in seen["agree"]]


def test_without_the_check_each_process_has_its_rows(seen):
    first, second = seen["unchecked"]
    assert len(first) == len(second) == 2


def test_a_process_that_never_comes_is_named(seen):
    first, second = seen["never_comes"]
    assert second[0] == first[1] == "absent"
    for text, absent in ((first[0], 1), (second[1], 0)):
        assert f"process {absent} has not reached the next batch of numbers within 2 s" in text
        assert "check_processes=SECONDS" in text


def test_a_partition_spec_is_of_the_mesh_that_is_set(seen):
    assert seen["mesh_of_the_context"] == [own[0] for own in seen["agree"]]


def test_numpy_arrays_of_clu_are_refused_over_several_processes(seen):
    assert all("element='numpy' with a sharding" in text for text in seen["numpy_of_clu"])


def test_skipping_is_refused_over_several_processes(seen):
    assert all("on_error='skip' over several processes" in text for text in seen["skipping"])
