"""Records the batches that iterators deliver, to compare two versions of the code.

    export PYTHONPATH=tests:tests/support:tests/system
    python tests/support/record_cells.py before.json     # with the old version: records
    python tests/support/record_cells.py before.json     # with the new version: compares

Each cell is an iterator of the public API. For every call of a walk through its epochs, the file
contains a digest of the batch, or the end of the epoch, or the error. Each cell is then restored at
several positions in a new iterator, and must deliver the remaining recorded batches. The encoding
of states is not recorded, since only the batches must stay the same.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import elastic_graphs
import grain
import jax
import numpy as np
import test_conformance
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn as dali_fn

from conformance import frozen
from conftest import corrupt, write_jpegs
from dalijax import LastBatchPolicy, data_iterator, fn, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset

Make = Callable[[], Any]
CALLS = 14  # steps of cells that are endless
POLICIES = ("FILL", "DROP", "PARTIAL")


def rows_over(devices: int) -> NamedSharding:
    """Returns a sharding of rows over some devices."""
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))


def source_cells(folder: pathlib.Path) -> Iterator[tuple[str, Make]]:
    """Yields a cell for each code path of sources, graphs, policies and devices."""

    def make(source: str, graph: str, devices: int = 0, **config: Any) -> Any:
        function = elastic_graphs.iterator_function(str(folder), source, graph)
        if devices:
            config["sharding"] = rows_over(devices)
        return function(batch_size=4, num_threads=1, **config)

    for source in elastic_graphs.LOCAL:
        yield f"source {source}", lambda s=source: make(s, "augment", mask="mask")
    yield "source two devices", lambda: make("Files", "augment", devices=2, mask="mask")
    yield "source rand_augment", lambda: make("Tar", "rand_augment", mask="mask")
    for policy in POLICIES:
        rule = LastBatchPolicy[policy]
        yield (
            f"source {policy}",
            lambda r=rule: make("Records", "draw", last_batch_policy=r, shuffle=False),
        )
    yield (
        "source stream",
        lambda: elastic_graphs.iterator_function(str(folder), "Mixture", "draw").stream(
            None, batch_size=4, num_threads=1
        ),
    )


class FourthFails(list):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("no such record")
        return {"x": np.int32(index)}


def bad_cells(folder: pathlib.Path) -> Iterator[tuple[str, Make]]:
    """Yields cells with records and files that fail."""
    files = write_jpegs(folder / "bad", 10)
    corrupt(files[4])

    def over_reader(files: list[str]) -> Any:
        data, label = dali_fn.readers.file(files=files, pad_last_batch=True, name="reader")
        return dali_fn.decoders.image(data), label

    def over_records(x: Any) -> Any:
        return x + 0

    for how in ("raise", "skip"):
        function = data_iterator(
            over_reader, ["image", "label"], reader_name="reader", on_error=how
        )
        yield f"reader {how}", lambda f=function: f(files, batch_size=2, num_threads=1)
    for how in ("raise", "skip", "mask"):
        function = data_iterator(over_records, ["x"], on_error=how, mask="mask")
        source = sources.Records(FourthFails(range(10)), identity="fourth")
        yield f"records {how}", lambda f=function, s=source: f(source=s, batch_size=3, seed=3)
    transform = DALITransform(
        over_records, batch_size=3, output_map=["x"], pad="mask", on_error="mask"
    )
    dataset = grain.MapDataset.source(FourthFails(range(10)))
    yield "transform mask", lambda: iter(dataset.pipe(transform))


def function_cells() -> Iterator[tuple[str, Make]]:
    """Yields cells with functions in the graph, with keys."""
    scaled = fn.jax_function(lambda x, *, key: x * 2 + jax.random.uniform(key, x.shape))
    source = sources.Arrays({"x": np.arange(11, dtype=np.float32)[:, None]})

    def over_source(x: Any, *, draw: Any) -> Any:
        return scaled(x) + draw.uniform(shape=[1])

    function = data_iterator(over_source, ["x"], source=source, mask="mask")
    yield "jax_function over a source", lambda: function(batch_size=4)


def adapter_cells(files: list[str], folder: pathlib.Path) -> Iterator[tuple[str, Make]]:
    """Yields adapters over sources; test_conformance.py has adapters over readers."""
    function = elastic_graphs.iterator_function(str(folder), "Files", "augment")
    call = {"batch_size": 4, "num_threads": 1}
    yield "CLU", lambda: DALIDatasetIterator(function, mask="mask", **call)
    yield "tf.data", lambda: iter(DALIDataset(function, **call).repeat(3).skip(2).take(9))
    yield "Grain dataset", lambda: iter(DALIIterDataset(function, num_epochs=2, **call))

    def augmented(x: Any, *, draw: Any) -> Any:
        return x + draw.uniform(shape=[1]), dali_fn.random.uniform()

    records = [{"x": np.full(1, k, np.float32)} for k in range(11)]
    dataset = grain.MapDataset.source(records).seed(5).shuffle().repeat(2)
    for devices in (0, 2):
        sharding = {"sharding": rows_over(devices)} if devices else {}
        transform = DALITransform(
            augmented, batch_size=4, output_map=["x", "u"], pad="mask", **sharding
        )
        yield f"Grain transform {devices}", lambda t=transform: iter(dataset.pipe(t))
        yield (
            f"Grain loader {devices}",
            lambda s=sharding: iter(
                DALIDataLoader(
                    test_conformance.Listed(records),
                    grain.samplers.IndexSampler(11, num_epochs=2, shuffle=True, seed=3),
                    pipeline_fn=augmented,
                    output_map=["x", "u"],
                    batch_size=4,
                    pad="mask",
                    **s,
                )
            ),
        )


def cells(folder: pathlib.Path) -> dict[str, Make]:
    """Returns all cells by name."""
    elastic_graphs.write(folder)
    files = write_jpegs(folder / "class", 12)
    made = {
        f"{name}, {row}": lambda make=make: make(files)
        for name, rows in test_conformance.ROWS.items()
        for row, (make, _) in rows.items()
    }
    for more in (source_cells(folder), bad_cells(folder), function_cells()):
        made |= dict(more)
    return made | dict(adapter_cells(files, folder))


def digest(batch: dict[str, Any]) -> str:
    """Returns a digest of a batch: names, dtypes, shapes and values, on each device."""
    text = repr(sorted(frozen(batch).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def call_next(iterator: Any) -> str:
    """Returns the digest of the next batch, "end" or "error"."""
    try:
        return digest(next(iterator))
    except StopIteration:
        if hasattr(iterator, "epoch") and hasattr(iterator, "reset"):
            iterator.reset()
        return "end"
    except (RuntimeError, OSError):
        return "error"


def walk(make: Make, calls: int) -> tuple[list[str], list[Any]]:
    """Returns the results of some calls of a new iterator, and the state before each call."""
    iterator = make()
    results, states = [], []
    for _ in range(calls):
        states.append(json.dumps(iterator.get_state()))
        results.append(call_next(iterator))
    iterator.close()
    return results, states


def check_restores(name: str, make: Make, results: list[str], states: list[Any]) -> None:
    """Raises ValueError if a restored iterator delivers different batches."""
    for at in {0, 1, 2, len(states) // 2, len(states) - 2}:
        iterator = make()
        iterator.set_state(json.loads(states[at]))
        rest = [call_next(iterator) for _ in results[at:]]
        iterator.close()
        if rest != results[at:]:
            raise ValueError(f"{name}: restored before call {at}: {rest} for {results[at:]}")


def main(path: str) -> int:
    """Records or compares; returns the number of cells that differ."""
    recorded: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cells(pathlib.Path(folder)).items():
            results, states = walk(make, CALLS)
            check_restores(name, make, results, states)
            recorded[name] = results
    file = pathlib.Path(path)
    if not file.exists():
        file.write_text(json.dumps(recorded, indent=1))
        print(f"recorded {len(recorded)} cells in {path}")
        return 0
    before = json.loads(file.read_text())
    differ = sorted(k for k in {*before} | {*recorded} if before.get(k) != recorded.get(k))
    for name in differ:
        print(f"{name}:\n  before {before.get(name)}\n  now    {recorded.get(name)}")
    print(f"{len(recorded)} cells, {len(differ)} differ")
    return len(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
