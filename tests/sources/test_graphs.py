"""Records enter DALI's graphs without a copy, and DALI's threads read paths."""

import io

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

from dalijax import data_iterator
from dalijax.sources import Arrays, Files, Records, Tar
from tars import write_tar

SHAPES = [(17, 23), (40, 11), (8, 8), (31, 64), (5, 90)]


def encoded_images():
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(buffer, "PNG")
        yield buffer.getvalue()


def sources(folder):
    contents = list(encoded_images())
    for number, content in enumerate(contents):
        (folder / f"{number}.png").write_bytes(content)
    entries = [
        (f"{n}.{e}", c) for n, d in enumerate(contents) for e, c in (("png", d), ("cls", b"%d" % n))
    ]
    yield Files(paths=[folder / f"{n}.png" for n in range(5)], labels=range(5))
    yield Tar(
        write_tar(folder / "a.tar", entries), {"data": "png", "label": "cls"}, cache_dir=folder
    )
    yield Records([{"data": d, "label": n} for n, d in enumerate(contents)])


@pytest.mark.parametrize("which", range(3))
def test_images_are_decoded(which, tmp_path):
    source = list(sources(tmp_path))[which]
    batches = [np.array(rows) for rows in ([4, 0, 2], [1, 1, 3], [3, 2, 0])]
    turns = iter(batches)

    def read():
        columns = source.read(next(turns), ["data", "label"])
        return columns["data"], np.asarray(columns["label"])

    @pipeline_def(batch_size=3, num_threads=2, device_id=None, prefetch_queue_depth=1)
    def graph():
        data, label = fn.external_source(
            source=read, num_outputs=2, dtype=[types.UINT8, types.INT32], ndim=[1, 0], no_copy=True
        )
        if source.fields["data"].is_path:
            data = fn.io.file.read(data)
        return fn.decoders.image(data), label

    pipeline = graph()
    pipeline.build()
    for rows in batches:
        images, labels = pipeline.run()
        np.testing.assert_array_equal(labels.as_array(), rows)
        for index, image in zip(rows, images):
            with Image.open(tmp_path / f"{index}.png") as known:
                np.testing.assert_array_equal(np.array(image), np.array(known))
        sizes = source.sizes(rows, "data", source.read(rows, ["data"])["data"])
        np.testing.assert_array_equal(sizes, [SHAPES[index] for index in rows])


def test_rows_of_arrays_are_taken(tmp_path):
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    source = Arrays({"x": rows})

    @pipeline_def(batch_size=2, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def graph():
        x = fn.external_source(
            source=lambda: source.read(np.array([5, 1]), ["x"])["x"], no_copy=True
        )
        return x * 2

    pipeline = graph()
    pipeline.build()
    np.testing.assert_array_equal(pipeline.run()[0].as_array(), rows[[5, 1]] * 2)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2)])
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_fortran_order_are_unchanged(shape, mapped, tmp_path):
    rows = np.asfortranarray(np.random.default_rng(0).random(shape, np.float32))
    np.save(tmp_path / "rows.npy", rows)
    table = np.load(tmp_path / "rows.npy", mmap_mode="r") if mapped else rows
    make = data_iterator(lambda x: x + 0, ["x"], source=Arrays({"x": table}), shuffle=False)
    batches = [np.asarray(batch["x"]) for batch in make(batch_size=2)]
    np.testing.assert_array_equal(np.concatenate(batches), rows)


@pytest.mark.parametrize("name", ("pack", "bucket"))
def test_settings_may_have_the_names_of_arguments_of_other_sources(name):
    namespace = {}
    exec(f"def graph(x, *, {name}=2):\n    return {{'y': x * {name}}}", namespace)  # noqa: S102
    source = Arrays({"x": np.arange(4, dtype=np.int32)})
    for call, factor in (({}, 2), ({name: 3}, 3)):
        loop = data_iterator(namespace["graph"], source=source)(batch_size=4, shuffle=False, **call)
        assert next(loop)["y"].tolist() == [0, factor, 2 * factor, 3 * factor]
