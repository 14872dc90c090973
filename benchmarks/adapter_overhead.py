"""Host time of each batch through each adapter, over what a raw DALI loop takes, on a CPU.

Between two batches each variant is left alone for a while, so that DALI has the next one
ready and only the host's own work is timed. All variants take turns in one process, round by
round; figures are medians over all batches, differences those of a round's medians::

    python benchmarks/adapter_overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import nvidia.dali
from nvidia.dali import fn, pipeline_def, types

from dalijax import data_iterator

SIZES = {"tiny": [1], "32x224x224x3": [224, 224, 3]}
BATCH = 32


def graph(files: list[str], shape: list[int]) -> Any:
    """A picture of zeros for each file, and its number."""
    label = fn.readers.file(
        files=files, labels=list(range(len(files))), name="reader", pad_last_batch=True
    )[1]
    return fn.constant(idata=[0], shape=shape, dtype=types.UINT8), label


def raw(call: dict[str, Any]) -> Iterator[Any]:
    pipeline = pipeline_def(graph, enable_checkpointing=False)(
        **call, batch_size=BATCH, num_threads=1, device_id=None
    )
    pipeline.build()
    pipeline.schedule_run()
    while True:
        yield pipeline.share_outputs()
        pipeline.release_outputs()
        pipeline.schedule_run()


def variants(call: dict[str, Any]) -> dict[str, Callable[[], Iterator[Any]]]:
    """What makes an endless iterator of each kind."""
    own = {**call, "batch_size": BATCH, "num_threads": 1}
    function = data_iterator(graph, ["images", "labels"], reader_name="reader")
    found: dict[str, Callable[[], Iterator[Any]]] = {
        "raw DALI loop": lambda: raw(call),
        "core, as_numpy": lambda: function.stream(None, as_numpy=True, **own),
        "core, jax.Array": lambda: function.stream(None, **own),
    }
    try:
        from dalijax.adapters.grain import DALIIterDataset

        found["DALIIterDataset"] = lambda: iter(DALIIterDataset(function, num_epochs=None, **own))
    except ImportError:
        pass
    try:
        from dalijax.adapters.clu import DALIDatasetIterator

        found["CLU DALIDatasetIterator"] = lambda: DALIDatasetIterator(function, **own)
    except ImportError:
        pass
    from dalijax.adapters.tfdata import DALIDataset

    found["DALIDataset"] = lambda: iter(DALIDataset(function, **own).repeat())
    try:
        import tensorflow as tf

        from dalijax.adapters import tfdata_bridge as bridge

        tf.config.set_visible_devices([], "GPU")
        made = DALIDataset(function, **own).repeat()
        found["to_tf_dataset(), from_generator"] = lambda: iter(bridge.by_generator(made))
        if bridge.by_plugin(made) is not None:
            found["to_tf_dataset(), DALI's plugin"] = lambda: iter(bridge.by_plugin(made))
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

        found["Pax DALIInput"] = pax
    except ImportError:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=50, help="batches of a round")
    parser.add_argument("--rest", type=float, default=0.005, help="seconds between batches")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, DALI {nvidia.dali.__version__}, {os.cpu_count()} cores")
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in range(1024):
            files.append(f"{folder}/{number}.jpg")
            pathlib.Path(files[-1]).write_bytes(b"x")
        for size, shape in SIZES.items():
            iterators = {
                name: make() for name, make in variants({"files": files, "shape": shape}).items()
            }
            times: dict[str, list[float]] = {name: [] for name in iterators}
            for each in iterators.values():
                for _ in range(50):
                    next(each)
            gc.collect()
            for _ in range(arguments.rounds):
                for name, each in iterators.items():
                    own = []
                    for _ in range(arguments.batches):
                        time.sleep(arguments.rest)
                        begin = time.perf_counter()
                        batch = next(each)
                        own.append((time.perf_counter() - begin) * 1e6)
                        del batch
                    times[name].append(statistics.median(own))
            base = times["raw DALI loop"]
            print(f"\n{size}, two outputs; us for each batch, and over the raw loop\n")
            result[size] = {}
            for name, own in times.items():
                over = statistics.median(a - b for a, b in zip(own, base))
                result[size][name] = statistics.median(own)
                print(f"| {name} | {statistics.median(own):.0f} | {over:+.0f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
