"""Worker process of test_agreement.py: opens iterators that agree or differ between processes."""

import contextlib
import os
import signal
import sys
import threading
import time

import jax

from processes import join, report

options = join()

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from nvidia.dali import fn  # noqa: E402

from dalijax import LastBatchPolicy, data_iterator, sources  # noqa: E402
from dalijax.core.pipeline import processes as agreements  # noqa: E402

PROCESS, PROCESSES = options["process"], options["processes"]
LAST = PROCESS == PROCESSES - 1  # the process that differs
MESH = Mesh(np.array(jax.devices()), ("d",))
SHARDING = NamedSharding(MESH, PartitionSpec("d"))
FILES = options["files"]
BATCH = 2 * PROCESSES
TOTAL = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(MESH, PartitionSpec()))


def rows(batch):
    """Returns the unmasked records of this process's rows."""
    values, mask = (
        np.concatenate([np.ravel(shard.data) for shard in batch[name].addressable_shards])
        for name in ("x", "mask")
    )
    return values[mask].tolist()


def delivered(iterator, steps=None):
    """Returns the records of each batch, summed over all processes, or the error."""
    batches = []
    try:
        for batch in iterator:
            float(TOTAL(batch["x"]))
            batches.append(rows(batch))
            if len(batches) == steps:
                break
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return batches


def numbers(x, plus=0):
    return x + plus


def over_source(ids=range(21), batch_size=BATCH, plus=0, **more):
    arguments = {"mask": "mask", "sharding": SHARDING, "check_processes": 60, **more}
    source = sources.Arrays({"x": np.array(ids, np.int32)})
    function = data_iterator(numbers, ["x"], source=source, **arguments)
    return function(batch_size=batch_size, plus=plus)


def seeded(seed, **more):
    function = data_iterator(numbers, ["x"], mask="mask", sharding=SHARDING, **more)
    return function(source=sources.Arrays({"x": np.arange(21)}), batch_size=BATCH, seed=seed)


def read(files, shard_id=0, num_shards=1, pad=True, plus=0, own=False, shuffle=False):
    split = {} if own else {"shard_id": shard_id, "num_shards": num_shards}
    own_files = files[shard_id::num_shards] if own else files
    labels = fn.readers.file(
        files=own_files,
        labels=[int(name[-8:-4]) for name in own_files],
        name="reader",
        pad_last_batch=pad,
        random_shuffle=shuffle,
        **split,
    )[1]
    return fn.cast(fn.squeeze(labels, axes=0), dtype=dali_int()) + plus


def dali_int():
    from nvidia.dali import types

    return types.INT32


def over_reader(files=FILES[:13], batch_size=BATCH, seed=0, policy=LastBatchPolicy.FILL, **more):
    function = data_iterator(
        read, ["x"], reader_name="reader", mask="mask", sharding=SHARDING, last_batch_policy=policy
    )
    return function(files, batch_size=batch_size, seed=seed, num_threads=1, **more)


# Each scenario returns the records of this process's batches, or an error.


def agree():
    return [delivered(over_source()), delivered(over_reader()), delivered(seeded(3))]


def source_lacks_a_record():
    return delivered(over_source(np.delete(np.arange(21), 5) if LAST else range(21)))


def source_in_another_order():
    return delivered(over_source(range(20, -1, -1) if LAST else range(21)))


def source_seed():
    return delivered(seeded(int(LAST)))


def source_batch():
    return delivered(over_source(batch_size=2 * BATCH if LAST else BATCH))


def source_policy():
    policy = LastBatchPolicy.DROP if LAST else LastBatchPolicy.FILL
    return delivered(over_source(last_batch_policy=policy))


def source_padding():
    return delivered(over_source(last_batch_padded=LAST))


def source_shuffle():
    return delivered(over_source(shuffle=LAST))


def source_graph():
    return delivered(over_source(plus=3 if LAST else 2))


def source_mesh():
    devices = np.array(jax.devices())
    mesh = Mesh(devices[::-1] if LAST else devices, ("d",))
    return delivered(over_source(sharding=NamedSharding(mesh, PartitionSpec("d"))))


def source_spec():
    spec = PartitionSpec() if LAST else PartitionSpec("d")
    return delivered(over_source(sharding={"x": NamedSharding(MESH, spec)}))


def source_epochs():
    function = data_iterator(numbers, ["x"], mask="mask", sharding=SHARDING, check_processes=60)
    source = sources.Arrays({"x": np.arange(21)})
    return delivered(function.stream(1 if LAST else None, source=source, batch_size=BATCH))


def source_batch_map():
    def double(batch, key):
        return {**batch, "x": 2 * batch["x"]}

    return delivered(over_source(batch_map=[double] if LAST else []))


class Versioned(sources.Source):
    """A source with an identity of its own."""

    def __init__(self, version):
        self.fields = {"x": sources.Field(np.int32)}
        self._version = version

    def __len__(self):
        return 21

    def read(self, indices, names):
        return {"x": [np.int32(index) for index in indices]}

    def identity(self):
        return f"a data set of numbers, version {self._version}"


class Unidentified(Versioned):
    """A source without an identity, of which some records can't be read."""

    def read(self, indices, names):
        if 3 in indices:
            raise OSError("record 3 can't be read")
        return {"x": [np.int32(index + self._version) for index in indices]}

    def identity(self):
        raise NotImplementedError


def differing_sources():
    """Compares pairs of sources whose identities begin with the same characters."""
    ids = sources.Arrays({"x": np.arange(30, dtype=np.int32)})
    chosen = np.arange(22 if LAST else 21)[-21:]
    part = sources.Selection(ids, chosen)
    pairs = {
        "Selection": part,
        "Mixture of Selection": sources.Mixture([(part, 1), (ids, 1)]),
        "Selection of Named": sources.Selection(sources.Named(ids, "name"), chosen),
        "Named of Selection": sources.Named(part, "name"),
        "Selection of Selection": sources.Selection(part, np.arange(LAST, 20 + LAST)),
        "Mixture of Named": sources.Mixture([(sources.Named(part, "name"), 1)]),
        "a source of the user": Versioned(LAST),
        "no identity": Unidentified(LAST),
        "Selection without identity": sources.Selection(Unidentified(0), chosen[:-2]),
        "identity=": sources.Arrays(
            {"x": np.arange(21, dtype=np.int32)}, identity=f"numbers from 0 to 20, v{1 + LAST}"
        ),
    }
    function = data_iterator(numbers, ["x"], mask="mask", sharding=SHARDING, check_processes=60)
    return {
        name: delivered(function(source=source, batch_size=BATCH)) for name, source in pairs.items()
    }


def auto_reset():
    return delivered(over_source(auto_reset=LAST))


def source_of_a_host():
    from dalijax.adapters.tfdata import DALIDataset  # imports TensorFlow, which takes seconds

    ids = np.arange(20 if LAST else 21)
    function = data_iterator(numbers, ["x"], last_batch_padded=True)
    dataset = DALIDataset(function, source=sources.Arrays({"x": ids}), batch_size=2)
    try:
        return len(list(dataset.shard(PROCESSES, PROCESS)))
    except RuntimeError as error:
        return str(error)


def reader_lacks_a_file():
    return delivered(over_reader(FILES[:12] if LAST else FILES[:13]))


def reader_in_another_order():
    return delivered(over_reader(FILES[12::-1] if LAST else FILES[:13]))


def reader_seed():
    return delivered(over_reader(seed=int(LAST), shuffle=True))


def reader_batch():
    return delivered(over_reader(batch_size=2 * BATCH if LAST else BATCH))


def reader_policy():
    policy = LastBatchPolicy.DROP if LAST else LastBatchPolicy.FILL
    return delivered(over_reader(policy=policy))


def reader_padding():
    return delivered(over_reader(pad=LAST))


def reader_graph():
    return delivered(over_reader(plus=2 if LAST else 3))


def reader_mesh():
    devices = np.array(jax.devices())
    mesh = Mesh(devices[::-1] if LAST else devices, ("d",))
    function = data_iterator(read, ["x"], reader_name="reader", mask="mask")
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    arguments = {"batch_size": BATCH, "num_threads": 1, "sharding": sharding}
    return delivered(function(FILES[:13], **arguments))


def reader_of_a_folder_for_each_host():
    count = 14 if LAST else 20
    files = [name for name in FILES[: 20 * PROCESSES] if int(name[-8:-4]) // PROCESSES < count]
    return delivered(over_reader(files, own=True))


def reader_of_equal_folders():
    return delivered(over_reader(FILES[: 4 * PROCESSES], own=True))


def of_a_host_reader():
    function = data_iterator(read, ["x"], reader_name="reader")
    call = function._shard_arguments(PROCESS, PROCESSES)
    iterator = function(FILES[: 12 - LAST], batch_size=2, num_threads=1, **call)
    try:
        return len(list(iterator))
    except RuntimeError as error:
        return str(error)


def restored_apart():
    made = [over_source(), over_reader()]
    states = []
    for iterator in made:
        delivered(iterator, 2)
        states.append(iterator.get_state())
        delivered(iterator, 1)
        if LAST:
            iterator.set_state(states[-1])
        else:
            iterator.set_state(iterator.get_state())
    results = [delivered(iterator, 1) for iterator in made]
    for iterator, state in zip(made, states):
        iterator.set_state(state)
    return [*results, [delivered(iterator, 1) for iterator in made]]


def sought_apart():
    iterator = over_source()
    iterator.seek(1, int(LAST))
    result = delivered(iterator, 1)
    iterator.seek(1, 1)
    return [result, delivered(iterator, 1)]


def skipped_apart():
    """Skips a batch in all processes but the last; after a restore of one position all continue."""
    made = [over_source(), over_reader()]
    for iterator in made:
        iterator.skip(0 if LAST else 2)
    results = [delivered(iterator, 1) for iterator in made]
    for iterator in made:
        iterator.skip(2 if LAST else 0)
    return [*results, [delivered(iterator, 1) for iterator in made]]


def moved_alone():
    """Moves the last process alone, in several ways; then all processes move to one batch."""
    results = {}
    for way in ("seek", "seek_step", "skip", "reset", "set_state"):
        iterator = over_reader() if way == "set_state" else over_source()
        state = iterator.get_state()
        delivered(iterator, 2)
        if LAST:
            arguments = {"seek": [1, 2], "seek_step": [3], "skip": [1], "set_state": [state]}
            getattr(iterator, way)(*arguments.get(way, []))
        jax.experimental.multihost_utils.sync_global_devices(way)
        errors = [delivered(iterator, 1) for _ in range(1 if LAST else 2)]
        jax.experimental.multihost_utils.sync_global_devices("again")
        iterator.set_state(state)
        results[way] = [errors, delivered(iterator, 1)]
    return results


def stream_moved_alone():
    """Moves a stream in the last process alone: to its start, and into the next epoch."""
    results = {}
    for way in ("reset", "skip", "skip nothing"):
        function = data_iterator(numbers, ["x"], mask="mask", sharding=SHARDING, check_processes=60)
        source = sources.Arrays({"x": np.arange(21, dtype=np.int32)})
        stream = function.stream(None, source=source, batch_size=BATCH)
        delivered(stream, 2)
        if LAST:
            count = {"skip": [9], "skip nothing": [0]}.get(way)
            stream.reset() if count is None else stream.skip(*count)
        jax.experimental.multihost_utils.sync_global_devices(way)
        error = delivered(stream, 1)
        jax.experimental.multihost_utils.sync_global_devices("again")
        stream.reset()
        results[way] = [error, delivered(stream, 1)]
    return results


def peeked_alone():
    """Peeks in the last process, at the end of the first epoch of a stream."""
    function = data_iterator(numbers, ["x"], mask="mask", sharding=SHARDING, check_processes=60)
    source = sources.Arrays({"x": np.arange(21, dtype=np.int32)})
    stream = function.stream(None, source=source, batch_size=BATCH)
    epoch = -(-21 // BATCH)
    first = delivered(stream, epoch)
    if LAST:
        stream.peek()
    jax.experimental.multihost_utils.sync_global_devices("peeked")
    return [first, delivered(stream, epoch)]


def refused_move():
    """Skips too many batches in all processes, which does not move them."""
    iterator = over_source()
    first = delivered(iterator, 2)
    for count in (100, 50):
        with contextlib.suppress(ValueError):
            iterator.skip(count)
    return [*first, *delivered(iterator)]


def same_part():
    """Each process takes part 0 of the batches."""
    from dalijax.adapters.tfdata import DALIDataset  # imports TensorFlow, which takes seconds

    function = data_iterator(numbers, ["x"], last_batch_padded=True)
    source = sources.Arrays({"x": np.arange(20)})
    dataset = DALIDataset(function, source=source, batch_size=2)
    try:
        return len(list(dataset.shard(PROCESSES, 0)))
    except RuntimeError as error:
        return str(error)


def moved_after_the_end():
    """Ends an epoch and moves in all processes, the last of which is late."""
    iterator = over_source()
    results = []
    for epoch in range(3):
        results.append(delivered(iterator))
        jax.experimental.multihost_utils.sync_global_devices("end")
        if LAST:
            time.sleep(0.1)  # the other processes have moved
        iterator.seek(epoch + 1)
    return results


def interrupted():
    """Interrupts the last process while it waits for the others, which arrive later."""
    iterator = over_source()
    result = None
    if LAST:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            next(iterator)
        except KeyboardInterrupt:
            result = "interrupted"
    jax.experimental.multihost_utils.sync_global_devices("interrupted")
    if not LAST:
        result = delivered(iterator, 1)
    jax.experimental.multihost_utils.sync_global_devices("told")
    return [result, delivered(iterator)]


def made_in_another_order():
    """Creates two iterators with equal arguments, in a different order in each process."""
    ids = {"train": range(21), "eval": range(21, 42)}
    names = sorted(ids, reverse=LAST)
    made = {name: over_source(ids[name]) for name in names}
    return [delivered(made[name]) for name in ("train", "eval")]


def in_threads():
    """Takes the first batches in threads, which start in a different order in each process."""
    made = [over_source(range(21 + k)) for k in range(3)]
    firsts = {}

    def take(k):
        firsts[k] = rows(next(made[k]))

    threads = [threading.Thread(target=take, args=(k,)) for k in range(3)]
    for thread in threads[::-1] if LAST else threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [firsts[k] for k in range(3)]


def alone():
    """Calls what needs no other process: peek, element_spec, prefetch, local iterators."""
    iterator = over_source()
    local = data_iterator(numbers, ["x"], source=sources.Arrays({"x": np.arange(8)}))
    if not LAST:
        assert iterator.element_spec["x"].shape == (BATCH,)
        iterator.peek()
        iterator.start_prefetch()
        next(local(batch_size=4, as_numpy=True))
    return delivered(iterator)


def numpy_of_clu():
    from dalijax.adapters.clu import DALIDatasetIterator

    function = data_iterator(numbers, ["x"], source=sources.Arrays({"x": np.arange(21)}))
    try:
        DALIDatasetIterator(function, batch_size=BATCH, sharding=SHARDING)
    except ValueError as error:
        return str(error)


def unchecked():
    """Varies what may differ between processes: each process has its own rows."""
    iterator = over_source(np.arange(20) if LAST else range(21), check_processes=False)
    return [rows(next(iterator)) for _ in range(2)]


def never_comes():
    """Takes no batch in the last process; then the first process takes no batch."""
    results = []
    for absent in (LAST, PROCESS == 0):
        iterator = over_source(check_processes=2)
        results.append("absent" if absent else delivered(iterator, 1))
        jax.experimental.multihost_utils.sync_global_devices("both")
    return results


def mesh_of_the_context():
    """Resolves a bare PartitionSpec with the current mesh of all processes."""
    with jax.set_mesh(jax.make_mesh((PROCESSES,), ("d",))):
        return delivered(over_source(sharding=PartitionSpec("d")))


def ending():
    """Ends the last process; the first process waits for its batch and fails with the error."""
    if not LAST:
        next(over_source(check_processes=300))
    if options["way"] == "raises":
        raise ValueError("an error of the program")
    sys.exit()


def skipping():
    try:
        over_reader(on_error="skip")
    except ValueError as error:
        return str(error)


def impatient(scenario):
    """Returns a scenario in which differences are reported at once: no equal offer can follow."""

    def run():
        before, agreements._PATIENCE = agreements._PATIENCE, (0.0, 0.0)
        try:
            return scenario()
        finally:
            agreements._PATIENCE = before

    return run


if __name__ == "__main__":
    report(
        options, {**globals(), **{k: impatient(globals()[k]) for k in options.get("different", ())}}
    )
