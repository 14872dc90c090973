"""Stored indexes are complete or absent, mapped into memory, and validated."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from dalijax.core.formats import index as indexes
from dalijax.core.formats.index import DamagedIndexError, Index, load, load_or_build, save

ARRAYS = {
    "start": np.arange(1000) * 512,
    "label.value": np.arange(1000, dtype=np.int32),
    "odd": np.zeros((3, 7), np.uint8),
    "none": np.zeros(0, np.int64),
}


def test_a_saved_index_is_loaded(tmp_path):
    path = str(tmp_path / "a" / "b.index")
    save(path, Index({"sizes": [1, 2]}, ARRAYS))
    loaded = load(path)
    assert loaded.about == {"sizes": [1, 2]} and list(loaded.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded.arrays[name], array, strict=True)
        assert not loaded.arrays[name].flags.writeable and loaded.arrays[name].flags.aligned
    assert os.listdir(tmp_path / "a") == ["b.index"]
    again = pickle.loads(pickle.dumps(loaded))
    assert len(pickle.dumps(loaded)) < 500  # the path, not the arrays
    os.unlink(path)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(again)).arrays["start"], ARRAYS["start"]
    )


def test_a_pickled_index_without_its_file_raises_with_the_fix(tmp_path):
    path = tmp_path / "a.index"
    save(str(path), Index({}, ARRAYS))
    data = pickle.dumps(load(str(path)))
    path.unlink()
    with pytest.raises(FileNotFoundError, match="a.index.*Create the source.*by cache_dir="):
        pickle.loads(data)


@pytest.mark.parametrize("whole", [1 << 28, 1])
def test_damage_is_detected(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(indexes, "_WHOLE", whole)
    path = tmp_path / "a.index"
    save(str(path), Index({}, ARRAYS))
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(60), *rng.integers(0, len(data), 200), len(data) - 1]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        with pytest.raises(DamagedIndexError):
            load(str(path))
    for end in (0, 10, 40, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(DamagedIndexError):
            load(str(path))


def test_a_failed_write_keeps_only_the_old_index(tmp_path):
    path = tmp_path / "a.index"
    save(str(path), Index({}, ARRAYS))
    data = path.read_bytes()
    with pytest.raises(TypeError):
        save(str(path), Index({"x": object()}, ARRAYS))
    assert path.read_bytes() == data and os.listdir(tmp_path) == ["a.index"]


def test_matching_indexes_are_built_once(tmp_path):
    made = []

    def build():
        made.append(1)
        return Index({"n": len(made)}, ARRAYS)

    for turn in range(3):
        assert load_or_build(str(tmp_path), "key", build, lambda index: True).about == {"n": 1}
    assert load_or_build(str(tmp_path), "key", build, lambda index: False).about == {"n": 2}
    assert load_or_build(
        str(tmp_path), "key", build, lambda index: index.about["n"] == 2
    ).about == {"n": 2}
    assert load_or_build(str(tmp_path), "other", build, lambda index: True).about == {"n": 3}


LARGE = """
import resource, sys, time
import numpy as np
from dalijax.core.sources.byte_records import ByteRecords
from dalijax.core.formats.index import load
from dalijax.core.formats.field import Field
from dalijax.core.remote.storage import Storage
from dalijax.core.sources.source import order_of

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before, start = peak(), time.process_time()
fields = {"data": Field(np.dtype(np.uint8), 1), "label": Field(np.dtype(np.int32))}
source = ByteRecords(load(sys.argv[1]), [sys.argv[2]], fields, {}, None, index_again=load,
    storage=Storage())
order = order_of(source, 1, True)
for batch in range(20):
    rows, _ = order(np.arange(batch * 256, batch * 256 + 256))
    values = source.read(rows, ["data", "label"])
    sizes = source.sizes(rows, "data", values["data"])
    assert len(values["data"]) == 256 and (values["label"] == 0).all() and (sizes == -1).all()
assert len(source) == 10**8 and len(source.identity()) == 32
print(time.process_time() - start, peak() - before)
"""


@pytest.mark.slow
def test_a_hundred_million_records_take_little_time_and_memory(tmp_path):
    count = 10**8
    path = tmp_path / "large.index"
    about = {"sizes": [0], "first": [0, count], "names": ["a"]}
    types = {"start": "<i8", "data.offset": "<i8", "data.size": "<i8", "label.value": "<i4"}
    with open(path, "w+b") as file:  # all zeros, hence sparse
        indexes.write_head(file, about, {name: (t, (count,)) for name, t in types.items()})
        size = file.tell() + sum(count * np.dtype(t).itemsize for t in types.values())
        file.truncate(size + -size % 64)
        indexes.seal(file)
    (tmp_path / "data").write_bytes(b"")
    assert path.stat().st_size > 28 * count > 1000 * path.stat().st_blocks
    result = subprocess.run(
        [sys.executable, "-c", LARGE, str(path), str(tmp_path / "data")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, megabytes = map(float, result.stdout.split())
    assert seconds < 5 and megabytes < 200
