"""`draw` and `dalijax.augment` over Grain's records: numbers depend on the place in the stream."""

import io
import json
import re
import traceback

import grain
import jax
import numpy as np
import pytest
from bad_image_worker import padded
from nvidia.dali import fn as dali_fn
from nvidia.dali import ops
from PIL import Image
from shardings import rows_over

from dalijax import augment, data_iterator, fn, sources
from dalijax.adapters.grain import DALIBatch, DALIDataLoader, DALITransform, data_loader
from dalijax.adapters.grain import transform as transform_module
from dalijax.core.feeding import record_supply
from dalijax.core.formats.image_size import look_at_input
from dalijax.core.random.hashing import column_keys, fold, uniform
from dalijax.errors import RecordError

N, BATCH, SEED = 22, 4, 7
SIZES = [(20 + 3 * k, 24 + 2 * k) for k in range(N)]


def encoded_image(k, form="JPEG"):
    file = io.BytesIO()
    pixels = np.random.default_rng(k).integers(0, 255, (*SIZES[k], 3), np.uint8)
    Image.fromarray(pixels).save(file, form, quality=95)
    return file.getvalue()


JPEGS = [encoded_image(k) for k in range(N)]
# DALI decodes it, but no parser reads its size.
OTHER = encoded_image(5, "GIF")  # DALI has no decoder for it


def records(other=()):
    return [{"image": OTHER if k in other else JPEGS[k], "i": np.int32(k)} for k in range(N)]


def numbers(i, draw):
    return i + 0, draw.uniform(), draw.uniform(2, 3, shape=(2,), name="two")


def augmented(image, i, draw):
    images = dali_fn.decoders.image(image)
    images = augment.random_resized_crop(images, size=16, draw=draw)
    return augment.flip(images, draw=draw), i + 0


def expected(places, seed=SEED):
    """Returns the numbers "u" and "v" that `numbers` draws at places of the stream."""
    hashes = fold(seed, 0, np.asarray(places, np.int64))
    one = uniform(hashes, column_keys("#0", 1))[:, 0]
    two = uniform(hashes, column_keys("two", 2)).astype(np.float64) + 2
    return one, two.astype(np.float32)


def transform(graph=numbers, names=("x", "u", "v"), **options):
    options = {"batch_size": BATCH, "num_threads": 1, "pad": "mask", **options}
    return DALITransform(graph, output_map=names, **options)


def loader(**options):
    graph = options.pop("graph", numbers)
    names = options.pop("names", ("x", "u", "v"))
    options = {"batch_size": BATCH, "num_threads": 1, "pad": "mask", **options}
    sampler = grain.samplers.IndexSampler(N, shuffle=True, num_epochs=2, seed=3)
    return DALIDataLoader(
        options.pop("source", records()),
        sampler,
        pipeline_fn=graph,
        output_map=names,
        **options,
    )


def on_host(iterator):
    return [{name: np.asarray(array) for name, array in batch.items()} for batch in iterator]


def check(batches, order, first=0, seed=SEED):
    """Checks that batches have the records of an order, and the numbers of their places."""
    for step, batch in enumerate(batches, first):
        places = np.arange(BATCH * step, BATCH * (step + 1))
        one, two = expected(places, seed)
        valid = batch["mask"]
        assert batch["x"][valid].tolist() == [order[k] for k in places[valid]]
        np.testing.assert_array_equal(batch["u"][valid], one[valid])
        np.testing.assert_array_equal(batch["v"][valid], two[valid])
    assert step == -(-len(order) // BATCH) - 1


@pytest.mark.parametrize("shape", (None, (1,), (2,), (4,), (2, 2)), ids=str)
def test_the_numbers_of_a_transform_depend_on_the_place_in_the_stream(shape):
    ds = grain.MapDataset.source(records())
    options = {"seed": SEED} if shape is None else {"seed": SEED, "sharding": rows_over(*shape)}
    whole = iter(ds.pipe(transform(**options)))
    batches, states = [], []
    for batch in whole:
        batches.append(batch)
        states.append(json.loads(json.dumps(whole.get_state())))
    check(on_host(batches), list(range(N)))
    again = iter(ds.pipe(transform(**options)))
    again.set_state(states[1])
    check(on_host(again), list(range(N)), 2)


@pytest.mark.parametrize("second", (None, (1,), (4,), (2, 2)), ids=str)
@pytest.mark.parametrize("read", (lambda ds: ds, lambda ds: ds.to_iter_dataset()), ids="mi")
def test_a_transform_that_only_draws_resumes_on_any_number_of_devices(read, second):
    ds = read(grain.MapDataset.source(records()))
    start = iter(ds.pipe(transform(seed=SEED, sharding=rows_over(2))))
    for _ in range(2):
        next(start)
    state = json.loads(json.dumps(start.get_state()))
    assert transform_module.FORM.decode(state)["random"] == ""  # nothing belongs to a device
    rest = iter(ds.pipe(transform(seed=SEED, sharding=second and rows_over(*second))))
    rest.set_state(state)
    check(on_host(rest), list(range(N)), 2)


def test_the_seed_of_the_call_is_the_seed_of_draws_and_states():
    ds = grain.MapDataset.source(records())
    check(on_host(ds.pipe(transform(seed=5))), list(range(N)), seed=5)
    check(on_host(ds.pipe(transform())), list(range(N)), seed=0)
    saved = iter(ds.seed(9).pipe(transform()))
    next(saved)
    plain = iter(ds.pipe(transform()))
    plain.set_state(saved.get_state())  # without a seed
    check(
        on_host(plain),
        list(range(N)),
        1,
        seed=transform_module.FORM.decode(saved.get_state())["seed"],
    )


@pytest.mark.parametrize("first", (None, (4,), (2, 2)), ids=str)
@pytest.mark.parametrize("second", (None, (2,), (4,)), ids=str)
def test_a_loader_resumes_on_any_number_of_shards(first, second):
    order = [
        int(one.record_key)
        for one in map(loader()._steps.config.sampler.__getitem__, range(2 * N))  # both epochs
    ]
    start = iter(loader(seed=SEED, sharding=first and rows_over(*first)))
    for _ in range(3):
        next(start)
    state = start.get_state()
    assert data_loader.FORM.decode(state)["random"] == 0  # nothing belongs to a shard
    rest = iter(loader(seed=SEED, sharding=second and rows_over(*second)))
    rest.set_state(json.loads(json.dumps(state)))
    check(on_host(rest), order, 3)


@pytest.mark.parametrize("shards", (2, 4))
def test_each_part_of_a_loader_draws_for_its_rows(shards):
    parts = [
        on_host(loader(seed=SEED, shard_options=grain.sharding.ShardOptions(k, shards)))
        for k in range(shards)
    ]
    for step in range(len(parts[0])):
        u = np.concatenate([part[step]["u"] for part in parts])
        valid = np.concatenate([part[step]["mask"] for part in parts])
        one, _ = expected(np.arange(BATCH * step, BATCH * (step + 1)))
        np.testing.assert_array_equal(u[valid], one[valid])


def test_augmented_images_equal_those_of_a_source():
    source = sources.Records([{"image": data, "i": np.int32(k)} for k, data in enumerate(JPEGS)])
    make = data_iterator(augmented, ["image", "i"], source=source, shuffle=False, as_numpy=True)
    want = on_host(make(batch_size=BATCH, num_threads=1, seed=SEED))
    ds = grain.MapDataset.source(records()).seed(SEED)
    got = on_host(ds.pipe(transform(augmented, ("image", "i"), seed=SEED)))
    for one, other in zip(got, want, strict=True):
        valid = one["mask"]
        np.testing.assert_array_equal(one["image"][valid], other["image"][valid])
        assert one["i"][valid].tolist() == other["i"][valid].tolist()


def of_paths(path, i, draw):
    return augmented(fn.read_file(path), i, draw)


@pytest.fixture
def paths(tmp_path):
    for k, data in enumerate(JPEGS):
        (tmp_path / f"{k}.jpg").write_bytes(data)
    return [{"path": f"{tmp_path}/{k}.jpg", "i": np.int32(k)} for k in range(N)]


@pytest.mark.parametrize("shape", (None, (2,)), ids=str)
def test_images_of_paths_equal_images_of_bytes(paths, shape):
    options = {"seed": SEED} if shape is None else {"seed": SEED, "sharding": rows_over(*shape)}
    bytes_, files = grain.MapDataset.source(records()), grain.MapDataset.source(paths)
    want = on_host(bytes_.pipe(transform(augmented, ("image", "i"), **options)))
    got = on_host(files.pipe(transform(of_paths, ("image", "i"), **options)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one["mask"], other["mask"])
        valid = one["mask"]
        np.testing.assert_array_equal(one["image"][valid], other["image"][valid])
    encoded = [{**record, "path": record["path"].encode()} for record in paths]
    make = data_iterator(of_paths, ["image", "i"], source=sources.Records(encoded), shuffle=False)
    for one, other in zip(make(batch_size=BATCH, num_threads=1, seed=SEED), want):
        valid = other["mask"]
        np.testing.assert_array_equal(np.asarray(one["image"])[valid], other["image"][valid])


def test_a_path_without_a_file_is_a_named_bad_record(paths):
    paths[5]["path"] += "x"
    options = {"seed": SEED, "prefetch": 1}
    ds = grain.MapDataset.source(paths)
    masks = on_host(ds.pipe(transform(of_paths, ("image", "i"), on_error="mask", **options)))
    assert [np.flatnonzero(~batch["mask"]).tolist() for batch in masks] == [
        *([], [1], [], [], []),
        [2, 3],
    ]
    raises = iter(ds.pipe(transform(of_paths, ("image", "i"), **options)))
    next(raises)
    with pytest.raises(RecordError, match="record 5 of the stream") as raised:
        next(raises)
    assert "5.jpgx" in str(raised.value)


def test_paths_may_be_padded_by_zeros(paths):
    want = on_host(grain.MapDataset.source(paths).pipe(transform(of_paths, ("image", "i"), seed=1)))
    with_zeros = [{**record, "path": padded(record["path"])} for record in paths]
    ds = grain.MapDataset.source(with_zeros)
    got = on_host(ds.pipe(transform(of_paths, ("image", "i"), seed=1)))
    columns = {name: np.stack([record[name] for record in with_zeros]) for name in ("path", "i")}
    make = data_iterator(of_paths, ["image", "i"], source=sources.Arrays(columns), shuffle=False)
    own = on_host(make(batch_size=BATCH, num_threads=1, seed=1))
    for one, other, wanted in zip(got, own, want, strict=True):
        valid = wanted["mask"]
        np.testing.assert_array_equal(one["image"][valid], wanted["image"][valid])
        np.testing.assert_array_equal(other["image"][valid], wanted["image"][valid])


def read_by_operator(path, i, draw):
    return augmented(ops.io.file.Read()(path), i, draw)


def sizes_alone(image, i, draw):
    images = dali_fn.decoders.image(image)  # DALI drops it, since it is not an output
    return draw.compute(lambda _, sizes: sizes, (2,), np.int32, images=images, columns=1), i + 0


def sizes_of_paths(path, i, draw):
    return sizes_alone(fn.read_file(path), i, draw)


@pytest.mark.parametrize("graph", [sizes_alone, sizes_of_paths])
def test_draws_get_sizes_of_images_that_are_not_decoded(paths, graph):
    taken = records() if graph is sizes_alone else paths
    got = on_host(grain.MapDataset.source(taken).pipe(transform(graph, ("size", "i"))))
    encoded = [{k: v.encode() if k == "path" else v for k, v in one.items()} for one in taken]
    make = data_iterator(graph, ["size", "i"], source=sources.Records(encoded), shuffle=False)
    for batches in (got, on_host(make(batch_size=BATCH, num_threads=1))):
        sizes = np.concatenate([batch["size"] for batch in batches])[:N]
        assert sizes.tolist() == [list(size) for size in SIZES]


def test_files_may_be_read_by_dalis_operators(paths):
    ds = grain.MapDataset.source(paths)
    want = on_host(ds.pipe(transform(of_paths, ("image", "i"), seed=1)))
    got = on_host(ds.pipe(transform(read_by_operator, ("image", "i"), seed=1)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])


def test_a_graph_of_records_may_have_conditions():
    def graph(image, i, *, draw):
        images = augment.random_resized_crop(dali_fn.decoders.image(image), size=16, draw=draw)
        if i > 5:
            images = dali_fn.cast_like(images * 0, images)
        return images, i + 0

    class Record(dict):
        def __getitem__(self, key):
            callers.update((f.filename, f.name) for f in traceback.extract_stack())
            return super().__getitem__(key)

    callers = set()
    ds = grain.MapDataset.source(records()).map(Record).seed(SEED)
    want = on_host(ds.pipe(transform(augmented, ("image", "i"))))
    got = on_host(ds.pipe(transform(graph, ("image", "i"), enable_conditionals=True)))
    for one, other in zip(got, want, strict=True):
        assert one["i"].tolist() == other["i"].tolist()
        assert one["image"].any(axis=(1, 2, 3)).tolist() == (one["i"] <= 5).tolist()
    iterator = iter(ds.pipe(transform(graph, ("image", "i"), enable_conditionals=True)))
    next(iterator)
    callers.clear()
    next(iterator)
    # DALI rewrites the callbacks of the graph's inputs, but not the code that reads records.
    rewritten = {name for file, name in callers if "__autograph_generated" in file}
    assert callers and rewritten <= {"<lambda>"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_state_before_two_bad_images_of_a_batch_resumes(on_error, nested):
    def graph(a, b, i):
        decoded = [dali_fn.resize(dali_fn.decoders.image(one), size=8) for one in (a, b)]
        return *decoded, dali_fn.random.uniform(), i + 0

    def graph_nested(x, i):
        return graph(x["a"], x["b"], i)

    def run(state=None):
        names = ("a", "b", "u", "i")
        pipe = transform(graph_nested if nested else graph, names, on_error=on_error, seed=SEED)
        iterator = iter(grain.MapDataset.source(taken).pipe(pipe))
        if state is not None:
            iterator.set_state(state)
        seen = []
        while True:
            try:
                batch = {name: np.asarray(array).tolist() for name, array in next(iterator).items()}
                seen.append((batch, iterator.get_state()))
            except StopIteration:
                return seen
            except RecordError as error:
                # DALI's threads decide which fault comes first.
                named = re.findall(r"record (\d+) of the stream", str(error))
                seen.append((named, iterator.get_state()))

    taken = [{"a": JPEGS[k], "b": JPEGS[k], "i": np.int32(k)} for k in range(N)]
    taken[9]["a"] = taken[10]["b"] = JPEGS[0][:40]
    if nested:
        taken = [{"x": {"a": one["a"], "b": one["b"]}, "i": one["i"]} for one in taken]
    whole = run()
    assert run(whole[1][1]) == whole[2:]
    if on_error == "raise":
        assert whole[2][0] == ["9", "10"]


def test_a_header_is_parsed_once_in_a_run(monkeypatch):
    parsed = []

    def counted(data, image_input):
        parsed.append(bytes(data))
        return look_at_input(data, image_input)

    monkeypatch.setattr(record_supply, "look_at_input", counted)
    ds = grain.MapDataset.source(records()[: 4 * BATCH]).seed(SEED)
    assert len(on_host(ds.pipe(transform(augmented, ("image", "i"))))) == 4
    assert parsed == JPEGS[: 4 * BATCH]


@pytest.mark.parametrize("shape", (None, (2,)), ids=str)
def test_an_image_without_a_size_is_a_bad_record(shape):
    options = {"seed": SEED} if shape is None else {"seed": SEED, "sharding": rows_over(*shape)}
    ds, bad = grain.MapDataset.source(records((5,))), grain.MapDataset.source(records())
    want = on_host(bad.pipe(transform(augmented, ("image", "i"), **options)))
    masks = on_host(ds.pipe(transform(augmented, ("image", "i"), on_error="mask", **options)))
    assert [np.flatnonzero(~batch["mask"]).tolist() for batch in masks] == [
        *([], [1], [], [], []),
        [2, 3],
    ]
    for one, other in zip(masks, want, strict=True):
        valid = one["mask"]
        np.testing.assert_array_equal(one["image"][valid], other["image"][valid])
    skips = on_host(ds.pipe(transform(augmented, ("image", "i"), on_error="skip", **options)))
    assert [batch["i"][0] for batch in skips] == [0, 8, 12, 16, 20]
    for one, other in zip(skips, want[:1] + want[2:], strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
    raises = iter(ds.pipe(transform(augmented, ("image", "i"), **options)))
    next(raises)
    state = raises.get_state()
    with pytest.raises(RecordError, match="record 5 of the stream .*decoders: GIF"):
        next(raises)
    rest = on_host(raises)
    assert [batch["i"][0] for batch in rest] == [8, 12, 16, 20]
    again = iter(ds.pipe(transform(augmented, ("image", "i"), **options)))
    again.set_state(state)
    with pytest.raises(RecordError, match="record 5 of the stream"):
        next(again)
    for one, other in zip(on_host(again), rest, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])


def test_keys_of_functions_resume_on_another_layout():
    def noisy(i, draw):
        function = fn.jax_function(lambda x, *, key: jax.random.uniform(key, x.shape))
        return i + 0, function(i)

    def run():
        return iter(loader(graph=noisy, names=("x", "u"), seed=SEED))

    whole, start, rest = on_host(run()), run(), run()
    for _ in range(2):
        next(start)
    rest.set_state(start.get_state())
    assert len({batch["u"].tobytes() for batch in whole}) == len(whole)
    for one, other in zip(on_host(rest), whole[2:], strict=True):
        np.testing.assert_array_equal(one["u"], other["u"])


def test_a_different_draw_is_a_different_graph():
    def other(i, draw):
        return i + 0, draw.uniform(0, 2), draw.uniform(2, 3, shape=(2,), name="two")

    ds = grain.MapDataset.source(records())
    saved = iter(ds.pipe(transform()))
    next(saved)
    restored = iter(ds.pipe(transform(other)))
    with pytest.raises(ValueError, match="high: 1.0 -> 2"):
        restored.set_state(saved.get_state())
        next(restored)


def test_a_key_of_the_records_takes_precedence():
    ds = grain.MapDataset.source([{"i": np.int32(k), "draw": np.int32(k + 1)} for k in range(8)])
    made = DALITransform(
        lambda i, draw: (i + 0, draw + 0), batch_size=4, output_map=["i", "d"], num_threads=1
    )
    assert [batch["d"].tolist() for batch in ds.pipe(made)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_an_operation_of_a_loader_has_no_place_in_the_stream():
    batch = DALIBatch(numbers, BATCH, ["x", "u", "v"], num_threads=1)
    sampler = grain.samplers.IndexSampler(N, shuffle=False, num_epochs=1)
    with pytest.raises(ValueError, match="Use DALITransform or DALIDataLoader, or draw"):
        next(iter(grain.DataLoader(data_source=records(), sampler=sampler, operations=[batch])))
