"""Measures steps of robot episodes: sources.RLDS and tf.data on a CPU, and sources.RLDS on GPUs.

On a CPU, sources.RLDS is compared with tf.data's recipe for robot data, as in openpi and dlimp:
episodes are split into frames, decoded, and shuffled in a buffer. Each variant runs in a separate
process, in turn, for several rounds::

    python benchmarks/robot.py

On GPUs, sources.RLDS decodes all combinations of the options, and so does DALI alone, with encoded
batches in memory: a pipeline for each GPU, in one thread. TensorFlow is not needed::

    python benchmarks/robot.py --gpus 1 2 --sizes 320x180 640x480 --loads 0.9 1.0 --threads 4 8

``--device cpu`` tries the program without GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import droid
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def

import report
import turns
from dalijax import data_iterator, sources

SIDE = 224
LEAST = 10  # batches of a measurement
IN_MEMORY = 8  # encoded batches that DALI alone decodes again and again
OUTPUTS = ["image", "wrist", "joints", "actions"]
Batches = Iterator[Any]


def padded(data: Any, device: str, load: float) -> Any:
    """Defines decoded images, resized to at most 224 pixels a side and padded to 224x224."""
    options = {"hw_decoder_load": load} if device == "gpu" else {}
    images = fn.decoders.image(data, device="mixed" if device == "gpu" else "cpu", **options)
    images = fn.resize(images, size=[SIDE, SIDE], mode="not_larger")
    return fn.crop(images, crop=[SIDE, SIDE], out_of_bounds_policy="pad", fill_values=0)


def graph_of(args: argparse.Namespace) -> Callable[..., Any]:
    """Returns the graph function: two images, joints and actions on the device."""
    device, load = args.device, args.loads[0]

    def graph(image: Any, wrist: Any, joints: Any, actions: Any) -> Any:
        images = padded(image, device, load), padded(wrist, device, load)
        return (*images, *((x.gpu() if device == "gpu" else x) for x in (joints, actions)))

    return graph


def ours(paths: list[str], args: argparse.Namespace) -> Batches:
    """Returns endless batches of sources.RLDS in a uniform order."""
    source, graph = sources.RLDS(paths, droid.FIELDS), graph_of(args)
    config: dict[str, Any] = {"source": source, "auto_reset": True}
    gpus = args.gpus[0] if args.gpus else 0
    if gpus > 1:
        mesh = Mesh(np.array(jax.devices()[:gpus]), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    iterator = data_iterator(graph, OUTPUTS, **config)(
        batch_size=args.batch * max(1, gpus),
        num_threads=args.threads[0],
        seed=args.seed,
        prefetch_queue_depth=args.depth,
    )
    while True:
        yield from iterator  # an epoch


def dali_alone(paths: list[str], args: argparse.Namespace) -> Batches:
    """Returns outputs of a pipeline for each GPU, which decodes batches in memory."""
    source, graph = sources.RLDS(paths, droid.FIELDS), graph_of(args)
    numbers = np.random.default_rng(args.seed).permutation(len(source))
    wanted = [numbers[i * args.batch : (i + 1) * args.batch] for i in range(IN_MEMORY)]
    read = (source.read(batch, OUTPUTS) for batch in wanted)
    batches = [tuple(values[name] for name in OUTPUTS) for values in read]

    @pipeline_def(
        batch_size=args.batch, num_threads=args.threads[0], prefetch_queue_depth=args.depth
    )
    def pipeline() -> Any:
        inputs = fn.external_source(batches, num_outputs=len(OUTPUTS), cycle=True, no_copy=True)
        return tuple(graph(*inputs))

    gpus = range(args.gpus[0]) if args.device == "gpu" else [None]
    return zip(*(turns.raw_loop(pipeline(device_id=gpu)) for gpu in gpus))


def read_only(paths: list[str], args: argparse.Namespace) -> Batches:
    """Yields batches of encoded steps, read in this thread in a random order."""
    source = sources.RLDS(paths, droid.FIELDS)
    rng = np.random.default_rng(args.seed)
    while True:
        order = rng.permutation(len(source))
        for start in range(0, len(order) - args.batch, args.batch):
            yield source.read(order[start : start + args.batch], list(source.fields))


def tensorflow(paths: list[str], args: argparse.Namespace, buffer: int, when: str) -> Batches:
    """Returns endless batches of tf.data.

    Args:
        paths: The files.
        args: The options.
        buffer: Number of frames in the shuffle buffer.
        when: "before": images are decoded before the shuffle, as in openpi; "after": after it;
            "never": they are not decoded.
    """
    import tensorflow as tf

    names = {name: f if isinstance(f, str) else f[0] for name, f in droid.FIELDS.items()}
    texts = ("image", "wrist", "prompt")
    features = {
        feature: tf.io.FixedLenSequenceFeature(
            [], tf.string if name in texts else tf.float32, allow_missing=True
        )
        for name, feature in names.items()
    }

    def frames(record: Any) -> dict[str, Any]:
        episode = tf.io.parse_single_example(record, features)
        columns = {name: episode[feature] for name, feature in names.items()}
        count = tf.shape(columns["image"])[0]
        steps = tf.range(count)[:, None] + tf.range(droid.WINDOW)
        actions = tf.reshape(columns["actions"], [count, -1])
        columns["actions"] = tf.gather(actions, tf.minimum(steps, count - 1))
        columns["mask"] = steps < count
        columns["joints"] = tf.reshape(columns["joints"], [count, -1])
        return columns

    def decoded(frame: dict[str, Any]) -> dict[str, Any]:
        return frame | {k: tf.io.decode_jpeg(frame[k], 3) for k in ("image", "wrist")}

    def resized(frame: dict[str, Any]) -> dict[str, Any]:
        for name in ("image", "wrist"):
            image = tf.image.resize_with_pad(frame[name], SIDE, SIDE)
            frame = frame | {name: tf.cast(tf.round(image), tf.uint8)}
        return frame

    auto, cores = tf.data.AUTOTUNE, len(os.sched_getaffinity(0))
    ds = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=args.seed).repeat()
    ds = ds.interleave(tf.data.TFRecordDataset, cycle_length=cores, num_parallel_calls=auto)
    ds = ds.map(frames, num_parallel_calls=auto)
    ds = ds.interleave(
        tf.data.Dataset.from_tensor_slices, cycle_length=cores, num_parallel_calls=auto
    )
    if when == "before":
        ds = ds.map(decoded, num_parallel_calls=auto)
    ds = ds.shuffle(buffer, seed=args.seed)
    if when == "after":
        ds = ds.map(decoded, num_parallel_calls=auto)
    if when != "never":
        ds = ds.map(resized, num_parallel_calls=auto)
    ds = ds.batch(args.batch, drop_remainder=True).prefetch(args.depth)
    options = tf.data.Options()
    options.autotune.ram_budget = 1  # as in openpi: no further buffers
    return iter(ds.with_options(options).as_numpy_iterator())


VARIANTS: dict[str, Callable[[list[str], argparse.Namespace], Batches]] = {
    "RLDS, read only": read_only,
    "tf.data, read only, 1,000 frames": lambda *a: tensorflow(*a, 1000, "never"),
    "RLDS": ours,
    "tf.data, 1,000 frames": lambda *a: tensorflow(*a, 1000, "before"),
    "tf.data, 8,000 frames": lambda *a: tensorflow(*a, 8000, "before"),
    "tf.data, 8,000 encoded frames": lambda *a: tensorflow(*a, 8000, "after"),
}
ON_GPUS = {"RLDS": ours, "DALI alone": dali_alone}


def memory(key: str) -> float:
    """Returns a value of /proc/self/status in MB: VmRSS, or VmHWM for its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(key))


def data_set(args: argparse.Namespace) -> list[str]:
    """Returns the paths of the episodes, which are written if necessary."""
    width, height = map(int, args.sizes[0].split("x"))
    return droid.make(args.folder, args.episodes, args.files, (width, height))


def worker(args: argparse.Namespace) -> None:
    """Measures a variant in this process and prints the result as JSON."""
    if args.only.startswith("tf.data"):
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
    if args.gpus and args.device == "cpu":
        jax.config.update("jax_num_cpu_devices", args.gpus[0])
    jax.devices()
    paths = data_set(args)
    per_batch = args.batch * max(1, *args.gpus, 0)
    base, start, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
    batches = {**VARIANTS, **ON_GPUS}[args.only](paths, args)
    jax.block_until_ready(next(batches))
    first, first_busy = time.perf_counter() - start, time.process_time() - busy
    for _ in range(args.warm):
        last = next(batches)
    jax.block_until_ready(last)
    count, busy, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < args.seconds or count < LEAST * per_batch:
        last = next(batches)
        count += per_batch
    jax.block_until_ready(last)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    result = {
        "steps_per_s": count / seconds,
        "frames_per_s": 2 * count / seconds,
        "cpu_us": 1e6 * busy / count,
        "cores": busy / seconds,
        "first_s": first,
        "first_cpu_s": first_busy,
        "memory_mb": memory("VmHWM") - base,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # without waiting for threads of tf.data


def run(args: argparse.Namespace, name: str, cache: pathlib.Path, **chosen: Any) -> dict[str, Any]:
    """Measures a variant in a separate process.

    Args:
        args: The options.
        name: The variant.
        cache: Folder of stored indexes.
        **chosen: Options that differ.
    """
    options = vars(args) | chosen
    command = [sys.executable, __file__, "--only", name]
    for key in ("folder", "episodes", "files", "batch", "seconds", "warm", "depth", "device"):
        command += [f"--{key}", str(options[key])]
    command += ["--seed", str(options["seed"])]
    for key in ("sizes", "loads", "threads", "gpus"):
        if options[key]:
            command += [f"--{key}", *map(str, options[key])]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name} {chosen}: {result}", flush=True)
    return result


def index_cost(args: argparse.Namespace, rounds: int) -> list[float]:
    """Returns the CPU time of building an index, in microseconds per step, for each round."""
    paths, costs = data_set(args), []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            before = time.process_time()
            source = sources.RLDS(paths, droid.FIELDS, cache_dir=cache)
            costs.append((time.process_time() - before) / len(source) * 1e6)
    return costs


def _cells(runs: list[dict[str, Any]], digits: dict[str, int]) -> list[str]:
    """Formats values of some runs with numbers of digits."""
    return [report.spread([run[key] for run in runs], count) for key, count in digits.items()]


def on_cpu(args: argparse.Namespace, cache: pathlib.Path) -> None:
    """Compares sources.RLDS with tf.data."""
    costs = index_cost(args, args.rounds)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for number in range(args.rounds):
        for name in VARIANTS:
            results[name].append(run(args, name, cache, seed=number))
    digits = {"steps_per_s": 0, "cpu_us": 0, "memory_mb": 0, "first_s": 1, "first_cpu_s": 1}
    report.table(
        ("", "steps/s", "CPU us per step", "more memory, MB", "first batch, s", "its CPU time, s"),
        [(name, *_cells(runs, digits)) for name, runs in results.items()],
    )
    report.table(
        ("", "CPU us per step"), [("building the index of two cameras", report.spread(costs))]
    )
    micros = {name: statistics.median(r["cpu_us"] for r in runs) for name, runs in results.items()}
    everything = {"index_us": costs, **results}
    report.write(args.out, "robot", everything, {"": micros}, "CPU us per step")


def on_gpus(args: argparse.Namespace, cache: pathlib.Path) -> None:
    """Measures sources.RLDS and DALI alone with all combinations of the options."""
    cells = list(itertools.product(args.sizes, args.gpus, args.loads, args.threads, ON_GPUS))
    results: dict[tuple[Any, ...], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for size in args.sizes:
        data_set(argparse.Namespace(**vars(args) | {"sizes": [size]}))
    for number in range(args.rounds):
        for size, gpus, load, threads, name in cells:
            chosen = {"sizes": [size], "gpus": [gpus], "loads": [load], "threads": [threads]}
            result = run(args, name, cache, seed=number, **chosen)
            results[size, gpus, load, threads, name].append(result)
    digits = {"frames_per_s": 0, "cores": 1, "memory_mb": 0, "first_s": 1}
    report.table(
        (
            *("images", "GPUs", "hw_decoder_load", "threads per GPU", ""),
            *("frames/s", "cores", "more memory, MB", "first batch, s"),
        ),
        [(*cell, *_cells(runs, digits)) for cell, runs in results.items()],
    )
    rates = {
        f"{size}, {gpus} GPUs, load {load:g}, {threads} threads, {name}": statistics.median(
            r["frames_per_s"] for r in runs
        )
        for (size, gpus, load, threads, name), runs in results.items()
    }
    everything = [{"cell": cell, "runs": runs} for cell, runs in results.items()]
    report.write(args.out, "robot", everything, {"": rates}, "frames/s")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="numbers of GPUs")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where images are decoded")
    parser.add_argument("--sizes", nargs="+", default=["320x180"], help="of images in the files")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0], help="hw_decoder_load")
    parser.add_argument("--threads", type=int, nargs="+", help="threads per pipeline")
    parser.add_argument("--depth", type=int, help="prefetch_queue_depth")
    parser.add_argument("--episodes", type=int, default=240, help="of 60 to 300 steps")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--batch", type=int, help="steps of a batch, per GPU")
    parser.add_argument("--warm", type=int, help="batches before the measurement")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path, help="of the data set, written if necessary")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = args.device or ("gpu" if args.gpus else "cpu")
    defaults = {"batch": 256, "depth": 3, "warm": 20} if args.gpus else {}
    for key, value in ({"batch": 64, "depth": 2, "warm": 3} | defaults).items():
        setattr(args, key, getattr(args, key) or value)
    args.threads = args.threads or [4 if args.gpus else 2]
    if args.only:
        worker(args)
        return
    report.heading()
    with tempfile.TemporaryDirectory() as spare:
        args.folder = args.folder or pathlib.Path(spare)
        (on_gpus if args.gpus else on_cpu)(args, pathlib.Path(spare) / "cache")


if __name__ == "__main__":
    main()
