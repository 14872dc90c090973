"""Some of the records of a source, compared with the records themselves."""

import json
import pickle

import numpy as np
import pytest

from dalijax import data_iterator
from dalijax.errors import StateError
from dalijax.sources import Arrays, Files, Mixture, Named, Selection, Tar
from tars import FIELDS, samples, write_tar

NUMBERS = Arrays({"x": np.arange(100, 120)})


@data_iterator(output_map=["x"], mask=True, as_numpy=True)
def plain(x):
    return x


def iterator_of(source, **call):
    return plain(source=source, batch_size=3, **{"seed": 4, **call})


@pytest.mark.parametrize("kind", (bool, int, np.uint8, list))
def test_an_epoch_has_each_selected_record_once(kind):
    chosen = np.arange(20) % 3 == 0
    records = {bool: chosen, list: np.flatnonzero(chosen).tolist()}
    source = Selection(NUMBERS, records.get(kind, np.flatnonzero(chosen).astype(kind)))
    assert len(source) == 7
    for shuffle in (False, True):
        with iterator_of(source, shuffle=shuffle) as iterator:
            rows = np.concatenate([batch["x"][batch["mask"]] for batch in iterator])
        assert (rows if not shuffle else np.sort(rows)).tolist() == list(range(100, 120, 3))


def test_it_is_the_same_input_as_a_source_of_its_records():
    with (
        iterator_of(Selection(NUMBERS, [2, 3, 5, 7, 11])) as selected,
        iterator_of(Arrays({"x": np.array([102, 103, 105, 107, 111])})) as alone,
    ):
        for _ in range(2):
            for batch, wanted in zip(selected, alone, strict=True):
                np.testing.assert_array_equal(batch["x"], wanted["x"])


def test_states_resume_and_compare_the_selection():
    with iterator_of(Selection(NUMBERS, range(1, 9))) as iterator:
        next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        wanted = next(iterator)
        with iterator_of(Selection(NUMBERS, np.arange(1, 9))) as again:
            again.set_state(state)
            np.testing.assert_array_equal(next(again)["x"], wanted["x"])
        with (
            iterator_of(Selection(NUMBERS, range(8))) as other,
            pytest.raises(ValueError, match="data"),
        ):
            other.set_state(state)


def test_a_source_without_an_identity_has_no_states():
    class Unnamed(Arrays):
        def identity(self):
            return None

    selection = Selection(Unnamed({"x": np.arange(20)}), range(8))
    with (
        iterator_of(selection) as iterator,
        pytest.raises(StateError, match="Unnamed.identity.. returned None"),
    ):
        iterator.get_state()


def test_names_paths_and_pickles(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k in range(3):
            (tmp_path / name / f"{k}.jpg").write_bytes(b"%d" % k)
    files = Selection(Named(Files(tmp_path), index="index"), [1, 3])
    files = pickle.loads(pickle.dumps(files))
    values = files.read(np.array([1, 0]), ["name", "index", "label"])
    assert values["name"] == [str(tmp_path / "b/0.jpg"), str(tmp_path / "a/1.jpg")]
    assert values["index"].tolist() == [3, 1] and list(values["label"]) == [1, 0]
    assert files.name(0) == str(tmp_path / "a/1.jpg")
    tar = Tar(write_tar(tmp_path / "a.tar", samples(0, 4)), FIELDS, cache_dir=tmp_path)
    chosen = Selection(tar, [0, 2])
    assert chosen.name(1) == f"{tmp_path / 'a.tar'}: 0002"
    assert chosen.identity() != tar.identity() != Selection(tar, [0, 3]).identity()
    assert repr(chosen) == f"Selection({tar!r}, 2 records)"


def test_a_selection_of_a_selection_and_in_a_mixture():
    evens = Selection(NUMBERS, np.arange(0, 20, 2))
    source = Mixture([(Selection(evens, [0, 4]), 1), (Selection(NUMBERS, [1, 3]), 1)])
    with plain(source=source, batch_size=4, seed=0) as iterator:
        assert sorted(next(iterator)["x"].tolist()) == [100, 101, 103, 108]
    for mixture in (source, Named(source)):
        with pytest.raises(TypeError, match="select records of its sources, and mix"):
            Selection(mixture, [0])


@pytest.mark.parametrize(
    ("source", "records", "words"),
    [
        (NUMBERS, np.zeros(20, bool), "leaves no record"),
        (NUMBERS, [], "leaves no record"),
        (NUMBERS, np.ones(3, bool), "3 booleans for 20 records"),
        (NUMBERS, [0, 20], "increasing numbers from 0 to 19"),
        (NUMBERS, [-1, 0], "increasing numbers"),
        (NUMBERS, [2, 2], "numpy.unique"),
        (NUMBERS, [1.5], r"numbers of records, .* not \[1.5\]"),
        (NUMBERS, [[1]], r"not \[\[1\]\]"),
        (Arrays, [0], "requires a source"),
        ([1, 2], [0], "requires a source"),
    ],
)
def test_unsuitable_selections_are_refused(source, records, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Selection(source, records)
