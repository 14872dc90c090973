"""AVI and WAV files that have fewer bytes than their headers say."""

import io
import struct

import numpy as np
import pytest

import clips
from dalijax.core.pipeline.riff import check_whole, check_whole_file


def riff(kind=b"WAVE", size=None, count=40):
    """A file of so many bytes."""
    return struct.pack("<4sI4s", b"RIFF", count - 8 if size is None else size, kind) + bytes(
        count - 12
    )


def whole(data, tmp_path, name="file.wav"):
    """Whether a file is taken for whole, from its bytes of each kind and from its path."""
    (tmp_path / name).write_bytes(data)
    path = str(tmp_path / name).encode()
    found = set()
    for check, value in (
        (check_whole, data),
        (check_whole, memoryview(data)),
        (check_whole, np.frombuffer(data, np.uint8)),
        (check_whole_file, path),
    ):
        try:
            check(value)
            found.add("")
        except ValueError as error:
            found.add(str(error))
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("kind", (b"AVI ", b"WAVE"))
def test_every_cut_is_found_and_no_whole_file(kind, tmp_path):
    data = riff(kind)
    assert whole(data, tmp_path) == ""
    assert whole(data + b"more", tmp_path) == ""  # as big AVIs have it
    for count in range(12, len(data)):
        said = whole(data[:count], tmp_path)
        assert said == f"it is cut off: by its header it has 40 bytes, and not {count}"


def test_a_missing_last_byte_of_an_odd_size_is_no_cut(tmp_path):
    data = riff(size=33)  # 41 bytes; with the one that fills it up 42
    assert len(data) == 40
    assert whole(data, tmp_path) == ""
    assert "41 bytes, and not 39" in whole(data[:-1], tmp_path)


@pytest.mark.parametrize("size", (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF024))
def test_a_size_that_is_not_known_passes(size, tmp_path):
    assert whole(riff(size=size), tmp_path) == ""


@pytest.mark.parametrize(
    "data", (b"", b"R", b"RIFF", b"RIFFS ARE LOUD, AND THIS IS A TEXT", riff(b"WEBP", size=99))
)
def test_other_files_pass(data, tmp_path):
    assert whole(data, tmp_path) == ""


def test_files_by_their_names(tmp_path):
    cut = riff(size=99)
    for name in ("a.WAV", "b.avi", "c.wav"):
        assert "99" not in whole(riff(), tmp_path, name)
        assert "107 bytes" in whole(cut, tmp_path, name)
    (tmp_path / "d.jpg").write_bytes(cut)
    check_whole_file(str(tmp_path / "d.jpg").encode())
    check_whole_file(b"/no/such/file.wav")


def test_files_that_libraries_write_are_whole(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    for count in (1, 2, 999, 1000):
        for subtype in ("PCM_16", "PCM_24", "PCM_U8", "FLOAT"):
            file = io.BytesIO()
            soundfile.write(file, np.zeros(count), 16_000, subtype, format="WAV")
            data = file.getvalue()
            assert whole(data, tmp_path) == ""
            assert whole(data[: len(data) // 2], tmp_path)
    frames = list(clips.draw_clip("rising", np.random.default_rng(0)))
    clips.write_avi(tmp_path / "clip.avi", frames)
    assert whole((tmp_path / "clip.avi").read_bytes(), tmp_path, "copy.avi") == ""
