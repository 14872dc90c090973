"""Sources that plan their batches, for tests/sources/test_planned_processes.py and its worker."""

import hashlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn

from dalijax import data_iterator, sources
from drawing import drawn_image, png

ROWS = 4


def records(count=31):
    rng = np.random.default_rng(0)
    return [
        {
            "data": png(drawn_image(k, *rng.integers(4, 40, 2).tolist())),
            "text": np.arange(1 + k % 3, dtype=np.int32),
            "images": [png(drawn_image(k + j, 6, 6)) for j in range(k % 4)],
            "label": np.int32(k),
        }
        for k in range(count)
    ]


def packed(data, text, label, *, draw, pack):
    images = fn.flip(fn.decoders.image(data), horizontal=draw.coin_flip())
    return {
        "patches": pack.patches(images),
        "tokens": pack.tokens(text),
        "label": pack.per_image(label),
    }


def bucketed(data, label, *, bucket):
    return {"image": bucket.crop(fn.decoders.image(data), flip=0.5), "label": label}


def several(images, label, *, draw, pack):
    pixels = fn.decoders.image(images)
    return {"images": pack.per_image(pixels), "label": pack.per_row(label)}


def iterator(name, devices=None, **call):
    """Returns a stream over one device, or over a mesh of all processes' devices."""
    plain = sources.Records(records(), kinds={"images": sources.Field(None)})
    function, source = {
        "Packed": lambda: (
            packed,
            sources.Packed(plain, length=40, images=5, patch=4, tokens=30, text="text"),
        ),
        "Buckets": lambda: (
            bucketed,
            sources.Buckets(plain, buckets=[(12, 12), (8, 16), (16, 8)]),
        ),
        "MultiImage": lambda: (several, sources.MultiImage(plain, "images", images=3)),
    }[name]()
    if devices is not None:
        mesh = Mesh(np.array(devices), ("data",))
        call["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    make = data_iterator(function, source=source, mask=True)
    return make.stream(None, batch_size=ROWS, num_threads=1, **call)


def rows_of(batch):
    """Returns a digest of each row that this process has, by the number of the row."""
    rows = {}
    for name in sorted(batch):
        array = batch[name]
        if not isinstance(array, jax.Array):
            continue
        for shard in array.addressable_shards:
            first = shard.index[0].start or 0
            for k, row in enumerate(np.asarray(shard.data), first):
                rows.setdefault(k, {})[name] = hashlib.sha256(row.tobytes()).hexdigest()[:16]
    return {str(k): rows[k] for k in sorted(rows)}
