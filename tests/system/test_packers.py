"""The comparison of packers by benchmarks/packed_rows.py: sizes, judgement of rows, our rows."""

import pathlib

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_images_are_not_enlarged():
    import packed_rows

    sizes = np.array([[1, 16], [300, 200], [17, 4000], [3000, 4000]], np.int32)
    limit = packed_rows.Limit(1024, False)
    assert packed_rows.token_counts(sizes, limit)[:3].tolist() == [1, 19 * 13, 2 * 250]
    resized = packed_rows.token_counts(sizes, packed_rows.Limit(1024, True))
    assert packed_rows.token_counts(sizes, limit)[3] == resized[3]
    assert (resized >= packed_rows.token_counts(sizes, limit)).all() and resized.max() <= 1024


def test_rows_of_tokens_are_judged():
    from packers import protocol, worker

    lengths = np.array([3, 2, 4, 1, 2], np.int32)  # of the images 0 to 4
    rows = [np.array(row) for row in ([1, 1, 1, 2, 2], [3, 3, 0, 0, 0], [3, 3, 5, 5, 5])]
    assert protocol.parts_of(rows[2]) == [(2, 2), (4, 3)]
    found = worker.statistics(protocol.packing_of(rows, lengths))
    assert found["padding"] == pytest.approx(3 / 15) and found["slots per image"] == 3
    assert {key: found[key] for key in ("lost", "split", "repeated", "cut")} == {
        "lost": 1,  # image 3
        "split": 1,  # image 2
        "repeated": 1,  # image 4 has a token more
        "cut": 0,
    }
    with pytest.raises(RuntimeError, match="more tokens than its width"):
        worker.statistics(
            protocol.Packing(*(np.array(part) for part in ([0], [0], [3], [2])), lengths)
        )


def test_batches_of_processes_are_merged():
    import packed_rows

    processes = [[[[(3, 2)]], [[(0, 1), (4, 2)]]], [[[(1, 5)]], [[(2, 1), (3, 1)]]]]
    merged = packed_rows.merge(processes)
    assert merged == [[[(1, 5)], [(3, 2)]], [[(0, 1), (4, 2)], [(2, 1), (3, 1)]]]
    assert packed_rows.delivered(merged) == {0: 1, 1: 5, 2: 1, 3: 3, 4: 2}


def test_the_measured_plan_is_that_of_the_iterator(tmp_path):
    from packers import planned, protocol

    lengths = np.random.default_rng(0).integers(1, 50, 200).astype(np.int32)
    np.save(tmp_path / "lengths.npy", lengths)
    job = protocol.Job(str(tmp_path / "lengths.npy"), "", len(lengths), row=64, tokens=50)
    packer = planned.Packer(job)
    order, starts = packer.work()
    rows = [
        [(image, int(lengths[image])) for image in images.tolist()]
        for images in np.split(order, starts[1:-1])
    ]
    batches = list(packer.batches())
    packer.close()
    assert [row for batch in batches for row in batch] == rows
    assert all(len(batch) == job.batch for batch in batches[:-1])
