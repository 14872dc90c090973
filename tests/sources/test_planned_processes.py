"""Planned batches of two processes: those of one process, and states that one process restores."""

import pathlib

from planned_graphs import iterator, rows_of

from processes import started

WORKER = pathlib.Path(__file__).parents[1] / "support" / "planned_worker.py"
NAMES = ["Packed", "Buckets", "MultiImage"]


def test_two_processes_deliver_the_rows_of_one(tmp_path):
    reports = started(WORKER, tmp_path, {"devices": 2, "names": NAMES}, 2)
    for name in NAMES:
        loop = iterator(name, seed=5)
        expected = [rows_of(next(loop)) for _ in range(12)]
        loop.close()
        first, second = (report[name] for report in reports)
        assert first["state"] == second["state"]
        for number, (one, two) in enumerate(
            zip(first["before"] + first["after"], second["before"] + second["after"], strict=True)
        ):
            assert sorted(one) == ["0", "1"] and sorted(two) == ["2", "3"]
            assert one | two == expected[number], (name, number)
        again = iterator(name)
        again.set_state(first["state"])
        assert [rows_of(next(again)) for _ in range(9)] == expected[3:]
        again.close()
