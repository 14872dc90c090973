"""Untrusted file names in errors, logs and pages are escaped and on a single line."""

import logging
import os
import tarfile

import numpy as np
import pytest
from nvidia.dali import fn

from conftest import write_jpegs
from dalijax import data_iterator, show
from dalijax.core.formats.tfrecord_headers import masked_crc
from dalijax.errors import BatchError
from dalijax.sources import Files, Tar, TFRecord
from tars import FIELDS, samples, write_tar

HOSTILE = [
    "a\x1b[2J\x1b]0;title\x07.jpg",
    "a\nbatch 7 of epoch 9 failed: all is well\r.jpg",
    "gpj\u202e\u2066.a\u2028b\x9bm.jpg",
    os.fsdecode(b"latin\xe9\xff.jpg"),
    "<script>alert(1)</script>.jpg".replace("/", "\u2215"),
]


def check(text):
    """Checks that a message contains neither control characters nor lines of a file's name."""
    assert text
    for line in text.split("\n"):
        assert line.isprintable(), repr(line)
        assert not line.startswith("batch 7 of epoch 9")
    text.encode()


@data_iterator(output_map=["images"])
def decode(data):
    return fn.resize(fn.decoders.image(data, device="cpu"), size=(8, 8))


@data_iterator(output_map=["images"], reader_name="reader")
def read(files):
    data, _ = fn.readers.file(files=files, name="reader", pad_last_batch=True)
    return fn.resize(fn.decoders.image(data, device="cpu"), size=(8, 8))


@pytest.fixture
def folder(tmp_path):
    write_jpegs(tmp_path / "images", 7)
    return tmp_path / "images"


@pytest.mark.parametrize("content", [b"not an image", None])
@pytest.mark.parametrize("name", HOSTILE)
def test_errors_and_logs_of_files(name, content, folder, caplog):
    (folder / name).write_bytes(b"x" if content is None else content)
    source = Files(folder)
    if content is None:
        (folder / name).unlink()
    true_name = str(folder / name)
    with decode(source=source, batch_size=8) as iterator:
        with pytest.raises(BatchError) as raised:
            next(iterator)
        check(str(raised.value))
        assert raised.value.files == (true_name,)
    caplog.set_level(logging.WARNING, "dalijax")
    for policy in ("mask", "skip"):
        caplog.clear()
        mask = {"mask": "mask"} if policy == "mask" else {}
        with decode(source=source, batch_size=4, on_error=policy, **mask) as iterator:
            list(iterator)
            (failed,) = iterator.errors
            check(failed.message)
            assert failed.files == (true_name,)
        for record in caplog.records:
            check(record.getMessage())


@pytest.mark.parametrize("name", HOSTILE[:3])
def test_errors_of_readers(name, folder):
    (folder / name).write_bytes(b"not an image")
    with (
        read(sorted(map(str, folder.iterdir())), batch_size=8) as iterator,
        pytest.raises(BatchError) as raised,
    ):
        next(iterator)
    assert raised.value.files == (str(folder / name),)
    text = str(raised.value)
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("name", HOSTILE)
def test_errors_of_tars(name, tmp_path, caplog):
    stem = name.removesuffix(".jpg").replace(".", "")
    encoded = tmp_path / name.replace(".jpg", ".tar")
    for entries in (
        [(f"{stem}.jpg", b"x"), (f"{stem}.cls", b"not a number")],
        [(f"{stem}.jpg", b"x")],
        [(f"{stem}.jpg", b"x"), (f"{stem}.jpg", b"x"), (f"{stem}.cls", b"1")],
        [(f"{stem}.jpg", b"x"), (f"{stem}2.cls", b"1"), (f"{stem}.cls", b"1")],
    ):
        with pytest.raises(ValueError) as raised:
            Tar(write_tar(encoded, entries, tarfile.GNU_FORMAT), FIELDS, cache_dir=tmp_path / "c")
        check(str(raised.value))
    path = write_tar(encoded, samples(0, 5))
    for damage in (700, 5000):
        with open(path, "r+b") as file:
            file.seek(damage)
            file.write(b"\xff" * 600)
        with pytest.raises(ValueError) as raised:
            Tar(path, FIELDS, cache_dir=tmp_path / "c")
        check(str(raised.value))
    path = write_tar(encoded, samples(0, 5))
    source = Tar(path, FIELDS, cache_dir=tmp_path / "c")
    assert source.name(0).startswith(path)
    os.truncate(path, 520)
    with pytest.raises(OSError) as raised:
        source.read(np.array([0]), ["data"])
    check(str(raised.value))
    for record in caplog.records:
        check(record.getMessage())


@pytest.mark.parametrize("name", HOSTILE)
def test_errors_of_folders(name, tmp_path):
    def refused(*arguments, **options):
        with pytest.raises((ValueError, OSError)) as raised:
            Files(*arguments, **options)
        check(str(raised.value))

    file = tmp_path / name
    refused(file)
    refused(tmp_path / f"*{name}")
    file.write_bytes(b"")
    refused(file)
    (tmp_path / "folders" / name).mkdir(parents=True)
    refused(tmp_path / "folders")
    refused(tmp_path / "folders", extensions=[name])
    refused(paths=[tmp_path / "missing" / name])


@pytest.mark.parametrize("name", HOSTILE)
def test_errors_of_tfrecords(name, tmp_path):
    path = tmp_path / name
    length = (3).to_bytes(8, "little")
    head = length + masked_crc(length).to_bytes(4, "little")
    for content in (b"", b"garbage of some length", head, head + b"\xff\xff\xff" + bytes(4)):
        path.write_bytes(content)
        with pytest.raises(ValueError) as raised:
            TFRecord(path, {"data": "x"}, cache_dir=tmp_path / "c")
        check(str(raised.value))


@pytest.mark.parametrize("name", HOSTILE)
def test_pages(name, folder, tmp_path):
    (folder / name).write_bytes(b"not an image")
    page = show.show(decode, source=Files(folder), batch_size=8)
    assert page.failures
    for suffix in (".html", ".png"):
        page.save(tmp_path / f"page{suffix}")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    check(text)
    texts = np.array([name] * 2, object)
    page = show.show({"label": texts, "x": np.zeros((2, 4, 4, 3), np.uint8)})
    assert all(line.isprintable() for line in page.html.split("\n"))
    assert "<script" not in page.html
    page.save(tmp_path / "page.png")


def test_errors_of_ragged_records(folder):
    os.rename(folder / "00003.jpg", folder / HOSTILE[0])

    @data_iterator(output_map=["data"])
    def plain(data):
        return data

    (folder / HOSTILE[1]).write_bytes(b"1")
    with plain(source=Files(folder), batch_size=8) as iterator:
        with pytest.raises(ValueError) as raised:
            next(iterator)
        check(str(raised.value))
