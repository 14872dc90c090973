"""Orbax: models and iterators together, in new processes and with another number of processes.

Run as a script, this is one training process; see `main`.
"""

import io
import itertools
import json
import pathlib

import jax
from shardings import rows_over

from processes import join, leave, started

if __name__ == "__main__":
    options = join()

import grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn
from orbax.checkpoint import v1
from PIL import Image
from sealing import crafted

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform, RandomInputs
from dalijax.adapters.grain.data_loader import FORM, DALIDataLoaderIterator
from dalijax.adapters.grain.orbax import ElasticRestore, ElasticSave
from dalijax.core.order.shuffle import shuffled
from full import in_full

N, BATCH, STEPS, SAVED = 21, 8, 6, 2
APIS = ("v0", "v1", "json")


def source():
    """Records of a gray JPEG and its number."""
    made = []
    for i in range(N):
        file = io.BytesIO()
        Image.fromarray(np.full((16, 16, 3), 8 * i, np.uint8)).save(file, "JPEG", quality=100)
        made.append({"image": file.getvalue(), "number": np.array([i], np.int32)})
    return made


SAMPLER = grain.samplers.IndexSampler(N, shuffle=True, num_epochs=2, seed=5)


def per_record(image, angle):
    return fn.rotate(fn.decoders.image(image), angle=angle, keep_size=True)


def per_batch(image):
    image = fn.decoders.image(image)
    return fn.brightness(image, brightness=fn.random.uniform(range=(0.5, 1.5)))


def reader(files):
    image, number = fn.readers.file(
        files=files, random_shuffle=True, pad_last_batch=True, name="reader"
    )
    return per_batch(image), number


def drawn(image, number, *, draw):
    return per_record(image, draw.uniform(-90.0, 90.0)), number


def elastic(kind="loader"):
    """Defines random numbers for each record, over all devices."""
    sharding = rows_over(jax.device_count())
    options = {"batch_size": BATCH, "sharding": sharding, "pad": "mask", "num_threads": 1}
    if kind == "source":
        make = data_iterator(drawn, ["x", "number"], source=sources.Records(source()))
        return iter(DALIIterDataset(make, num_epochs=2, seed=5, **options))
    operations = [RandomInputs(angle=(-90.0, 90.0))]
    options |= {"pipeline_fn": per_record, "output_map": ["x"]}
    return iter(DALIDataLoader(source(), SAMPLER, operations, **options))


def iterators(files):
    """Returns an iterator of each kind, with random operators, on one device."""
    options = {"batch_size": BATCH, "num_threads": 1, "seed": 7, "pad": "mask"}
    records = grain.MapDataset.source(source()).seed(3).shuffle().repeat(2)
    transform = DALITransform(per_batch, output_map=["x"], **options)
    return {
        "transform": lambda: iter(records.pipe(transform)),
        "dataset": lambda: iter(
            DALIIterDataset(
                reader,
                output_map=["x", "number"],
                reader_name="reader",
                num_epochs=None,
                files=files,
                **options,
            )
        ),
        "loader": lambda: iter(
            DALIDataLoader(source(), SAMPLER, pipeline_fn=per_batch, output_map=["x"], **options)
        ),
    }


# The model and its checkpoints


def start(devices):
    """Returns the weights of a tiny model, the same on any devices."""
    everywhere = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    return jax.device_put({"w": np.zeros((16, 16, 3), np.float32)}, everywhere)


@jax.jit
def update(state, x, mask):
    x = jnp.asarray(x, jnp.float32) / 255
    error = (x * state["w"]).sum((1, 2, 3)) - x.mean((1, 2, 3))
    return {
        "w": state["w"]
        - 0.01 * (x * (error * mask.astype(jnp.float32))[:, None, None, None]).mean(0)
    }


def train(state, iterator, steps):
    """Trains for some steps; returns the weights and the batches."""
    batches = []
    for _ in range(steps):
        batches.append(next(iterator))
        state = update(state, batches[-1]["x"], batches[-1]["mask"])
    return state, batches


def arguments_of(iterator):
    """Returns the arguments with which Orbax's old API saves and restores."""
    if isinstance(iterator, DALIDataLoaderIterator) or getattr(iterator, "over_source", False):
        return ElasticSave, ElasticRestore
    return grain.checkpoint.CheckpointSave, grain.checkpoint.CheckpointRestore


def save(api, folder, state, iterator):
    folder = pathlib.Path(folder).absolute()
    if api == "v0":
        data = arguments_of(iterator)[0](iterator)
        with ocp.CheckpointManager(folder / api) as manager:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=data)
            manager.save(SAVED, args=args)
    elif api == "v1":
        v1.save_checkpointables(folder / api, {"state": state, "data": iterator})
    elif jax.process_index() == 0:
        (folder / api).write_text(json.dumps(iterator.get_state()))


def restore(api, folder, state, iterator):
    """Returns the saved weights, and restores the iterator."""
    folder = pathlib.Path(folder).absolute()
    if api == "v0":
        data = arguments_of(iterator)[1](iterator)
        with ocp.CheckpointManager(folder / api) as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(state), data=data)
            return manager.restore(manager.latest_step(), args=args)["state"]
    if api == "v1":
        elastic = arguments_of(iterator)[1] is ElasticRestore
        data = ElasticRestore(iterator) if elastic else iterator
        return v1.load_checkpointables(folder / api, {"state": state, "data": data})["state"]
    iterator.set_state(json.loads((folder / api).read_text()))
    return state


# One of several processes, or a new process


def report_rows(batches):
    """Returns this process's part of each batch as JSON: number, mask and pixels of its rows."""
    made = []
    for batch in batches:
        rows = {}
        for name in ("number", "mask", "x"):
            for shard in batch[name].addressable_shards:
                first = shard.index[0].start or 0
                for k, row in enumerate(np.asarray(shard.data)):
                    rows.setdefault(str(first + k), []).append(row.tolist())
        made.append(rows)
    return made


def weights(state):
    return np.asarray(state["w"].addressable_data(0)).tobytes().hex()


def of_each_kind(job):
    """Returns a job that does the same for the iterators of each kind."""
    return lambda folder, kinds: {kind: job(pathlib.Path(folder, kind), kind) for kind in kinds}


def walk(folder, kind):
    """Runs elastically and saves in each way."""
    folder.mkdir(exist_ok=True)
    iterator = elastic(kind)
    state, first = train(start(jax.devices()), iterator, SAVED)
    for api in APIS:
        save(api, folder, state, iterator)
    _, rest = train(state, iterator, STEPS - SAVED)
    assert next(iterator, None) is None
    return {"saved": weights(state), "batches": report_rows(first + rest)}


def go_on(folder, kind):
    """Runs the rest elastically, restored in each way."""
    report = {}
    for api in APIS:
        iterator = elastic(kind)
        state = restore(api, folder, start(jax.devices()), iterator)
        _, rest = train(state, iterator, STEPS - SAVED)
        assert next(iterator, None) is None
        report[api] = {"saved": weights(state), "batches": report_rows(rest)}
    return report


def finish(folder, files):
    """Returns the final weights of each saved model."""
    report = {}
    for (name, make), api in itertools.product(iterators(files).items(), APIS[:2]):
        iterator = make()
        state = restore(api, pathlib.Path(folder) / name, start(jax.devices()[:1]), iterator)
        report[f"{name} {api}"] = weights(train(state, iterator, STEPS - SAVED)[0])
    return report


JOBS = {"walk": of_each_kind(walk), "go_on": of_each_kind(go_on), "finish": finish}


def run(tmp_path, job, *arguments, processes=1, devices=1):
    """Runs a job in several new processes, and returns their reports."""
    options = {"devices": devices, "job": job, "arguments": arguments}
    return started(__file__, tmp_path, options, processes)


def together(reports):
    """Merges the batches of all processes: the rows in order, each exactly once."""
    made = []
    for pieces in zip(*(report["batches"] for report in reports), strict=True):
        rows = {int(k): v for own in pieces for k, v in own.items()}
        assert sum(map(len, pieces)) == len(rows) == BATCH
        made.append([rows[k] for k in range(BATCH)])
    return made


def batches_of(kind):
    """Returns the numbers in each batch of the sampler or the source, without padding."""
    if kind == "source":
        epochs = [shuffled(range(N), N, 5, epoch).tolist() for epoch in range(2)]
    else:
        epochs = [[int(SAMPLER[i].record_key) for i in range(2 * N)]]
    return [epoch[k : k + BATCH] for epoch in epochs for k in range(0, len(epoch), BATCH)]


def check_records(batches, want):
    """Checks the numbers and masks of some batches."""
    for rows, own in zip(batches, want, strict=True):
        assert [number[0] for number, mask, _ in rows if mask] == own
        assert [mask for _, mask, _ in rows] == [True] * len(own) + [False] * (BATCH - len(own))


KINDS = ("loader", "source")


@pytest.fixture(scope="module", params=(((2, 2), (1, 4)), in_full(((1, 4), (2, 2)))))
def before_and_after(request, tmp_path_factory):
    """Returns the reports of runs of all kinds, with other numbers of processes and devices."""
    folder = tmp_path_factory.mktemp("elastic")
    return [
        run(folder, job, str(folder), KINDS, processes=processes, devices=devices)
        for job, (processes, devices) in zip(("walk", "go_on"), request.param)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_processes_resumes(before_and_after, kind):
    whole, reports = ([report[kind] for report in made] for made in before_and_after)
    want = together(whole)
    check_records(want, batches_of(kind))
    for api in APIS:
        got = together([report[api] for report in reports])
        assert got == want[SAVED:]  # pixels, too
        if api != "json":
            assert all(report[api]["saved"] == whole[0]["saved"] for report in reports)


@pytest.mark.slow
def test_a_model_ends_with_the_same_weights_in_a_new_process(tmp_path, jpegs):
    straight = {}
    for (name, make), api in itertools.product(iterators(jpegs).items(), APIS[:2]):
        iterator = make()
        state, _ = train(start(jax.devices()[:1]), iterator, SAVED)
        (tmp_path / name).mkdir(exist_ok=True)
        save(api, tmp_path / name, state, iterator)
        before = weights(state)
        straight[f"{name} {api}"] = weights(train(state, iterator, STEPS - SAVED)[0])
        assert straight[f"{name} {api}"] != before
    assert run(tmp_path, "finish", str(tmp_path), jpegs) == [straight]


# Files of another number of processes, without processes


def saved_by_two(tmp_path, steps=(2, 2)):
    """Returns a folder as Orbax leaves it after two processes at these steps."""
    iterator = elastic()
    next(iterator)
    save("v0", tmp_path, start(jax.devices()), iterator)
    folder = tmp_path / "v0" / str(SAVED) / "data"
    state = iterator.get_state()
    (folder / "process_0-of-1.json").unlink()
    for process, step in enumerate(steps):
        text = json.dumps(crafted(FORM, state, step=step))
        (folder / f"process_{process}-of-{len(steps)}.json").write_text(text)
    return folder


def test_states_of_two_steps_are_refused_without_effect(tmp_path):
    saved_by_two(tmp_path, (2, 3))
    iterator = elastic()
    next(iterator)
    with pytest.raises(ValueError, match="different steps.*process_0-of-2.*process_1-of-2"):
        restore("v0", tmp_path, start(jax.devices()), iterator)
    assert iterator.get_state()["step"] == 1


def test_a_folder_without_states_is_refused(tmp_path):
    saved_by_two(tmp_path, ())
    with pytest.raises(FileNotFoundError, match="no iterator was saved there"):
        restore("v0", tmp_path, start(jax.devices()), elastic())


def test_one_manager_saves_and_restores_and_saves_again(tmp_path):
    iterator = elastic()
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(1, 3):
            next(iterator)
            manager.save(step, args=ocp.args.Composite(data=ElasticSave(iterator)))
            manager.wait_until_finished()
            again = elastic()
            manager.restore(step, args=ocp.args.Composite(data=ElasticRestore(again)))
            assert again.get_state() == iterator.get_state()


def test_files_are_exchanged_with_grain(tmp_path):
    saving = (grain.checkpoint.CheckpointSave, ElasticSave)
    restoring = (ElasticRestore, grain.checkpoint.CheckpointRestore)
    iterator = elastic()
    next(iterator)
    for k in range(2):
        with ocp.CheckpointManager(tmp_path / str(k)) as manager:
            manager.save(1, args=ocp.args.Composite(data=saving[k](iterator)))
        again = elastic()
        with ocp.CheckpointManager(tmp_path / str(k)) as manager:
            manager.restore(1, args=ocp.args.Composite(data=restoring[k](again)))
        assert again.get_state() == iterator.get_state()


@pytest.mark.parametrize("arguments", (ElasticSave, ElasticRestore))
def test_iterators_with_states_of_one_process_are_refused(arguments):
    for kind in ("transform", "dataset"):
        iterator = iterators([])[kind]()
        with pytest.raises(TypeError, match="not an iterator of a DALIDataLoader.*CheckpointSave"):
            arguments(iterator)


def main():
    leave(options, JOBS[options["job"]](*options["arguments"]))


if __name__ == "__main__":
    main()
