"""Images per second of every way to feed DALI from Grain, and of Grain with OpenCV.

All variants do the same work in one run, in turn, for some rounds: JPEGs of 500 x 375 to a random
resized crop of 224, mirrored, normalised, f16, on the GPU (on the CPU without one); figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from nvidia.dali import backend, fn, pipeline_def, types

import photos
from dalijax import data_iterator
from dalijax import fn as dalijax_fn
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform

GPU = backend.GetCUDADeviceCount() > 0
LOAD = 0.9
MEAN = np.array([123.7, 116.3, 103.5], np.float32)
STD = np.array([58.4, 57.1, 57.4], np.float32)


def augment(encoded: Any) -> Any:
    """The work on an encoded image."""
    if GPU:
        images = fn.decoders.image(encoded, device="mixed", hw_decoder_load=LOAD)
    else:
        images = fn.decoders.image(encoded)
    images = fn.random_resized_crop(images, size=(224, 224))
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16,
        output_layout="HWC",
        mean=MEAN.tolist(),
        std=STD.tolist(),
        mirror=fn.random.coin_flip(),
    )


def reading(files: list[str], shard_id: int = 0, num_shards: int = 1) -> Any:
    """The graph over DALI's own reader."""
    encoded, labels = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        name="reader",
        random_shuffle=True,
        pad_last_batch=True,
        shard_id=shard_id,
        num_shards=num_shards,
    )
    return augment(encoded), labels


def of_bytes(image: Any, label: Any) -> Any:
    return augment(image), label


def of_paths(path: Any, label: Any) -> Any:
    return augment(dalijax_fn.read_file(path)), label


class Read(grain.transforms.Map):
    """A record of a path becomes one of the file's bytes."""

    def map(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"image": pathlib.Path(record["path"]).read_bytes(), "label": record["label"]}


class Decode(grain.transforms.RandomMap):
    """The same work by OpenCV, in Grain's worker processes."""

    def random_map(self, record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        import cv2

        cv2.setNumThreads(0)  # each worker has a core
        image = cv2.imread(record["path"])[:, :, ::-1]
        height, width = image.shape[:2]
        for _ in range(10):
            area = rng.uniform(0.08, 1.0) * height * width
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if w <= width and h <= height:
                break
        else:
            w, h = width, height
        left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
        crop = cv2.resize(image[top : top + h, left : left + w], (224, 224))
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        made = ((crop - MEAN) * (1 / STD)).astype(np.float16)
        return {"images": made, "labels": record["label"]}


class Paths:
    """A data source of records with a path."""

    def __init__(self, files: list[str]):
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"path": self._files[index], "label": np.int32(index)}

    def __repr__(self) -> str:
        return f"Paths({len(self._files)})"


def variants(
    files: list[str], batch: int, threads: int, workers: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """What is compared: by name, what makes an endless iterator."""
    call = {"batch_size": batch, "num_threads": threads}
    records = grain.MapDataset.source(Paths(files)).seed(1).shuffle().repeat()
    names = ["images", "labels"]

    def transform(graph: Any, **options: Any) -> DALITransform:
        return DALITransform(graph, output_map=names, prefetch=2, **call, **options)

    def raw() -> Iterator[Any]:
        pipeline = pipeline_def(reading)(files, device_id=0 if GPU else None, seed=1, **call)
        pipeline.build()
        pipeline.schedule_run()
        while True:
            outputs = pipeline.share_outputs()
            pipeline.release_outputs()
            pipeline.schedule_run()
            yield outputs

    def source() -> Iterator[Any]:
        iterator_fn = data_iterator(reading, names, reader_name="reader")
        ds = DALIIterDataset(iterator_fn, num_epochs=None, drop_remainder=True, files=files, **call)
        return iter(ds)

    def core() -> Iterator[Any]:
        return data_iterator(reading, names, reader_name="reader").stream(None, files, **call)

    def options(count: int) -> grain.MultiprocessingOptions:
        return grain.MultiprocessingOptions(count, per_worker_buffer_size=2)

    def by_workers(graph: Any, operation: Any = None) -> Iterator[Any]:
        ds = records.map(operation) if operation else records
        lists = ds.batch(batch, batch_fn=list).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        )
        return iter(lists.mp_prefetch(options(workers)).pipe(transform(graph)))

    def loader(worker_count: int) -> Iterator[Any]:
        sampler = grain.samplers.IndexSampler(len(files), shuffle=True, seed=1)
        made = DALIDataLoader(
            Paths(files),
            sampler,
            pipeline_fn=of_paths,
            output_map=names,
            drop_remainder=True,
            worker_count=worker_count,
            **call,
        )
        return iter(made)

    def opencv() -> Iterator[Any]:
        ds = records.random_map(Decode()).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=batch)
        )
        ds = ds.batch(batch).mp_prefetch(options(workers))
        return (jax.device_put(one) for one in ds)

    one = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return {
        "raw DALI reader": raw,
        "dalijax.data_iterator": core,
        "DALIIterDataset": source,
        "DALITransform, MapDataset of paths": lambda: iter(records.pipe(transform(of_paths))),
        "DALITransform, MapDataset of paths, 1 read thread": lambda: iter(
            records.pipe(transform(of_paths, read_options=one))
        ),
        "DALITransform, MapDataset of bytes": lambda: iter(
            records.map(Read()).pipe(transform(of_bytes))
        ),
        "DALITransform, IterDataset of paths": lambda: iter(
            records.to_iter_dataset().pipe(transform(of_paths))
        ),
        "DALITransform, IterDataset of bytes": lambda: iter(
            records.map(Read()).to_iter_dataset().pipe(transform(of_bytes))
        ),
        f"DALITransform, {workers} workers, lists of paths": lambda: by_workers(of_paths),
        f"DALITransform, {workers} workers, lists of bytes": lambda: by_workers(of_bytes, Read()),
        "DALIDataLoader, paths": lambda: loader(0),
        f"DALIDataLoader, paths, {workers} workers": lambda: loader(workers),
        f"Grain + OpenCV, {workers} workers": opencv,
    }


def seconds(iterator: Iterator[Any], batches: int) -> float:
    """Seconds for so many batches, the last of them there."""
    start = time.perf_counter()
    for _ in range(batches):
        last = next(iterator)
    jax.block_until_ready([x for x in jax.tree.leaves(last) if isinstance(x, jax.Array)])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each variant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8, help="of DALI")
    parser.add_argument("--workers", type=int, default=16, help="of Grain")
    parser.add_argument(
        "--match", default="", help="only variants whose name has it, or one of a|b"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="where the JPEGs lie, or are put")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("grain_rates.json"))
    args = parser.parse_args()
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    with tempfile.TemporaryDirectory() as folder:
        files = photos.make(args.folder or pathlib.Path(folder), args.files)
        made = variants(files, args.batch, args.threads, args.workers)
        rates: dict[str, list[float]] = {
            name: [] for name in made if any(part in name for part in args.match.split("|"))
        }
        for _ in range(args.rounds):  # in turn, so that what disturbs one disturbs all
            for name, own in rates.items():
                iterator = made[name]()
                warm = seconds(iterator, 8) / 8
                warm = min(warm, seconds(iterator, 8) / 8)
                batches = max(4, min(400, round(args.seconds / warm)))
                own.append(args.batch * batches / seconds(iterator, batches))
                getattr(iterator, "close", lambda: None)()
                print(f"  {name}: {own[-1]:,.0f}", flush=True)
        rows = []
        base = statistics.median(next(iter(rates.values())))
        for name, own in rates.items():
            middle = statistics.median(own)
            rows.append({"variant": name, "images_per_s": middle, "rates": own})
            print(
                f"{name:52s} {middle:9,.0f} images/s ({min(own):,.0f} to {max(own):,.0f}), "
                f"{middle / base:.2f} of {next(iter(rates))}",
                flush=True,
            )
    args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
