"""Measures the host time of a batch through each adapter, compared with a loop of DALI calls.

Runs on a CPU. A pause between batches lets DALI prepare the next batch, so that only the work of
the host is timed. All variants take turns in one process. Values are medians over all batches, and
differences are differences of the medians of a round::

    python benchmarks/adapter_overhead.py
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from nvidia.dali import fn, pipeline_def, types

import report
import turns
from dalijax import data_iterator

SIZES = {"tiny": [1], "32x224x224x3": [224, 224, 3]}
BATCH = 32


def graph(files: list[str], shape: list[int]) -> Any:
    """Defines an image of zeros for each file, and its number."""
    label = fn.readers.file(
        files=files, labels=list(range(len(files))), name="reader", pad_last_batch=True
    )[1]
    return fn.constant(idata=[0], shape=shape, dtype=types.UINT8), label


def raw(call: dict[str, Any]) -> Iterator[Any]:
    pipeline = pipeline_def(graph, enable_checkpointing=False)(
        **call, batch_size=BATCH, num_threads=1, device_id=None
    )
    return turns.raw_loop(pipeline)


def variants(call: dict[str, Any]) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns functions that create the endless iterators."""
    arguments = {**call, "batch_size": BATCH, "num_threads": 1}
    function = data_iterator(graph, ["images", "labels"], reader_name="reader")
    makers: dict[str, Callable[[], Iterator[Any]]] = {
        "raw DALI loop": lambda: raw(call),
        "core, as_numpy": lambda: function.stream(None, as_numpy=True, **arguments),
        "core, jax.Array": lambda: function.stream(None, **arguments),
    }
    try:
        from dalijax.adapters.grain import DALIIterDataset

        makers["DALIIterDataset"] = lambda: iter(
            DALIIterDataset(function, num_epochs=None, **arguments)
        )
    except ImportError:
        pass
    try:
        from dalijax.adapters.clu import DALIDatasetIterator

        makers["CLU DALIDatasetIterator"] = lambda: DALIDatasetIterator(function, **arguments)
    except ImportError:
        pass
    from dalijax.adapters.tfdata import DALIDataset

    makers["DALIDataset"] = lambda: iter(DALIDataset(function, **arguments).repeat())
    try:
        import tensorflow as tf

        from dalijax.adapters.tfdata.to_tf import by_plugin

        tf.config.set_visible_devices([], "GPU")
        dataset = DALIDataset(function, **arguments).repeat()
        spec = dataset.element_spec
        makers["to_tf_dataset(), from_generator"] = lambda: iter(dataset.to_tf_dataset(spec))
        if by_plugin(dataset._source, dataset._epochs, dataset._chain) is not None:
            makers["to_tf_dataset(), DALI's plugin"] = lambda: iter(dataset.to_tf_dataset())
    except ImportError:
        pass
    try:
        from praxis import base_hyperparams, pax_fiddle

        from dalijax.adapters.pax import DALIInput

        def pax() -> Iterator[Any]:
            config = pax_fiddle.Config(
                DALIInput,
                iterator_fn=function,
                arguments={**call, "num_threads": 1},
                batch_size=BATCH,
                is_training=True,
            )
            data = base_hyperparams.instantiate(config)
            return iter(data.get_next, None)

        makers["Pax DALIInput"] = pax
    except ImportError:
        pass
    return makers


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=50, help="batches per round")
    parser.add_argument("--rest", type=float, default=0.005, help="seconds between batches")
    arguments = parser.parse_args()
    report.heading()
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = turns.small_files(folder, 1024)
        for size, shape in SIZES.items():
            iterators = {
                name: make() for name, make in variants({"files": files, "shape": shape}).items()
            }
            for iterator in iterators.values():
                for _ in range(50):
                    next(iterator)
            rest = functools.partial(time.sleep, arguments.rest)
            times = turns.time_iterators(iterators, arguments.rounds, arguments.batches, rest)
            result[size] = {name: statistics.median(values) for name, values in times.items()}
            over = {
                name: statistics.median(values)
                for name, values in turns.over(times, "raw DALI loop").items()
            }
            report.table(
                (f"{size}, two outputs", "us per batch", "more than the raw loop"),
                [(name, f"{result[size][name]:.0f}", f"{over[name]:+.0f}") for name in over],
            )
    report.write(arguments.out, "adapter_overhead", result, result, "us per batch")


if __name__ == "__main__":
    main()
