"""The augmentation of the benchmarks in other loaders, each as its documentation recommends.

OpenCV in Grain's workers, tf.data, torchvision in workers of PyTorch's DataLoader, and DALI's JAX
plugin: random resized crop to 224 and a flip. For the recipe, also brightness, contrast and
saturation as defined by torchvision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

import turns

SIDE = 224
GRAY = np.array([0.299, 0.587, 0.114], np.float32)


def opencv_crop(path: str, rng: np.random.Generator) -> Any:
    """Returns a random resized crop of a JPEG with a random flip: RGB, uint8 [224, 224, 3]."""
    import cv2

    cv2.setNumThreads(0)  # one core per worker
    # imread is slower by a tenth.
    with open(path, "rb") as file:
        encoded = np.frombuffer(file.read(), np.uint8)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
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
    crop = cv2.resize(image[top : top + h, left : left + w], (SIDE, SIDE))
    return cv2.flip(crop, 1) if rng.random() < 0.5 else crop


def opencv_jitter(image: Any, strength: float, rng: np.random.Generator) -> Any:
    """Multiplies brightness, contrast and saturation by 1 - strength to 1 + strength."""
    import cv2

    for operation in rng.permutation(3):
        factor = rng.uniform(1 - strength, 1 + strength)
        if operation == 0:
            image = cv2.convertScaleAbs(image, alpha=factor)
        elif operation == 1:
            mean = round(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0])
            levels = np.rint(np.arange(256) * factor + (1 - factor) * mean)
            image = cv2.LUT(image, levels.clip(0, 255).astype(np.uint8))
        else:
            gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
            image = cv2.addWeighted(image, factor, gray, 1 - factor, 0)
    return image


class Augment(grain.transforms.RandomMap):
    """Augments a batch of records with paths with OpenCV.

    With one record for each image, and rows to stack, Grain is slower by a fifth.

    Args:
        jitter: Strength of the jitter; 0 turns it off.
    """

    def __init__(self, jitter: float):
        self._jitter = jitter

    def random_map(self, record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        images = np.empty((len(record["path"]), SIDE, SIDE, 3), np.uint8)
        for row, path in zip(images, record["path"]):
            image = opencv_crop(path, rng)
            row[...] = opencv_jitter(image, self._jitter, rng) if self._jitter else image
        return {"images": images, "labels": record["label"]}


def grain_batches(
    files: Sequence[str],
    labels: Sequence[int],
    batch: int,
    workers: int,
    jitter: float,
    sharding: Any,
) -> Iterator[dict[str, jax.Array]]:
    """Returns endless batches of Grain's workers, with one batch placed ahead.

    With these buffers, each worker prepares four batches; with larger buffers it prepares seven.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # required by Grain's workers
    records = [{"path": path, "label": np.int32(label)} for path, label in zip(files, labels)]
    ds = grain.MapDataset.source(records).seed(1).shuffle().repeat().batch(batch)
    options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=1)
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    ds = ds.random_map(Augment(jitter)).to_iter_dataset(read)
    return _ahead(iter(ds.mp_prefetch(options)), sharding)


def tensorflow_crop(path: Any) -> Any:
    """Returns a random resized crop of a JPEG with a random flip: float32 [224, 224, 3], 0 to 255.

    Only the cropped pixels are decoded, as TensorFlow's guides recommend.
    """
    import tensorflow as tf

    data = tf.io.read_file(path)
    shape = tf.image.extract_jpeg_shape(data)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([0, 0, 4]),
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], size[:2]], 0)
    image = tf.image.resize(tf.image.decode_and_crop_jpeg(data, window, channels=3), (SIDE, SIDE))
    return tf.image.random_flip_left_right(image)


def tensorflow_jitter(image: Any, strength: float) -> Any:
    """Changes brightness, contrast and saturation of an image from 0 to 255, in this order.

    Args:
        image: float32 [SIDE, SIDE, 3].
        strength: At most 1.
    """
    import tensorflow as tf

    brightness, contrast, saturation = tf.unstack(
        tf.random.uniform([3], 1 - strength, 1 + strength)
    )
    # Long rows are faster by a tenth than a last dimension of three channels. The matrix product
    # processes eight pixels at once.
    pixels = tf.minimum(tf.reshape(image, [SIDE, 3 * SIDE]) * brightness, 255.0)
    mean = tf.reduce_sum(tf.reshape(tf.reduce_mean(pixels, 0), [SIDE, 3]) * (GRAY / SIDE))
    pixels = tf.clip_by_value(pixels * contrast + mean * (1 - contrast), 0, 255)
    grays = np.kron(np.eye(8), np.tile(GRAY[:, None], 3)).astype(np.float32)
    mixing = saturation * tf.eye(24) + (1 - saturation) * grays
    mixed = tf.matmul(tf.reshape(pixels, [-1, 24]), mixing)
    return tf.reshape(tf.clip_by_value(mixed, 0, 255), [SIDE, SIDE, 3])


def tensorflow_batches(
    files: Sequence[str], labels: Sequence[int], batch: int, jitter: float, sharding: Any
) -> Iterator[dict[str, jax.Array]]:
    """Returns endless batches of tf.data, with one batch placed ahead."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")

    def augmented(path: Any, label: Any) -> dict[str, Any]:
        image = tensorflow_crop(path)
        image = tensorflow_jitter(image, jitter) if jitter else image
        return {"images": tf.cast(tf.round(image), tf.uint8), "labels": label}

    ds = tf.data.Dataset.from_tensor_slices((list(files), np.array(labels, np.int32)))
    ds = ds.shuffle(len(files), seed=1).repeat()
    ds = ds.map(augmented, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return _ahead(ds.batch(batch, drop_remainder=True).prefetch(2).as_numpy_iterator(), sharding)


class TorchFiles:
    """Map-style dataset of PyTorch: files of images, and their labels.

    Augmented images are uint8 [224, 224, 3].

    Args:
        jitter: Strength of the jitter; 0 turns it off.
    """

    def __init__(self, files: Sequence[str], labels: Sequence[int], jitter: float):
        from torchvision.transforms import v2

        self._files, self._labels = list(files), list(labels)
        crop = [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()]
        colors = [v2.ColorJitter(jitter, jitter, jitter)] if jitter else []
        self._transform = v2.Compose([*crop, *colors])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from torchvision import io

        image = io.decode_jpeg(io.read_file(self._files[index]), mode=io.ImageReadMode.RGB)
        return {
            "images": self._transform(image).permute(1, 2, 0),
            "labels": np.int32(self._labels[index]),
        }


def torchvision_batches(
    files: Sequence[str],
    labels: Sequence[int],
    batch: int,
    workers: int,
    jitter: float,
    sharding: Any,
) -> Iterator[dict[str, jax.Array]]:
    """Returns endless batches of the workers of a DataLoader, with one batch placed ahead.

    The documentation of torchvision recommends transforms.v2 on uint8 tensors. The workers start as
    new processes, since forked processes would inherit the threads of JAX.
    """
    from torch.utils import data

    dataset: Any = TorchFiles(files, labels, jitter)
    # One endless epoch of permutations: at the end of an epoch, the workers would run empty.
    sampler = data.RandomSampler(dataset, num_samples=1 << 40)
    loader = data.DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, multiprocessing_context="spawn"
    )
    return _ahead(({k: v.numpy() for k, v in batch.items()} for batch in loader), sharding)


def plugin_batches(
    files: Sequence[str], labels: Sequence[int], batch: int, threads: int, jitter: float, gpu: bool
) -> Iterator[dict[str, jax.Array]]:
    """Returns endless batches of DALI's JAX plugin with DALI's random operators, on one device.

    Args:
        files: The images.
        labels: The labels.
        batch: Batch size.
        threads: Number of DALI's threads.
        jitter: Strength of the jitter; 0 turns it off.
        gpu: Whether DALI decodes and augments on the GPU, with all of its JPEG engines.
    """
    from nvidia.dali import fn
    from nvidia.dali.plugin.jax import data_iterator

    decoder = {"device": "mixed", "hw_decoder_load": 1.0} if gpu else {"device": "cpu"}

    def graph() -> Any:
        encoded, label = fn.readers.file(
            files=list(files),
            labels=list(labels),
            name="reader",
            random_shuffle=True,
            pad_last_batch=True,
        )
        images = fn.decoders.image(encoded, **decoder)
        images = fn.random_resized_crop(images, size=(SIDE, SIDE))
        images = fn.flip(images, horizontal=fn.random.coin_flip())
        if jitter:
            factors = {
                name: fn.random.uniform(range=[1 - jitter, 1 + jitter])
                for name in ("brightness", "contrast", "saturation")
            }
            images = fn.color_twist(images, **factors)
        return images, label.gpu() if gpu else label

    create = data_iterator(graph, ["images", "labels"], reader_name="reader", auto_reset=True)
    return turns.endless(
        create(batch_size=batch, num_threads=threads, seed=1, device_id=0 if gpu else None)
    )


def _ahead(batches: Iterator[Any], sharding: Any) -> Iterator[dict[str, jax.Array]]:
    """Places batches over a sharding, one batch ahead of the consumer."""

    def place() -> Any:
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(sharding, array), next(batches)
        )

    following = place()
    while True:
        batch, following = following, place()
        yield batch
