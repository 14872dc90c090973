"""Pointers of git-lfs in place of files: each error names the file and the fix."""

import io
import re

import grain
import numpy as np
import pytest
from nvidia.dali import fn, tfrecord
from PIL import Image

from dalijax import data_iterator
from dalijax.adapters.grain import DALITransform
from dalijax.core.formats.file_kinds import pointer_fault
from dalijax.fn import read_file
from dalijax.sources import RLDS, Files, Records, Tar, TFRecord
from range_server import serving
from tars import write_tar

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 12345\n" % (
    b"4d7a" * 16
)
FIX = "it is a git-lfs pointer; run git lfs pull"


def jpeg(level):
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (level,) * 3).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cat").mkdir()
    for name in ("a.tar", "a.tfrecord", "a.idx", "cat/0.jpg", "cat/1.jpg", "a.wav", "a.mp4"):
        (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "mixed" / "cat").mkdir(parents=True)
    for k in range(4):
        content = POINTER if k == 2 else jpeg(k)
        (tmp_path / f"mixed/cat/{k}.jpg").write_bytes(content)
    (tmp_path / "whole.idx").write_text(f"0 {len(POINTER)}\n")
    entries = [("0.jpg", jpeg(0)), ("0.cls", b"0"), ("0.txt", b"a"), ("0.json", b"1")]
    entries += [(f"1.{extension}", POINTER) for extension in ("jpg", "cls", "txt", "json")]
    write_tar(tmp_path / "members.tar", entries)
    return tmp_path


def image(data):
    return {"x": fn.decoders.image(data)}


def sound(data):
    return {"x": fn.decoders.audio(data)[0]}


def image_of(path):
    return image(read_file(path))


def sound_of(path):
    return sound(read_file(path))


def batch(graph, source=None, size=2, **options):
    return next(iter(data_iterator(graph)(source=source, batch_size=size, **options)))


def read(source, name):
    return source.read(np.arange(len(source)), [name])


def paths(path):
    return Records([{"path": str(path).encode()}] * 2)


# For each kind of file, a function of the folder, and the file that the error names.
SOURCES = {
    "tar": (lambda d: Tar(d / "a.tar", {"data": "jpg"}), "a.tar is not a tar"),
    "records": (
        lambda d: TFRecord(d / "a.tfrecord", {"data": "x"}),
        "a.tfrecord is not a TFRecord",
    ),
    "episodes": (
        lambda d: RLDS(d / "a.tfrecord", {"x": "steps/x"}),
        "a.tfrecord is not a TFRecord",
    ),
    "image in a tar": (
        lambda d: batch(image, Tar(d / "members.tar", {"data": "jpg"}), shuffle=False),
        "members.tar: 1 can't be read",
    ),
    "number": (lambda d: read(Tar(d / "members.tar", {"y": "cls"}), "y"), "members.tar: 1.cls"),
    "text": (lambda d: read(Tar(d / "members.tar", {"y": "txt"}), "y"), "'y' of .*members.tar: 1"),
    "json": (lambda d: read(Tar(d / "members.tar", {"y": "json"}), "y"), "'y' of .*members.tar: 1"),
    "images": (lambda d: batch(image, Files(d / "cat"), shuffle=False), r"cat/0\.jpg.* can't be"),
    "an image": (lambda d: batch(image, Files(d / "mixed"), 4), r"cat/2\.jpg can't be read"),
    "sound": (lambda d: batch(sound, Files(paths=[d / "a.wav"] * 2)), r"a\.wav can't be read"),
    "video": (
        lambda d: batch(
            lambda data: {"x": fn.decoders.video(data)}, Files(paths=[d / "a.mp4"] * 2)
        ),
        r"a\.mp4 can't be read",
    ),
    "bytes": (lambda d: batch(sound, Records([{"data": POINTER}] * 2)), "record [01] can't be"),
    "path of an image": (lambda d: batch(image_of, paths(d / "cat/0.jpg")), r"0\.jpg\) can't be"),
    "path of a sound": (lambda d: batch(sound_of, paths(d / "a.wav")), r"a\.wav\) can't be"),
}


def examples(d, path, index):
    features = {"x": tfrecord.FixedLenFeature((), tfrecord.string, "")}
    names = {"path": str(d / path), "index_path": str(d / index)}
    return fn.readers.tfrecord(**names, features=features, name="r")["x"]


READERS = {
    "2.jpg": lambda d: fn.decoders.image(fn.readers.file(file_root=str(d / "mixed"), name="r")[0]),
    "a.tar": lambda d: fn.readers.webdataset(paths=str(d / "a.tar"), ext="jpg", name="r"),
    "a.tfrecord": lambda d: examples(d, "a.tfrecord", "whole.idx"),
    "a.idx": lambda d: examples(d, "members.tar", "a.idx"),
    "a.mp4": lambda d: fn.readers.numpy(files=[str(d / "a.mp4")], name="r"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_pointers_are_named_with_the_fix(kind, folder):
    make, name = SOURCES[kind]
    with pytest.raises((ValueError, RuntimeError), match=name) as raised:
        make(folder)
    assert FIX in str(raised.value)


@pytest.mark.parametrize("name", READERS)
def test_readers_name_pointers(name, folder):
    graph = data_iterator(lambda: {"x": READERS[name](folder)}, reader_name="r")
    with pytest.raises(RuntimeError, match=rf"{name}( can't be read)?: {FIX}"):
        next(iter(graph(batch_size=4, mask=True)))


@pytest.fixture
def url(folder):
    with serving(folder) as (url, _):
        yield url


def test_remote_pointers_are_named(url, folder):
    opened = {
        "a.tar is not a tar": lambda: Tar(f"{url}/a.tar", {"data": "jpg"}),
        "a.tfrecord is not a TFRecord": lambda: TFRecord(f"{url}/a.tfrecord", {"data": "x"}),
        "a.idx is not an index": lambda: Tar(
            f"{url}/members.tar", {"data": "jpg"}, index_paths=f"{url}/a.idx"
        ),
        "cat/0.jpg can't be read": lambda: batch(image, Files(paths=[f"{url}/cat/0.jpg"] * 2)),
    }
    for words, make in opened.items():
        with pytest.raises(ValueError, match=f"{words}.*{FIX}"):
            make()


def test_a_pointer_in_place_of_a_shared_index_is_not_used(folder, caplog):
    (folder / ".dalijax-tar.index").write_bytes(POINTER)
    assert len(Tar(folder / "members.tar", {"data": "jpg"})) == 2
    assert FIX in caplog.text


@pytest.mark.parametrize("graph", (image, sound, image_of, sound_of))
def test_records_of_grain(graph, folder):
    field, value = ("path", str(folder / "a.wav").encode()), POINTER
    record = dict([field]) if graph in (image_of, sound_of) else {"data": value}
    dataset = grain.MapDataset.source([record] * 4).to_iter_dataset()
    transform = DALITransform(graph, batch_size=2, num_threads=1)
    with pytest.raises(Exception, match=FIX):
        next(iter(transform(dataset)))


def test_texts_that_only_resemble_pointers():
    assert pointer_fault(np.frombuffer(POINTER, np.uint8)) == FIX
    for data in (b"", b"version", POINTER[1:], POINTER + bytes(1024), b"x" + POINTER):
        assert not pointer_fault(data)
    assert re.match(rb"version https://git-lfs\.github\.com/spec/v1\n", POINTER)
