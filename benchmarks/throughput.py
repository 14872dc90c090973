"""Measures images per second of DALI, DALI's plugin, dalijax, its adapters, and others.

All variants do the same work in one run, in turn, for several rounds: JPEGs of 500 x 375 are
decoded, cropped at random to 224, mirrored and normalized to float16, on the GPU if there is one.
Values are medians over the rounds, and ratios compare within a round::

    python benchmarks/throughput.py --threads 8 --workers 16

With ``--read``, the sources are compared without decoding. DALI reads each byte of the images once,
on the CPU::

    python benchmarks/throughput.py --read --threads 2 --rounds 5

With ``--views``, each image becomes several uint8 crops whose colors are changed: the views of
SimCLR, BYOL and DINO. DINO has two views of 224 x 224 and six of 96 x 96. The raw loop makes DINO's
crops alone, and the other variants add one change of colors after the other::

    python benchmarks/throughput.py --views --threads 8 --seconds 4

With ``--windows``, boxes and labels, or a mask, follow the crop of each image. The records are in
memory. They have 0 to 8 boxes, and a PNG mask of 500 x 375. Ratios are to the plain crop::

    python benchmarks/throughput.py --windows --threads 8 --seconds 4 --rounds 7

With ``--packed``, images of many sizes keep their aspect ratio and become patches: one image per
row, or several.

    python benchmarks/throughput.py --packed --threads 8 --seconds 4 --rounds 7

After ``--limit`` seconds, no turn begins, but each variant has at least one turn.
"""

from __future__ import annotations

import functools
import io
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import flags
from nvidia.dali import OperatorConcurrency, fn, pipeline_def, types
from nvidia.dali.plugin import jax as dax
from PIL import Image, ImageDraw

import other_inputs
import photos
import report
import turns
from dalijax import augment as dalijax_augment
from dalijax import data_iterator, sources
from dalijax import fn as dalijax_fn
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform, pack_records
from report import GPU

RAW = "raw DALI loop"
PLAIN = "plain crop"
ARRAY_RECORD, HUGGING_FACE = "Records of ArrayRecord", "Records of HuggingFace"
KINDS = ("Tar", "TFRecord", "Files", ARRAY_RECORD, HUGGING_FACE)
LOAD = 0.9
REPEATS = 4  # of the records of packed rows in an epoch
MEAN = np.array([123.7, 116.3, 103.5], np.float32)
STD = np.array([58.4, 57.1, 57.4], np.float32)
WEAK = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
STRONG = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
COLORS = ("jitter", "grayscale", "blur", "solarize")
NORMALIZED = ((np.arange(256, dtype=np.float32)[:, None] - MEAN) / STD).astype(np.float16)[None]


class View(NamedTuple):
    """A view: its size and area, the strengths of its jitter, its blur, and probabilities."""

    size: int
    scale: tuple[float, float]
    jitter: dict[str, float]
    kernel_size: int
    blur: float
    solarize: float = 0.0


VIEWS = {
    "SimCLR": [View(224, (0.08, 1.0), STRONG, 23, 0.5)] * 2,
    "BYOL": [View(224, (0.08, 1.0), WEAK, 23, 1.0), View(224, (0.08, 1.0), WEAK, 23, 0.1, 0.2)],
    "DINO": [
        View(224, (0.4, 1.0), WEAK, 9, 1.0),
        View(224, (0.4, 1.0), WEAK, 9, 0.1, 0.2),
        *[View(96, (0.05, 0.4), WEAK, 9, 0.5)] * 6,
    ],
}


def decoded(encoded: Any, load: float = LOAD) -> Any:
    """Decodes images, on the GPU if there is one; ``load`` is the share of its JPEG engines."""
    if GPU:
        return fn.decoders.image(encoded, device="mixed", hw_decoder_load=load)
    return fn.decoders.image(encoded)


def augment(encoded: Any, antialias: bool = True) -> Any:
    """Decodes and augments images."""
    images = decoded(encoded)
    images = fn.random_resized_crop(images, size=(224, 224), antialias=antialias)
    return normalized(images, fn.random.coin_flip())


def normalized(images: Any, mirror: Any) -> Any:
    """Mirrors and normalizes images, float16."""
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16,
        output_layout="HWC",
        mean=MEAN.tolist(),
        std=STD.tolist(),
        mirror=mirror,
    )


def reading(
    files: list[str],
    shard_id: int = 0,
    num_shards: int = 1,
    antialias: bool = True,
) -> Any:
    """Defines the graph over DALI's reader."""
    encoded, labels = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        name="reader",
        random_shuffle=True,
        pad_last_batch=True,
        shard_id=shard_id,
        num_shards=num_shards,
    )
    return augment(encoded, antialias), labels


def plainly(files: list[str]) -> Any:
    """Defines the same without antialiasing, like OpenCV and TensorFlow."""
    return reading(files, antialias=False)


def to_host(files: list[str]) -> Any:
    """Defines the same, and DALI copies the outputs to the host."""
    return tuple(output.cpu() for output in reading(files))


def of_bytes(image: Any, label: Any) -> Any:
    return augment(image), label


def of_paths(path: Any, label: Any) -> Any:
    return augment(dalijax_fn.read_file(path)), label


def of_images(data: Any, *, draw: Any) -> Any:
    """Defines the same over a source, with random numbers of `draw`, without labels."""
    images = dalijax_augment.random_resized_crop(decoded(data), 224, flip=0.5, draw=draw)
    return dalijax_augment.normalize(images, MEAN.tolist(), STD.tolist(), dtype="float16")


def of_source(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines the same with labels."""
    return of_images(data, draw=draw), label


def changed(images: Any, view: View, colors: Sequence[str], draw: Any) -> Any:
    """Defines a view of images, with some of `COLORS`."""
    images = dalijax_augment.random_resized_crop(
        images, view.size, scale=view.scale, flip=0.5, draw=draw
    )
    if "jitter" in colors:
        images = dalijax_augment.color_jitter(images, **view.jitter, probability=0.8, draw=draw)
    if "grayscale" in colors:
        images = dalijax_augment.grayscale(images, probability=0.2, draw=draw)
    if "blur" in colors:
        images = dalijax_augment.gaussian_blur(
            images, view.kernel_size, probability=view.blur, draw=draw
        )
    if "solarize" in colors and view.solarize:
        images = dalijax_augment.solarize(images, 128, probability=view.solarize, draw=draw)
    return images


def of_views(
    data: Any, label: Any, *, draw: Any, method: str = "DINO", colors: Sequence[str] = COLORS
) -> Any:
    """Defines the views of a method, stacked by size."""
    images = decoded(data, 1.0)
    views = [changed(images, view, colors, draw) for view in VIEWS[method]]
    return *(fn.stack(*part) for part in (views[:2], views[2:]) if part), label


def of_crop(data: Any, *, draw: Any) -> Any:
    """Defines a random crop that is flipped at random."""
    images = decoded(data, 1.0)
    return normalized(dalijax_augment.random_resized_crop(images, 224, flip=0.5, draw=draw), 0)


def of_label(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines the same with a label."""
    return of_crop(data, draw=draw), label


def of_window(data: Any, *, draw: Any) -> Any:
    """Defines the crop as a window."""
    images = decoded(data, 1.0)
    window = dalijax_augment.random_window(images, 224, flip=0.5, draw=draw)
    return normalized(window.image(images), 0)


def of_boxes(data: Any, boxes: Any, labels: Any, *, draw: Any, by_iou: bool = False) -> Any:
    """Defines a window of images, boxes and labels; possibly one that overlaps with a box."""
    images = decoded(data, 1.0)
    if by_iou:
        window = dalijax_augment.iou_window(images, boxes, 224, flip=0.5, draw=draw)
    else:
        window = dalijax_augment.random_window(images, 224, flip=0.5, draw=draw)
    return normalized(window.image(images), 0), *window.boxes(boxes, labels)


def of_mask(data: Any, mask: Any, *, draw: Any, device: str = "cpu") -> Any:
    """Defines a window of images and of masks, which are decoded on a device."""
    images = decoded(data, 1.0)
    masks = fn.decoders.image(mask, device=device, output_type=types.GRAY)
    window = dalijax_augment.random_window(images, 224, flip=0.5, draw=draw)
    return normalized(window.image(images), 0), window.mask(masks)


def of_patches(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines patches of whole images, padded to 256."""
    patches, positions, mask, _ = dalijax_augment.patches(decoded(data, 1.0), draw=draw)
    return patches, positions, mask, label


def of_rows(data: Any, label: Any, *, pack: Any) -> Any:
    """Defines patches of whole images, packed into rows."""
    return pack.patches(decoded(data, 1.0)), pack.per_image(label)


def eight_crops(files: list[str]) -> Any:
    """Defines crops like those of DINO over DALI's reader."""
    images = decoded(fn.readers.file(files=files, name="reader", random_shuffle=True)[0], 1.0)
    crops = [
        fn.random_resized_crop(images, size=(view.size, view.size), random_area=view.scale)
        for view in VIEWS["DINO"]
    ]
    return fn.stack(*crops[:2]), fn.stack(*crops[2:])


def largest_byte(data: Any) -> Any:
    """Defines the largest byte of each encoded image, for which DALI reads all its bytes."""
    return fn.reductions.max(data, axes=[0])


def largest_of_files(files: list[str]) -> Any:
    """Defines the same over DALI's reader."""
    return largest_byte(fn.readers.file(files=files, name="reader", random_shuffle=True)[0])


def open_source(kind: str, files: list[str]) -> Any:
    """Returns a source of the files, or of archives of the files.

    Raises:
        ImportError: If the library of the kind is not installed.
    """
    folder = pathlib.Path(files[0]).parent / "packed"
    if kind == "Files":
        return sources.Files(paths=files, labels=list(range(len(files))))
    if kind == "TFRecord":
        path = folder / "all.tfrecord"
        path = pathlib.Path(photos.tfrecord(path, files)) if not path.exists() else path
        return sources.TFRecord([str(path)], fields={"data": "image", "label": "label"})
    if kind == ARRAY_RECORD:
        path = folder / "all.array_record"
        path = path if path.exists() else pathlib.Path(photos.array_record(path, files))
        return sources.Records(grain.sources.ArrayRecordDataSource(str(path)))
    if kind == HUGGING_FACE:
        import datasets

        path = folder / "huggingface"
        path = path if path.exists() else pathlib.Path(photos.huggingface(path, files))
        images = datasets.load_from_disk(str(path))
        return sources.Records(images, {"data": "image/bytes", "label": "label"})
    count = 4 if kind == "Mixture" else 1
    tars = sorted(map(str, folder.glob(f"*-of-{count}.tar"))) or photos.tars(folder, files, count)
    fields = {"data": "jpg", "label": "cls"}
    if kind == "Tar":
        return sources.Tar(tars, fields)
    weights = (4, 3, 2, 1)
    return sources.Mixture([(sources.Tar([t], fields), w) for t, w in zip(tars, weights)])


def of_many_sizes(files: Sequence[str]) -> list[dict[str, Any]]:
    """Returns records of the images of files, at sizes that are distributed like ImageNet's."""
    rng, records = np.random.default_rng(0), []
    areas = np.exp(rng.normal(np.log(500 * 375), 0.7, len(files)))
    aspects = np.exp(rng.normal(0.15, 0.35, len(files)))
    for k, (area, aspect) in enumerate(zip(areas, aspects)):
        size = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        jpeg = io.BytesIO()
        Image.open(files[k]).resize(size).save(jpeg, "jpeg", quality=90)
        records.append({"data": jpeg.getvalue(), "label": np.int32(k)})
    return records


def labelled(files: Sequence[str]) -> list[dict[str, Any]]:
    """Returns records of files: a label, 0 to 8 boxes, and a mask of the ellipses in the boxes."""
    rng, records = np.random.default_rng(0), []
    for file in files:
        start = rng.uniform(0, 0.8, (rng.integers(9), 2))
        boxes = np.concatenate([start, rng.uniform(start + 0.1, 1)], axis=1)
        boxes = (boxes * np.tile(photos.SIZE, 2)).astype(np.float32)
        labels = rng.integers(1, 80, len(boxes), np.int32)
        image, png = Image.new("L", photos.SIZE), io.BytesIO()
        for box, label in zip(boxes.tolist(), labels.tolist()):
            ImageDraw.Draw(image).ellipse(box, fill=label)
        image.save(png, "png")
        data = pathlib.Path(file).read_bytes()
        record = {"data": data, "label": len(boxes), "boxes": boxes, "labels": labels}
        records.append({**record, "mask": png.getvalue()})
    return records


class Read(grain.transforms.Map):
    """Replaces the path of a record by the bytes of the file."""

    def map(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"image": pathlib.Path(record["path"]).read_bytes(), "label": record["label"]}


class Normalize(grain.transforms.Map):
    """Normalizes a batch of uint8 pixels to float16, in Grain's workers."""

    def map(self, batch: dict[str, Any]) -> dict[str, Any]:
        import cv2

        pixels = batch["images"]
        # A lookup table of float16 values, which is four times as fast as NumPy's arithmetic.
        bits = cv2.LUT(pixels.reshape(-1, *pixels.shape[2:]), NORMALIZED.view(np.int16))
        return batch | {"images": bits.view(np.float16).reshape(pixels.shape)}


def tensorflow_decode(path: Any, label: Any) -> tuple[Any, Any]:
    """Does the same work with TensorFlow."""
    import tensorflow as tf

    image = other_inputs.tensorflow_crop(path)
    if GPU:  # the GPU normalizes the image
        return tf.cast(tf.round(image), tf.uint8), label
    # Long rows are faster: a last dimension of three channels takes a third of the whole time.
    rows = tf.reshape(image, [224, 3 * 224])
    rows = tf.cast((rows - np.tile(MEAN, 224)) / np.tile(STD, 224), tf.float16)
    return tf.reshape(rows, [224, 224, 3]), label


def placed(batches: Iterator[Any]) -> Iterator[Any]:
    """Places batches on the device; a GPU normalizes the pixels."""
    normalize = jax.jit(lambda images: ((images - MEAN) / STD).astype(np.float16))
    for batch in batches:
        images, labels = jax.device_put(batch)
        yield (normalize(images) if GPU else images), labels


class Paths:
    """A Grain data source of records with a path."""

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
    """Returns functions that create the endless iterators, by name."""
    call = {"batch_size": batch, "num_threads": threads}
    records = grain.MapDataset.source(Paths(files)).seed(1).shuffle().repeat()
    names = ["images", "labels"]

    def transform(graph: Any, **options: Any) -> DALITransform:
        return DALITransform(graph, output_map=names, prefetch=2, **call, **options)

    def raw(graph: Callable[..., Any] = reading) -> Iterator[Any]:
        pipeline = pipeline_def(graph)(files, device_id=0 if GPU else None, seed=1, **call)
        return turns.raw_loop(pipeline)

    def source() -> Iterator[Any]:
        iterator_fn = data_iterator(reading, names, reader_name="reader")
        ds = DALIIterDataset(iterator_fn, num_epochs=None, drop_remainder=True, files=files, **call)
        return iter(ds)

    def core() -> Iterator[Any]:
        return data_iterator(reading, names, reader_name="reader").stream(None, files, **call)

    def of_records(kind: str) -> Iterator[Any]:
        has_labels = kind != ARRAY_RECORD
        iterator_fn = data_iterator(
            of_source if has_labels else of_images,
            names if has_labels else names[:1],
            source=open_source(kind, files),
        )
        return iterator_fn.stream(None, **call)

    def plugin() -> Iterator[Any]:
        iterator = dax.data_iterator(reading, names, reader_name="reader", auto_reset=True)(
            files, seed=1, device_id=0 if GPU else None, **call
        )
        return turns.endless(iterator)

    def dataset() -> Iterator[Any]:
        from dalijax.adapters.tfdata import DALIDataset

        iterator_fn = data_iterator(reading, names, reader_name="reader")
        return iter(DALIDataset(iterator_fn, files=files, **call).repeat())

    def options(count: int) -> grain.MultiprocessingOptions:
        return grain.MultiprocessingOptions(count, per_worker_buffer_size=2)

    def by_workers(graph: Any, operation: Any = None) -> Any:
        ds = records.map(operation) if operation else records
        batches = ds.batch(batch, batch_fn=pack_records).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        )
        return iter(batches.mp_prefetch(options(workers)).pipe(transform(graph)))

    def loader(worker_count: int) -> Iterator[Any]:
        sampler = grain.samplers.IndexSampler(len(files), shuffle=True, seed=1)
        batches = DALIDataLoader(
            Paths(files),
            sampler,
            pipeline_fn=of_paths,
            output_map=names,
            drop_remainder=True,
            worker_count=worker_count,
            **call,
        )
        return iter(batches)

    def opencv(count: int) -> Iterator[Any]:
        """Returns batches of Grain's workers, or of its threads if `count` is 0."""
        # Each worker or thread prefetches batches.
        threads = 0 if count else workers
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        ds = records.batch(batch).random_map(other_inputs.Augment(0))
        ds = (ds if GPU else ds.map(Normalize())).to_iter_dataset(read)
        if count:
            ds = ds.mp_prefetch(options(count))
        return placed((batch["images"], batch["labels"]) for batch in ds)

    def tensorflow() -> Iterator[Any]:
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        ds = tf.data.Dataset.from_tensor_slices((files, np.arange(len(files), dtype=np.int32)))
        ds = ds.shuffle(len(files), seed=1).repeat()
        ds = ds.map(tensorflow_decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        ds = ds.batch(batch, drop_remainder=True).prefetch(2)
        return placed(ds.as_numpy_iterator())

    def of_map(graph: Any, read_threads: int, operation: Any = None) -> Iterator[Any]:
        read = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=4)
        ds = records.map(operation) if operation else records
        return iter(ds.pipe(transform(graph, read_options=read)))

    return {
        RAW: raw,
        **({f"{RAW}, to the host": lambda: raw(to_host)} if GPU else {}),
        f"{RAW}, not antialiased": lambda: raw(plainly),
        "DALI's JAX plugin": plugin,
        "dalijax.data_iterator": core,
        **{
            f"dalijax.sources.{kind}": functools.partial(of_records, kind)
            for kind in (*KINDS, "Mixture")
        },
        "DALIIterDataset": source,
        "DALIDataset (tf.data-like)": dataset,
        **{
            f"DALITransform, MapDataset of {kind}, read threads: {count}": functools.partial(
                of_map, graph, count, operation
            )
            for kind, graph, operation in (("paths", of_paths, None), ("bytes", of_bytes, Read()))
            for count in (1, 2, 4)
        },
        "DALITransform, IterDataset of paths": lambda: iter(
            records.to_iter_dataset().pipe(transform(of_paths))
        ),
        "DALITransform, IterDataset of bytes": lambda: iter(
            records.map(Read()).to_iter_dataset().pipe(transform(of_bytes))
        ),
        f"DALITransform, {workers} workers, packed paths": lambda: by_workers(of_paths),
        f"DALITransform, {workers} workers, packed bytes": lambda: by_workers(of_bytes, Read()),
        "DALIDataLoader, paths": lambda: loader(0),
        f"DALIDataLoader, paths, {workers} workers": lambda: loader(workers),
        f"Grain + OpenCV, {workers} workers": lambda: opencv(workers),
        f"Grain + OpenCV, {workers} threads": lambda: opencv(0),
        "tf.data, TensorFlow's decoder": tensorflow,
    }


def readings(files: list[str], batch: int, threads: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns functions that create endless iterators without a decoder, by name."""
    call: dict[str, Any] = {"batch_size": batch, "num_threads": threads, "device_id": None}

    def raw() -> Iterator[Any]:
        return turns.raw_loop(pipeline_def(largest_of_files)(files, seed=1, **call))

    def of_records(kind: str) -> Iterator[Any]:
        iterator_fn = data_iterator(largest_byte, ["largest"], source=open_source(kind, files))
        return iterator_fn.stream(None, as_numpy=True, **call)

    return {
        RAW: raw,
        **{f"dalijax.sources.{kind}": functools.partial(of_records, kind) for kind in KINDS},
    }


def of_methods(
    files: list[str], batch: int, threads: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns functions that create endless iterators of several views, by name."""
    call: dict[str, Any] = {"batch_size": batch, "num_threads": threads}

    def raw() -> Iterator[Any]:
        device_id = 0 if GPU else None
        return turns.raw_loop(pipeline_def(eight_crops)(files, device_id=device_id, seed=1, **call))

    def of_method(method: str, count: int, **options: Any) -> Iterator[Any]:
        names = ["globals", *(["locals"] if method == "DINO" else []), "labels"]
        iterator_fn = data_iterator(of_views, names, source=open_source("Tar", files))
        return iterator_fn.stream(None, method=method, colors=COLORS[:count], **call, **options)

    return {
        RAW: raw,
        **{
            " + ".join(("DINO: crops", *COLORS[:count])): functools.partial(
                of_method, "DINO", count
            )
            for count in range(len(COLORS) + 1)
        },
        **{
            f"DINO, with {text}": functools.partial(of_method, "DINO", len(COLORS), **options)
            for text, options in (
                ("prefetch_queue_depth=3", {"prefetch_queue_depth": 3}),
                ("OperatorConcurrency.BACKEND", {"concurrency": OperatorConcurrency.BACKEND}),
            )
        },
        **{name: functools.partial(of_method, name, len(COLORS)) for name in ("SimCLR", "BYOL")},
    }


def of_windows(
    files: list[str], batch: int, threads: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns functions that create endless iterators of windows, by name."""
    source = sources.Records(labelled(files))

    def windows(graph: Any, *names: str, **options: Any) -> Callable[[], Iterator[Any]]:
        iterator_fn = data_iterator(graph, ["images", *names], source=source)
        return lambda: iterator_fn.stream(None, batch_size=batch, num_threads=threads, **options)

    boxes = "boxes", "labels", "count"
    return {
        PLAIN: windows(of_crop),
        "plain crop and a label": windows(of_label, "label"),
        "random_window": windows(of_window),
        "random_window, boxes and labels": windows(of_boxes, *boxes),
        "iou_window, boxes and labels": windows(of_boxes, *boxes, by_iou=True),
        **{
            f"random_window, PNG mask decoded on the {unit}": windows(
                of_mask, "masks", device=device
            )
            for unit, device in (("CPU", "cpu"), ("GPU", "mixed"))[: 1 + GPU]
        },
    }


def of_packing(
    files: list[str], batch: int, threads: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns functions that create endless iterators of crops, and of patches."""
    # A plan takes 2 us per record of short epochs, and 0.7 us of long ones.
    source = sources.Records(of_many_sizes(files) * REPEATS)

    def iterator(graph: Any, source: Any, rows: int, *names: str) -> Callable[[], Iterator[Any]]:
        iterator_fn = data_iterator(graph, names, source=source, mask=True)
        return lambda: iterator_fn.stream(None, batch_size=rows, num_threads=threads)

    def packed(length: int, images: int) -> Callable[[], Iterator[Any]]:
        rows = sources.Packed(source, length=length, images=images, tokens=256)
        count = max(1, round(batch * rows.lengths.mean() / length))
        return iterator(of_rows, rows, count, "patches", "label")

    return {
        PLAIN: iterator(of_label, source, batch, "images", "label"),
        "patches, one image per row": iterator(
            of_patches, source, batch, "patches", "positions", "valid", "label"
        ),
        "packed rows of 1,024 tokens": packed(1024, 16),
        "packed rows of 4,096 tokens": packed(4096, 64),
    }


def measure(iterator: Iterator[Any], batch: int, budget: float, ahead: int) -> tuple[float, float]:
    """Measures images per second and microseconds of CPU time per image.

    Args:
        iterator: The batches.
        batch: Images of a batch, if the batch has no mask.
        budget: Seconds, approximately.
        ahead: Number of prefetched batches, which are not timed.
    """
    started, _ = seconds(iterator, 1, batch)
    print(f"  first batch after {started:.1f} s,", end=" ", flush=True)
    seconds(iterator, ahead, batch)
    warm = seconds(iterator, 8, batch)[0] / 8
    batches = max(4, min(400, round(budget / warm)))
    busy = report.cpu_seconds()
    elapsed, images = seconds(iterator, batches, batch)
    return images / elapsed, 1e6 * (report.cpu_seconds() - busy) / images


def seconds(iterator: Iterator[Any], batches: int, batch: int) -> tuple[float, int]:
    """Returns the seconds of some batches, until the last is complete, and their images."""
    start, images = time.perf_counter(), 0
    for _ in range(batches):
        last = next(iterator)
        has_mask = isinstance(last, dict) and "mask" in last
        images += int(np.asarray(last["mask"]).sum()) if has_mask else batch
    jax.block_until_ready([x for x in jax.tree.leaves(last) if isinstance(x, jax.Array)])
    return time.perf_counter() - start, images


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per variant and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no turn begins"
    )
    parser.add_argument("--threads", type=int, default=8, help="DALI's threads")
    parser.add_argument("--workers", type=int, default=16, help="Grain's workers")
    parser.add_argument(
        "--match", default="", help="substrings of names, as a|b; the first variant always runs"
    )
    parser.add_argument("--read", action="store_true", help="compare sources without decoding")
    parser.add_argument("--views", action="store_true", help="measure self-supervised views")
    parser.add_argument("--windows", action="store_true", help="measure windows of boxes and masks")
    parser.add_argument("--packed", action="store_true", help="measure patches in packed rows")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    args = parser.parse_args()
    ends = time.monotonic() + args.limit
    report.heading()
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # required by Grain's workers
    rates: dict[str, list[float]] = {}
    micros: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = photos.make(args.folder or pathlib.Path(folder), args.files)
        if args.read:
            makers = readings(files, args.batch, args.threads)
        elif args.views:
            makers = of_methods(files, args.batch, args.threads)
        elif args.windows:
            makers = of_windows(files, args.batch, args.threads)
        elif args.packed:
            makers = of_packing(files, args.batch, args.threads)
        else:
            makers = variants(files, args.batch, args.threads, args.workers)
        parts = args.match.split("|")
        base = next(iter(makers))
        chosen = [name for name in makers if name == base or any(part in name for part in parts)]
        rates = {name: [] for name in chosen}
        for name in turns.in_turn(rates, args.rounds, is_over=lambda: time.monotonic() > ends):
            try:
                # A new iterator for each turn, since idle iterators continue to fill their buffers.
                iterator = makers[name]()
                ahead = 2 * args.workers + 8 if "Grain" in name or "worker" in name else 8
                rate, busy = measure(iterator, args.batch, args.seconds, ahead)
                getattr(iterator, "close", lambda: None)()
                del iterator
            except ImportError as error:
                print(f"  {name}: skipped, {error}", flush=True)
                del rates[name]
                continue
            rates[name].append(rate)
            micros.setdefault(name, []).append(busy)
            print(f"{name}: {rate:,.0f}, {busy:,.0f} us of CPU time per image", flush=True)
    shares = {name: [a / b for a, b in zip(values, rates[base])] for name, values in rates.items()}
    report.table(
        ("", "images/s", f"ratio to the {base}", "us of CPU time per image"),
        [
            (
                name,
                report.spread(values),
                report.spread(shares[name], 3),
                report.spread(micros[name]),
            )
            for name, values in rates.items()
        ],
    )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    results = [
        {
            "variant": name,
            "images_per_s": medians[name],
            "rates": values,
            "of_raw": shares[name],
            "cpu_us": micros[name],
        }
        for name, values in rates.items()
    ]
    kinds = {
        "-read": args.read,
        "-views": args.views,
        "-windows": args.windows,
        "-packed": args.packed,
    }
    title = "throughput" + next((kind for kind, is_chosen in kinds.items() if is_chosen), "")
    report.write(args.out, title, results, {"": medians}, "images/s")


if __name__ == "__main__":
    main()
