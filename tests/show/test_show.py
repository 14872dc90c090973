"""Pages and sheets of iterators, whose position does not change."""

import io
import pathlib
import struct
import subprocess
import sys
import zlib

import grain
import jax
import numpy as np
import pytest
from clu.data import dataset_iterator
from forks import run_fork
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from markupsafe import Markup
from nvidia.dali import fn
from PIL import Image
from show_pages import Parsed, parsed

from conftest import corrupt, write_jpegs
from dalijax import DALIGenericIterator, data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from dalijax.core.tools.show.command import main
from dalijax.core.tools.show.contents import contents_of
from dalijax.show import show

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Paths of 12 JPEGs of noise."""
    folder = tmp_path_factory.mktemp("noise") / "class"
    folder.mkdir()
    paths = []
    for number in range(12):
        paths.append(str(folder / f"{number:02d}.jpg"))
        Image.fromarray(RNG.integers(0, 256, (24, 24, 3)).astype(np.uint8)).save(paths[-1])
    return paths


@data_iterator(output_map=["image", "label", "number"], reader_name="reader", mask="valid")
def train(files):
    data, label = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        random_shuffle=True,
        pad_last_batch=True,
        name="reader",
    )
    number = fn.random.uniform(range=(0.5, 1.0))
    return fn.decoders.image(data) * number, label, number


def same(batch, other):
    assert {*batch} == {*other}
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name])


def test_every_kind_of_output_is_drawn():
    count = 4
    images = RNG.integers(0, 256, (count, 20, 30, 3)).astype(np.uint8)
    floats = np.moveaxis(images, -1, 1) / np.float32(255)
    video = RNG.integers(0, 256, (count, 5, 10, 12, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(images[0]).save(file, "PNG")
    batch = {
        "images": images,
        "floats": jax.numpy.asarray(floats),
        "gray": images[..., :1],
        "video": video,
        "sound": RNG.normal(size=(count, 2, 4000)).astype(np.float32),
        "text": ["<script>alert(1)</script>", "b & b", "c", "d"],
        "tokens": np.arange(count * 12).reshape(count, 12),
        "encoded": [file.getvalue()] * 3 + [b"\xff\xd8\xff is none"],
        "label": np.array([0, 2, 1, 7]),
        "nested": {"mixed": np.array([[0.25, 0.75, 0]] * count)},
    }
    names = ["cat", "dog", "elk"]
    page = show(batch, classes={"label": names, "nested/mixed": names})
    found = parsed(page)
    drawn = iter(found.pictures)
    for row, image in enumerate(images):  # the images of a sample in a row
        for _ in range(2):  # as bytes, and as floats with the channels first
            np.testing.assert_array_equal(next(drawn), image)
        np.testing.assert_array_equal(next(drawn), image[..., :1].repeat(3, -1))
        for frame in video[row]:
            np.testing.assert_array_equal(next(drawn), frame)
        for _ in range(2):  # the spectrograms of two channels
            assert next(drawn).shape[0] == 129
        if row < 3:
            np.testing.assert_array_equal(next(drawn), images[0])
    assert next(drawn, None) is None
    assert found.classes("svg").count("waveform") == count * 2
    text = "".join(found.texts)
    for words in (
        *("[4, 20, 30, 3]", "uint8", "float32", "0 is black, 1 is white", "one device", "cpu:0"),
        *(
            "<script>alert(1)</script>",
            "0 1 2 3 4 5 6 7 and 4 more",
            "no picture that Pillow reads",
        ),
        *("label: elk", "label: 7", "0.75 dog + 0.25 cat", f"{images.mean():.4g}"),
    ):
        assert words in text, words
    # A histogram for each output of numbers: all except the text and the files.
    assert found.classes("svg").count("histogram") == 8


def test_a_decompression_bomb_is_not_drawn():
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
    files = np.stack([np.frombuffer(bomb, np.uint8)] * 2)
    page = show({"files": files})
    assert page.html.count("no picture that Pillow reads") == 2


def test_wrong_figures_are_highlighted():
    values = RNG.normal(size=(4, 8)).astype(np.float32)
    values[1, 2] = np.nan
    found = parsed(show({"bad": values, "good": values[2:].repeat(2, 0)}))
    assert found.classes("dd").count("bad") == 1
    assert "1, 0" in found.texts and "0, 0" in found.texts


def test_an_iterator_does_not_move(pictures):
    with train(pictures, batch_size=5) as iterator, train(pictures, batch_size=5) as other:
        stats = iterator.watch()
        next(iterator), next(other)
        before, counted = iterator.get_state(), stats.batches
        one = show(iterator)
        assert one.title == "Batch of 5 records: image, label, number, valid"
        assert one.html.count(f"<h1>{one.title}</h1>") == 1
        assert [contents.title for contents in one.batches] == ["Epoch 0, batch 1"]
        # More batches than the epoch has left.
        all_left = show(iterator, batches=5)
        assert [c.title for c in all_left.batches] == ["Epoch 0, batch 1", "Epoch 0, batch 2"]
        assert all_left.failures == [] and all_left.title.startswith("2 batches of 5 records: ")
        assert iterator.get_state() == before and stats.batches == counted
        peeked = np.stack(one.batches[0].outputs[0].samples)
        np.testing.assert_array_equal(peeked, np.stack(all_left.batches[0].outputs[0].samples))
        np.testing.assert_array_equal(peeked, other.peek()["image"])
        same(next(iterator), next(other))
        same(next(iterator), next(other))
        ended = show(iterator)
        assert (
            ended.batches == []
            and ended.title == "No batches"
            and "at the end of its epoch" in ended.failures[0]
        )


def test_padding_is_hatched(pictures):
    page = show(train, files=pictures, batch_size=5, batches=3)
    last = page.batches[2]
    assert last.valid.tolist() == [True, True, False, False, False]
    found = parsed(page)
    assert found.classes("figure").count("padding") == 3
    assert "3 of 5 samples are padding (the mask is False): they are hatched." in found.texts


def test_a_mask_of_boxes_is_not_a_mask_of_samples():
    image = np.zeros((3, 20, 30, 3), np.uint8)
    contents = contents_of({"image": image, "mask": np.ones((3, 2), bool)}, "")
    assert contents.valid is None and len(contents.outputs[0].samples) == 3
    devices = {"image": np.zeros((2, 2, 20, 30, 3), np.uint8), "mask": np.ones((2, 2), bool)}
    assert contents_of(devices, "").valid.tolist() == [True] * 4


def episodes(count=3):
    """A batch of steps of episodes: two frames of a camera, and a window of actions."""
    image = RNG.integers(0, 256, (count, 2, 20, 30, 3)).astype(np.uint8)
    valid = np.arange(6) < np.array([6, 4, 1])[:count, None]
    return {
        "before": image[:, 0],
        "now": jax.numpy.asarray(image[:, 1]),
        "action": RNG.normal(size=(count, 6, 2)).astype(np.float32),
        "action_mask": valid,
        "state": np.arange(count * 3).reshape(count, 3),
        "prompt": ["lift", "push", "turn"][:count],
    }


def test_a_record_has_the_images_and_windows_of_a_sample(tmp_path):
    batch = episodes()
    page = show(batch)
    found = parsed(page)
    pictures = iter(found.pictures)
    for row in range(3):
        np.testing.assert_array_equal(next(pictures), batch["before"][row])
        np.testing.assert_array_equal(next(pictures), batch["now"][row])
        plot = next(pictures)
        # The upper left corner of each step, between its border and its dot, shows the mask.
        corners = plot[4, (np.arange(6) * plot.shape[1] / 6).astype(int) + 5].mean(-1)
        np.testing.assert_array_equal(corners > 240, batch["action_mask"][row])
    assert next(pictures, None) is None
    assert "state: 3 4 5\nprompt: push" in found.texts
    assert found.classes("figure") == [""] * 3 and found.classes("div").count("panel") == 9
    page.save(tmp_path / "strips.png")
    sheet = np.asarray(Image.open(tmp_path / "strips.png"))
    for image in np.stack([batch["before"], batch["now"]], 1).reshape(-1, 20, 30, 3):
        large = image.repeat(3, 0).repeat(3, 1)  # 96 // 30
        places = np.argwhere((sheet == large[0, 0]).all(-1))
        assert any(np.array_equal(sheet[y : y + 60, x : x + 90], large) for y, x in places.tolist())


def test_only_floats_with_a_mask_of_steps_are_windows():
    values = RNG.normal(size=(4, 12, 12)).astype(np.float32)
    valid = np.ones((4, 12), bool)
    sound = RNG.normal(size=(4, 500)).astype(np.float32)

    def layout(x, mask, device_axis=False):
        return contents_of({"x": x, "x_mask": mask}, "", device_axis=device_axis).outputs[0].layout

    assert layout(values, valid) == layout(values[..., 0], valid) == "window"
    assert layout(values.reshape(2, 2, 12, 12), valid.reshape(2, 2, 12), True) == "window"
    assert layout(values, valid[0]) == layout(values, values > 0) == "HW"
    assert layout(values, valid.astype(int)) == "HW"
    assert layout(np.arange(48).reshape(4, 12), valid) == "numbers"  # tokens
    assert layout(sound, sound > 0) == "T"


def test_masked_frames_of_a_video_are_gray():
    video = RNG.integers(0, 256, (2, 5, 10, 12, 3)).astype(np.uint8)
    valid = np.arange(5) < np.array([[5], [2]])
    found = parsed(show({"video": video, "video_mask": valid}))
    for picture, frame, is_valid in zip(
        found.pictures, video.reshape(-1, 10, 12, 3), valid.ravel(), strict=True
    ):
        assert np.array_equal(picture, frame) == is_valid
        assert (np.ptp(picture, axis=-1) == 0).all() == (not is_valid)


def test_a_window_of_non_finite_values_is_drawn():
    batch = episodes()
    batch["action"][0] = np.nan
    batch["action"][1, 2] = np.inf
    plots = parsed(show(batch)).pictures[2::3]
    colors = [np.ptp(plot.astype(int), axis=-1).max() for plot in plots]
    assert colors[0] == 0 and min(colors[1:]) > 50  # a plot without lines is gray


def test_the_sheet_has_the_pictures(tmp_path):
    images = RNG.integers(0, 256, (3, 40, 40, 3)).astype(np.uint8)
    batch = {"images": images, "label": np.arange(3)}
    show(batch).save(tmp_path / "out" / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "out" / "sheet.png"))
    large = images.repeat(3, 1).repeat(3, 2)  # 128 // 40
    for image in large:
        places = np.argwhere((sheet == image[0, 0]).all(-1))
        assert any(
            np.array_equal(sheet[y : y + 120, x : x + 120], image) for y, x in places.tolist()
        )
    show({"text": ["a", "b"]}).save(tmp_path / "text.png")  # no images
    with pytest.raises(ValueError, match=r"sheet\.jpg' must end in \.html"):
        show(batch).save(tmp_path / "sheet.jpg")


def test_the_sheet_does_not_cut_text_off(tmp_path):
    def ink(text):
        show({"image": np.full((1, 40, 40, 3), 255, np.uint8), "label": [text]}).save(path)
        return (255 - np.asarray(Image.open(path)).astype(int)).sum()

    path = tmp_path / "sheet.png"
    for letter in "Wi@":
        few, many = ink(5 * letter) - ink(""), ink(20 * letter) - ink("")
        assert few > 0 and many == pytest.approx(4 * few, rel=0.01)


def test_a_notebook_displays_it():
    page = show({"x": np.zeros((2, 9, 9, 3), np.uint8), "\"<&'": ["'\"<&>"] * 2})
    frame = Parsed(page._repr_html_())
    ((tag, attrs),) = frame.elements
    assert tag == "iframe" and attrs["srcdoc"] == page.html and frame.texts == []
    assert attrs["sandbox"] == ""  # without scripts, and in an origin of its own


class UnusualArray:
    """An array whose dtype and shape are a text."""

    def __init__(self, text):
        self.dtype, self.shape = text, (text,)

    def __array__(self, dtype=None, copy=None):
        return np.zeros((2, 3), np.int32)


class UnusualIterator:
    """An iterator with a text as its name, which fails with this text after its batches."""

    def __init__(self, text, *batches):
        self.__name__, self.batches = text, batches

    def __next__(self):
        if self.batches:
            batch, *self.batches = self.batches
            return batch
        error = ValueError(self.__name__)
        error.files = [f"/files/{self.__name__}.jpg"]
        raise error

    def get_state(self):
        return self.batches

    def set_state(self, batches):
        self.batches = batches


def unusual_pages(text):
    """Returns pages with a text in each place that takes text."""
    images = np.zeros((2, 9, 9, 3), np.uint8)
    mesh = Mesh(np.array(jax.devices()[:1]), (text,))
    rows = NamedSharding(mesh, PartitionSpec(text))
    batch = {
        text: images,
        f"{text} 2": [b"BM" + text.encode(), b"BM"],  # in the strips, without a picture
        "nested": {text: {text: np.arange(2)}},
        "bytes": [text.encode(), b"b"],
        "array": np.frombuffer((text + "x" + text).encode() * 2, np.uint8).reshape(2, -1),
        "object": [{text: text}, None],
        "record": np.zeros(2, [("name " + text, np.int32)]),
        "class": np.array([0, 1]),
        "mix": np.array([[0.25, 0.75]] * 2),
        "window": np.zeros((2, 3), np.float32),
        "window_mask": np.ones((2, 3), bool),
        "array dtype": UnusualArray(text),
        "sharding": jax.device_put(np.zeros((2, 3)), rows),
        "sound": np.zeros((2, 500), np.float32),
        "keep": np.array([True, False]),
    }
    names = {"class": [text, text], "mix": [text, text]}
    page = show(UnusualIterator(text, batch), mask="keep", classes=names, batches=2)
    assert len(page.batches) == len(page.failures) == 1
    return [page, show({"file": [b"BM" + text.encode()], "label": [text]})]


@pytest.mark.parametrize(
    "text",
    [
        "<script>document.title='OWNED'</script>",
        "\"'><img src=x onerror=alert(1)>",
        "' onload='alert(1)' x='\" onload=\"alert(1)",
        "</style></title></svg></iframe><script>alert(1)</script>",
        "<!--", "]]>", "<svg/onload=alert(1)>", "<?php", "&lt;b&gt;&#60;b>",
        "{{ 7 * 7 }}{% raw %}{#", Markup("<b>safe</b>"),
    ],
)  # fmt: skip
def test_text_can_add_no_elements(text):
    for page, ordinary in zip(unusual_pages(text), unusual_pages("plain"), strict=True):
        found, expected = parsed(page), parsed(ordinary)
        assert [(tag, {*attrs}) for tag, attrs in found.elements] == [
            (tag, {*attrs}) for tag, attrs in expected.elements
        ]
        for (_, attrs), (_, usual) in zip(found.elements, expected.elements):
            assert attrs == usual | {k: v for k, v in attrs.items() if k in ("src", "d")}
        assert text in "".join(found.texts)
        ((tag, attrs),) = Parsed(page._repr_html_()).elements
        assert tag == "iframe" and attrs["srcdoc"] == page.html


def test_control_characters_are_escaped(tmp_path):
    text = "\0<b\f>\x1b[31m\u202e\udcff\ud800"
    page = show({text: np.arange(2), "caption": [text, "b"]}, classes={text: [text, "b"]})
    escaped = r"\x00<b\x0c>\x1b[31m\u202e\xff\ud800"
    texts = parsed(page).texts
    assert texts.count(escaped) == 1  # the output's heading
    assert f"{escaped}: {escaped}\ncaption: {escaped}" in texts
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page.html


def test_failures_are_named(tmp_path):
    files = write_jpegs(tmp_path, 8)
    corrupt(files[2])

    @data_iterator(output_map=["image", "label"], reader_name="reader")
    def fails():
        data, label = fn.readers.file(files=files, labels=[*range(8)], name="reader")
        return fn.decoders.image(data), label

    page = show(fails, batch_size=2, batches=4)
    assert [contents.title for contents in page.batches] == [
        f"Epoch 0, batch {step}" for step in (0, 2, 3)
    ]
    (failure,) = page.failures
    assert files[2] in failure and "batch 1" in failure
    assert files[2] in "".join(parsed(page).texts)
    page = show(fails, batch_size=2, batches=3, on_error="skip")
    assert len(page.batches) == 3 and files[2] in page.failures[0]
    with fails(batch_size=2) as iterator:
        next(iterator)
        assert files[2] in show(iterator).failures[0]
        with pytest.raises(RuntimeError):
            next(iterator)
        assert next(iterator)["label"].ravel().tolist() == [4, 5]


@data_iterator(output_map=["image", "label", "number"], mask="mask", last_batch_padded=True)
def over_source(data, label, *, draw):
    number = draw.uniform(0.5, 1.0)
    return fn.decoders.image(data) * number, label, number


def test_iterators_over_sources_and_sources(pictures):
    source = sources.Files(paths=pictures, labels=[*range(12)])
    with over_source(source=source, batch_size=5) as iterator:
        state = iterator.get_state()
        page = show(iterator, batches=3)
        assert len(page.batches) == 3 and iterator.get_state() == state
    page = show(source, samples=3)
    decoded = [np.asarray(Image.open(file)) for file in pictures[:3]]
    for drawn, image in zip(parsed(page).pictures, decoded, strict=True):
        np.testing.assert_array_equal(drawn, image)
    rows = {"label": np.arange(4), "text": np.array(["a", "b", "c", "d"])}
    found = parsed(show(sources.Arrays(rows)))
    assert "label: 1\ntext: b" in found.texts and "label: 3\ntext: d" in found.texts


def decode(data):
    return fn.resize(fn.decoders.image(data), size=(8, 8))


def test_grain(pictures):
    contents = [pathlib.Path(file).read_bytes() for file in pictures]
    records = [{"data": data, "name": f"record {k}"} for k, data in enumerate(contents)]
    ds = grain.MapDataset.source(records).seed(0)
    ds = ds.pipe(DALITransform(decode, batch_size=5, output_map=["image"], pad="mask"))
    page = show(ds, batches=9)
    assert len(page.batches) == 3 and page.batches[2].valid.tolist() == [True] * 2 + [False] * 3
    assert "name: record 11" in "".join(parsed(page).texts)
    iterator = iter(ds)
    next(iterator)
    state = iterator.get_state()
    assert len(show(iterator).batches) == 1 and iterator.get_state() == state
    assert next(iterator)["name"].tolist()[0] == "record 5"
    unmasked = data_iterator(train.pipeline_fn, ["image", "label", "number"], reader_name="reader")
    dataset = DALIIterDataset(unmasked, files=pictures, batch_size=4)
    page = show(dataset, batches=2)
    assert [output.name for output in page.batches[0].outputs] == ["image", "label", "number"]


def test_tfdata_and_clu(pictures):
    dataset = DALIDataset(train, files=pictures, batch_size=4)
    page = show(dataset.enumerate(), batches=2)
    assert page.batches[1].outputs[0].caption(0) == "1"
    assert {"1/image", "1/label"} <= {output.name for output in page.batches[0].outputs}
    iterator = DALIDatasetIterator(train, files=pictures, batch_size=4)
    assert isinstance(iterator, dataset_iterator.DatasetIterator)
    state = iterator.get_state()
    assert len(show(iterator).batches) == 1 and len(show(iterator, batches=4).batches) == 4
    assert iterator.get_state() == state
    iterator.close()


def test_shardings_and_devices(pictures):
    @data_iterator(output_map=["image", "label"], reader_name="reader", mask="mask")
    def sharded(files, shard_id=0, num_shards=1):
        data, label = fn.readers.file(
            files=files,
            labels=[*range(len(files))],
            name="reader",
            pad_last_batch=True,
            shard_id=shard_id,
            num_shards=num_shards,
        )
        return fn.decoders.image(data), label

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    output = show(sharded, files=pictures, batch_size=4, sharding=layout).batches[0].outputs[0]
    assert output.device == ", ".join(map(str, jax.devices()[:2]))
    assert "'data'" in output.sharding and output.shape == (4, 24, 24, 3)
    page = show(sharded, files=pictures, batch_size=4, devices=jax.devices()[:2])
    contents = page.batches[0]
    assert contents.outputs[0].shape == (2, 2, 24, 24, 3) and contents.outputs[0].layout == "HWC"
    assert len(contents.outputs[0].samples) == len(contents.valid) == 4
    labels = [contents.outputs[1].caption(row) for row in range(4)]
    assert labels == ["0", "1", "6", "7"]


def test_pipelines_made_by_hand(pictures):
    from nvidia.dali import pipeline_def

    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def pipeline():
        data, label = fn.readers.file(files=pictures, labels=[*range(12)], name="reader")
        return fn.decoders.image(data), label

    with DALIGenericIterator(pipeline(), ["image", "label"], reader_name="reader") as iterator:
        assert len(show(iterator).batches) == 1
        assert next(iterator)["label"].ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "arguments,error,words",
    [
        (
            dict(data=3),
            TypeError,
            "3 is not an iterator function, iterator, dataset, source or batch",
        ),
        (dict(data=iter([1])), TypeError, "can't return to its position. Pass one of its batches"),
        (
            dict(data={}, batch_size=3),
            TypeError,
            "batch_size.* are arguments of an iterator function",
        ),
        (dict(data={"x": 1}, classes={"z": "ab"}), ValueError, r"\['z'\] are not outputs"),
        (dict(data={"x": 1}, mask="m"), ValueError, r"\['m'\] are not outputs"),
        (dict(data={"x": 1}, batches=0), ValueError, "batches must be a whole number"),
        (dict(data={"x": 1}, samples="a"), TypeError, "samples must be a whole number"),
        (dict(data=train, file=[], batch_size=2), TypeError, "no argument .'file'."),
    ],
)
def test_mistakes(arguments, error, words):
    with pytest.raises(error, match=words):
        show(**arguments)


MODULE = """
from nvidia.dali import fn
from dalijax import data_iterator

@data_iterator(output_map=["image", "label"], reader_name="reader")
def train(folder, side=8):
    jpegs, label = fn.readers.file(file_root=folder, name="reader")
    return fn.resize(fn.decoders.image(jpegs), size=(side, side)), label

def iterator(folder, batch_size):
    return train(folder, batch_size=batch_size)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module ``my_data`` and 8 images in ``data/class``."""
    write_jpegs(tmp_path / "data" / "class", 8)
    (tmp_path / "my_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_data", None)  # of another test
    yield tmp_path
    sys.modules.pop("my_data", None)


TRAIN = ("my_data:train", "--batch-size", "4", "--arg", "folder=data")


@pytest.mark.slow
def test_the_command(folder, capsys):
    command = [sys.executable, "-m", "dalijax.show", *TRAIN, "--arg", "side=16", "--batches", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 batches of image, label: batch.html\n"
    found = Parsed((folder / "batch.html").read_text())
    assert [picture[0, 0, 0] for picture in found.pictures] == [8 * k for k in range(8)]
    assert found.pictures[0].shape == (16, 16, 3)
    main([*TRAIN, "--arg", "side=16", "--out", "single.html"])
    assert capsys.readouterr().out == "1 batch of image, label: single.html\n"


def test_the_command_draws(folder):
    main([*TRAIN, "--out", "out/batch.png", "--classes", "label=zero,one"])
    assert np.ptp(np.asarray(Image.open("out/batch.png"))) == 255
    main(["my_data:iterator", *TRAIN[1:], "--samples", "3"])
    assert len(Parsed((folder / "batch.html").read_text()).pictures) == 3


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["my_data"], "write module:function"),
        (["my_data:nothing"], "can't be loaded from"),
        (["my_data:train", "--batch-size", "4"], "needs more arguments: pass --arg folder=VALUE"),
        (["my_data:train", *TRAIN[3:]], "pass --batch-size"),
        (["my_data:number"], "3 is not an iterator function"),
        ([*TRAIN, "--out", "batch.pdf"], "must end in .html"),
        ([*TRAIN, "--classes", "label"], "write OUTPUT=VALUE"),
        ([*TRAIN, "--classes", "x=cat,dog"], "are not outputs of the batch"),
        ([*TRAIN, "--boxes", "x"], "are not outputs of the batch"),
        ([*TRAIN, "--format", "xy"], "format must be one of"),
        ([*TRAIN, "--arg", "folder"], "write NAME=VALUE"),
    ],
)
def test_mistakes_of_the_command(folder, capsys, arguments, words):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert words in f"{raised.value.code} {capsys.readouterr().err}"
    assert not (folder / "batch.html").exists()


def test_a_batch_that_fails_ends_the_command(folder, capsys):
    for file in (folder / "data" / "class").glob("*.jpg"):
        corrupt(file)
    with pytest.raises(
        SystemExit, match="my_data:train returned no batch; batch.html contains the reasons"
    ):
        main([*TRAIN])
    assert "class/00000.jpg" in capsys.readouterr().err
    assert "class/00000.jpg" in (folder / "batch.html").read_text()


@pytest.mark.parametrize("package", ["PIL", "jinja2"])
def test_a_missing_package_is_named_at_once(package):
    program = f"import sys; sys.modules[{package!r}] = None\nimport dalijax, dalijax.show"
    done = run_fork(program, code=1)
    assert done.stderr.strip().endswith('pip install "dalijax[show]"')
    assert package in done.stderr.splitlines()[-1]
