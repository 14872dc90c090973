"""Iterators over steps of robot episodes: epochs, states, devices, URLs, values on the host."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, types

from conformance import Expected, check
from dalijax import data_iterator
from dalijax.sources import RLDS, Mixture
from oracle import Case
from range_server import serving

pytest.importorskip("tensorflow")

from episodes import FIELDS, STEPS, episodes, level_of, steps_of, write

BATCH = 4
OUTPUTS = ["image", "after", "action", "action_mask"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write(tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def graph(image, after, action, action_mask):
    return fn.decoders.image(image), fn.decoders.image(after), action, action_mask


def over(source, devices=0, seed=None, **config):
    """Returns an iterator; a batch has the outputs of the graph and the fields that bypass it."""
    if devices:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    make = data_iterator(graph, OUTPUTS, mask="mask", last_batch_padded=True, **config)
    return make(source=source, batch_size=BATCH, num_threads=1, seed=seed)


def rows_of(iterator):
    """Returns the rows of the rest of the epoch, as lists of values by name."""
    rows = []
    for batch in iterator:
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        for row in np.flatnonzero(arrays["mask"]):
            rows.append({name: array[row] for name, array in arrays.items()})
    return rows


def test_each_step_of_an_epoch_is_delivered_once(paths, cache):
    expected = steps_of(paths)
    iterator = over(RLDS(paths, FIELDS, cache_dir=cache), seed=3)
    orders = []
    for _ in range(2):
        rows = rows_of(iterator)
        orders.append([int(row["number"]) for row in rows])
        assert sorted(orders[-1]) == list(range(STEPS))
        for row in rows:
            step = expected[row["number"]]
            for name in ("action", "action_mask", "past", "past_mask", "state", "gripper"):
                np.testing.assert_array_equal(row[name], step[name])
            assert (row["prompt"], row["path"]) == (step["prompt"], step["path"])
            assert abs(int(row["image"][0, 0, 0]) - level_of(row["number"])) <= 2
            after = step["number"] + np.flatnonzero(step["action_mask"][:3])[-1]
            assert abs(int(row["after"][0, 0, 0]) - level_of(after, 1)) <= 2
        iterator.reset()
    assert orders[0] != orders[1]
    iterator.close()


def test_maps_of_steps(paths, cache):
    def mapped(record):
        assert isinstance(record["prompt"], str)
        state = record["state"] + np.float32(1)
        return {"state": state, "prompt": record["prompt"].upper()}

    source = RLDS(paths, FIELDS, cache_dir=cache).map(mapped, inputs=["state", "prompt"])
    source = source.random_map(lambda record, rng: {"noise": rng.random()}, inputs=[])
    assert source.fields["state"].bypass
    make = data_iterator(lambda number, noise: (number, noise), ["number", "noise"])
    iterator = make(source=source, batch_size=4, num_threads=1, seed=3)
    next(iterator)
    state, batch = iterator.get_state(), next(iterator)
    expected = steps_of(paths)
    for number, value, prompt in zip(batch["number"], batch["state"], batch["prompt"]):
        np.testing.assert_array_equal(value, np.float32(expected[int(number)]["state"]) + 1)
        assert prompt == expected[int(number)]["prompt"].upper()
    iterator.set_state(state)
    np.testing.assert_array_equal(next(iterator)["noise"], batch["noise"])


def test_numbers_bypass_the_graph_on_the_host(paths, cache):
    fields = {"image": "steps/observation/cam", "state": FIELDS["state"], "n": FIELDS["number"]}
    make = data_iterator(lambda image: fn.decoders.image(image), ["image"], shuffle=False)
    batch = next(make(source=RLDS(paths, fields, cache_dir=cache), batch_size=4, num_threads=1))
    expected = steps_of(paths)[:4]
    assert isinstance(batch["state"], np.ndarray) and batch["state"].dtype == np.float32
    np.testing.assert_array_equal(batch["state"], [row["state"] for row in expected])
    np.testing.assert_array_equal(batch["n"], np.arange(4, dtype=np.int32), strict=True)


def test_windows_are_normalized_by_statistics_of_all_steps(paths, cache):
    source = RLDS(paths, {"action": FIELDS["action"]}, cache_dir=cache)
    actions = source.column("steps/action")
    low, high = np.quantile(actions, [0.01, 0.99], axis=0).astype(np.float32)

    def normalized(action):
        values = (action - types.Constant(low)) / types.Constant(high - low) * 2.0 - 1.0
        return action, values

    make = data_iterator(normalized, ["action", "normalized"])
    batch = next(make(source=source, batch_size=8, num_threads=1))
    wanted = (np.asarray(batch["action"]) - low) / (high - low) * 2 - 1
    np.testing.assert_allclose(batch["normalized"], wanted, rtol=1e-6, atol=1e-6)


def test_conformance(paths, cache):
    source = RLDS(paths, FIELDS, cache_dir=cache)
    steps, epochs = steps_of(paths), []
    case = Case(STEPS, 1, BATCH, "FILL", True, False)
    for number, streams in case.epochs(2):
        epochs.append([])
        for samples in streams[0]:
            rows = [steps[s[0]] for s in samples]
            names = ("action", "action_mask", "number", "state")
            batch = {name: np.array([row[name] for row in rows]) for name in names}
            epochs[-1].append({**batch, "mask": np.array(case.mask(samples, number))})
    make = data_iterator(
        lambda action, action_mask: (action, action_mask),
        ["action", "action_mask"],
        source=source,
        mask="mask",
        last_batch_padded=True,
        shuffle=False,
    )
    expected = Expected(epochs, state_bytes=2048)
    check(lambda: make(batch_size=BATCH, num_threads=1), expected, tail=2)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 4), (4, 1)])
def test_a_state_resumes_on_other_devices(paths, cache, first, second):
    source = RLDS(paths, FIELDS, cache_dir=cache).select(np.arange(STEPS) != 2)
    saved = over(source, first, seed=5)
    next(saved)
    state = json.loads(json.dumps(saved.get_state()))
    other = over(source, second)
    other.set_state(state)
    wanted, rows = rows_of(saved), rows_of(other)
    assert len(rows) == STEPS - 1 - BATCH
    for row, want in zip(rows, wanted, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(row[name], value, name)


def test_a_state_of_other_steps_is_refused(paths, cache):
    source = RLDS(paths, FIELDS, cache_dir=cache)
    state = over(source.select(np.arange(6))).get_state()
    with pytest.raises(ValueError, match="records"):
        over(source.select(np.arange(1, 7))).set_state(state)


def test_urls_give_the_same_batches(paths, cache, tmp_path):
    pytest.importorskip("obstore")
    write(tmp_path / "files" / "a", episodes())
    local = RLDS(paths, FIELDS, cache_dir=cache)
    with serving(tmp_path / "files") as (url, server):
        urls = [f"{url}/a/{path.rpartition('/')[2]}" for path in paths]
        remote = RLDS(urls, FIELDS, cache_dir=tmp_path, read_ahead="20kB")
        assert remote.identity() == local.identity()
        assert remote.column("steps/is_first").sum() == 5
        rows = [rows_of(over(source, seed=3)) for source in (remote, local)]
        cached = RLDS(urls, FIELDS, cache_dir=tmp_path, cache=tmp_path / "disk")
        first = cached.read(np.arange(STEPS), ["image", "before"])
        server.ranges.clear()
        again = cached.read(np.arange(STEPS), ["image", "before"])
        assert not server.ranges
        for name, values in first.items():
            assert [v.tobytes() for v in again[name]] == [v.tobytes() for v in values]
    for row, want in zip(*rows, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(row[name], value, name)


def test_a_mixture_delivers_both_cameras(paths, cache):
    fields = {"number": FIELDS["number"]}
    cameras = [
        RLDS(paths, {**fields, "image": f"steps/observation/{name}"}, cache_dir=cache)
        for name in ("cam", "wrist")
    ]
    source = Mixture([(camera, 1) for camera in cameras])
    make = data_iterator(lambda image: fn.decoders.image(image), ["image"], source=source)
    seen = set()
    for batch in make(batch_size=BATCH, num_threads=1, seed=1):
        for number, image in zip(batch["number"], np.asarray(batch["image"])):
            levels = [level_of(number, camera) for camera in (0, 1)]
            differences = [abs(int(image[0, 0, 0]) - level) for level in levels]
            assert min(differences) <= 2
            seen.add((int(number), int(np.argmin(differences))))
    assert seen == {(n, camera) for n in range(STEPS) for camera in (0, 1)}
