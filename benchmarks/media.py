"""Recordings, clips and arrays by DALI over a source, beside the usual libraries of Python.

Recordings are FLACs of 10 s at 16 kHz, of which log-mel spectrograms are made: soundfile and SciPy,
or librosa. Clips are Motion JPEGs of 320x240, decoded on the CPU, and on a GPU H.264, of which 8
frames with a stride of 2 are resized to 112x112: PyAV or OpenCV, resized by OpenCV. Volumes are
.npy files of 96x96x96 f32, cropped to 64x64x64 and mirrored: NumPy, which reads the whole file as
DALI does, or maps it and reads the crop alone. Rows are 1,024 f32 of one mapped .npy, normalised:
NumPy, in one call.

The other libraries work two batches ahead, as DALI does, in threads or in worker processes, in as
many as each is fastest in, up to as many as DALI has threads; each decoder has one thread.
Processes write into memory that they share. Rows of the table are made when they are taken. All
batches end on JAX's first device. All read the same files and take turns, in another order each
round; before the first round their results are compared. What is not installed is left out; all is
in the extra `bench`. After ``--limit`` seconds no task begins, once one was measured.
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
PIECE = 128  # windows that are transformed at once, and stay in a core's cache
START, LENGTH, STRIDE, SIDE = 12, 8, 2, 112  # of sequences
WANTED = range(START, START + LENGTH * STRIDE, STRIDE)  # frames
AHEAD = 2  # batches
TRIED = 6  # batches of each way in which a library may work
DRAWN = 16  # clips; the other files are copies of these
VOLUME, CROP = 96, 64  # voxels of a side
COLUMNS = 1024  # of a table
Batch = NDArray[Any]
Make = Callable[[Sequence[str]], Batch | jax.Array]  # a batch of paths


def module(name: str) -> Any:
    """A module; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


soundfile, librosa, av, cv2 = map(module, ("soundfile", "librosa", "av", "cv2"))


def prepare() -> None:
    """Prepares this process for the libraries' work in threads, or as one of several processes."""
    # Those of NumPy's matrix products, beside those of a pool, are six times as slow.
    threadpoolctl.threadpool_limits(1, "blas")
    if cv2 is not None:
        cv2.setNumThreads(0)
    # malloc keeps what is freed, instead of giving it back. Else NumPy waits for the kernel at each
    # large array: spectrograms took 1.7 times as long, and volumes up to 1.4.
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 1 << 30)


class Turn:
    """A variant as `turns.time_pipelines` has it: `run` has the next batch on the device."""

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
    """The mel filter bank that DALI and librosa have, of shape [BANDS, FFT / 2 + 1]."""
    step, hertz = np.log(6.4) / 27, np.linspace(0, RATE / 2, 100_001)
    mels = np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1) / 1000) / step)
    edges = np.interp(np.linspace(0, mels[-1], BANDS + 2), mels, hertz)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    bins = np.linspace(0, RATE / 2, FFT // 2 + 1)
    weights = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    return (weights.clip(0) * 2 / (high - low)).astype(np.float32)


@functools.cache
def hann() -> NDArray[np.float32]:
    """DALI's window, padded on both sides: of shape [FFT]."""
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

        alone = stream.codec_context.codec.intra_only  # no frame needs another one
        for packet in container.demux(stream):
            wanted = packet.pts is None or number(packet) in WANTED
            if alone and not wanted:
                continue
            # Others are decoded only if frames refer to them.
            stream.codec_context.skip_frame = "DEFAULT" if wanted else "NONREF"
            for frame in packet.decode():
                if number(frame) in WANTED:
                    picture = converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    frames[WANTED.index(number(frame))] = cv2.resize(picture, (SIDE, SIDE))
                if number(frame) >= WANTED[-1]:
                    return frames
    raise ValueError(f"{path} ends before frame {WANTED[-1]}")


def by_opencv(path: str) -> Batch:
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    frames = []
    for number in range(WANTED[-1] + 1):  # to seek takes longer than the first 12 frames do
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


def in_threads(pool: Executor, one: Callable[[str], Batch], paths: Sequence[str]) -> Batch:
    """A batch, whose rows the threads write."""
    first = one(paths[0])
    batch = np.empty((len(paths), *first.shape), first.dtype)
    batch[0] = first

    def write(row: int) -> None:
        batch[row] = one(paths[row])

    list(pool.map(write, range(1, len(paths))))
    return batch


@functools.cache
def mapped(file: str) -> Batch:
    """The memory of a file, which processes share."""
    return np.load(file, mmap_mode="r+")


def write_row(one: Callable[[str], Batch], file: str, row: int, path: str) -> None:
    """What a process makes of a batch."""
    mapped(file)[row] = one(path)


class InProcesses:
    """Makes batches in worker processes, which write into memory that they share.

    A batch is on the device before the memory of its file is written to again.

    Args:
        pool: The processes.
        one: Makes a row of a path.
        count: Tasks of a batch.
        folder: Where files are kept in memory.
    """

    def __init__(self, pool: Executor, one: Callable[[str], Batch], count: int, folder: str):
        self._pool = pool
        self._one = one
        self._count = count
        self._folder = folder
        self._free: list[str] = []  # files that no batch is being made in

    def __call__(self, paths: Sequence[str]) -> jax.Array:
        try:
            file = self._free.pop()
        except IndexError:
            file = self._new_file(paths)
        write = functools.partial(write_row, self._one, file)
        size = math.ceil(len(paths) / self._count)
        list(self._pool.map(write, range(len(paths)), paths, chunksize=size))
        # Arrays on a CPU would have the memory of the file.
        batch = jax.device_put(mapped(file) if GPU else mapped(file).copy(), jax.devices()[0])
        batch.block_until_ready()
        self._free.append(file)
        return batch

    def _new_file(self, paths: Sequence[str]) -> str:
        first = self._one(paths[0])
        with tempfile.NamedTemporaryFile(suffix=".npy", dir=self._folder, delete=False) as file:
            shape = len(paths), *first.shape
            np.lib.format.open_memmap(file.name, "w+", first.dtype, shape)
        return file.name


class Ahead:
    """Batches of two halves of the files in turn, which are made ahead of time.

    Args:
        make: Makes a batch of paths.
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
        """Waits for what is being made."""
        self._threads.shutdown()


def fastest(
    one: Callable[[str], Batch], paths: Sequence[str], most: int, processes: Executor, folder: str
) -> tuple[str, Make, dict[str, float]]:
    """How a library makes batches in the shortest time, its name, and the times of all ways.

    Threads do less where they wait for Python's lock, and processes where their results are large.

    Args:
        one: Makes a row of a path.
        paths: The files of two batches.
        most: It tries 1, 2, 4 and so on threads, so many at most, and so many processes with one
            task of a batch for each, for half, or for a quarter of them.
        processes: A pool of so many processes, which run.
        folder: Where files are kept in memory.

    Returns:
        Milliseconds of a batch by each way, ahead of time, and the least of three for those near
        the fastest; of one batch alone where that took three times what the fastest way did.
    """
    ways: dict[str, Make] = {}
    for count in sorted({most, most // 2, most // 4} - {0, 1}, reverse=True):
        name = f"{most} processes, {count} a batch"
        ways[name] = InProcesses(processes, one, count, folder)
    for count in sorted({*(2**power for power in range(most.bit_length())), most}, reverse=True):
        pool = ThreadPoolExecutor(count)
        name = f"{count} threads" if count > 1 else "1 thread"
        ways[name] = functools.partial(in_threads, pool, one)
    times: dict[str, float] = {}
    for name, make in ways.items():
        for _ in range(2):  # the first one imports and allocates
            begin = time.perf_counter()
            make(paths[: len(paths) // 2])
            alone = 1e3 * (time.perf_counter() - begin)
        times[name] = alone
        if alone <= 3 * min(times.values()):
            times[name] = _milliseconds_ahead(make, paths)
    for name in [name for name in times if times[name] <= 1.5 * min(times.values())]:
        for _ in range(2):  # what disturbed one of them may be over
            times[name] = min(times[name], _milliseconds_ahead(ways[name], paths))
    best = min(times, key=lambda name: times[name])
    return best, ways[best], times


def _milliseconds_ahead(make: Make, paths: Sequence[str]) -> float:
    """Of a batch, made ahead of time."""
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
    """That a library makes about the same batch, whose rows are no others, nor moved by one.

    Args:
        first: dalijax's.
        other: The library's.
        name: Its name.
        limit: The mean difference that decoders may have.
    """
    wanted, made = np.asarray(first).astype(float), np.asarray(other).astype(float)
    off = np.abs(wanted - made).mean()
    moved = min(np.abs(wanted - np.roll(made, 1, axis)).mean() for axis in (0, 1))
    if off > limit or off > moved / 2:
        sys.exit(
            f"{name} makes something else of the first batch: {off:.2f} off, {moved:.2f} moved"
        )


class Run:
    """Tasks that are measured one after the other, and what they took.

    Args:
        arguments: Of the command line.
        folder: Where files may be written.
        shared: Where files are kept in memory.
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
        """dalijax over a source, in order."""
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
        """Compares the first batches of all with those of the first, and measures them in turns."""
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
        taken = {name: [one / 1e3 for one in values] for name, values in micros.items()}
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
        """Writes the files of two batches, and measures dalijax and the others over them."""
        folder = self._folder / task.replace(" ", "-")
        folder.mkdir()
        batch, threads = self._arguments.batch, self._arguments.threads
        paths = write(folder, 2 * batch)
        variants, tried = {}, {}
        for name, one in others.items():
            way, make, tried[name] = fastest(one, paths, threads, self._processes, self._shared)
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
    parser.add_argument("--batches", type=int, default=4, help="of a round at least")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each in a round at least")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, when tasks end")
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
        wait([processes.submit(time.sleep, 1) for _ in range(arguments.threads)])  # they begin
        run = Run(arguments, pathlib.Path(scratch), shared, processes)
        tasks: list[Callable[[], None]] = []
        if soundfile is not None:
            tasks.append(run.recordings)
        # Motion JPEG is what GPUs do not decode.
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
        "in",
        f"ms of a batch of {arguments.batch}",
        "a second",
        "cores busy",
        "share of dalijax's time",
    )
    report.table(heads, run.lines)
    groups = {
        task: {name: statistics.median(values) for name, values in seen["ms"].items()}
        for task, seen in run.results.items()
    }
    report.write(arguments.out, "media", run.results, groups, "ms of a batch")


if __name__ == "__main__":
    main()
