"""States of mixtures: which mixtures restore them, and how others are refused."""

import json

import numpy as np
import pytest
from PIL import Image
from planned_graphs import bucketed, packed, records, rows_of, several
from sealing import crafted, opened, sealed
from staged_mixtures import (
    SEED,
    SIZES,
    TOTAL,
    WEIGHTS,
    mixed,
    parts,
    reference,
    restored,
    saved,
    stream,
    taken,
)

from dalijax import data_iterator
from dalijax.core.sources.state import FORM
from dalijax.errors import StateError
from dalijax.sources import (
    Arrays,
    Buckets,
    Field,
    Files,
    Mixture,
    MultiImage,
    Named,
    Packed,
    Records,
    Selection,
    Source,
)


def refusal(mixture, state, allow=()):
    """Returns the error of a restore."""
    iterator = stream(mixture)
    before = iterator.get_state()
    with pytest.raises(StateError) as error:
        iterator.set_state(state, allow=allow)
    assert iterator.get_state() == before
    iterator.close()
    return str(error.value)


@pytest.mark.parametrize(
    ("weights", "lines"),
    [
        ((3, 2), ["mixture.0.weight: 3/4 -> 3/5 from record 0 on", "1.weight: 1/4 -> 2/5"]),
        ((3, [(0, 1), (47, 2)]), ["mixture.1.weight: 1/4 -> 2/5 from record 47 on"]),
        ((3, 1, 1), ["mixture.2.weight: 0 -> 1/5 from record 0 on"]),
        ((1,), ["mixture.1.weight: 1/4 -> 0 from record 0 on"]),
        ((3, 1, [(47, 1)]), ["mixture.2.weight: 0 -> 1/5 from record 47 on"]),
    ],
)
def test_other_weights_before_a_state(weights, lines):
    state = saved(mixed(3, 1), 2)
    for allow in ((), ["identity"], ["mixture", "mixture.0.weight", "mixture.1.weight"]):
        text = refusal(mixed(*weights), state, allow)
        assert all(line in text for line in lines)
        assert "old_mixture.then(48, " in text and "identity" not in text
        assert "allow= can't ignore mixture.0.weight" in text


def test_other_sources_before_a_state():
    a, b, c = parts()
    state = saved(Mixture([(a, 3), (b, 1)]), 2)
    text = refusal(Mixture([(a, 3), (c, 1)]), state, ["identity"])
    assert "mixture.1.records: 37 -> 23" in text and "identity:" not in text
    assert "mixture.0.records: 50 -> 37" in refusal(Mixture([(b, 3), (a, 1)]), state)
    other = Arrays({"x": np.arange(37, dtype=np.int32)})
    text = refusal(Mixture([(a, 3), (other, 1)]), state)
    assert "identity.1: " in text and "mixture" not in text and "identity:" not in text
    for allow in (["identity"], ["identity.1"]):
        restored(Mixture([(a, 3), (other, 1)]), state, allow=allow).close()
    added = saved(Mixture([(a, 3), (b, 1), (c, [(24, 1)])]), 2)
    text = refusal(Mixture([(a, 3), (b, 1), (other, [(24, 1)])]), added, ["identity"])
    assert "mixture.2.records: 23 -> 37" in text
    text = refusal(a, state, ["identity"])
    assert "mixture: weights 3/4, 1/4 -> (none)" in text
    state = saved(Mixture([(a, 3), (b, 1)], length=50), 2)
    assert "mixture: " not in refusal(Mixture([(a, 3), (b, 1)]), state)
    text = refusal(Mixture([(a, 1)]), saved(a, 1), ["identity"])
    assert "mixture: another source, or other weights" in text and "-> weights 1" in text


def test_names_of_equal_parts_may_be_allowed():
    """Trainers pass ``allow_changes`` at each restore, also after the change."""
    state = saved(mixed(3, 1), 2)
    make = data_iterator(lambda x: {"x": x}, source=mixed(3, 1), allow_changes=["identity.1"])
    make.stream(None, batch_size=24).set_state(state)


class Gone(Source):
    """Stands for a source that has ended, and whose data are deleted."""

    def __init__(self, source):
        self.fields, self._len, self._identity = source.fields, len(source), source.identity()

    def __len__(self):
        return self._len

    def read(self, indices, names):
        raise OSError("deleted")

    def identity(self):
        return self._identity


def test_a_source_that_ended_may_be_gone():
    a, b, c = parts()
    state = saved(mixed(*WEIGHTS), 42)
    assert state["sample"] == 1008
    mixture = Mixture([*zip((a, Gone(b), c), WEIGHTS)])
    rows = reference(SIZES, WEIGHTS, TOTAL)[0]
    iterator = restored(mixture, state, 42)
    np.testing.assert_array_equal(taken(iterator, 16), rows[1008:])
    iterator.close()


def older(state):
    """Returns a state without stages, as saved by dalijax before weights could change."""
    shown, packed = opened(FORM, state)
    del packed["mixture"]
    return sealed(shown, packed)


def test_older_states():
    a, b, c = parts()
    state = older(saved(Mixture([(a, 3), (b, 1)]), 17))
    assert json.dumps(state) < json.dumps(saved(Mixture([(a, 3), (b, 1)]), 17))
    weights = (3, [(0, 1), (408, 4)], [(408, 2)])
    rows = reference(SIZES, weights, TOTAL)[0]
    iterator = restored(Mixture([*zip((a, b, c), weights)]), state)
    np.testing.assert_array_equal(taken(iterator, 5), rows[408:528])
    iterator.close()
    text = refusal(Mixture([(a, 3), (b, [(0, 1), (407, 4)])]), state, ["identity"])
    assert "mixture.1.weight: 1/4 -> 4/7 from record 407 on" in text
    text = refusal(Mixture([(a, 3), (b, 2)]), state, ["identity"])
    assert "(an older state has only a digest of them) -> weights 3/5, 2/5" in text
    assert "identity: " not in text and "old_mixture.then(408, " in text


def test_a_planned_change_that_is_missing_is_reported():
    state = saved(mixed(3, [(0, 1), (2000, 4)]), 17)
    for weights in ((3, [(0, 1), (200_000, 4)]), (3, 1), (3, [(0, 1), (2000, 5)])):
        with pytest.warns(RuntimeWarning, match="has the weights 3/7, 4/7 from record 2,000 on"):
            restored(mixed(*weights), state).close()
    for weights in ((3, [(0, 1), (2000, 4)]), (3, [(0, 1), (1000, 2), (2000, 4)], [(3000, 1)])):
        restored(mixed(*weights), state).close()  # warnings are errors


def test_a_hundred_stages_of_ten_sources_take_less_than_four_kib():
    rng = np.random.default_rng(0)
    sources = [Arrays({"x": np.arange(3, dtype=np.int32)}, identity=f"{k}") for k in range(10)]
    starts = [0, *np.cumsum(rng.integers(10**6, 10**7, 99)).tolist()]
    weights = [[(start, int(rng.integers(1, 99))) for start in starts] for _ in sources]
    mixture = Mixture([*zip(sources, weights)], length=100)
    state = saved(mixture, 1)
    assert len(json.dumps(state)) < 4096
    iterator = restored(mixture, state)
    assert iterator.get_state() == state
    iterator.close()


DAMAGED = [
    ["0"],
    ["0 401 1003"],
    ["", "50 d 3"],
    ["x", "50 d 3"],
    ["1", "50 d 3"],
    ["0 5 5", "50 d 3 2 1"],
    ["0 5 4", "50 d 3 2 1"],
    ["0 5", "50 d 3"],
    ["0", "50 d 3 2"],
    ["0", "50 d"],
    ["0", "x d 3"],
    ["0", "50 d x"],
    ["0", "50 d 0"],
    ["0", "50 d 1001"],
    ["0", "50 d -1", "37 e 3"],
    ["0", "50 d 3", "37 e"],
    ["0 5", "50 d 3 1", "37 e 1"],
    ["0", f"50 d {'9' * 5000}"],
]


def test_damaged_stages():
    state = saved(mixed(*WEIGHTS), 1)
    starts, *lines = opened(FORM, state)[1]["mixture"]
    assert starts == "0 401 1003"
    iterator = stream(mixed(*WEIGHTS))
    for wrong in DAMAGED:
        with pytest.raises(StateError, match="the state is damaged: data.mixture is "):
            iterator.set_state(crafted(FORM, state, mixture=wrong))
    iterator.set_state(crafted(FORM, state, mixture=[starts, *lines]))
    iterator.close()


# Wrappers


def named(mixture):
    return Named(mixture, index="i").map(lambda record: record, inputs=["x"])


def test_wrapped_mixtures():
    a, b, c = parts()
    mixture = Mixture([(a, 3), (b, 1)])
    state = saved(named(mixture), 17)
    changed = mixture.then(408, [(c, 1), (a, 1)])
    rows = reference(SIZES, ([(0, 3), (408, 1)], [(0, 1), (408, 0)], [(408, 1)]), 480)[0]
    iterator = restored(named(changed), state)
    np.testing.assert_array_equal(next(iterator)["i"], rows[408:432])
    iterator.close()
    assert "mixture.1.weight" in refusal(named(Mixture([(a, 3), (b, 2)])), state)


RECORDS = records(45)
PLANNED = {
    "Packed": lambda source: (
        packed,
        Packed(source, length=40, images=5, patch=4, tokens=30, text="text"),
    ),
    "Buckets": lambda source: (bucketed, Buckets(source, buckets=[(12, 12), (8, 16), (16, 8)])),
    "MultiImage": lambda source: (several, MultiImage(source, "images", images=3)),
}


@pytest.mark.parametrize("name", PLANNED)
def test_sources_that_plan_batches_change_at_an_epoch(name):
    a, b, c = (
        Records(RECORDS[k : k + 15], kinds={"images": Field(None)}) for k in range(0, 45, 15)
    )

    def run(mixture, **kwargs):
        function, source = PLANNED[name](mixture)
        make = data_iterator(function, source=source, mask=True)
        return make.stream(None, batch_size=4, num_threads=1, **kwargs)

    mixture = Mixture([(a, 1), (b, 1)])
    changed = mixture.then(60, [(b, 1), (c, 2)])
    whole, begun = run(changed, seed=SEED), run(mixture, seed=SEED)
    rows, states = [], []
    while whole.epoch < 4:
        rows.append(rows_of(next(whole)))
        if whole.epoch < 2:
            assert rows_of(next(begun)) == rows[-1]
            states.append(begun.get_state())
    for number in (3, len(states) - 1):
        again = run(changed)
        again.set_state(states[number])
        assert [rows_of(next(again)) for _ in rows[number + 1 :]] == rows[number + 1 :]
        again.close()
    again = run(mixture.then(45, [(b, 1), (c, 2)]))
    with pytest.raises(StateError, match=r"(?s)mixture.2.weight.*from record 45.*then\(60, "):
        again.set_state(states[-1])
    for iterator in (whole, begun, again):
        iterator.close()


def doubled(record):
    return {"x": record["x"] * 2}


def test_maps_of_added_sources_are_free():
    a, b, c = parts()
    mixture = Mixture([(a.map(doubled), 3), (b, 1)])
    state = saved(mixture, 17)
    weights = (3, [(0, 1), (408, 0)], [(408, 2)])
    rows = reference(SIZES, weights, 480)[0]
    iterator = restored(mixture.then(408, [(mixture._sources[0], 3), (c.map(doubled), 2)]), state)
    np.testing.assert_array_equal(taken(iterator, 3), (rows * np.where(rows % 87 < 50, 2, 1))[408:])
    later = iterator.get_state()
    iterator.close()
    text = refusal(Mixture([*zip((a.map(doubled), b, c), weights)]), later)
    assert "operators.doubled" in text and "mixture" not in text
    text = refusal(Mixture([(a, 3), (b, 1)]), state)
    assert "operators.doubled" in text


def test_the_wrapper_of_a_mixture_is_compared():
    a, b = (Records(RECORDS[k : k + 15], kinds={"images": Field(None)}) for k in (0, 15))

    def run(sizes):
        source = Buckets(Mixture([(a, 1), (b, 1)]), buckets=sizes)
        make = data_iterator(bucketed, source=source, mask=True)
        return make.stream(None, batch_size=4, num_threads=1)

    first, other = run([(12, 12), (8, 16)]), run([(12, 12), (16, 8)])
    next(first), next(other)
    with pytest.raises(StateError, match=r"identity: .*\(8, 16\).* -> .*\(16, 8\)") as error:
        other.set_state(first.get_state())
    assert "mixture" not in str(error.value)
    for iterator in (first, other):
        iterator.close()


def packed_text(length):
    """Rows of the texts of two sources; those of the source that is added have a length."""
    first, added = (
        Arrays({"text": np.arange(start, start + 8, dtype=np.int32)}, identity=f"from {start}")
        for start in (0, 100)
    )

    def repeated(count):
        return lambda record: {"text": np.full(count, record["text"], np.int32)}

    mixture = Mixture([(first.map(repeated(2)), 1)]).then(8, [(added.map(repeated(length)), 1)])
    packed = Packed(mixture, None, length=6, images=4, text="text")

    def graph(text, *, pack):
        return {"text": pack.tokens(text)}

    return data_iterator(graph, source=packed, as_numpy=True).stream(None, batch_size=1, seed=1)


def test_lengths_of_an_added_source_are_compared_after_its_first_use():
    iterator = packed_text(2)
    packed_text(3).set_state(iterator.get_state())
    while next(iterator)["text"].max() < 100:
        pass
    state = iterator.get_state()
    packed_text(2).set_state(state)
    with pytest.raises(StateError, match="identity.1: "):
        packed_text(3).set_state(state)


def test_stored_sizes_belong_to_all_sources(tmp_path):
    folders = []
    for name, shapes in (("first", [(12, 12)] * 4), ("added", [(8, 16), (16, 8)] * 4)):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        for number, shape in enumerate(shapes):
            image = Image.fromarray(np.zeros((*shape, 3), np.uint8))
            image.save(folders[-1] / f"{number}.png")
    first, added = map(Files, folders)
    for half in (0, 1):
        mixture = Mixture([(first, 1)]).then(4, [(Selection(added, range(half, 8, 2)), 1)])
        shapes = [(12, 12), (8, 16), (16, 8)]
        stored = Buckets(mixture, buckets=shapes, cache_dir=tmp_path / "cache")
        assert stored.counts == Buckets(mixture, buckets=shapes).counts
        assert stored.counts[shapes[1 + half]] == 4


def test_mistakes_in_then_are_named():
    sources = parts()
    mixture = Mixture([(source, 1) for source in sources]).then(40, [(sources[0], 1)])
    for number in (40, 30, -1, 41.5):
        with pytest.raises(
            (ValueError, TypeError), match=f"number of records above 40, .*{number}"
        ):
            mixture.then(number, [(sources[0], 1)])
    with pytest.raises(TypeError, match="Pass its number of records, state\\['sample'\\]"):
        mixture.then({"sample": 50}, [(sources[0], 1)])
    with pytest.raises(ValueError, match="a source is listed twice"):
        mixture.then(50, [(sources[0], 1), (sources[1], 1), (sources[0], 2)])
