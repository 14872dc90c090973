"""Tables of records in bounded memory, compared with a dict."""

import pickle
import threading

import numpy as np
import pytest

from dalijax.core.sources.base import SizeTables
from dalijax.core.sources.record_table import RecordTable


@pytest.mark.parametrize("slots", (1, 7, 64, 1000))
@pytest.mark.parametrize("columns", (0, 2))
def test_the_last_value_is_returned(slots, columns):
    chosen, table = np.random.default_rng(slots), RecordTable(500, columns, slots)
    put, seen = {}, {}
    for _ in range(200):
        records = chosen.integers(0, 800, int(chosen.integers(1, 20)))
        values = records[:, None] * np.array([3, 5][:columns], np.int64) - 1
        known, found = table.get(records)
        assert found.shape == (len(records), columns) and found.dtype == np.int32
        for record, is_known, row, want in zip(records.tolist(), known, found, values):
            assert is_known == (seen.get(record % min(slots, 500)) == record)
            assert not is_known or (row.tolist() == want.tolist() and record in put)
        table.put(records, values)
        put.update(zip(records.tolist(), values))
        seen.update((record % min(slots, 500), record) for record in records.tolist())


def test_a_table_of_many_records_takes_bounded_memory():
    for columns, most in ((0, 9 << 20), (2, 26 << 20)):
        table = RecordTable(200_000_000, columns)
        assert table.most_bytes <= most
        records = np.array([0, 199_999_999, 123_456_789, 2**40 + 5])
        table.put(records, np.ones((4, columns)))
        assert table.get(records)[0].all() and not table.get(records + 1)[0].any()
    assert pickle.loads(pickle.dumps(table)).most_bytes == table.most_bytes


def test_threads_never_see_another_records_values():
    table, wrong = RecordTable(10_000, 2, 8), []

    def work(seed):
        chosen = np.random.default_rng(seed)
        for _ in range(2000):
            records = chosen.integers(0, 10_000, 16)
            known, found = table.get(records)
            wrong.extend(records[known & (found[:, 0] != records)].tolist())
            table.put(records, np.stack([records, records], axis=1))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_sizes_are_looked_up_once():
    tables, looked = SizeTables(), []
    for records in ([3, 1, 3], [1, 2, 7], [7, 7, 9]):
        indices = np.array(records)

        def look_up(rows, indices=indices):
            looked.extend(indices[rows].tolist())
            return np.stack([indices[rows], indices[rows] + 1], axis=1).astype(np.int32)

        sizes = tables.sizes(10, indices, "image", look_up)
        assert sizes.tolist() == [[k, k + 1] for k in records]
    assert sorted({*looked}) == [1, 2, 3, 7, 9] and looked.count(1) == 1 and looked.count(7) == 1
