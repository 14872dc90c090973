"""Detects AVI and WAV files with fewer bytes than their headers declare."""

import io
import struct

import numpy as np
import pytest

import clips
from dalijax.core.formats.riff import cut_off, file_cut_off

MAY_LACK = {b"AVI ": 9, b"WAVE": 4096}  # bytes


def riff(kind=b"WAVE", size=None, count=5000):
    """Returns a file with the given number of bytes."""
    head = struct.pack("<4sI4s", b"RIFF", count - 8 if size is None else size, kind)
    return head + bytes(count - len(head))


def error_of(data, tmp_path, name="file.wav"):
    """Returns the error of a file, given as bytes of each type and as a path."""
    (tmp_path / name).write_bytes(data)
    said = {cut_off(one) for one in (data, memoryview(data), np.frombuffer(data, np.uint8))}
    said.add(file_cut_off(str(tmp_path / name).encode()))
    assert len(said) == 1
    return said.pop()


@pytest.mark.parametrize("kind", MAY_LACK)
def test_truncated_files_are_found_but_no_complete_file(kind, tmp_path):
    data = riff(kind)
    for more in (b"", b"more"):  # like large AVIs
        assert error_of(data + more, tmp_path) == ""
    least = len(data) - MAY_LACK[kind]
    for count in range(12, len(data), 1 if kind == b"AVI " else 37):
        said = cut_off(data[:count])
        wanted = f"it is cut off: its header declares 5000 bytes, but it has {count}"
        assert said == (wanted if count < least else "")
    assert error_of(data[: least - 1], tmp_path) and not error_of(data[:least], tmp_path)


@pytest.mark.parametrize("kind", MAY_LACK)
@pytest.mark.parametrize("more", (1, 8, 9))
def test_a_size_that_includes_the_header_or_a_padding_byte_is_complete(kind, more, tmp_path):
    assert error_of(riff(kind, size=5000 - 8 + more), tmp_path) == ""


@pytest.mark.parametrize("size", (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF024))
def test_an_unknown_size_is_accepted(size, tmp_path):
    assert error_of(riff(size=size), tmp_path) == ""


@pytest.mark.parametrize(
    "data", (b"", b"R", b"RIFF", b"RIFFS ARE LOUD, AND THIS IS A TEXT", riff(b"WEBP", size=9999))
)
def test_other_files_are_accepted(data, tmp_path):
    assert error_of(data, tmp_path) == ""


@pytest.mark.parametrize("value", (None, np.uint8(82), np.array(82, np.uint8), 7))
def test_values_that_are_not_bytes_are_ignored(value):
    assert cut_off(value) == ""


def test_files_by_their_names(tmp_path):
    cut = riff(size=9999)
    for name in ("a.WAV", "b.avi", "c.wav"):
        assert error_of(riff(), tmp_path, name) == ""
        assert "10007 bytes" in error_of(cut, tmp_path, name)
    (tmp_path / "d.jpg").write_bytes(cut)
    for path in (tmp_path / "d.jpg", "/no/such/file.wav", "/a\0zero.wav"):
        assert file_cut_off(str(path).encode()) == ""


def test_files_written_by_libraries_are_complete(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    for count in (1, 2, 9_999, 10_000):
        for subtype in ("PCM_16", "PCM_24", "PCM_U8", "FLOAT", "MS_ADPCM"):
            file = io.BytesIO()
            soundfile.write(file, np.zeros(count), 16_000, subtype, format="WAV")
            data = file.getvalue()
            assert error_of(data, tmp_path) == ""
            assert bool(error_of(data[: len(data) // 2], tmp_path)) == (len(data) > 2 * 4096)
    frames = list(clips.draw_clip("rising", np.random.default_rng(0)))
    clips.write_avi(tmp_path / "clip.avi", frames)
    data = (tmp_path / "clip.avi").read_bytes()
    assert error_of(data, tmp_path, "copy.avi") == "" and error_of(data[:-10], tmp_path, "copy.avi")
