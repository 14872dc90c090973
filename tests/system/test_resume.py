"""The comparison of loaders by benchmarks/resume.py: its judgement, and short runs of loaders."""

import importlib
import pathlib

import pytest

from full import in_full

pytestmark = pytest.mark.slow

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
ORDER = ([3, 0], [2, 1])  # two batches of an epoch of four records


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("loaders.judge")


def batches(judge, *numbers, epoch=0, scale=1.0):
    return [judge.Batch(epoch, tuple(ids), tuple(scale * k for k in ids)) for ids in numbers]


@pytest.mark.parametrize(
    ("delivered", "repeated", "lost", "moved"),
    [
        (ORDER, 0, 0, 0),
        (([0, 3], [1, 2]), 0, 0, 0),  # other rows of the same batch
        (([3, 0], [3, 0], [2, 1]), 2, 0, 2),  # the batch before the state comes again
        (([3, 0],), 0, 2, 0),
        (([2, 1], [3, 0]), 0, 0, 4),
        (([3, 0], [2, 0]), 1, 1, 0),
        (([3, 0], [2], [1]), 0, 0, 0),  # batches of another size, in the same order
        (([3], [0, 1], [2]), 0, 0, 2),
    ],
)
def test_repeated_lost_and_moved_records_are_counted(judge, delivered, repeated, lost, moved):
    verdict = judge.compare(batches(judge, *ORDER), batches(judge, *delivered))
    assert verdict == judge.Verdict(repeated, lost, moved, 0)
    assert verdict.equal == (delivered in (ORDER, ([0, 3], [1, 2]), ([3, 0], [2], [1])))


def test_other_random_numbers_are_counted(judge):
    other = batches(judge, ORDER[0]) + batches(judge, ORDER[1], scale=2)
    assert judge.compare(batches(judge, *ORDER), other) == judge.Verdict(0, 0, 0, 2)


def test_epochs_are_judged_separately(judge):
    first, second = batches(judge, *ORDER), batches(judge, [1, 2], [0, 3], epoch=1)
    assert judge.compare(first + second, first + second).equal
    verdict = judge.compare(first + second, first + second[1:])
    assert (verdict.repeated, verdict.lost, verdict.moved) == (0, 2, 2)
    later = batches(judge, [0, 1], epoch=2)  # after the epochs of the uninterrupted run
    assert judge.compare(first, first + later).equal


def test_rows_of_processes_are_merged_by_step(judge):
    parts = [batches(judge, [0], [1]), batches(judge, [2], [3], [4])]
    assert judge.merge(parts) == batches(judge, [0, 2], [1, 3], [4])
    assert judge.merge([]) == []


def test_deliveries_of_an_evaluation_are_counted(judge):
    delivered = batches(judge, [0, 1], [1, 3]) + batches(judge, [2], epoch=1)
    assert judge.counts(delivered, range(5)) == (1, 2)


def test_a_record_that_every_epoch_repeats_is_not_held_against_the_restart(judge):
    drawn = batches(judge, [0, 0], [1, 2])  # with replacement
    assert judge.compare(drawn, drawn).equal
    assert judge.compare(drawn, batches(judge, [0, 1], [1, 2])) == judge.Verdict(1, 1, 1, 0)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("dalijax_source", {"batch": "yes", "transform": "yes"}),
        ("grain_map", {"middle": "yes", "seed": "no"}),
        in_full("dalijax_source", {"2to4": "yes", "2to1": "yes", "twice": "yes", "file": "yes"}),
        in_full("dalijax_reader", {"middle": "yes", "2to2": "yes", "2to1": "refused"}),
        in_full("dali_plugin", {"middle": "yes", "2to1": "no"}),
        in_full("grain_elastic", {"2to1": "yes", "2to4": "yes", "batch": "yes"}),
        in_full("tfdata_checkpoint", {"middle": "yes", "buffer": "yes"}),
    ],
)
def test_a_loader_is_killed_and_resumed(monkeypatch, tmp_path, loader, expected):
    monkeypatch.syspath_prepend(BENCHMARKS)
    resume = importlib.import_module("resume")
    session, results = resume.measure(loader, list(expected), tmp_path, 200)
    session.close()
    assert {name: result.answer for name, result in results.items()} == expected
