"""The table of public iterators, each with the conformance check in every way of restoring.

A public iterator or adapter without a row fails a test.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import pkgutil
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def
from shardings import rows_over

import dalijax
from conformance import Expected, check
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from dalijax.adapters import clu as clu_adapter
from dalijax.adapters import grain as grain_adapter
from dalijax.adapters import tfdata
from full import FULL
from numbered import read_case
from oracle import Case

N, BATCH = 11, 4


def graph(files: list[str], case: Case, shard_id: int = 0, num_shards: int = 1) -> Any:
    label = read_case(files, case, shard_id, num_shards)[1]
    return label, fn.random.uniform()


def expected_of_case(case: Case, shards: int = 1, axis: bool = False, **options: Any) -> Expected:
    """Returns three epochs of all shards of a case together."""
    epochs = []
    for number, streams in case.epochs(3):
        epochs.append([])
        for pieces in zip(*streams):
            x = [[[s[0]] for s in own] for own in pieces]
            mask = [case.mask(own, number) for own in pieces]
            if axis:
                epochs[-1].append({"x": np.array(x, np.int32), "mask": np.array(mask)})
            else:
                flat = {"x": np.concatenate(x).astype(np.int32), "mask": np.concatenate(mask)}
                epochs[-1].append(flat)
    return Expected(epochs, pipelines=shards, **options)


def decorated(files: list[str], case: Case, mesh: Any = None, **config: Any) -> Any:
    """Returns a decorated function's iterator; ``mesh`` is (shape, axes, spec, devices)."""
    if mesh is not None:
        shape, axes, spec, order = mesh
        devices = np.array([jax.devices()[i] for i in order]).reshape(shape)
        config["sharding"] = NamedSharding(Mesh(devices, axes), PartitionSpec(*spec))
    if "devices" in config:
        config["devices"] = [jax.devices()[i] for i in config["devices"]]
    policy = LastBatchPolicy[case.policy]
    config = {"reader_name": "reader", "mask": "mask", "last_batch_policy": policy, **config}
    iterator_fn = data_iterator(graph, ["x", "u"], **config)
    return iterator_fn(files, case, batch_size=case.batch * case.shards, num_threads=1)


def stream(files: list[str], case: Case, num_epochs: int) -> Any:
    policy = LastBatchPolicy[case.policy]
    make = data_iterator(
        graph, ["x", "u"], reader_name="reader", mask="mask", last_batch_policy=policy
    )
    return make.stream(num_epochs, files, case, batch_size=case.batch, num_threads=1)


def hand_made(files: list[str], case: Case, kind: Any = DALIGenericIterator) -> Any:
    pipelines = [
        pipeline_def(graph)(
            files, case, s, case.shards, batch_size=case.batch, num_threads=1, device_id=None
        )
        for s in range(case.shards)
    ]
    return kind(
        pipelines,
        ["x", "u"],
        reader_name="reader",
        mask="mask",
        last_batch_policy=LastBatchPolicy[case.policy],
        pmap_compatible=case.shards > 1,
    )


def by_source(files: list[str], sized: bool) -> Any:
    def source(info: Any) -> np.ndarray:
        if info.iteration >= 3:
            raise StopIteration
        return np.arange(BATCH, dtype=np.int32)[:, None] + BATCH * info.iteration

    def pipe() -> Any:
        return fn.external_source(source, batch_info=True), fn.random.uniform()

    size = 3 * BATCH if sized else -1
    return data_iterator(pipe, ["x", "u"], size=size, mask="mask")(batch_size=BATCH)


def of_source(sized: bool) -> Expected:
    batch = np.arange(BATCH, dtype=np.int32)[:, None]
    epoch = [{"x": batch + BATCH * k, "mask": np.ones(BATCH, bool)} for k in range(3)]
    return Expected([epoch] * 3, sized=sized)


PADDED = Case(N, 1, BATCH, "FILL", True, False)
RUNS_ON = Case(N, 1, BATCH, "FILL", False, False)
COMPLETE = Case(2 * BATCH, 1, BATCH, "DROP", True, False)
SHORT = Case(BATCH - 1, 1, BATCH, "FILL", True, False)
TWO = Case(N, 2, 2, "FILL", True, True)
FOUR = Case(N, 4, 2, "FILL", False, False)


def grain_source(files: list[str], case: Case, **options: Any) -> Any:
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader")
    call = {"files": files, "case": case, "batch_size": case.batch, "num_threads": 1}
    return iter(grain_adapter.DALIIterDataset(iterator_fn, num_epochs=3, **options, **call))


def expected_stream(case: Case, mask: bool = True) -> Expected:
    """Returns three epochs of a case as a stream."""
    expected = expected_of_case(case)
    for batch in [] if mask else [b for epoch in expected.epochs for b in epoch]:
        del batch["mask"]
    return expected.as_stream(1024)


def between(expected: Expected, start: int, stop: int) -> Expected:
    """Returns some batches of a stream."""
    made = expected.as_stream(4096)
    return dataclasses.replace(made, epochs=[made.epochs[0][start:stop]])


def records(files: list[str], count: int = N) -> Any:
    source = [{"number": np.array([i], np.int32), "other": f"text {i}"} for i in range(count)]
    return grain.MapDataset.source(source)


def augment(number: Any) -> Any:
    return number + 0, fn.random.uniform()


def packed(files: list[str]) -> Any:
    """Passes the records of a batch like Grain's workers."""
    return records(files).batch(BATCH, batch_fn=grain_adapter.pack_records).to_iter_dataset()


def transformed(ds: Any, **options: Any) -> Any:
    made = grain_adapter.DALITransform(
        augment, batch_size=BATCH, output_map=["x", "u"], num_threads=1, **options
    )
    return iter(ds.pipe(made))


def loaded(shuffle: bool, **options: Any) -> Any:
    source = [{"number": np.array([i], np.int32)} for i in range(N)]
    sampler = grain.samplers.IndexSampler(N, num_epochs=2, shuffle=shuffle, seed=3)
    loader = grain_adapter.DALIDataLoader(
        Listed(source),
        sampler,
        pipeline_fn=augment,
        output_map=["x", "u"],
        batch_size=BATCH,
        num_threads=1,
        **options,
    )
    return iter(loader)


class Listed(list):
    """A data source whose repr does not contain an address."""

    def __repr__(self) -> str:
        return f"Listed({len(self)})"


def batched() -> Any:
    """`DALIBatch` in Grain's batching; its DataLoader's iterator is not a DatasetIterator."""
    operation = grain_adapter.DALIBatch(
        lambda number: number + 0, BATCH, ["x"], pad="mask", num_threads=1
    )
    return iter(records([]).batch(BATCH, batch_fn=operation.batch_fn).to_iter_dataset())


def clu_iterator(files: list[str], **options: Any) -> Any:
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader", mask="mask")
    return clu_adapter.DALIDatasetIterator(
        iterator_fn, files=files, case=PADDED, batch_size=BATCH, num_threads=1, **options
    )


def expected_of_clu() -> Expected:
    """Its length is the total of all epochs, without knowledge of single epochs."""
    expected = expected_of_case(PADDED).as_stream(4096)
    return dataclasses.replace(expected, sized=True)


def expected_records(count: int, mask: bool, drop: bool = False, pipelines: int = 1) -> Expected:
    """Returns the numbers 0 to N - 1 repeatedly, in batches."""
    epoch = []
    for start in range(0, count, BATCH):
        own = np.arange(start, min(start + BATCH, count))
        if len(own) < BATCH and drop:
            break
        pad = BATCH - len(own) if mask else 0
        x = np.concatenate([own, np.repeat(own[-1:], pad)]).astype(np.int32) % N
        epoch.append({"x": x[:, None]})
        if mask:
            epoch[-1]["mask"] = np.arange(BATCH) < len(own)
    return Expected([epoch], sized=False, resets=False, state_bytes=700, pipelines=pipelines)


def tf_iterator(files: list[str], policy: str, chain: Callable[[Any], Any]) -> Any:
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader")
    case, policy = dataclasses.replace(PADDED, policy=policy), LastBatchPolicy[policy]
    call = {"files": files, "case": case, "batch_size": BATCH, "num_threads": 1, "mask": "mask"}
    return iter(chain(tfdata.DALIDataset(iterator_fn, last_batch_policy=policy, **call)))


Row = tuple[Callable[[list[str]], Any], Expected]

ROWS: dict[str, dict[str, Row]] = {
    "data_iterator": {
        "padded": (lambda f: decorated(f, PADDED), expected_of_case(PADDED)),
        "runs on": (lambda f: decorated(f, RUNS_ON), expected_of_case(RUNS_ON)),
        "as_numpy, auto_reset": (
            lambda f: decorated(f, PADDED, as_numpy=True, auto_reset=True),
            expected_of_case(PADDED, auto_reset=True),
        ),
        "partial": (
            lambda f: decorated(f, Case(N, 1, BATCH, "PARTIAL", False, False)),
            expected_of_case(Case(N, 1, BATCH, "PARTIAL", False, False)),
        ),
        "drop": (
            lambda f: decorated(f, Case(N, 1, BATCH, "DROP", True, False)),
            expected_of_case(Case(N, 1, BATCH, "DROP", True, False)),
        ),
        "sharded over a mesh with replicas": (
            lambda f: decorated(f, TWO, ((2, 2), ("d", "m"), ("d",), (6, 2, 0, 5))),
            expected_of_case(TWO, 2),
        ),
        "sharded over two axes": (
            lambda f: decorated(f, FOUR, ((2, 2), ("d", "m"), (("d", "m"),), (0, 1, 2, 3))),
            expected_of_case(FOUR, 4),
        ),
        "devices": (
            lambda f: decorated(f, TWO, devices=(3, 1)),
            expected_of_case(TWO, 2, axis=True),
        ),
        "sized source": (lambda f: by_source(f, True), of_source(True)),
        "source that ends": (lambda f: by_source(f, False), of_source(False)),
    },
    "BatchStream": {
        "of three epochs": (
            lambda f: stream(f, PADDED, 3),
            dataclasses.replace(expected_of_case(PADDED).as_stream(4096), sized=True),
        ),
    },
    "DALIGenericIterator": {
        "one pipeline": (lambda f: hand_made(f, PADDED), expected_of_case(PADDED)),
        "two pipelines": (lambda f: hand_made(f, TWO), expected_of_case(TWO, 2, axis=True)),
    },
    "DALIGenericPeekableIterator": {
        "one pipeline": (
            lambda f: hand_made(f, PADDED, clu_adapter.DALIGenericPeekableIterator),
            expected_of_case(PADDED),
        ),
    },
    "DALIIterDataset": {
        "partial": (
            lambda f: grain_source(f, PADDED),
            expected_stream(Case(N, 1, BATCH, "PARTIAL", True, False), mask=False),
        ),
        "mask": (lambda f: grain_source(f, PADDED, pad="mask"), expected_stream(PADDED)),
        "drop": (
            lambda f: grain_source(f, PADDED, drop_remainder=True),
            expected_stream(Case(N, 1, BATCH, "DROP", True, False), mask=False),
        ),
        "complete batches": (
            lambda f: grain_source(f, COMPLETE, drop_remainder=True),
            expected_stream(COMPLETE, mask=False),
        ),
        "less than a batch": (
            lambda f: grain_source(f, SHORT, pad="mask"),
            expected_stream(SHORT),
        ),
    },
    "DALITransform": {
        "of a MapDataset": (
            lambda f: transformed(records(f), pad="mask"),
            expected_records(N, mask=True),
        ),
        "of an IterDataset": (
            lambda f: transformed(records(f).repeat(2).to_iter_dataset()),
            expected_records(2 * N, mask=False),
        ),
        "of lists, drop": (
            lambda f: transformed(
                records(f).batch(BATCH, batch_fn=list).to_iter_dataset(), drop_remainder=True
            ),
            expected_records(N, mask=False, drop=True),
        ),
        "of packed records": (
            lambda f: transformed(packed(f)),
            expected_records(N, mask=False),
        ),
    },
    "DALIBatch": {"behind batch()": (lambda f: batched(), expected_records(N, mask=True))},
    "DALIDatasetIterator": {
        "finite": (lambda f: clu_iterator(f, num_epochs=3), expected_of_clu()),
        "with peeks": (lambda f: clu_iterator(f, num_epochs=3, element="jax"), expected_of_clu()),
    },
    "DALIDataset": {
        "of three epochs": (
            lambda f: tf_iterator(f, "FILL", lambda ds: ds.repeat(3)),
            expected_of_case(PADDED).as_stream(4096),
        ),
        "partial, skipped and taken": (
            lambda f: tf_iterator(f, "PARTIAL", lambda ds: ds.repeat(4).skip(2).take(5)),
            between(expected_of_case(dataclasses.replace(PADDED, policy="PARTIAL")), 2, 7),
        ),
    },
    "DALIDataLoader": {
        "mask": (lambda f: loaded(False, pad="mask"), expected_records(2 * N, mask=True)),
        "drop": (
            lambda f: loaded(False, drop_remainder=True),
            expected_records(2 * N, mask=False, drop=True),
        ),
        "over two devices": (
            lambda f: loaded(False, pad="mask", sharding=rows_over(2)),
            expected_records(2 * N, mask=True, pipelines=2),
        ),
        "over a mesh with replicas": (
            lambda f: loaded(False, drop_remainder=True, sharding=rows_over(4, 2)),
            expected_records(2 * N, mask=False, drop=True, pipelines=4),
        ),
    },
}


@pytest.mark.parametrize("name,row", [(name, row) for name in ROWS for row in ROWS[name]])
def test_conformance(jpegs_many, name, row):
    make, expected = ROWS[name][row]
    # Another process repeats all restores; all rows of a class pass states in the same way.
    process = FULL or row == next(iter(ROWS[name]))
    check(functools.partial(make, jpegs_many), expected, process=process)


def public_iterators() -> set[str]:
    """Returns the names of all public iterators, of the package and of each adapter."""
    root = pathlib.Path(dalijax.__file__).parent
    found = set()
    modules = [dalijax]
    for module in pkgutil.iter_modules([str(root / "adapters")]):
        if module.name != "pax":  # tests/pax has its rows: it needs Python 3.10
            modules.append(importlib.import_module(f"dalijax.adapters.{module.name}"))
    for module in modules:
        for name in module.__all__:
            one = getattr(module, name)
            iterates = isinstance(one, type) and (
                hasattr(one, "__next__") or hasattr(one, "__iter__")
            )
            iterates = iterates and not issubclass(one, tuple)  # data
            makes = isinstance(one, type) and name.startswith("DALI")
            if (
                (iterates and name not in ("IteratorFunction", "LastBatchPolicy"))
                or makes
                or name == "data_iterator"
            ):
                found.add(name)
    return found


def test_every_public_iterator_has_a_row():
    assert public_iterators() == set(ROWS)
