"""Reads of tars over HTTP through obstore, with latency, faults, changes, forks and exits."""

import collections
import contextlib
import ctypes
import email.utils
import gc
import os
import pickle
import signal
import threading
import time
import warnings

import numpy as np
import pytest
from forks import Fork
from nvidia.dali import fn, types

from dalijax import data_iterator
from dalijax.core.feeding.announcer import Announcer
from dalijax.core.formats.example_message import example_message, record_parts
from dalijax.core.threads.workers import Workers
from dalijax.sources import Files, Mixture, Named, Tar, TFRecord
from range_server import serving, share_of_requests
from tars import numbered_bytes, write_numbered, write_tar

pytest.importorskip("obstore")

FIELDS = {"data": "bin", "label": "cls"}
TARS, SAMPLES = 6, 20
SIZE = 20_000  # more than the gap that is read between two ranges
QUICK = {"timeout": 0.3, "retry_timeout": 20}


def content(record):
    return numbered_bytes(record, SIZE)


def write(folder, shift=0):
    write_numbered(folder, TARS, SAMPLES, SIZE, shift)
    if not (folder / "bucket").exists():
        os.symlink(folder, folder / "bucket")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tars")
    write(path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def allocated():
    """Returns a function that returns the bytes that the C library has allocated."""
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library is not glibc 2.33 or newer")
    mallinfo.restype = Info

    def count():
        info = mallinfo()
        return info.uordblks + info.hblkhd

    return count


@pytest.fixture
def server(folder):
    with serving(folder) as (url, server):
        server.url, server.is_bucket = url, False
        yield server


@pytest.fixture(params=("http", "s3"))
def scheme(request, server):
    """Reads by one request for each call, or by calls with several requests of a bucket."""
    server.is_bucket = request.param == "s3"
    return request.param


def opened(server, **arguments):
    options = {**QUICK, **arguments.pop("storage_options", {})}
    root = server.url
    if server.is_bucket:
        root = "s3://bucket"
        options |= {"key": "a", "secret": "b", "region": "x", "endpoint_url": server.url}
    urls = [f"{root}/{k}.tar" for k in range(TARS)]
    return Tar(urls, FIELDS, storage_options=options, **arguments)


def check(source, records):
    values = source.read(np.array(records), ["data", "label"])
    assert [v.tobytes() for v in values["data"]] == [content(k) for k in records]
    assert values["label"].tolist() == list(records)


def identity(data, label):
    return fn.pad(data, shape=[SIZE + 200]), label


def labels_of(source, steps, **arguments):
    """Returns the labels of some batches, after comparing all bytes."""
    make = data_iterator(identity, ["data", "label"], source=source)
    labels = []
    with make.stream(batch_size=10, num_threads=1, as_numpy=True, seed=3, **arguments) as stream:
        for _, batch in zip(range(steps), stream):
            labels += batch["label"].tolist()
            for data, label in zip(batch["data"], batch["label"].tolist(), strict=True):
                assert (
                    data[: SIZE + label].tobytes() == content(label)
                    and not data[SIZE + label :].any()
                )
    return labels


def test_records_and_requests(server):
    source = opened(server)
    check(source, [119, 0, 3, 0, 40])
    server.ranges.clear()
    check(pickle.loads(pickle.dumps(source)), [7, 100, 7])
    assert len(server.ranges) == 2 and server.heads == 0
    assert source.name(21).endswith("/1.tar: 0021")
    local = Tar([str(server.folder / f"{k}.tar") for k in range(TARS)], FIELDS)
    assert source.identity() == local.identity()


def test_a_stored_index_needs_one_request_for_each_tar(server):
    opened(server)
    server.ranges.clear()
    opened(server)
    assert sorted(server.ranges) == [(f"{k}.tar", 0, 1) for k in range(TARS)]


def test_batches_are_those_of_local_files(server, scheme):
    local = Tar([str(server.folder / f"{k}.tar") for k in range(TARS)], FIELDS)
    expected = labels_of(local, 30)
    assert labels_of(opened(server), 30) == expected
    assert labels_of(opened(server, read_ahead=0), 30) == expected
    assert labels_of(opened(server, read_ahead="1kB"), 30) == expected
    assert sorted(expected[:120]) == list(range(120))


def test_numbers_at_any_address(server, tmp_path):
    values = np.random.default_rng(0).normal(size=(16, 500)).astype(np.float32)
    server.folder = tmp_path
    with open(tmp_path / "0.tfrecord", "wb") as file:
        for k in range(16):
            example = example_message({"x": [values[k, : 400 + k].tobytes()], "y": [bytes(k)]})
            file.writelines(record_parts(example))
    source = TFRecord(f"{server.url}/0.tfrecord", {"data": "x"})
    read = [array.view(np.float32) for array in source.read(np.arange(16), ["data"])["data"]]
    assert not all(array.flags.aligned for array in read)  # which share a request

    def scaled(data):
        numbers = fn.reinterpret(data, dtype=types.FLOAT)
        return fn.pad(2 * numbers + 1, shape=[416]), fn.reductions.sum(numbers)

    make = data_iterator(scaled, ["scaled", "sum"], source=source, as_numpy=True)
    batch = next(make(batch_size=16, shuffle=False))
    for k, (scaled_row, total) in enumerate(zip(batch["scaled"], batch["sum"], strict=True)):
        np.testing.assert_array_equal(scaled_row[: 400 + k], 2 * values[k, : 400 + k] + 1)
        np.testing.assert_allclose(total, values[k, : 400 + k].sum(dtype=float), rtol=1e-3)


@pytest.mark.parametrize("kind", ("503", "reset", "short", "hang", "gzip"))
def test_whole_files(kind, server, folder):
    urls = [f"{server.url}/{k}.tar" for k in range(TARS)]
    source = Files(paths=urls, storage_options=QUICK)
    server.fault = lambda path, start, end, count: kind if count < 2 else ""
    values = source.read(np.array([3, 1, 3]), ["data"])["data"]
    assert [v.tobytes() for v in values] == [(folder / f"{k}.tar").read_bytes() for k in (3, 1, 3)]
    assert source.name(2) == urls[2] and server.num_faults >= 4
    server.fault = lambda path, *_: "403" if path == "1.tar" else ""
    with pytest.raises(PermissionError, match=rf"^{urls[1]}: access is denied"):
        source.read(np.array([3, 1]), ["data"])


def test_mixtures_and_names_read_ahead(server):
    source = opened(server)
    mixture = Named(Mixture([(source, 1), (opened(server), 2)]), index="index")
    assert mixture._read_ahead == source._read_ahead == 128_000_000
    server.ranges.clear()
    server.latency = 0.1  # so that the requests of several batches are in flight together
    assert len(labels_of(mixture, 20)) == 200
    assert server.most_in_flight > 10


def test_maps_read_their_inputs(server):
    def sum_of(record, rng):
        return {"sum": int(record["data"].sum(dtype=np.int64)), "noise": rng.random()}

    source = opened(server).random_map(sum_of, inputs=["data"])
    assert source._read_ahead == 128_000_000 and list(source.fields) == ["label", "sum", "noise"]
    make = data_iterator(lambda label, sum, noise: (label, sum, noise), ["label", "sum", "noise"])

    def batches():
        return [*make(source=source, batch_size=24, num_threads=1, as_numpy=True, seed=1)]

    server.fault = share_of_requests(0.2, ("503", "reset"), most=1)
    first, second = batches(), batches()
    assert sorted(np.concatenate([batch["label"] for batch in first])) == list(range(120))
    for batch, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(batch["noise"], again["noise"])
        for record, total in zip(batch["label"], batch["sum"], strict=True):
            assert total == np.frombuffer(content(record), np.uint8).sum(dtype=np.int64)


def test_maps_of_indexed_labels_request_nothing(server):
    small = opened(server).map(lambda record: {"n": record["label"] * 2}, inputs=["label"])
    server.ranges.clear()
    make = data_iterator(lambda n: n + 0, ["n"])
    assert len(list(make(source=small, batch_size=24, num_threads=1))) == 5
    assert not server.ranges


@pytest.mark.parametrize(
    "kind",
    (
        *("429", "500", "503", "reset", "hang", "stall", "short", "less", "other", "cut", "long"),
        *("chunked", "unsized", "garbled"),
    ),
)
def test_faults_that_pass_lose_no_record(kind, server, scheme):
    source = opened(server)
    server.fault = share_of_requests(0.4, (kind,), most=1)
    records = list(range(0, 120, 2))
    check(source, records)
    assert server.num_faults > 5


def test_a_server_that_does_not_answer_has_the_file(server):
    server.latency = 10.0
    threading.Timer(0.8, setattr, (server, "latency", 0.0)).start()
    check(opened(server), [1, 30])


@pytest.mark.parametrize("on_error", ("raise", "skip", "mask"))
@pytest.mark.parametrize("kind", ("403", "404", "412"))
def test_final_errors_are_not_errors_of_records(kind, on_error, server):
    source = opened(server, read_ahead=0)  # so that few batches are read early
    make = data_iterator(identity, ["data", "label"], source=source, on_error=on_error, mask="mask")
    labels = []
    with make.stream(batch_size=10, num_threads=1, as_numpy=True, shuffle=False) as stream:
        labels += next(stream)["label"].tolist()
        server.fault = lambda path, *_: kind if path == "3.tar" else ""
        with pytest.raises(OSError, match=rf"^{server.url}/3\.tar.*{kind}"):
            for _ in range(6):
                labels += next(stream)["label"].tolist()
        assert not stream.errors
        server.fault = None  # e.g. after new credentials
        for _ in range(24):
            if len(labels) < 120:
                with contextlib.suppress(OSError):  # of a batch that was read before
                    labels += next(stream)["label"].tolist()
    assert labels == list(range(120))


def test_an_outage_sends_few_requests(server):
    server.is_bucket = True
    # A busy machine may need more than 0.3 s for a response.
    source = opened(server, storage_options={**QUICK, "timeout": 20})
    server.ranges.clear()
    end = time.monotonic() + 1.5
    server.fault = lambda *_: "503" if time.monotonic() < end else ""
    check(source, range(0, 120, 2))
    # Six calls of ten ranges, each with up to six attempts.
    assert 60 + server.num_faults == len(server.ranges) and server.num_faults <= 6 * (9 + 2 + 5)


@pytest.mark.slow
def test_many_random_faults(server, scheme):
    source = opened(server, read_ahead=600_000)
    kinds = ("429", "500", "503", "reset", "short", "less", "other", "cut", "long")
    server.fault = share_of_requests(0.3, kinds, most=3)
    assert sorted(labels_of(source, 12)) == list(range(120))
    assert server.num_faults > 30


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("403", PermissionError, "access is denied .403.*storage_options"),
        ("401", PermissionError, "access is denied .401"),
        ("404", FileNotFoundError, "does not exist"),
        ("412", OSError, "was changed after the source was opened"),
        ("400", OSError, "status 400"),
        ("norange", OSError, "the server ignores ranges.*download the files"),
    ],
)
def test_final_errors_are_raised_after_one_request(kind, error, text, server):
    source = opened(server)
    server.ranges.clear()
    server.fault = share_of_requests(1.0, (kind,))
    with pytest.raises(error, match=f"^{server.url}/0.tar.*{text}"):
        source.read(np.array([3]), ["data"])
    assert len(server.ranges) == 1
    with pytest.raises(error, match=f"^{server.url}/.*{text}"):
        opened(server)
    server.fault = None
    check(source, [3, 4])


@pytest.mark.parametrize("kind", ("503", "hang", "less", "other", "gzip"))
def test_retries_end(kind, server):
    source = opened(server, storage_options={"timeout": 2, "retry_timeout": 0.5})
    server.fault = share_of_requests(1.0, (kind,))
    text = "no answer for" if kind in ("503", "hang") else "the server is faulty"
    with pytest.raises(OSError, match=text):
        source.read(np.array([3]), ["data"])
    server.fault = None
    check(source, [3])


@pytest.mark.parametrize("tag", (None, ""))
def test_a_changed_object_is_refused(tag, server, scheme, tmp_path):
    write(tmp_path)
    server.folder = tmp_path
    source = opened(server)
    check(source, [3])
    write(tmp_path, shift=1000)
    with pytest.raises(OSError, match="0.tar was changed after the source was opened.*Reopen"):
        source.read(np.array([3]), ["data"])
    values = opened(server).read(np.array([3]), ["data"])["data"]
    assert values[0].tobytes() == content(1003)


def test_a_date_that_a_change_may_keep_is_compared(server, tmp_path):
    server.folder, server.tag = tmp_path, ""
    server.date = email.utils.formatdate(usegmt=True)
    write_tar(tmp_path / "0.tar", [("0.bin", b"a" * 5000)])
    source = Tar([f"{server.url}/0.tar"], {"data": "bin"}, storage_options=QUICK)
    assert source.read(np.array([0]), ["data"])["data"][0].tobytes() == b"a" * 5000
    write_tar(tmp_path / "0.tar", [("0.bin", b"b" * 5000)])
    server.date = email.utils.formatdate(time.time() + 2, usegmt=True)
    with pytest.raises(OSError, match="0.tar was changed after the source was opened"):
        pickle.loads(pickle.dumps(source)).read(np.array([0]), ["data"])


def test_an_object_that_changes_during_a_call_is_refused(server, scheme, tmp_path):
    write(tmp_path)
    server.folder = tmp_path
    source = opened(server)

    def change(path, start, end, count):
        """Replaces the tars after the first request of the call was received."""
        if not changed.is_set() and len(server.ranges) > 3:
            changed.set()
            write(tmp_path, shift=1000)
        return ""

    changed = threading.Event()
    server.ranges.clear()
    server.fault = change
    with pytest.raises(OSError, match="was changed after the source was opened"):
        source.read(np.arange(0, 20, 2), ["data"])
    assert changed.is_set()


def test_announced_bytes_stay_within_the_budget(server):
    source = opened(server, read_ahead=600_000)  # 30 records
    held = []
    cache = source._files._ranges
    lease = type(cache).lease

    def watched(*arguments, **options):
        result = lease(*arguments, **options)
        gc.collect(0)
        blocks = [block for ref in list(cache._blocks.get()) if (block := ref()) is not None]
        refs = [ref for block in blocks for ref in block.fetches]
        held.append(sum(fetch.memory.num_bytes for ref in refs if (fetch := ref()) is not None))
        return result

    type(cache).lease = watched
    try:
        labels_of(source, 36)
    finally:
        type(cache).lease = lease
    # The records that are read without an announcement, at the start, are not in the budget.
    assert max(held) <= 600_000 + 3 * 10 * (SIZE + 120)
    deadline = time.monotonic() + 20
    # Threads end after their current tasks.
    while cache._blocks.get() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not cache._blocks.get()


def test_responses_take_no_more_memory_than_their_bytes(server, allocated):
    source = opened(server)
    files, location = source._files, source._files._locations[0]
    version = files._ranges._versions[0]
    ends = range(300, 20_300, 20_000 // 10)

    def read():
        starts = [end - 300 for end in ends]
        return files._ranges._client.read(location, files.paths[0], starts, list(ends), version)

    read()
    before = allocated()
    pieces = [read() for _ in range(200)]
    assert allocated() - before <= 2 * sum(len(piece) for call in pieces for piece in call)


@pytest.mark.parametrize("kind", ("", "503"))
def test_requests_count_until_they_end(kind, server):
    server.is_bucket = True  # one call
    source = opened(server, storage_options={"timeout": 60})
    freed = collections.deque()
    has_begun, may_end = threading.Event(), threading.Event()

    def fault(*_):
        has_begun.set()
        may_end.wait(60)
        return kind

    server.fault = fault
    ranges = np.zeros(6, int), np.arange(6) * SIZE, np.full(6, 1000)
    ((lease, _),) = source._files.announce(*ranges, np.arange(6), freed)
    count = lease.num_bytes
    assert has_begun.wait(60)
    del lease  # as after a restart
    assert count == 6000 and not freed
    may_end.set()
    deadline = time.monotonic() + 60
    while not freed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(freed) == [count]


def test_the_bytes_between_ranges_are_in_the_budget(server, tmp_path):
    server.folder = tmp_path
    sizes = {"bin": 2000, "x": 12_000}
    entries = [(f"{k:04d}.{name}", bytes(sizes[name])) for k in range(60) for name in sizes]
    write_tar(tmp_path / "0.tar", entries)
    source = Tar([f"{server.url}/0.tar"], {"data": "bin"}, read_ahead=200_000)
    server.ranges.clear()
    announcer = Announcer(source, ["data"], lambda run: np.array([run % 60]), lambda run: run + 1)
    announcer.restart(0, 0)
    for run in range(10):
        announcer.was_read(announcer.generation, run)
        announcer._workers.call(int).get()  # after the announcement
        assert 100_000 <= announcer._held <= 200_000
    announcer.close()


def test_bytes_of_many_runs_are_counted_at_once(server, tmp_path):
    counted = []

    class Counting(Tar):
        def _range_bytes(self, indices, names):
            counted.append(len(indices))
            return super()._range_bytes(indices, names)

    server.folder = tmp_path
    write_tar(tmp_path / "0.tar", [(f"{k:04d}.bin", bytes(2000)) for k in range(400)])
    source = Counting([f"{server.url}/0.tar"], {"data": "bin"}, read_ahead=200_000)
    counted.clear()
    announcer = Announcer(source, ["data"], lambda run: np.array([run % 400]), lambda run: run + 1)
    announcer.restart(0, 0)
    for run in range(400):
        announcer.was_read(announcer.generation, run)
        announcer._workers.call(int).get()  # after the announcement
    announcer.close()
    assert len(counted) < 60 and sum(counted) < 2000


def test_an_error_of_the_announcements_is_raised(server):
    class Failing(Tar):
        fails = False

        def _announce(self, *arguments):
            if self.fails:
                raise ValueError("no more announcements")
            return super()._announce(*arguments)

    urls = [f"{server.url}/{k}.tar" for k in range(TARS)]
    source = Failing(urls, FIELDS, read_ahead=600_000)
    make = data_iterator(identity, ["data", "label"], source=source)
    with make.stream(batch_size=10, num_threads=1, as_numpy=True, shuffle=False) as stream:
        labels = next(stream)["label"].tolist()
        source.fails = True
        with pytest.raises(ValueError, match="no more announcements"):
            for _ in range(12):
                labels += next(stream)["label"].tolist()
        source.fails = False
        for _ in range(24):
            if len(labels) < 120:
                with contextlib.suppress(ValueError):  # of a batch that was read before
                    labels += next(stream)["label"].tolist()
    assert labels == list(range(120))


@pytest.mark.parametrize("kind", ("503", "hang"))
@pytest.mark.parametrize("read_ahead", (0, "1MB"))
def test_reading_threads_end_when_an_iterator_is_closed(kind, read_ahead, server):
    options = {"timeout": 60, "retry_timeout": 60}
    source = opened(server, read_ahead=read_ahead, storage_options=options)
    server.fault = lambda *_: kind
    make = data_iterator(identity, ["data", "label"], source=source)
    others = set(threading.enumerate())  # e.g. of iterators that other tests have not freed
    stream = make.stream(batch_size=10, num_threads=1, as_numpy=True)
    workers, before = Workers(1, "test"), len(server.ranges)
    future = workers.future(lambda: next(stream))
    while len(server.ranges) == before:
        time.sleep(0.001)
    stream.close()
    with pytest.raises((ValueError, RuntimeError), match="closed|ended"):
        future.result(timeout=20)
    deadline = time.monotonic() + 20
    while any(
        thread.name.startswith("dalijax-read") for thread in {*threading.enumerate()} - others
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_restore_requests_no_earlier_records(server):
    source = opened(server, read_ahead="1kB")
    local = Tar([str(server.folder / f"{k}.tar") for k in range(TARS)], FIELDS)
    make = data_iterator(identity, ["data", "label"], source=local)
    arguments = {"batch_size": 10, "num_threads": 1, "as_numpy": True, "seed": 3}
    with make.stream(**arguments) as stream:
        for _ in range(4):
            next(stream)
        state = stream.get_state()
        expected = [next(stream)["label"].tolist() for _ in range(8)]
    server.ranges.clear()
    make = data_iterator(identity, ["data", "label"], source=source)
    with make.stream(**arguments) as stream:
        stream.set_state(state)
        assert next(stream)["label"].tolist() == expected[0]
    offsets = source._index.arrays["data.offset"]
    later = {(f"{k // SAMPLES}.tar", int(offsets[k])) for labels in expected for k in labels}
    assert {(path, start) for path, start, _ in server.ranges} <= later


def test_the_first_batch_waits_only_for_its_own_records(server):
    source = opened(server, storage_options={"timeout": 60, "retry_timeout": 60})
    make = data_iterator(identity, ["data", "label"], source=source)
    arguments = {"batch_size": 10, "num_threads": 1, "as_numpy": True, "seed": 3}
    with make.stream(**arguments) as stream:
        for _ in range(3):
            next(stream)
        state = stream.get_state()
        expected = next(stream)["label"].tolist()
    offsets = source._index.arrays["data.offset"]
    needed = {(f"{k // SAMPLES}.tar", int(offsets[k])) for k in expected}
    source = opened(
        server, storage_options={"timeout": 60, "retry_timeout": 60}
    )  # requests nothing
    server.fault = lambda path, start, end, _: "" if (path, start) in needed else "hang"
    make = data_iterator(identity, ["data", "label"], source=source)
    with make.stream(**arguments) as stream:
        stream.set_state(state)
        workers = Workers(1, "test")  # the threads end when it is freed
        future = workers.future(lambda: next(stream)["label"])
        assert future.result(timeout=20).tolist() == expected


def test_a_forked_child_reads(server, scheme):
    source = opened(server)
    check(source, [1, 30])

    def child(depth):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python and JAX, about threads and forks
            process = os.fork()
        if process == 0:
            signal.alarm(20)
            try:
                check(source, [2, 50])
                check(opened(server), [2, 50])
                if depth:
                    child(depth - 1)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0

    child(1)
    check(source, [3, 60])


PROGRAM = """
import os, signal, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
from dalijax.sources import Tar
signal.signal(signal.SIGALRM, signal.default_int_handler)
source = Tar(sys.argv[2:], {"data": "bin", "label": "cls"})
print("opened", flush=True)
def read():
    for _ in range(1000):
        source.read(np.random.default_rng(0).integers(0, 100, 50), ["data"])
        print("read", flush=True)
if sys.argv[1] == "exit":
    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
else:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    read()
"""


@pytest.mark.parametrize("way", ("exit", "interrupt"))
@pytest.mark.parametrize("hangs", (False, True))
def test_exits(way, hangs, server):
    server.latency = 0.02
    opened(server)
    urls = [f"{server.url}/{k}.tar" for k in range(TARS)]

    def fault(path, start, end, count):
        return "hang" if hangs and end - start > 5000 else ""

    server.fault = fault
    program = Fork(PROGRAM, way, *urls, modules=["dalijax.sources"], frees=True)
    code, out, err = program.result(timeout=60)
    assert code is not None and "opened" in out
    expected = "" if way == "exit" else "KeyboardInterrupt"
    assert err.strip().endswith(expected), err
