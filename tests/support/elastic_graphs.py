"""Sources, graphs and layouts for tests/sources/test_processes.py and its workers."""

import hashlib
import pathlib

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn

from dalijax import augment, data_iterator, sources
from dalijax.core.formats.example_message import record_parts
from dalijax.core.formats.protobuf import message
from drawing import drawn_image, png
from tars import FIELDS, write_tar

IMAGES, MORE = 21, 8  # in the class folder and in the tars
SEED = 11


def write(folder):
    """Writes the files of all sources."""
    (folder / "images").mkdir()
    names = [f"{k:03d}" for k in range(IMAGES + MORE)]
    files = [png(drawn_image(k, 30 + k % 5, 40 + k % 3)).tobytes() for k in range(len(names))]
    for name, data in zip(names[:IMAGES], files):
        (folder / "images" / f"{name}.png").write_bytes(data)
    for tar, part in (("most", slice(IMAGES)), ("rest", slice(IMAGES, None))):
        entries = zip(names[part], files[part])
        write_tar(
            folder / f"{tar}.tar",
            [e for k, data in entries for e in ((f"{k}.jpg", data), (f"{k}.cls", k.encode()))],
        )
    for number, part in enumerate((slice(8), slice(8, IMAGES))):
        labels = list(range(IMAGES))[part]
        table = pa.table({"data": files[part], "label": pa.array(labels, pa.int32())})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=3)
    write_episodes(folder / "episodes.tfrecord", files[:IMAGES], [*range(1, 6), IMAGES - 15])


def write_episodes(path, images, lengths):
    """Writes an RLDS file of episodes with some numbers of steps, without TensorFlow."""
    records, step = [], 0
    for length in lengths:
        steps = range(step, step + length)
        features = {
            b"steps/image": (1, [(1, images[k]) for k in steps]),
            b"steps/label": (3, [(1, bytes(steps))]),  # packed
            b"steps/is_first": (3, [(1, bytes([1] + [0] * (length - 1)))]),
        }
        entries = [
            (1, message([(1, name), (2, message([(kind, message(values))]))]))
            for name, (kind, values) in features.items()
        ]
        records += record_parts(message([(1, message(entries))]))
        step += length
    path.write_bytes(b"".join(records))


def paths(folder):
    return sorted(pathlib.Path(folder, "images").glob("*.png"))


def files(folder):
    return sources.Files(paths=paths(folder), labels=range(IMAGES))


def tar(folder, name="most"):
    return sources.Tar(f"{folder}/{name}.tar", FIELDS, cache_dir=f"{folder}/index")


def records(folder):
    return sources.Records(
        [{"data": path.read_bytes(), "label": k} for k, path in enumerate(paths(folder))]
    )


def mixture(folder):
    return sources.Mixture([(tar(folder), 2), (tar(folder, "rest"), [(0, 1), (17, 3)])])


def remote(folder):
    """Returns a mixture of the tars of the server whose URL is in the file ``url``."""
    url = pathlib.Path(folder, "url").read_text()
    options = {"cache_dir": f"{folder}/index", "read_ahead": "20kB"}
    tars = [sources.Tar(f"{url}/{name}.tar", FIELDS, **options) for name in ("most", "rest")]
    return sources.Mixture([(tars[0], 2), (tars[1], 1)])


def drawn(data, label, *, draw):
    numbers = fn.cat(
        draw.uniform(shape=[2]), draw.normal(shape=[2]), draw.choice([0.5, 1.5], shape=[1])
    )
    return label, numbers, fn.resize(fn.decoders.image(data), size=[24, 24])


def augmented(data, label, *, draw):
    image = augment.random_resized_crop(fn.decoders.image(data), 24, draw=draw)
    image = augment.color_jitter(augment.flip(image, draw=draw), brightness=0.3, draw=draw)
    return label, draw.uniform(shape=[2]), image


def by_policy(data, label, *, draw):
    image = augment.rand_augment(fn.decoders.image(data), draw=draw)
    return label, draw.uniform(shape=[2]), fn.resize(image, size=[24, 24])


def episodes(folder):
    """Returns steps of the episodes in an RLDS file, with numbers that bypass the graph."""
    fields = {
        "data": "steps/image",
        "label": "steps/label",
        "labels": ("steps/label", range(-1, 3)),
    }
    return sources.RLDS(f"{folder}/episodes.tfrecord", fields, cache_dir=f"{folder}/index")


def parquet(folder):
    """Returns the rows of two files, in two parts with one or two row groups in a window."""
    return sources.Parquet(f"{folder}/*.parquet", window="40kB", parts=2, batch_size=8)


LOCAL = {"Files": files, "Tar": tar, "Records": records, "Mixture": mixture, "RLDS": episodes}
SOURCES = {**LOCAL, "Parquet": parquet, "remote Mixture": remote}
GRAPHS = {"draw": drawn, "augment": augmented, "rand_augment": by_policy}


def iterator_function(folder, source, graph):
    names = ["label", "numbers", "image"]
    return data_iterator(
        GRAPHS[graph], names, source=SOURCES[source](folder), last_batch_padded=True
    )


def sharding(devices, copies=1, turned=False):
    """Returns a sharding over a mesh whose second axis contains replicas.

    Args:
        devices: Number of devices of each process in the mesh.
        copies: Number of devices with the same rows.
        turned: Whether to reorder the devices so that replicas are in different processes.
    """
    each = len(jax.local_devices())
    chosen = [device for k, device in enumerate(jax.devices()) if k % each < devices]
    grid = np.array(chosen[::-1]).reshape(copies, -1).T if turned else np.array(chosen)
    mesh = Mesh(grid.reshape(-1, copies), ("data", "copies"))
    return NamedSharding(mesh, PartitionSpec("data"))


def rows_of(batch):
    """Returns the rows of NumPy arrays: label, numbers, a digest of the pixels, and the mask."""
    arrays = [np.asarray(batch[name]) for name in ("label", "numbers", "image", "mask")]
    return [
        [int(label), numbers.tolist(), hashlib.sha256(image.tobytes()).hexdigest(), bool(mask)]
        for label, numbers, image, mask in zip(*arrays, strict=True)
    ]


def held_rows(batch, process):
    """Returns this process's rows as {row: values}, and checks that replicas agree.

    Args:
        batch: Global arrays, or NumPy arrays with equally many rows in each process.
        process: The number of this process.
    """
    if isinstance(batch["mask"], np.ndarray):
        pieces = [(process * len(batch["mask"]), batch)]
    else:
        shards = {name: array.addressable_shards for name, array in batch.items()}
        pieces = [
            (shard.index[0].start or 0, {name: own[k].data for name, own in shards.items()})
            for k, shard in enumerate(shards["mask"])
        ]
    rows = {}
    for first, arrays in pieces:
        for k, row in enumerate(rows_of(arrays), first):
            if rows.setdefault(k, row) != row:
                raise ValueError(f"the copies of row {k} differ")
    return rows
