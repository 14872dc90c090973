"""T5X's requirements of a dataset, with a test for each; the real trainer runs elsewhere."""

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.data import dataset_iterator
from jax.sharding import Mesh, PartitionSpec
from nvidia.dali import fn, types
from PIL import Image

from dalijax import data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.t5x import eval_get_dataset_fn, get_dataset_fn
from numbered import graph, read_files
from processes import started

N, LENGTH = 11, 8
WORKER = pathlib.Path(__file__).parents[1] / "support" / "t5x_worker.py"


@dataclasses.dataclass
class DatasetConfig:
    """The used fields of t5x.utils.DatasetConfig."""

    batch_size: int = 8
    seed: int | None = 1
    split: str = "train"


def numbers(files, shard_id=0, num_shards=1):
    return graph(files, stick=True, shard_id=shard_id, num_shards=num_shards)


NUMBERS = data_iterator(numbers, ["x", "u"], reader_name="reader")


def tokens(files, shard_id=0, num_shards=1):
    """Defines a sample of N nonzero tokens for each file."""
    label = numbers(files, shard_id=shard_id, num_shards=num_shards)[0]
    ramp = types.Constant(list(range(1, LENGTH + 1)), dtype=types.INT32)
    return label + ramp, fn.cast(label * ramp >= 0, dtype=types.FLOAT)


TOKENS = data_iterator(
    tokens, ["decoder_target_tokens", "decoder_loss_weights"], reader_name="reader"
)


@dataclasses.dataclass
class Partitioner:
    """The used properties of t5x.partitioning.PjitPartitioner."""

    mesh: Mesh
    data_partition_spec: PartitionSpec = PartitionSpec("data")  # noqa: RUF009 - never changed


def train(files, shard=0, shards=1, cfg=None, **options):
    call = {"num_threads": 1, **options}
    return get_dataset_fn(NUMBERS, files=files, **call)(cfg or DatasetConfig(), shard, shards, None)


def evaluation(files, shard=0, shards=1, steps=None, cfg=None, **options):
    call = {"num_threads": 1, **options}
    made = eval_get_dataset_fn(NUMBERS, masked=["x"], files=files, **call)
    return made(cfg or DatasetConfig(batch_size=4), shard, shards, steps, None)["numbers"]


def taken(batch):
    return {k: np.asarray(v).tolist() for k, v in batch.items()}


def test_the_train_iterator_is_a_real_clu_iterator_of_this_hosts_batch(jpegs_many):
    for shards in (1, 2, 4):
        iterator = train(jpegs_many, 0, shards)
        assert isinstance(iterator, dataset_iterator.DatasetIterator)
        for _ in range(3):  # T5X reads it several times before it restores
            spec = iterator.element_spec
            assert dict(spec)["x"].shape == (8 // shards, 1)
        assert next(iterator)["x"].shape == (8 // shards, 1)
        assert bool(iterator) and not hasattr(iterator, "__len__")


def test_each_host_reads_its_shard(jpegs_many):
    seen = [next(train(jpegs_many, s, 2))["x"].ravel().tolist() for s in range(2)]
    assert seen == [[0, 1, 2, 3], [5, 6, 7, 8]]
    draws = [next(train(jpegs_many, s, 2))["u"].tolist() for s in range(2)]
    assert draws[0] != draws[1]


def test_the_train_iterator_never_ends(jpegs_many):
    assert len(list(itertools.islice(train(jpegs_many), 50))) == 50


def test_unsuitable_settings_are_refused(jpegs_many):
    made = get_dataset_fn(NUMBERS, files=jpegs_many)
    with pytest.raises(ValueError, match="num_epochs=2 for training.*StopIteration"):
        made(DatasetConfig(), 0, 1, None, num_epochs=2)
    with pytest.raises(ValueError, match="batch_size=8 .* not divisible by the 3 hosts"):
        made(DatasetConfig(), 0, 3, None)
    plain = data_iterator(lambda files: numbers(files), ["x", "u"], reader_name="reader")
    with pytest.raises(ValueError, match="Add shard_id=0 and num_shards=1"):
        get_dataset_fn(plain, files=jpegs_many)(DatasetConfig(), 0, 2, None)
    made(DatasetConfig(), 0, 1, None, continue_from_last_checkpoint=True)
    with pytest.raises(TypeError, match=r"masked='x' must be a list.*Pass masked=\['x'\]"):
        eval_get_dataset_fn(NUMBERS, masked="x", files=jpegs_many)
    leaves_out = eval_get_dataset_fn(NUMBERS, masked=(), files=jpegs_many, on_error="skip")
    with pytest.raises(ValueError, match="which wait for it"):
        leaves_out(DatasetConfig(), 0, 2, None)
    leaves_out(DatasetConfig(), 0, 1, None)


@pytest.mark.parametrize("make", (get_dataset_fn, eval_get_dataset_fn))
def test_settings_of_t5x_are_refused_in_the_function(make, jpegs_many):
    for name in ("batch_size", "seed", "shard_id", "num_shards"):
        with pytest.raises(ValueError, match=f"'{name}'.*T5X sets them.*DatasetConfig"):
            make(TOKENS, files=jpegs_many, **{name: 5})
    with pytest.raises(ValueError, match="partitioner"):
        make(TOKENS, files=jpegs_many, devices=jax.local_devices())
    with pytest.raises(TypeError, match="not an iterator function. Decorate it with dalijax"):
        make(tokens, files=jpegs_many)
    with pytest.raises(
        TypeError, match="got \\['.* as a positional argument. Pass everything after"
    ):
        make(TOKENS, jpegs_many)


def test_save_and_restore_of_a_name_write_one_file_for_each_shard(jpegs_many, tmp_path):
    iterators = [train(jpegs_many, s, 2) for s in range(2)]
    for step in range(3):
        for shard, iterator in enumerate(iterators):
            assert isinstance(next(iterator)["x"], np.ndarray)
            iterator.save(str(tmp_path / f"train_ds-{shard:03d}-of-002"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "train_ds-000-of-002",
        "train_ds-001-of-002",
    ]
    for shard, iterator in enumerate(iterators):
        other = train(jpegs_many, shard, 2)
        other.restore(str(tmp_path / f"train_ds-{shard:03d}-of-002"))
        for _ in range(5):
            assert taken(next(other)) == taken(next(iterator))
    with pytest.raises(ValueError, match="shard_ids: 1 -> 0"):
        wrong = train(jpegs_many, 0, 2)
        next(wrong)
        wrong.restore(str(tmp_path / "train_ds-001-of-002"))


def test_peek_async_does_not_change_the_state(jpegs_many, tmp_path):
    # T5X peeks and then saves checkpoint_0; a run resumed from it needs batch 0.
    iterator = train(jpegs_many)
    iterator.peek_async().result()
    iterator.save(str(tmp_path / "0"))
    first = taken(next(iterator))
    other = train(jpegs_many)
    other.restore(str(tmp_path / "0"))
    assert taken(next(other)) == first


@pytest.fixture
def airio(tmp_path, monkeypatch):
    """Creates the module of airio's iterator from its interface: abstract except for its name."""
    package = tmp_path / "packages" / "airio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(
        "from clu.data import dataset_iterator\n"
        "class AirIODatasetIterator(dataset_iterator.DatasetIterator):\n"
        "    def __next__(self): raise NotImplementedError\n"
        "    def peek(self): raise NotImplementedError\n"
        "    def peek_async(self): raise NotImplementedError\n"
        "    def get_state(self): raise NotImplementedError\n"
        "    def set_state(self, state): raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    yield package.parent
    for name in [name for name in sys.modules if name.split(".")[0] == "airio"]:
        del sys.modules[name]


def test_the_iterator_is_airios_if_airio_is_installed(jpegs_many, airio):
    from airio import core

    iterator = train(jpegs_many)
    assert isinstance(iterator, core.AirIODatasetIterator)
    peeked = taken(iterator.peek_async().result())
    state = iterator.get_state()
    assert taken(next(iterator)) == peeked == taken(train(jpegs_many).peek())
    iterator.set_state(state)
    assert taken(next(iterator)) == peeked


def test_without_airio_t5x_places_the_batches_itself(jpegs_many):
    partitioner = Partitioner(Mesh(np.array(jax.devices()[:4]), ("data",)))
    iterator = train(jpegs_many, partitioner=partitioner)
    assert type(iterator) is DALIDatasetIterator and isinstance(next(iterator)["x"], np.ndarray)


@pytest.mark.parametrize("shape", ((4, 1), (2, 2)))
def test_a_partitioner_makes_global_arrays(jpegs_many, tmp_path, airio, shape):
    """T5X's compiled step gets global arrays from each batch, peeked or not, and resumes."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model"))
    partitioner = Partitioner(mesh)
    want = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    iterator = train(jpegs_many, partitioner=partitioner)
    assert {k: s.shape[1:] for k, s in iterator.element_spec.items()} == {"x": (1,), "u": ()}
    iterator.peek_async().result()
    iterator.save(str(tmp_path / "checkpoint_0"))
    seen = []
    for _ in range(6):
        batch = next(iterator)
        assert all(v.shape[0] == 8 and v.sharding == want for v in batch.values())
        seen.append(taken(batch))
    other = train(jpegs_many, partitioner=Partitioner(mesh))
    other.restore(str(tmp_path / "checkpoint_0"))
    assert [taken(next(other)) for _ in range(6)] == seen
    plain = [train(jpegs_many, s, shape[0]) for s in range(shape[0])]
    for batch in seen[:2]:
        rows = [next(host) for host in plain]
        assert batch["x"] == [x for row in rows for x in row["x"].tolist()]


def test_a_partitioner_whose_mesh_does_not_divide_the_batch_is_refused(jpegs_many, airio):
    partitioner = Partitioner(Mesh(np.array(jax.devices()[:3]), ("data",)))
    with pytest.raises(ValueError, match="batch_size=8 is not divisible by the 3 data"):
        train(jpegs_many, partitioner=partitioner)


@pytest.mark.slow
def test_two_processes_train_on_global_arrays(jpegs_many, tmp_path, airio):
    """Peeks and saves at batch 0, then compares six steps with a restored iterator, over gloo."""
    options = {"packages": str(airio), "folder": str(tmp_path), "shape": [2, 1]}
    first, second = started(WORKER, tmp_path, options | {"files": jpegs_many})
    assert first["refused"] == second["refused"]
    assert "2 processes without a partitioner" in first["refused"]
    assert first["drawn"] == second["drawn"]
    assert first["sums"] == second["sums"] == first["resumed"] == second["resumed"]
    for a, b in zip(first["rows"], second["rows"], strict=True):
        assert len(a) == len(b) == 4 and not set(a) & set(b)
    assert first["rows"][0] + second["rows"][0] == [0, 1, 2, 3, 5, 6, 7, 8]


# Files whose names contain the number of hosts


def iterator_over_source(host, hosts):
    """Returns a host's training iterator over a source of numbers."""
    records = sources.Arrays({"number": np.arange(29, dtype=np.int32)})
    make = data_iterator(lambda number, draw: (number + 0, draw.uniform()), ["x", "u"])
    return get_dataset_fn(make, source=records, num_threads=1)(DatasetConfig(), host, hosts)


def t5x_file(folder, host, hosts, processes=True):
    """Returns the path at which T5X saves a host's dataset: with Orbax, a folder per process."""
    if processes and hosts > 1:
        folder = folder / f"process_{host}-of-{hosts}"
    return str(folder / f"train_ds-{host:03}-of-{hosts:03}")


@pytest.mark.parametrize("processes", (True, False))
@pytest.mark.parametrize("before,after", [*itertools.permutations((1, 2, 4), 2)])
def test_a_source_resumes_on_another_number_of_hosts(tmp_path, before, after, processes):
    whole = iterator_over_source(0, 1)
    want = [taken(next(whole)) for _ in range(8)]
    for host in range(before):
        iterator = iterator_over_source(host, before)
        assert taken(next(iterator))["x"] == want[0]["x"][8 // before * host :][: 8 // before]
        for _ in range(2):
            next(iterator)
        iterator.save(t5x_file(tmp_path, host, before, processes))
    hosts = [iterator_over_source(host, after) for host in range(after)]
    for host, iterator in enumerate(hosts):
        iterator.load(t5x_file(tmp_path, host, after, processes))  # T5X's call
    for batch in want[3:]:
        parts = [taken(next(host)) for host in hosts]
        assert {k: [row for part in parts for row in part[k]] for k in batch} == batch


def test_files_of_differing_hosts_are_refused_without_effect(tmp_path):
    for host in range(2):
        iterator = iterator_over_source(host, 2)
        for _ in range(host + 1):
            next(iterator)
        iterator.save(t5x_file(tmp_path, host, 2))
    iterator = iterator_over_source(0, 1)
    state = iterator.get_state()
    with pytest.raises(ValueError, match="different steps.*process_0-of-2.*process_1-of-2"):
        iterator.restore(t5x_file(tmp_path, 0, 1))
    (tmp_path / "eval_ds-000-of-002").write_text("{}")
    with pytest.raises(FileNotFoundError, match="test_ds-000-of-001.*no iterator was saved"):
        iterator.restore(str(tmp_path / "test_ds-000-of-001"))
    assert iterator.get_state() == state


def test_a_readers_state_belongs_to_its_host(jpegs_many, tmp_path):
    train(jpegs_many, 0, 2).save(t5x_file(tmp_path, 0, 2, False))
    with pytest.raises(FileNotFoundError):
        train(jpegs_many).restore(t5x_file(tmp_path, 0, 1))


@pytest.mark.parametrize("shards", (1, 2))
def test_evaluation_is_finite_repeatable_and_equal_on_all_hosts(jpegs_many, shards):
    datasets = [evaluation(jpegs_many, s, shards) for s in range(shards)]
    lengths = {len(ds) for ds in datasets}
    assert lengths == {3} and all(bool(ds) for ds in datasets)
    for _ in range(3):
        batches = [list(ds) for ds in datasets]
        assert {len(own) for own in batches} == lengths
        weights = np.concatenate([b["weights"] for own in batches for b in own])
        seen = np.concatenate([b["x"].ravel() for own in batches for b in own])
        assert weights.sum() == N and weights.dtype == np.float32
        assert sorted(seen[weights > 0].tolist()) == list(range(N))
        assert {b["x"].shape for own in batches for b in own} == {(4 // shards, 1)}


def test_evaluation_is_cut_to_eval_steps(jpegs_many):
    for steps, want in ((1, 1), (2, 2), (3, 3), (9, 3), (None, 3)):
        ds = evaluation(jpegs_many, steps=steps)
        assert len(ds) == want == len(list(ds)) == len(list(ds.as_numpy_iterator()))


def test_the_spec_of_evaluation_matches_its_batches(jpegs_many):
    # T5X makes a batch of zeros of it, by shape and dtype, before the first evaluation.
    ds = evaluation(jpegs_many)
    assert all(isinstance(spec, jax.ShapeDtypeStruct) for spec in ds.element_spec.values())
    zeros = {k: jax.numpy.zeros(s.shape, s.dtype) for k, s in ds.element_spec.items()}
    assert {k: (v.shape, v.dtype) for k, v in zeros.items()} == {
        k: (v.shape, v.dtype) for k, v in next(iter(ds)).items()
    }


@pytest.mark.parametrize("shards", (1, 2))
def test_tokens_of_padded_rows_have_no_weight(jpegs_many, shards):
    """Computes weights like t5x.losses: decoder_loss_weights, or targets > 0 without them."""

    def batches(**options):
        make = eval_get_dataset_fn(TOKENS, files=jpegs_many, num_threads=1, **options)
        hosts = [make(DatasetConfig(4), s, shards)["tokens"] for s in range(shards)]
        return [batch for host in hosts for batch in host]

    for masked in (("decoder_loss_weights",), ("decoder_target_tokens",), ()):
        options = {"masked": masked} if masked != ("decoder_loss_weights",) else {}
        seen = batches(**options)
        weights, targets, samples = (
            np.concatenate([batch[name] for batch in seen])
            for name in ("decoder_loss_weights", "decoder_target_tokens", "weights")
        )
        assert samples.sum() == N
        valid = samples > 0
        assert len(valid) == 12 and not valid.all()
        assert weights.sum() == LENGTH * (N if "decoder_loss_weights" in masked else 12)
        assert (targets > 0).sum() == LENGTH * (N if "decoder_target_tokens" in masked else 12)
        want = np.arange(1, LENGTH + 1) + np.arange(N)[:, None]
        assert sorted(targets[valid].tolist()) == want.tolist()
        assert (weights[valid] == 1).all()


def test_outputs_without_a_padding_mask_are_refused_for_evaluation(jpegs_many):
    for options in ({}, {"masked": ["y"]}):
        with pytest.raises(ValueError, match=r"outputs of numbers\(\) are \['x', 'u'\].*Add that"):
            eval_get_dataset_fn(NUMBERS, files=jpegs_many, **options)


def test_masked_arrays_may_be_results_of_batch_map(jpegs_many):
    def add_weights(batch, key):
        return {**batch, "decoder_loss_weights": jnp.ones(batch["x"].shape)}

    call = {"files": jpegs_many, "num_threads": 1, "batch_map": add_weights}
    dataset = eval_get_dataset_fn(NUMBERS, **call)(DatasetConfig(4), 0, 1)["numbers"]
    weights = np.concatenate([batch["decoder_loss_weights"] for batch in dataset])
    assert weights.shape == (12, 1) and weights.sum() == N


def test_a_missing_seed_differs_between_runs(jpegs_many):
    # T5X: "use a new seed each run/restart".
    def draws(**options):
        return np.asarray(next(train(jpegs_many, **options))["u"]).tolist()

    none = DatasetConfig(seed=None)
    assert draws(cfg=none) != draws(cfg=none)
    assert draws(cfg=DatasetConfig(seed=0)) == draws(cfg=DatasetConfig(seed=0))


@pytest.mark.parametrize("placed", (False, True))
def test_a_run_without_a_seed_resumes_with_the_seed_of_its_state(
    jpegs_many, tmp_path, airio, placed
):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    options = {"partitioner": Partitioner(mesh)} if placed else {}
    first, second = (train(jpegs_many, cfg=DatasetConfig(seed=None), **options) for _ in range(2))
    next(first)
    first.peek()
    first.save(str(tmp_path / "state"))
    assert second.element_spec
    second.restore(str(tmp_path / "state"))
    for _ in range(4):
        assert taken(next(first)) == taken(next(second))
    with pytest.raises(ValueError, match="seed"):
        train(jpegs_many, cfg=DatasetConfig(seed=1), **options).restore(str(tmp_path / "state"))


def test_a_reader_without_padding_is_refused_for_evaluation(jpegs_many):
    def unpadded(files):
        return read_files(files[:N])[1]

    made = eval_get_dataset_fn(
        data_iterator(unpadded, ["x"], reader_name="reader"),
        masked=["x"],
        files=jpegs_many,
        name="numbers",
    )
    with pytest.raises(ValueError, match="Pass pad_last_batch=True"):
        list(made(DatasetConfig(batch_size=4), 0, 1, None, None)["numbers"])


def test_a_resumed_run_equals_an_uninterrupted_run(jpegs_many, tmp_path):
    """Runs a small training loop with T5X's calls and compares a hash of its parameters."""

    @jax.jit
    def step(weights, x, u):
        return weights * 0.9 + (x[:, 0] * u).mean()

    def run(iterator, weights, steps):
        for _ in range(steps):
            batch = next(iterator)
            weights = step(weights, batch["x"].astype(np.float32), batch["u"])
        return weights

    straight = run(train(jpegs_many), np.float32(1), 6)
    iterator = train(jpegs_many)
    iterator.peek_async()
    half = run(iterator, np.float32(1), 4)
    iterator.peek()
    iterator.save(str(pathlib.Path(tmp_path) / "train_ds-000-of-001"))
    resumed = train(jpegs_many)
    assert resumed.element_spec
    resumed.restore(str(pathlib.Path(tmp_path) / "train_ds-000-of-001"))
    assert np.asarray(run(resumed, half, 2)).tobytes() == np.asarray(straight).tobytes()


# The example; T5X's trainer runs it elsewhere, see docs/t5x.md


@pytest.fixture
def class_folders(tmp_path):
    """Five images of noise in each of two folders."""
    rng = np.random.default_rng(0)
    for k in range(10):
        folder = tmp_path / f"class{k % 2}"
        folder.mkdir(exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (80, 100, 3), np.uint8))
        image.save(folder / f"{k}.jpg")
    return str(tmp_path)


@pytest.fixture
def vit_input(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples" / "t5x")
    return importlib.import_module("vit_input")


def test_the_example_has_complete_batches_and_resumes_on_two_hosts(vit_input, class_folders):
    make = vit_input.train_data(class_folders)
    config = DatasetConfig(batch_size=4)
    with contextlib.closing(make(config, 0, 1, None)) as whole:
        batches = [next(whole) for _ in range(5)]
        state = whole.get_state()
        batches += [next(whole) for _ in range(4)]
    assert {k: (v.shape, v.dtype) for k, v in batches[0].items()} == {
        "images": ((4, 64, 64, 3), np.uint8),
        "labels": ((4,), np.int32),
    }
    for host in range(2):
        with contextlib.closing(make(config, host, 2, None)) as own:
            own.set_state(state)
            for batch in batches[5:]:
                for name, array in next(own).items():
                    rows = np.asarray(batch[name])[2 * host : 2 * host + 2]
                    np.testing.assert_array_equal(array, rows)


def test_the_examples_evaluation_has_each_image_once(vit_input, class_folders):
    config = DatasetConfig(batch_size=4)
    (dataset,) = vit_input.evaluation_data(class_folders)(config, 0, 1, 100, None).values()
    for _ in range(2):
        seen = list(dataset)
        assert sum(float(np.asarray(batch["weights"]).sum()) for batch in seen) == 10
        labels = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in seen])
        assert sorted(labels.tolist()) == [0] * 5 + [1] * 5


def test_padding_of_packed_rows_is_masked():
    rng = np.random.default_rng(0)
    records = [
        {
            "data": rng.integers(0, 255, (8, 8 * (1 + k % 3), 3)),
            "text": np.ones(1 + k % 2, np.int32),
        }
        for k in range(11)
    ]
    records = [{**record, "data": record["data"].astype(np.uint8)} for record in records]
    source = sources.Packed(sources.Records(records), length=10, images=3, patch=8, text="text")

    @data_iterator(source=source)
    def packed(data, text, *, pack):
        ones = fn.full(1.0, shape=[])
        return {
            "loss_weights": pack.tokens(text),
            "image_weights": pack.per_image(ones),
            "patches": pack.patches(data),
        }

    made = eval_get_dataset_fn(packed, name="packed", masked=("loss_weights", "image_weights"))
    images = 0
    for batch in made(DatasetConfig(batch_size=2), 0, 1, None, None)["packed"]:
        np.testing.assert_array_equal(
            batch["loss_weights"],
            (batch["segment_ids"] > 0) & (batch["positions"][..., 0] == -1),
        )
        np.testing.assert_array_equal(batch["image_weights"], batch["weights"])
        images += batch["weights"].sum()
    assert images == len(records)
