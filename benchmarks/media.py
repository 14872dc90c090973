"""Compares dalijax with other Python libraries on recordings, clips and arrays.

| task | data | work | other libraries |
| --- | --- | --- | --- |
| recordings | FLAC, 10 s at 16 kHz | log-mel spectrograms | soundfile and SciPy, librosa |
| clips | Motion JPEG (GPU: also H.264), 320x240 | 8 frames, stride 2, 112x112 | PyAV, OpenCV |
| volumes | .npy, 96x96x96 float32 | crop to 64x64x64 and flip | NumPy, also memory-mapped |
| rows | memory-mapped .npy, 1,024 float32 | normalize | NumPy |

The other libraries prepare two batches ahead, like DALI, in threads or worker processes. Their
number is the fastest of several, up to the number of DALI's threads. Each decoder has one thread,
and processes write to shared memory. Rows are computed when they are taken.

All batches end on JAX's first device. All libraries read the same files and take turns, in a
different order in each round. Before the first round, their results are compared. Libraries that
are not installed are skipped; the extra `bench` installs all of them. After ``--limit`` seconds, no
task begins.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import importlib
import itertools
import math
import multiprocessing
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
import scipy.fft
import threadpoolctl
from numpy.typing import NDArray
from nvidia.dali import fn, types

import report
import turns
from dalijax import data_iterator, sources
from report import GPU

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import clips  # of examples/

RATE, BANDS, SECONDS = 16_000, 64, 10
HOP, WINDOW, FFT = 160, 400, 512  # samples
PIECE = 128  # number of windows that are transformed at once, so that they fit into the cache
START, LENGTH, STRIDE, SIDE = 12, 8, 2, 112  # frames and pixels of sequences
WANTED = range(START, START + LENGTH * STRIDE, STRIDE)  # frames
AHEAD = 2  # prefetched batches
TRIED = 6  # batches to compare numbers of threads and processes
DRAWN = 16  # generated clips; the other files are copies
VOLUME, CROP = 96, 64  # sides in voxels
COLUMNS = 1024  # columns of the table
Batch = NDArray[Any]
Make = Callable[[Sequence[str]], Batch | jax.Array]  # makes a batch from paths


def module(name: str) -> Any:
    """Imports a module; returns None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


soundfile, librosa, av, cv2 = map(module, ("soundfile", "librosa", "av", "cv2"))


def prepare() -> None:
    """Configures the libraries for a pool of threads or processes."""
    # Matrix products with BLAS threads inside a pool are six times as slow.
    threadpoolctl.threadpool_limits(1, "blas")
    if cv2 is not None:
        cv2.setNumThreads(0)
    # malloc must keep freed memory. Otherwise NumPy waits for the kernel at each large array, which
    # made spectrograms slower by a factor of 1.7 and volumes by up to 1.4.
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 1 << 30)


class Turn:
    """A variant for `turns.time_pipelines`: `run` places the next batch on the device."""

    def __init__(self, take: Callable[[], Any]):
        self.take = take

    def run(self) -> Any:
        return jax.block_until_ready(jax.device_put(self.take(), jax.devices()[0]))


# Recordings


def by_dali(data: Any) -> Any:
    sound, _ = fn.decoders.audio(data, downmix=True)
    power = fn.spectrogram(
        sound.gpu() if GPU else sound, nfft=FFT, window_length=WINDOW, window_step=HOP
    )
    mel = fn.mel_filter_bank(power, sample_rate=RATE, nfilter=BANDS)
    return fn.to_decibels(mel, multiplier=10.0, cutoff_db=-80.0)


@functools.cache
def triangles() -> NDArray[np.float32]:
    """Returns the mel filter bank of DALI and librosa, of shape [BANDS, FFT / 2 + 1]."""
    step, hertz = np.log(6.4) / 27, np.linspace(0, RATE / 2, 100_001)
    mels = np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1) / 1000) / step)
    edges = np.interp(np.linspace(0, mels[-1], BANDS + 2), mels, hertz)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    bins = np.linspace(0, RATE / 2, FFT // 2 + 1)
    weights = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    return (weights.clip(0) * 2 / (high - low)).astype(np.float32)


@functools.cache
def hann() -> NDArray[np.float32]:
    """Returns DALI's window, padded on both sides to shape [FFT]."""
    window = np.sin(np.pi * (np.arange(WINDOW) + 0.5) / WINDOW) ** 2
    return np.pad(window, (FFT - WINDOW) // 2).astype(np.float32)


def by_scipy(path: str) -> Batch:
    sound = np.pad(soundfile.read(path, dtype="float32")[0], FFT // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(sound, FFT)[::HOP]
    mel = np.empty((BANDS, len(windows)), np.float32)
    for begin in range(0, len(windows), PIECE):
        piece = slice(begin, begin + PIECE)
        spectrum = scipy.fft.rfft(windows[piece] * hann(), axis=1)
        mel[:, piece] = triangles() @ (spectrum.real**2 + spectrum.imag**2).T
    return 10 * np.log10(np.maximum(mel / mel.max(), 1e-8))


def by_librosa(path: str) -> Batch:
    sound, _ = librosa.load(path, sr=None)
    mel = librosa.feature.melspectrogram(
        y=sound, sr=RATE, n_fft=FFT, win_length=WINDOW, hop_length=HOP, n_mels=BANDS,
        pad_mode="reflect",
    )  # fmt: skip
    return librosa.power_to_db(mel, ref=np.max)


# Clips


def sequences(data: Any, device: str) -> Any:
    frames = fn.decoders.video(
        data, device=device, start_frame=START, sequence_length=LENGTH, stride=STRIDE
    )
    if GPU:
        frames = frames.gpu()
    return fn.resize(frames, size=[SIDE, SIDE], antialias=False)


def by_pyav(path: str) -> Batch:
    frames = np.empty((LENGTH, SIDE, SIDE, 3), np.uint8)
    converter = av.video.reformatter.VideoReformatter()
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        container.seek(int(START / clips.RATE / stream.time_base), stream=stream)

        def number(packet_or_frame: Any) -> int:
            return round(float(packet_or_frame.pts * stream.time_base) * clips.RATE)

        independent = stream.codec_context.codec.intra_only  # frames do not refer to others
        for packet in container.demux(stream):
            wanted = packet.pts is None or number(packet) in WANTED
            if independent and not wanted:
                continue
            # Other frames are decoded only if frames refer to them.
            stream.codec_context.skip_frame = "DEFAULT" if wanted else "NONREF"
            for frame in packet.decode():
                if number(frame) in WANTED:
                    image = converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    frames[WANTED.index(number(frame))] = cv2.resize(image, (SIDE, SIDE))
                if number(frame) >= WANTED[-1]:
                    return frames
    raise ValueError(f"{path} ends before frame {WANTED[-1]}")


def by_opencv(path: str) -> Batch:
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    frames = []
    for number in range(WANTED[-1] + 1):  # seeking is slower than decoding 12 frames
        capture.grab()
        if number in WANTED:
            frame = cv2.resize(capture.retrieve()[1], (SIDE, SIDE))
            frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(frames)


# Arrays


def cropped(data: Any) -> Any:
    volume = fn.decoders.numpy(data, dtype=types.FLOAT)
    volume = fn.slice(volume, [VOLUME - CROP] * 3, [CROP] * 3, axes=[0, 1, 2])
    volume = fn.reshape(volume.gpu() if GPU else volume, shape=[CROP, CROP, CROP, 1], layout="DHWC")
    return fn.flip(volume, depthwise=1, vertical=1, horizontal=0)


def by_slicing(path: str, mmap_mode: Any = None) -> Batch:
    volume = np.load(path, mmap_mode=mmap_mode)
    return volume[VOLUME - CROP :, VOLUME - CROP :, VOLUME - CROP :][::-1, ::-1, :, None]


def normalized(row: Any) -> Any:
    return ((row.gpu() if GPU else row) - 0.5) * 2.0


# Files


def write_volumes(folder: pathlib.Path, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    for number in range(count):
        np.save(folder / f"{number}.npy", rng.random([VOLUME] * 3, np.float32))
    return sorted(map(str, folder.iterdir()))


def write_recordings(folder: pathlib.Path, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    time = np.arange(RATE * SECONDS) / RATE
    for number in range(count):
        sound = 0.2 * np.sin(2 * np.pi * rng.uniform(200, 2000) * (1 + time / 10) * time)
        soundfile.write(folder / f"{number}.flac", sound + 0.05 * rng.normal(size=len(time)), RATE)
    return sorted(map(str, folder.glob("*.flac")))


def write_clips(folder: pathlib.Path, count: int, codec: str) -> list[str]:
    rng = np.random.default_rng(0)
    suffix = ".avi" if codec == "mjpeg" else ".mp4"
    for number in range(min(count, DRAWN)):
        path = folder / f"{number}{suffix}"
        frames = clips.draw_clip("turning", rng, (320, 240)).astype(int)
        frames = np.concatenate([frames, frames[::-1]])
        noise = rng.integers(-12, 13, (12, *frames.shape[1:]))
        frames = (frames + np.tile(noise, (4, 1, 1, 1))).clip(0, 255).astype(np.uint8)
        if codec == "mjpeg":
            clips.write_avi(path, list(frames))
            continue
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=clips.RATE)
            stream.height, stream.width = frames.shape[1:3]
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
            container.mux(stream.encode())
    for number in range(DRAWN, count):
        shutil.copyfile(folder / f"{number % DRAWN}{suffix}", folder / f"{number}{suffix}")
    return sorted(map(str, folder.iterdir()))


# Measuring


def in_threads(pool: Executor, load: Callable[[str], Batch], paths: Sequence[str]) -> Batch:
    """Makes a batch in threads, which write its rows."""
    first = load(paths[0])
    batch = np.empty((len(paths), *first.shape), first.dtype)
    batch[0] = first

    def write(row: int) -> None:
        batch[row] = load(paths[row])

    list(pool.map(write, range(1, len(paths))))
    return batch


@functools.cache
def mapped(file: str) -> Batch:
    """Maps a file, whose memory the processes share."""
    return np.load(file, mmap_mode="r+")


def write_row(load: Callable[[str], Batch], file: str, row: int, path: str) -> None:
    """Writes a row of a batch in a worker process."""
    mapped(file)[row] = load(path)


class InProcesses:
    """Makes batches in worker processes, which write to shared memory.

    The memory is reused after the batch is on the device.

    Args:
        pool: The processes.
        load: Makes a row from a path.
        count: Number of tasks per batch.
        folder: Directory of files in memory.
    """

    def __init__(self, pool: Executor, load: Callable[[str], Batch], count: int, folder: str):
        self._pool = pool
        self._load = load
        self._count = count
        self._folder = folder
        self._free: list[str] = []  # files that are not in use

    def __call__(self, paths: Sequence[str]) -> jax.Array:
        try:
            file = self._free.pop()
        except IndexError:
            file = self._new_file(paths)
        write = functools.partial(write_row, self._load, file)
        size = math.ceil(len(paths) / self._count)
        list(self._pool.map(write, range(len(paths)), paths, chunksize=size))
        # On a CPU, the array would share the memory of the file.
        batch = jax.device_put(mapped(file) if GPU else mapped(file).copy(), jax.devices()[0])
        batch.block_until_ready()
        self._free.append(file)
        return batch

    def _new_file(self, paths: Sequence[str]) -> str:
        first = self._load(paths[0])
        with tempfile.NamedTemporaryFile(suffix=".npy", dir=self._folder, delete=False) as file:
            shape = len(paths), *first.shape
            np.lib.format.open_memmap(file.name, "w+", first.dtype, shape)
        return file.name


class Ahead:
    """Prefetches batches of the two halves of the files in turn.

    Args:
        make: Makes a batch from paths.
        paths: The files of two batches.
    """

    def __init__(self, make: Make, paths: Sequence[str]):
        self._make = make
        middle = len(paths) // 2
        self._halves = itertools.cycle([paths[:middle], paths[middle:]])
        self._threads = ThreadPoolExecutor(AHEAD)
        self._following = collections.deque(self._start() for _ in range(AHEAD))

    def _start(self) -> Any:
        half = next(self._halves)
        return self._threads.submit(lambda: jax.device_put(self._make(half), jax.devices()[0]))

    def __call__(self) -> jax.Array:
        batch = self._following.popleft().result()
        self._following.append(self._start())
        return batch

    def close(self) -> None:
        """Waits for unfinished batches."""
        self._threads.shutdown()


def fastest(
    load: Callable[[str], Batch], paths: Sequence[str], limit: int, processes: Executor, folder: str
) -> tuple[str, Make, dict[str, float]]:
    """Finds the fastest number of threads or processes for a library.

    Threads are slow if they contend for the GIL, and processes if their results are large.

    Args:
        load: Makes a row from a path.
        paths: The files of two batches.
        limit: Maximum number of threads; 1, 2, 4 and so on are tried. Processes are tried with as
            many tasks per batch, half as many, and a quarter.
        processes: A pool of `limit` running processes.
        folder: Directory of files in memory.

    Returns:
        The name and the function of the fastest way, and the milliseconds per batch of all ways:
        with prefetching, and the minimum of three measurements for ways near the fastest. Slow
        ways are measured with a single batch without prefetching.
    """
    ways: dict[str, Make] = {}
    for count in sorted({limit, limit // 2, limit // 4} - {0, 1}, reverse=True):
        name = f"{limit} processes, {count} per batch"
        ways[name] = InProcesses(processes, load, count, folder)
    for count in sorted({*(2**power for power in range(limit.bit_length())), limit}, reverse=True):
        pool = ThreadPoolExecutor(count)
        name = f"{count} threads" if count > 1 else "1 thread"
        ways[name] = functools.partial(in_threads, pool, load)
    times: dict[str, float] = {}
    for name, make in ways.items():
        for _ in range(2):  # the first batch imports and allocates
            begin = time.perf_counter()
            make(paths[: len(paths) // 2])
            alone = 1e3 * (time.perf_counter() - begin)
        times[name] = alone
        if alone <= 3 * min(times.values()):
            times[name] = _milliseconds_ahead(make, paths)
    for name in [name for name in times if times[name] <= 1.5 * min(times.values())]:
        for _ in range(2):  # a disturbance may be over
            times[name] = min(times[name], _milliseconds_ahead(ways[name], paths))
    best = min(times, key=lambda name: times[name])
    return best, ways[best], times


def _milliseconds_ahead(make: Make, paths: Sequence[str]) -> float:
    """Measures milliseconds per batch with prefetching."""
    batches = Ahead(make, paths)
    for _ in range(AHEAD + 1):
        batches()
    begin = time.perf_counter()
    for _ in range(TRIED):
        batches()
    milliseconds = 1e3 * (time.perf_counter() - begin) / TRIED
    batches.close()
    return milliseconds


def check(first: Any, other: Any, name: str, limit: float) -> None:
    """Checks that two batches are about equal, and not shifted by a row or a column.

    Args:
        first: The batch of dalijax.
        other: The batch of the library.
        name: The name of the library.
        limit: Maximum mean difference, for different decoders.
    """
    wanted, made = np.asarray(first).astype(float), np.asarray(other).astype(float)
    off = np.abs(wanted - made).mean()
    moved = min(np.abs(wanted - np.roll(made, 1, axis)).mean() for axis in (0, 1))
    if off > limit or off > moved / 2:
        sys.exit(f"{name} makes a different first batch: difference {off:.2f}, shifted {moved:.2f}")


class Run:
    """Measures tasks and stores the results.

    Args:
        arguments: The command line.
        folder: Directory of written files.
        shared: Directory of files in memory.
        processes: As many worker processes as DALI has threads.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        folder: pathlib.Path,
        shared: str,
        processes: Executor,
    ):
        self.results: dict[str, Any] = {}
        self.lines: list[tuple[str, ...]] = []
        self._arguments = arguments
        self._folder = folder
        self._shared = shared
        self._processes = processes

    def over(self, source: sources.Source, graph: Callable[..., Any]) -> tuple[str, Turn]:
        """Returns dalijax over a source, without shuffling."""
        make = data_iterator(graph, ["out"], source=source, shuffle=False, auto_reset=True)
        threads = self._arguments.threads
        iterator = turns.endless(make(batch_size=self._arguments.batch, num_threads=threads))
        return f"{threads} threads", Turn(lambda: next(iterator)["out"])

    def measure(
        self,
        task: str,
        variants: Mapping[str, tuple[str, Turn]],
        limit: float = 1e-6,
        tried: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Compares the first batches of all variants with dalijax, and measures all in turns."""
        (own, (_, first)), *others = variants.items()
        wanted = first.run()
        for name, (_, turn) in others:
            check(wanted, turn.run(), name, limit)
        batches = {name: turn for name, (_, turn) in variants.items()}
        count, shortest = self._arguments.batches, math.inf
        for turn in batches.values():
            begin = time.perf_counter()
            for _ in range(count + AHEAD):
                turn.run()
            shortest = min(shortest, (time.perf_counter() - begin) / (count + AHEAD))
        count = max(count, math.ceil(self._arguments.seconds / shortest))
        micros, cores = turns.time_pipelines(batches, self._arguments.rounds, count)
        taken = {name: [us / 1e3 for us in values] for name, values in micros.items()}
        for name, times in taken.items():
            speed = self._arguments.batch / statistics.median(times) * 1e3
            share = turns.share(times, taken[own])
            way, _ = variants[name]
            busy = f"{statistics.median(cores[name]):.1f}"
            spread = report.spread(times, 1)
            self.lines.append((task, name, way, spread, f"{speed:,.0f}", busy, share))
            print(*self.lines[-1], sep=" | ", flush=True)
        self.results[task] = {"ms": taken, "cores": cores, "tried_ms": tried or {}}

    def measure_files(
        self,
        task: str,
        write: Callable[..., list[str]],
        graph: Callable[..., Any],
        others: Mapping[str, Callable[[str], Batch]],
        limit: float,
    ) -> None:
        """Writes the files of two batches, and measures dalijax and the other libraries."""
        folder = self._folder / task.replace(" ", "-")
        folder.mkdir()
        batch, threads = self._arguments.batch, self._arguments.threads
        paths = write(folder, 2 * batch)
        variants, tried = {}, {}
        for name, load in others.items():
            way, make, tried[name] = fastest(load, paths, threads, self._processes, self._shared)
            variants[name] = way, Turn(Ahead(make, paths))
        variants = {"dalijax": self.over(sources.Files(paths=paths), graph), **variants}
        self.measure(task, variants, limit, tried)

    def recordings(self) -> None:
        others = {"soundfile + SciPy": by_scipy}
        others |= {"librosa": by_librosa} if librosa is not None else {}
        self.measure_files("recordings", write_recordings, by_dali, others, 4)

    def clips(self, name: str, codec: str, device: str) -> None:
        others = {"PyAV": by_pyav} if av is not None and cv2 is not None else {}
        others |= {"OpenCV": by_opencv} if cv2 is not None else {}
        write = functools.partial(write_clips, codec=codec)
        graph = functools.partial(sequences, device=device)
        self.measure_files(f"clips of {name}", write, graph, others, 4)

    def volumes(self) -> None:
        lazily = functools.partial(by_slicing, mmap_mode="r")
        others = {"NumPy": by_slicing, "NumPy, mapped": lazily}
        self.measure_files("volumes", write_volumes, cropped, others, 1e-6)

    def rows(self) -> None:
        batch, numbers = self._arguments.batch, itertools.count()
        file = self._folder / "rows.npy"
        np.save(file, np.random.default_rng(0).random((64 * batch, COLUMNS), np.float32))
        rows = np.load(file, mmap_mode="r")

        def by_indexing() -> Batch:
            indices = (next(numbers) * batch + np.arange(batch)) % len(rows)
            return (rows[indices] - np.float32(0.5)) * np.float32(2)

        own = self.over(sources.Arrays({"row": rows}), normalized)
        numpys = "1 thread", Turn(by_indexing)
        self.measure("rows of a table", {"dalijax": own, "NumPy": numpys})


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--batch", type=int, default=64 if GPU else 16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=4, help="minimum batches per round")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="minimum time per variant and round"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no task begins"
    )
    parser.add_argument("--threads", type=int, default=16 if GPU else 2)
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.limit
    report.heading()
    prepare()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        ProcessPoolExecutor(arguments.threads, spawn, initializer=prepare) as processes,
    ):
        wait(
            [processes.submit(time.sleep, 1) for _ in range(arguments.threads)]
        )  # starts the processes
        run = Run(arguments, pathlib.Path(scratch), shared, processes)
        tasks: list[Callable[[], None]] = []
        if soundfile is not None:
            tasks.append(run.recordings)
        # GPUs do not decode Motion JPEG.
        tasks.append(functools.partial(run.clips, "Motion JPEG", "mjpeg", "cpu"))
        if GPU and av is not None:
            tasks.append(functools.partial(run.clips, "H.264", "libx264", "mixed"))
        tasks += [run.volumes, run.rows]
        for task in tasks:
            if run.results and time.monotonic() > ends:
                break
            task()
    heads = (
        "",
        "",
        "threads or processes",
        f"ms per batch of {arguments.batch}",
        "per second",
        "CPU cores in use",
        "ratio to dalijax's time",
    )
    report.table(heads, run.lines)
    groups = {
        task: {name: statistics.median(values) for name, values in seen["ms"].items()}
        for task, seen in run.results.items()
    }
    report.write(arguments.out, "media", run.results, groups, "ms per batch")


if __name__ == "__main__":
    main()
