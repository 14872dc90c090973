"""Ranges of local files, read in C and in Python, compared with slices of the files' bytes."""

import errno
import os
import random
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalijax.core.formats import read_ranges as module
from dalijax.core.formats.byte_files import ByteFiles, _with_few_files
from dalijax.core.formats.read_ranges import read_ranges
from dalijax.sources import Tar
from full import FULL
from local_reads import Kernel, compiled
from tars import FIELDS, sample, samples, write_tar

pytestmark = pytest.mark.usefixtures("language")
UNTOUCHED = 0xAA  # byte of the buffer outside ranges


@pytest.fixture(scope="module")
def contents():
    draw = random.Random(0)
    return [draw.randbytes(size) for size in (0, 1, 511, 4096, 4097, 70_000)]


@pytest.fixture(scope="module")
def files(contents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)
    opened = [os.open(folder / str(number), os.O_RDONLY) for number in range(len(contents))]
    yield opened
    for file in opened:
        os.close(file)


def read(files, offsets, sizes, gap=3):
    """Returns the counts of ranges, their bytes, and the bytes of the buffer between them."""
    offsets, sizes = np.array(offsets, np.int64), np.array(sizes, np.int64)
    starts = np.cumsum(sizes + gap) - sizes
    buffer = np.full(int(sizes.sum()) + gap * (len(sizes) + 1), UNTOUCHED, np.uint8)
    counts = read_ranges(np.array(files, np.int64), offsets, sizes, starts, buffer)
    parts, end = [], 0
    outside = np.ones(buffer.size, bool)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        end = start + max(0, count)
        parts.append(buffer[start:end].tobytes())
        outside[start:end] = False
    return counts.tolist(), parts, set(buffer[outside].tolist())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 71_000), st.integers(0, 9_000)), max_size=80
    )
)
def test_ranges_are_slices_of_the_files(contents, files, ranges):
    numbers, offsets, sizes = zip(*ranges) if ranges else ([], [], [])
    counts, parts, outside = read([files[number] for number in numbers], offsets, sizes)
    slices = [contents[number][at : at + size] for number, at, size in ranges]
    assert parts == slices and counts == list(map(len, slices))
    assert outside == {UNTOUCHED}


def test_errors_have_the_number_of_their_cause(contents, files, tmp_path):
    closed = os.open(tmp_path, os.O_RDONLY)
    folder = os.open(tmp_path, os.O_RDONLY)
    only_written = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    os.close(closed)
    try:
        counts, parts, outside = read(
            [closed, files[5], folder, only_written, closed, files[4]],
            [0, 5, 0, 0, 0, 4000],
            [10, 60_000, 10, 10, 0, 200],
        )
    finally:
        os.close(folder)
        os.close(only_written)
    assert counts == [-errno.EBADF, 60_000, -errno.EISDIR, -errno.EBADF, 0, 97]
    assert [parts[1], parts[5]] == [contents[5][5:60_005], contents[4][4000:]]
    assert outside == {UNTOUCHED}


@pytest.mark.parametrize(
    "start, size", ((-1, 1), (0, 101), (100, 1), (99, 2), (0, -1), (1, 2**63 - 1), (2**63 - 1, 1))
)
def test_nothing_is_read_outside_the_buffer(files, start, size):
    buffer = np.full(100, UNTOUCHED, np.uint8)
    table = [np.array([first, second]) for first, second in ((files[5],) * 2, (0, 0), (10, size))]
    with pytest.raises(ValueError, match="outside the buffer of 100 bytes"):
        read_ranges(*table, np.array([0, start]), buffer)
    assert set(buffer.tolist()) == {UNTOUCHED}


def test_offsets_beyond_32_bits(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.seek(5 << 30)
        file.write(b"end")
        file.flush()
        with open(path, "rb") as opened:
            counts, parts, _ = read([opened.fileno()] * 2, [(5 << 30) - 1, 3 << 30], [4, 2])
    assert counts == [4, 2] and parts == [b"\0end", b"\0\0"]


@pytest.mark.skipif(not FULL, reason="make test-full")  # it takes 2 GiB
def test_a_range_that_the_kernel_reads_in_two_parts(tmp_path):
    path, size = tmp_path / "sparse", (1 << 31) + 5
    with open(path, "wb") as file:
        file.seek(size - 3)
        file.write(b"end")
    buffer = np.empty(size, np.uint8)
    zero = np.zeros(1, np.int64)
    with open(path, "rb") as file:
        assert read_ranges(zero + file.fileno(), zero, zero + size, zero, buffer) == [size]
    assert buffer[-5:].tobytes() == b"\0\0end" and not buffer[:-3].any()


# Kernels


def only_cached(cached):
    def size_of(size):
        if cached in ("nothing", "unknown", "no call"):
            number = {"nothing": errno.EAGAIN, "unknown": errno.EOPNOTSUPP, "no call": errno.ENOSYS}
            raise OSError(number[cached], "not at once")
        return size if cached == "all" else size // 2

    return size_of


@pytest.mark.parametrize("cached", ("all", "half", "nothing", "unknown", "no call", "no flag"))
def test_only_uncached_ranges_are_requested(
    contents, files, language, monkeypatch, tmp_path, cached
):
    """Advice for 0 bytes would apply to the rest of the file."""
    kernel = Kernel(only_cached(cached))
    kernel.use(monkeypatch, language, tmp_path)
    if cached == "no flag":
        if language == "C":
            pytest.skip("the C library has the flag")
        monkeypatch.setattr(module, "_NOWAIT", 0)
    file = files[5]
    counts, parts, _ = read([file] * 4, [700, 0, 9, 10], [700, 0, 5, 0])
    assert counts == [700, 0, 5, 0]
    assert parts == [contents[5][700:1400], b"", contents[5][9:14], b""]
    uncached = {"all": [], "half": [(file, 1050, 350), (file, 11, 3)]}
    assert kernel.advised == uncached.get(cached, [(file, 700, 700), (file, 9, 5)])
    flagged = {"unknown": {700}, "no call": {700}, "no flag": set()}
    assert {*kernel.flagged} - {0, 10} == flagged.get(cached, {700, 9})


def test_hundreds_of_uncached_ranges(contents, files, language, monkeypatch, tmp_path):
    kernel = Kernel(only_cached("nothing"))
    kernel.use(monkeypatch, language, tmp_path)
    offsets = [100 * k for k in range(300)]
    counts, parts, _ = read([files[5]] * 300, offsets, [90] * 300)
    assert counts == [90] * 300 and parts == [contents[5][at : at + 90] for at in offsets]
    assert kernel.advised == [(files[5], at, 90) for at in offsets]


@pytest.mark.parametrize("most", (1, 7, 4096))
def test_short_reads_are_continued(contents, files, language, monkeypatch, tmp_path, most):
    Kernel(lambda size: size // 3, most).use(monkeypatch, language, tmp_path)
    counts, parts, outside = read([files[3], files[5], files[2]], [0, 69_990, 9], [500, 20, 9])
    assert counts == [500, 10, 9] and outside == {UNTOUCHED}
    assert parts == [contents[3][:500], contents[5][69_990:], contents[2][9:18]]


def test_an_error_after_some_bytes_is_reported(files, language, monkeypatch, tmp_path):
    Kernel(most=5, faults=[0, 0, errno.EIO]).use(monkeypatch, language, tmp_path)
    counts, parts, _ = read([files[3], files[3]], [0, 100], [20, 5])
    assert counts == [-errno.EIO, 5] and len(parts[1]) == 5


def test_a_signal_is_handled_between_two_reads(contents, files, language, monkeypatch, tmp_path):
    if language == "Python":
        pytest.skip("Python itself repeats interrupted calls")
    handled = []
    before = signal.signal(signal.SIGINT, lambda *_: handled.append(len(handled)))
    try:
        kernel = Kernel(most=100, faults=[0, errno.EINTR, 0, errno.EINTR, 0])
        kernel.use(monkeypatch, language, tmp_path)
        counts, parts, outside = read([files[3]] * 3, [0, 500, 1000], [150, 200, 50])
        assert handled == [0, 1] and outside == {UNTOUCHED}
        assert parts == [contents[3][at : at + count] for at, count in zip((0, 500, 1000), counts)]
        assert counts == [150, 200, 50]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Kernel(faults=[errno.EINTR] * 99).use(monkeypatch, language, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            read([files[3]], [0], [10])
    finally:
        signal.signal(signal.SIGINT, before)


# Files of a source


def test_an_error_names_the_record_and_the_file(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    source = Tar(path, FIELDS)
    source.read(np.arange(3), ["data"])
    only_written = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    os.dup2(only_written, source._files.file(0).fd)
    os.close(only_written)
    with pytest.raises(OSError, match=r"'data' of .*a\.tar: .*, 42 bytes at byte 4,608") as caught:
        source.read(np.array([2]), ["data"])
    assert caught.value.errno == errno.EBADF and caught.value.filename == path


@pytest.mark.parametrize("limit", (40, 4096))
def test_hundreds_of_files(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("dalijax.core.formats.byte_files.most_open", lambda: limit)
    contents = [bytes([k % 256]) * (k + 1) for k in range(300)]
    for k, content in enumerate(contents):
        (tmp_path / str(k)).write_bytes(content)
    files = ByteFiles([str(tmp_path / str(k)) for k in range(300)], list(map(len, contents)))
    numbers = np.random.default_rng(0).integers(0, 300, 900)
    offsets = numbers // 2
    sizes = numbers + 1 - offsets
    values = files.read(numbers, offsets, sizes, str)
    assert [value.tobytes() for value in values] == [
        contents[number][at:] for number, at in zip(numbers, offsets)
    ]
    assert len(files._open) <= limit


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 4), st.booleans())
def test_parts_of_a_read_have_few_files(files, most, in_order):
    files = np.array(sorted(files) if in_order else files, np.int64)
    rows = 7 * np.arange(len(files))
    parts = _with_few_files(rows, files, most)
    assert np.concatenate([*parts, rows[:0]]).tolist() == rows.tolist()
    assert all(0 < len(set(files[part // 7].tolist())) <= most for part in parts)
    if in_order:  # no more parts than needed
        assert len(parts) == -(-len(set(files.tolist())) // most)


def test_threads_read_while_files_are_closed(tmp_path):
    """A thread keeps the files that it reads open, even if others open more than the limit."""
    there = len(os.listdir("/proc/self/fd"))
    count = 3 * there
    sizes = [5000 + k for k in range(count)]
    for k, size in enumerate(sizes):
        (tmp_path / str(k)).write_bytes(bytes([k % 256]) * size)
    files = ByteFiles([str(tmp_path / str(k)) for k in range(count)], sizes)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            numbers = rng.integers(0, count, 30)
            values = files.read(numbers, numbers * 0, np.array(sizes)[numbers], str)
            for number, value in zip(numbers.tolist(), values):
                assert value.tobytes() == bytes([number % 256]) * sizes[number]

    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * there, limits[1]))
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(8)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("found", ("missing", "no library", "other functions"))
def test_without_the_helper_files_are_read_in_python(tmp_path, monkeypatch, found):
    path = tmp_path / "helper.so"
    if found == "no library":
        path.write_bytes(b"\x7fELF")
    elif found == "other functions":
        path = compiled(tmp_path, "-Ddalijax_read_ranges=another")
        if path is None:
            pytest.skip("no C compiler")
    monkeypatch.setattr(module, "LIBRARY", path)
    assert module._best_reader() is module.read_in_python
    source = Tar(write_tar(tmp_path / "a.tar", samples(0, 3)), FIELDS)
    assert source.read(np.array([1]), ["data"])["data"][0].tobytes() == sample(1)[0][1]
