"""Recordings, clips and arrays by DALI over a source, beside the usual libraries of Python.

Recordings are FLACs of 10 s at 16 kHz, of which log-mel spectrograms are made: soundfile and NumPy,
or librosa. Clips are Motion JPEGs of 320x240, decoded on the CPU, and on a GPU H.264, of which 8
frames with a stride of 2 are resized to 112x112: PyAV or OpenCV, resized by OpenCV. Volumes are
.npy files of 96x96x96 f32, cropped to 64x64x64 and mirrored: NumPy, which reads the whole file as
DALI does, or maps it and reads the crop alone. Rows are 1,024 f32 of one mapped .npy, normalised:
NumPy. These work in up to as many threads as DALI has, in as many as each is fastest in, but for
rows, which NumPy takes in one call. All read the same files and take turns, in another order each
round; before the first round their results are compared. What is not installed is left out; all is
in the extra `bench`. Ctrl-C ends it, and what was measured is written.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
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
START, LENGTH, STRIDE, SIDE = 12, 8, 2, 112  # of sequences
DRAWN = 16  # clips; the other files are copies of these
VOLUME, CROP = 96, 64  # voxels of a side
COLUMNS = 1024  # of a table
Batch = NDArray[Any]


def module(name: str) -> Any:
    """A module; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


soundfile, librosa, av, cv2 = map(module, ("soundfile", "librosa", "av", "cv2"))
threadpoolctl = module("threadpoolctl")


class Turn:
    """A variant as `turns.time_pipelines` has it: `run` makes the next batch."""

    def __init__(self, take: Callable[[], Any]):
        self.take = take

    def run(self) -> Any:
        return jax.block_until_ready(self.take())


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


def by_numpy(path: str) -> Batch:
    sound = np.pad(soundfile.read(path, dtype="float32")[0], FFT // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(sound, FFT)[::HOP]
    hann = np.pad(np.sin(np.pi * (np.arange(WINDOW) + 0.5) / WINDOW) ** 2, (FFT - WINDOW) // 2)
    spectrum = np.fft.rfft(windows * hann.astype(np.float32), axis=1).T
    mel = triangles() @ (spectrum.real**2 + spectrum.imag**2)
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
    return fn.resize(frames, size=[SIDE, SIDE], antialias=False)


def resized(frames: list[Any]) -> Batch:
    return np.stack([cv2.resize(frame, (SIDE, SIDE)) for frame in frames])


def by_pyav(path: str) -> Batch:
    wanted = range(START, START + LENGTH * STRIDE, STRIDE)
    frames = []
    with av.open(path) as container:
        stream = container.streams.video[0]
        container.seek(int(START / clips.RATE / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            number = round(float(frame.pts * stream.time_base) * clips.RATE)
            if number in wanted:
                frames.append(frame.to_ndarray(format="rgb24"))
            if number >= wanted[-1]:
                break
    return resized(frames)


def by_opencv(path: str) -> Batch:
    capture = cv2.VideoCapture(path)
    capture.set(cv2.CAP_PROP_POS_FRAMES, START)
    frames = []
    for number in range((LENGTH - 1) * STRIDE + 1):
        capture.grab()
        if number % STRIDE == 0:
            frames.append(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return resized(frames)


# Arrays


def cropped(data: Any) -> Any:
    volume = fn.decoders.numpy(data, dtype=types.FLOAT)
    volume = fn.slice(
        volume.gpu() if GPU else volume, [VOLUME - CROP] * 3, [CROP] * 3, axes=[0, 1, 2]
    )
    volume = fn.reshape(volume, shape=[CROP, CROP, CROP, 1], layout="DHWC")
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


def loop(source: sources.Source, graph: Callable[..., Any], threads: int, batch: int) -> Turn:
    """dalijax over a source, in order."""
    make = data_iterator(graph, ["out"], source=source, shuffle=False, auto_reset=True)
    iterator = turns.endless(make(batch_size=batch, num_threads=threads))
    return Turn(lambda: next(iterator)["out"])


def batch_in(
    pool: ThreadPoolExecutor, one: Callable[[str], Batch], halves: Sequence[list[str]], number: int
) -> Batch:
    return np.stack(list(pool.map(one, halves[number % 2])))


def fastest(one: Callable[[str], Batch], paths: list[str], threads: int) -> int:
    """Of 1, 2, 4 and so on, and so many threads, how many do it in the shortest time.

    More of them do less where they wait for Python's lock.
    """

    def seconds(count: int) -> float:
        with ThreadPoolExecutor(count) as pool:
            batch_in(pool, one, [paths], 0)
            begin = time.perf_counter()
            batch_in(pool, one, [paths], 0)
            return time.perf_counter() - begin

    counts = {*(2**power for power in range(threads.bit_length())), threads}
    return min(sorted(counts), key=seconds)


def variants(
    first: Turn, others: Mapping[str, Callable[[int], Batch]], limit: float
) -> dict[str, Turn]:
    """Every variant of a task, and a check that they make about the same of the first batch.

    Args:
        first: dalijax.
        others: What makes a batch of the others, of its number, by their names.
        limit: The mean difference that decoders may have.
    """
    wanted = np.asarray(first.run()).astype(float)
    turn = {"dalijax": first}
    for name, one in others.items():
        off = np.abs(one(0).astype(float) - wanted).mean()
        if off > limit:
            sys.exit(f"{name} makes something else of the first batch: {off:.2f} off")
        numbers = itertools.count(1)
        turn[name] = Turn(lambda one=one, numbers=numbers: jax.device_put(one(next(numbers))))
    return turn


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--batch", type=int, default=64 if GPU else 16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=6, help="batches of a round")
    parser.add_argument("--threads", type=int, default=16 if GPU else 2)
    arguments = parser.parse_args()
    report.heading()
    sizes = arguments.threads, arguments.batch
    results: dict[str, Any] = {}
    lines = []
    with tempfile.TemporaryDirectory() as scratch, report.ended_by_ctrl_c(results):

        def measure(task: str, turn: dict[str, Turn], threads: Mapping[str, int]) -> None:
            micros = turns.time_pipelines(turn, arguments.rounds, arguments.batches)
            results[task] = {name: [one / 1e3 for one in values] for name, values in micros.items()}
            for name, times in results[task].items():
                speed = arguments.batch / statistics.median(times) * 1e3
                share = turns.share(times, results[task]["dalijax"])
                count = threads.get(name, arguments.threads)
                lines.append((task, name, count, report.spread(times, 1), f"{speed:,.0f}", share))
                print(*lines[-1], sep=" | ", flush=True)

        def measure_files(
            task: str, write: Callable[..., Any], graph: Any, others: Any, limit: float = 4
        ) -> None:
            folder = pathlib.Path(scratch, task.replace(" ", "-"))
            folder.mkdir()
            paths = write(folder, 2 * arguments.batch)
            halves = paths[: arguments.batch], paths[arguments.batch :]
            with contextlib.ExitStack() as pools:
                each, threads = {}, {}
                for name, one in others.items():
                    threads[name] = fastest(one, halves[0], arguments.threads)
                    pool = pools.enter_context(ThreadPoolExecutor(threads[name]))
                    each[name] = functools.partial(batch_in, pool, one, halves)
                first = loop(sources.Files(paths=paths), graph, *sizes)
                measure(task, variants(first, each, limit), threads)

        if soundfile is not None and threadpoolctl is not None:
            # Threads of NumPy's matrix products beside those of the pool are six times as slow.
            threadpoolctl.threadpool_limits(1, "blas")
            others = {"soundfile + NumPy": by_numpy}
            others |= {"librosa": by_librosa} if librosa is not None else {}
            measure_files("recordings", write_recordings, by_dali, others)
        others = {"PyAV": by_pyav} if av is not None and cv2 is not None else {}
        others |= {"OpenCV": by_opencv} if cv2 is not None else {}
        kinds = [("Motion JPEG", "mjpeg", "cpu")]  # which GPUs do not decode
        if GPU and av is not None:
            kinds.append(("H.264", "libx264", "mixed"))
        for name, codec, device in kinds:
            write = functools.partial(write_clips, codec=codec)
            graph = functools.partial(sequences, device=device)
            measure_files(f"clips of {name}", write, graph, others)
        others = {
            "NumPy": by_slicing,
            "NumPy, mapped": functools.partial(by_slicing, mmap_mode="r"),
        }
        measure_files("volumes", write_volumes, cropped, others, limit=1e-6)
        file = pathlib.Path(scratch, "rows.npy")
        np.save(file, np.random.default_rng(0).random((64 * arguments.batch, COLUMNS), np.float32))
        rows = np.load(file, mmap_mode="r")

        def by_indexing(number: int) -> Batch:
            indices = np.arange(number * arguments.batch, (number + 1) * arguments.batch)
            return (rows[indices % len(rows)] - np.float32(0.5)) * np.float32(2)

        first = loop(sources.Arrays({"row": rows}), normalized, *sizes)
        measure(
            "rows of a table", variants(first, {"NumPy": by_indexing}, limit=1e-6), {"NumPy": 1}
        )
    heads = (
        "",
        "",
        "threads",
        f"ms of a batch of {arguments.batch}",
        "a second",
        "share of dalijax's time",
    )
    report.table(heads, lines)
    groups = {
        task: {name: statistics.median(values) for name, values in times.items()}
        for task, times in results.items()
    }
    report.write(arguments.out, "media", results, groups, "ms of a batch")


if __name__ == "__main__":
    main()
