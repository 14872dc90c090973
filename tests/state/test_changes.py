"""States that resume despite differences that the caller names."""

import ast
import pathlib
import re

import grain
import numpy as np
import pytest
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from full import combinations
from numbered import read_files


def graph(files, size=8, flip=False, noise=False, first=False, gain=1.0, cast=True, reader=None):
    data, label = read_files(files, random_shuffle=True, **reader or {})
    drawn = []
    if first:
        drawn.append(fn.random.uniform(range=(5.0, 6.0)))
    images = fn.decoders.image(data)
    if size:
        images = fn.resize(images, size=(size, size))
    drawn.append(fn.random.uniform(range=(0.0, gain)))
    if flip:
        images = fn.flip(images, horizontal=fn.random.coin_flip())
    numbers = drawn[-1] + (drawn[0] * 0.0 if first else 0.0)
    if noise:
        images = fn.noise.gaussian(images)
    return images, label, numbers


def make(files, config=None, batch_size=2, **changed):
    names = ["images", "x", "u"]
    iterator_fn = data_iterator(graph, names, reader_name="reader", **(config or {}))
    return iterator_fn(files, batch_size=batch_size, seed=3, **changed)


def seen(iterator, count=3):
    out = []
    for _ in range(count):
        batch = next(iterator)
        out.append((batch["x"].ravel().tolist(), np.asarray(batch["u"]).tolist()))
    return out


def advised(error):
    """Returns the names that an error suggests."""
    return ast.literal_eval(re.search(r"allow=(\[.*\]) to set_state", str(error.value))[1])


CHANGES = [
    ({}, dict(size=12), ["operators.resize.size"]),
    ({}, dict(size=0), ["operators.resize"]),
    (dict(size=0), {}, ["operators.resize"]),
    ({}, dict(flip=True), ["operators.flip", "operators.random.coin_flip"]),
    (dict(flip=True), {}, ["operators.flip", "operators.random.coin_flip"]),
    ({}, dict(noise=True), ["operators.noise.gaussian"]),
    (dict(noise=True, flip=True), dict(size=4), None),
    ({}, dict(first=True), None),
    (dict(first=True), {}, None),
]


@pytest.mark.parametrize(("change", "lazy"), combinations(2, CHANGES, (False, True)), ids=str)
def test_named_settings_may_change_and_others_resume(jpegs, change, lazy):
    before, now, names = change
    saved = make(jpegs, **before)
    seen(saved, 2)
    state = saved.get_state()
    want = seen(saved)
    if lazy:
        iterator_fn = data_iterator(graph, ["images", "x", "u"], reader_name="reader")
        other = iterator_fn.stream(None, jpegs, batch_size=2, seed=3, **now)
    else:
        other = make(jpegs, **now)
    first = other.get_state()
    with pytest.raises(ValueError, match="saved -> now") as caught:
        other.set_state(state)
    assert other.get_state() == first
    assert names is None or advised(caught) == names
    names = advised(caught)
    if len(names) > 1:
        with pytest.raises(ValueError, match=re.escape(names[-1])):
            other.set_state(state, allow=names[:-1])
    other.set_state(state, allow=names)
    assert (other.get_state()["epoch"], other.get_state()["step"]) == (0, 2)
    again = make(jpegs, {"allow_changes": names}, **now)
    again.set_state(state)
    assert again.get_state() == other.get_state()
    assert seen(other) == want
    # The state that it saves is complete.
    plain = make(jpegs, **now)
    plain.set_state(other.get_state())
    assert seen(plain, 1) == seen(other, 1)
    # The start of an epoch, too.
    again.reset()
    assert seen(again, 2) == seen(make(jpegs, **before), 2)


def test_pixels_come_from_the_current_graph(jpegs):
    saved = make(jpegs)
    next(saved)
    other = make(jpegs, size=12)
    other.set_state(saved.get_state(), allow=["operators.resize.size"])
    batch = next(other)
    assert batch["images"].shape == (2, 12, 12, 3)
    gray = 8 * np.asarray(batch["x"]).reshape(2, 1, 1, 1) % 256
    assert np.abs(np.asarray(batch["images"]).astype(int) - gray).max() <= 1


FIXED = [
    (dict(batch_size=3), "batch_size"),
    (dict(reader=dict(num_shards=2)), "num_shards"),
    (dict(reader=dict(pad_last_batch=True)), "padded"),
]


@pytest.mark.parametrize("change,name", FIXED, ids=str)
def test_units_of_positions_must_not_change(jpegs, change, name):
    state = make(jpegs).get_state()
    everything = ["batch_size", "num_shards", "padded", "reader", "epoch_size", "operators"]
    other = make(jpegs, {"allow_changes": everything}, **change)
    for allow in ([], everything):
        words = f"{name}: .* -> .*allow= can't ignore .*{name}.*positions depend"
        with pytest.raises(ValueError, match=f"(?s){words}"):
            other.set_state(state, allow=allow)
    assert seen(other) == seen(make(jpegs, **change))


def test_an_added_or_removed_reader_is_refused(jpegs):
    def two(files, more):
        x = fn.readers.file(files=files, name="reader")[1]
        return x, fn.readers.file(files=files)[1] if more else x + 0

    one, other = (
        data_iterator(two, ["x", "y"], reader_name="reader")(jpegs, more, batch_size=2)
        for more in (False, True)
    )
    next(one), next(other)
    for here, there in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="can't ignore operators.readers.file"):
            here.set_state(there.get_state(), allow=["operators"])


def test_the_data_may_change_by_name(jpegs):
    state = make(jpegs).get_state()
    other = make(jpegs[::-1])
    with pytest.raises(ValueError, match=r"allow=\['reader.files'\]"):
        other.set_state(state)
    other.set_state(state, allow=["reader.files"])
    seen(other)


def test_names_are_checked(jpegs):
    iterator = make(jpegs)
    state = iterator.get_state()
    words = r"'operators.resze.size', which is not a name of a difference.*'operators.resize.size'"
    with pytest.raises(ValueError, match=words):
        iterator.set_state(state, allow=["operators.resze.size"])
    with pytest.raises(TypeError, match=r"must be a list of names, not 'a'. Pass \['a'\]"):
        iterator.set_state(state, allow="a")
    with pytest.raises(TypeError, match="must contain names, not 3"):
        make(jpegs, {"allow_changes": [3]})
    # A run that restarts after the change stores no names.
    make(jpegs, {"allow_changes": ["operators.flip"]}).set_state(state)
    iterator.set_state(state, allow=["operators.resize.size", "seed", "outputs", "reader"])


def test_many_differences_are_counted_and_may_be_ignored_together():
    def iterator(views):
        def graph(x, *, draw):
            return {f"view {k}": x + draw.uniform(0, views) for k in range(16)}

        source = sources.Arrays({"x": np.zeros((8, 2), np.float32)})
        return data_iterator(graph)(source=source, batch_size=4)

    saved, other = iterator(1), iterator(2)
    next(saved)
    state = saved.get_state()
    with pytest.raises(ValueError) as refused:
        other.set_state(state)
    lines = str(refused.value).splitlines()
    assert len(lines) < 14 and lines[-2].strip() == "and 6 more"
    assert "pass allow=['operators'] to set_state()" in lines[-1]
    other.set_state(state, allow=["operators"])
    assert other.step == 1


def test_adapters_use_the_names_of_data_iterator(jpegs, tmp_path):
    names = ["operators.resize.size"]
    plain = data_iterator(graph, ["images", "x", "u"], reader_name="reader")
    call = dict(files=jpegs, batch_size=2, reader=dict(pad_last_batch=True))

    def clu(iterator_fn, **more):
        return DALIDatasetIterator(iterator_fn, **call, **more)

    def grain(iterator_fn, **more):
        return iter(DALIIterDataset(iterator_fn, **call, **more))

    def tfdata(iterator_fn, **more):
        return iter(DALIDataset(iterator_fn, **call, **more))

    for kind in (clu, grain, tfdata):
        saved = kind(plain)
        next(saved)
        state, want = saved.get_state(), np.asarray(next(saved)["x"])
        with pytest.raises(ValueError, match="operators.resize.size"):
            kind(plain, size=12).set_state(state)
        other = kind(plain, size=12, allow_changes=names)
        other.set_state(state)
        batch = next(other)
        assert batch["images"].shape == (2, 12, 12, 3)
        assert np.array_equal(batch["x"], want)


@pytest.mark.parametrize("built", (False, True))
@pytest.mark.parametrize("loader", (False, True))
def test_arguments_of_a_graph_over_grains_records(jpegs, loader, built):
    def resized(image, size):
        return fn.resize(fn.decoders.image(image), size=(size, size)), fn.random.uniform()

    def make(size, **more):
        ds = grain.MapDataset.source(jpegs).map(lambda path: pathlib.Path(path).read_bytes())
        call = dict(output_map=["images", "u"], batch_size=2, seed=1, size=size, **more)
        if not loader:
            return iter(ds.pipe(DALITransform(resized, **call)))
        sampler = grain.samplers.IndexSampler(len(jpegs), num_epochs=1, seed=0)
        return iter(DALIDataLoader(ds, sampler, pipeline_fn=resized, **call))

    saved = make(8)
    next(saved)
    state, want = saved.get_state(), np.asarray(next(saved)["u"])
    refusing = make(12)
    other = make(12, allow_changes=["operators.resize.size"])
    if built:
        next(refusing), next(other)
    words = r"operators.resize.size: \[8.0,8.0\] -> \[12.0,12.0\].*allow_changes=\['operators"
    with pytest.raises(ValueError, match=f"(?s){words}"):
        refusing.set_state(state)
        next(refusing)  # the first record determines the graph
    other.set_state(state)
    batch = next(other)
    assert batch["images"].shape == (2, 12, 12, 3) and np.array_equal(batch["u"], want)
    plain = make(12)
    plain.set_state(other.get_state())
    assert np.array_equal(next(plain)["u"], next(other)["u"])
