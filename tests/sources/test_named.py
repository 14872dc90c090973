"""Names and numbers of records in the batch, for every source."""

import json
import pickle
import shutil
import subprocess
import sys
import tarfile

import jax
import numpy as np
import pytest

from dalijax import data_iterator, sources
from dalijax.sources import Arrays, Files, Mixture, Named, Records, Source, Tar, TFRecord
from tars import FIELDS, sample, samples, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def numbers(x):
    return Arrays({"x": np.arange(x, x + 7)})


@data_iterator(output_map=["x"], mask="mask", as_numpy=True)
def plain(x):
    return x


def iterator_of(source, **call):
    return plain(**{"source": source, "batch_size": 3, "seed": 4, **call})


def test_names_come_from_the_source_and_follow_its_order():
    source = numbers(10)
    named = Named(source, index="index")
    assert len(named) == 7 and named.identity() == source.identity()
    with iterator_of(named) as iterator, iterator_of(source) as other:
        assert len(iterator) == len(other) == 3
        for batch, alone in zip(iterator, other, strict=True):
            np.testing.assert_array_equal(batch["x"], alone["x"])
            assert list(batch["name"]) == [f"row {x - 10}" for x in batch["x"]]
            np.testing.assert_array_equal(batch["index"], batch["x"] - 10)
            assert batch["index"].dtype == np.int64


def test_a_state_of_the_source_alone_continues_with_names():
    with iterator_of(numbers(10)) as first, iterator_of(Named(numbers(10))) as second:
        next(first)
        state = json.loads(json.dumps(first.get_state()))
        wanted = next(first)["x"]
        second.set_state(state)
        assert second.get_state() == state
        batch = next(second)
        np.testing.assert_array_equal(batch["x"], wanted)
        assert list(batch["name"]) == [f"row {x - 10}" for x in wanted]
        second.seek(1, 1)
        np.testing.assert_array_equal(next(second)["x"].shape, (3,))


@pytest.mark.parametrize("inside", (False, True), ids=("around", "inside"))
def test_names_of_mixtures(inside):
    parts = numbers(0), numbers(100)
    alone = Mixture([(part, 1) for part in parts])
    if inside:
        source = Mixture([(Named(part), 1) for part in parts])
    else:
        source = Named(Mixture([(part, 1) for part in parts]))
    assert len(source) == len(alone) == 14
    for shuffle in (False, True):
        with (
            iterator_of(source, shuffle=shuffle) as iterator,
            iterator_of(alone, shuffle=shuffle) as other,
        ):
            for batch, wanted in zip(iterator, other, strict=True):
                np.testing.assert_array_equal(batch["x"], wanted["x"])
                assert list(batch["name"]) == [f"row {x % 100}" for x in batch["x"]]
    with pytest.raises(TypeError, match="a Mixture can't contain another Mixture"):
        Mixture([(Named(alone), 1)])


def test_names_of_files_tars_and_records(tmp_path):
    tensorflow = pytest.importorskip("tensorflow")
    (tmp_path / "c").mkdir()
    for k in range(2):
        (tmp_path / f"c/{k}.jpg").write_bytes(b"x")
    tar = write_tar(tmp_path / "a.tar", samples(0, 2))
    with tensorflow.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        value = tensorflow.train.Feature(int64_list=tensorflow.train.Int64List(value=[1]))
        features = tensorflow.train.Features(feature={"x": value})
        writer.write(tensorflow.train.Example(features=features).SerializeToString())
    for source, name in (
        (Files(tmp_path), str(tmp_path / "c/0.jpg")),
        (Tar(tar, FIELDS), f"{tar}: 0000"),
        (TFRecord(tmp_path / "a.tfrecord", {"x": "x"}), f"{tmp_path}/a.tfrecord: record 0"),
        (Records([{"x": 1}]), "record 0"),
    ):
        named = pickle.loads(pickle.dumps(Named(source, "path")))
        assert named.read(np.array([0]), ["path"]) == {"path": [name]}
        assert set(named.fields) == {*source.fields, "path"}
        assert getattr(named, "classes", None) == getattr(source, "classes", ())
        assert named.read_threads == source.read_threads


def test_keys_of_webdataset(tmp_path):
    entries = [(f"d.x/{n}", c) for k in range(4) for n, c in sample(k)]
    path = write_tar(tmp_path / "a.tar", entries)
    source = Tar(path, {**FIELDS, "key": "__key__", "tar": "__url__"})
    values = source.read(np.array([3, 0]), ["key", "label", "tar"])
    assert values["key"] == ["d.x/0003", "d.x/0000"] and values["tar"] == [path] * 2
    assert source.identity() == Tar(path, FIELDS).identity()
    (tmp_path / "moved").mkdir()
    moved = Tar(shutil.copy(path, tmp_path / "moved"), {**FIELDS, "tar": "__url__"})
    assert moved.identity() == source.identity()
    assert Named(source).identity() == source.identity()
    graph = data_iterator(lambda label: label, ["y"], as_numpy=True)
    with graph(source=source, batch_size=4) as iterator:
        batch = next(iterator)
        assert list(batch["key"]) == [f"d.x/{y + 3:04d}" for y in batch["y"]]


class Bad(Source):
    """Record 2 can't be read."""

    fields = numbers(0).fields

    def __len__(self):
        return 6

    def read(self, indices, names):
        if 2 in indices:
            raise OSError("the disk failed")
        return {"x": indices.astype(np.int32)}

    def identity(self):
        return "bad"


def test_names_of_masked_rows_are_those_of_the_replacements():
    with iterator_of(Named(Bad()), on_error="mask", shuffle=False) as iterator:
        batch = next(iterator)
    assert list(batch["mask"]) == [True, True, False]
    assert list(batch["name"]) == [f"record {x} of Bad" for x in batch["x"]]


def test_names_over_several_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    graph = data_iterator(lambda x: x, ["x"], sharding=sharding)
    with graph(source=Named(numbers(0)), batch_size=4) as iterator:
        batch = next(iterator)
    assert list(batch["name"]) == [f"row {x}" for x in np.asarray(batch["x"])]


def test_mistakes_are_named():
    for wrong in (Arrays, [1, 2], None):
        with pytest.raises(TypeError, match="Named requires a source of dalijax.sources, not"):
            Named(wrong)
    with pytest.raises(
        ValueError, match=r"the field 'x' would exist twice: the source has \['x'\]"
    ):
        Named(numbers(0), "x")
    with pytest.raises(ValueError, match="the field 'n' would exist twice"):
        Named(numbers(0), "n", index="n")
    with pytest.raises(ValueError, match=r"requires field= \(names of records\) or index="):
        Named(numbers(0), None)
    with pytest.raises(TypeError, match="must be a string, not 3"):
        Named(numbers(0), 3)
    with pytest.raises(AttributeError):
        Named(numbers(0)).missing


def test_the_module_prints_its_help():
    command = [sys.executable, "-m", "dalijax.sources"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert all(f"`{name}`" in shown for name in sources.__all__)


@pytest.mark.parametrize("convert", (float, np.float32, np.int64, jax.numpy.int32))
def test_seek_takes_integers_of_any_type(convert):
    with iterator_of(numbers(0), shuffle=False) as iterator:
        iterator.seek(convert(1), convert(1))
        assert (iterator.epoch, iterator.step) == (1, 1)
        assert list(next(iterator)["x"]) == [3, 4, 5]
        for wrong in (1.5, float("nan"), "1", True):
            with pytest.raises(TypeError, match="epoch must be a whole number"):
                iterator.seek(wrong, 0)


NAMES = ["1", "d/\udcff", "d/\udcfe", "é" * 120, "x" * 90 + "/" + "y" * 90, "a\nb"]


@pytest.mark.parametrize("form", (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), ids=str)
def test_keys_match_tarfile_and_are_read_together(form, tmp_path, monkeypatch):
    """Names that are not UTF-8 stay distinct, and a remote tar gets a single request per batch."""
    fsspec = pytest.importorskip("fsspec")
    path = write_tar(tmp_path / "a.tar", [(f"{name}.cls", b"1") for name in NAMES], form)
    with tarfile.open(path) as tar:
        wanted = [name.removesuffix(".cls") for name in tar.getnames()]
    files = fsspec.filesystem("memory")
    files.pipe("/keys.tar", (tmp_path / "a.tar").read_bytes())
    requests = []
    cat_ranges = type(files).cat_ranges

    def counted(self, paths, *args, **kwargs):
        requests.append(len(paths))
        return cat_ranges(self, paths, *args, **kwargs)

    for url in (path, "memory://keys.tar"):
        source = Tar(url, {"y": "cls", "key": "__key__"})
        with monkeypatch.context() as patch:
            patch.setattr(type(files), "cat_ranges", counted)
            keys = source.read(np.arange(len(NAMES))[::-1], ["key"])["key"]
            names = Named(Mixture([(source, 1)])).read(np.arange(len(NAMES)), ["name"])["name"]
        assert keys[::-1] == wanted
        assert names == [source.name(k) for k in range(len(NAMES))]
    assert requests == [1] * 2  # the headers are neighbors
