"""Volumes and tables from examples/arrays.py: crops as in NumPy, states, bad files."""

import pathlib

import arrays  # of examples/
import numpy as np
import pytest
from forks import run_fork
from labelled import check_resumes, expected_labels, rows_of
from nvidia.dali import backend
from PIL import Image
from shardings import rows_over

from conformance import check
from dalijax import sources
from dalijax.errors import BatchError
from dalijax.show import show
from full import combinations

N, BATCH = 11, 4
SIDE = arrays.SIDE
SHORT = {"batch_size": BATCH, "num_threads": 1, "device_id": None, "last_batch_padded": True}
KINDS = ("files", "table")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return arrays.draw_volumes(tmp_path_factory.mktemp("volumes"), N, seed=4)


@pytest.fixture(scope="module")
def opened(folder):
    files = sources.Files(folder, extensions=["npy"])
    return {"files": files, "table": arrays.open_table(folder.parent / "table.npy", N)}


def batches_of(source, **options):
    graph = arrays.volumes if isinstance(source, sources.Files) else arrays.patients
    return graph(source=source, **{**SHORT, **options})


def place_of(crop, volume):
    """Finds a crop, or a reflection of it, in a volume: (start, flips)."""
    for flips in np.ndindex(2, 2, 2):
        axes = [axis for axis in range(3) if flips[axis]]
        wanted = np.flip(crop, axes)
        for start in np.argwhere(volume == wanted[0, 0, 0]).tolist():
            if np.array_equal(volume[tuple(slice(s, s + SIDE) for s in start)], wanted):
                return tuple(start), flips
    return None


def test_crops_match_numpy(opened):
    """Each crop is a part of its file, mirrored or not; positions and flips vary."""
    source = opened["files"]
    rows = rows_of(batches_of(source, shuffle=False))
    places = []
    for number, crop in enumerate(rows["volume"]):
        assert crop.shape == (SIDE, SIDE, SIDE, 1) and crop.dtype == np.float32
        places.append(place_of(crop[..., 0], np.load(source.name(number))))
    assert None not in places
    assert len({start for start, _ in places}) > N // 2
    assert len({flips for _, flips in places}) > 2


def test_columns_match_the_table(opened):
    table = opened["table"]
    rows = rows_of(batches_of(table))
    columns = table.read(np.arange(N), ["age", "dose", "label"])
    order = [int(np.flatnonzero(columns["dose"] == dose)[0]) for dose in rows["dose"]]
    assert sorted(order) == list(range(N))
    np.testing.assert_array_equal(rows["label"], np.asarray(columns["label"])[order])
    np.testing.assert_allclose(rows["age"], np.asarray(columns["age"])[order] / 100, rtol=1e-6)
    for row, crop in zip(order, rows["volume"]):
        assert place_of(crop[..., 0], table.read(np.array([row]), ["volume"])["volume"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_resumes(opened, kind):
    source = opened[kind]
    check(lambda: batches_of(source, shuffle=False), expected_labels(source, BATCH), tail=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ({}, {"batch_size": 8, "sharding": rows_over(4)}))
@pytest.mark.parametrize(
    "then", ({"batch_size": 3}, {"batch_size": 6, "sharding": rows_over(2)}, {"as_numpy": True})
)
def test_a_state_resumes_with_any_batch_size_and_devices(opened, kind, first, then):
    source = opened[kind]
    check_resumes(batches_of(source, seed=9, **first), batches_of(source, **then))


def test_show_draws_the_slices_of_volumes(opened):
    source = opened["files"]
    page = show(batches_of(source), classes={"label": source.classes})
    outputs = {output.name: output for output in page.batches[0].outputs}
    assert outputs["volume"].layout == "FHWC"  # slices in a row, as frames
    assert any(f"label: {kind}" in page.batches[0].caption(0) for kind in arrays.KINDS)


BAD = {
    "cut": lambda whole, file: file.write_bytes(whole.read_bytes()[:-100]),
    "only a header": lambda whole, file: file.write_bytes(whole.read_bytes()[:30]),
    "too small": lambda whole, file: np.save(file, np.load(whole)[:8]),
    "a matrix": lambda whole, file: np.save(file, np.load(whole)[0]),
    "objects": lambda whole, file: np.save(file, np.array([{}], object)),
}


# Record 0 sets the layout.
@pytest.mark.parametrize(("bad", "damage"), combinations(2, (0, 3, 5, N - 1), BAD))
def test_bad_files_are_named_masked_and_skipped(opened, tmp_path, damage, bad):
    paths = [opened["files"].name(index) for index in range(N)]
    BAD[damage](pathlib.Path(paths[bad]), tmp_path / "bad.npy")
    paths[bad] = str(tmp_path / "bad.npy")
    source = sources.Files(paths=paths, labels=range(N))
    good = []
    iterator = batches_of(source, shuffle=False)
    # DALI decodes a different size, and the error names the operator after the decoder.
    named = r"bad\.npy can't be decoded|operator slice failed for \S*bad\.npy"
    with pytest.raises(BatchError, match=named) as error:
        for batch in iterator:
            good += batch["label"].tolist()
    iterator.close()
    assert good == list(range(bad // BATCH * BATCH))
    assert error.value.files == (paths[bad],)
    rows = rows_of(batches_of(source, shuffle=False, on_error="mask"))
    assert rows["label"].tolist() == [k for k in range(N) if k != bad]
    rows = rows_of(batches_of(source, shuffle=False, on_error="skip"))
    assert rows["label"].tolist() == [k for k in range(N) if k // BATCH != bad // BATCH]


def test_a_file_of_another_dtype_is_cast(opened, tmp_path):
    paths = [opened["files"].name(index) for index in range(N)]
    wanted = rows_of(batches_of(sources.Files(paths=paths, labels=range(N)), shuffle=False))
    np.save(tmp_path / "other.npy", np.load(paths[5]).astype(np.float64))
    paths[5] = str(tmp_path / "other.npy")
    rows = rows_of(batches_of(sources.Files(paths=paths, labels=range(N)), shuffle=False))
    np.testing.assert_array_equal(rows["volume"], wanted["volume"])


@pytest.mark.skipif(backend.GetCUDADeviceCount() > 0, reason="DALI transposes with a CUDA driver")
def test_a_file_of_fortran_order_is_named_without_a_driver(opened, tmp_path):
    np.save(tmp_path / "bad.npy", np.asfortranarray(np.load(opened["files"].name(0))))
    iterator = batches_of(sources.Files(paths=[tmp_path / "bad.npy"], labels=[0]))
    with pytest.raises(BatchError, match=r"bad\.npy can't be decoded"):
        next(iterator)
    iterator.close()


def test_the_example_draws_a_picture(tmp_path):
    said = run_fork(arrays.__file__, "--count", "24", "--epochs", "2", "--out", tmp_path).stdout
    assert "compiled 1 times" in said
    low, high = Image.open(tmp_path / "batch.png").convert("L").getextrema()
    assert high - low > 50
