"""The conformance check over tars and episodes that a server sends."""

import functools

import numpy as np
import pytest
from elastic_graphs import write_episodes
from nvidia.dali import fn, types

from conformance import Expected, check
from dalijax import data_iterator
from dalijax.adapters.grain import DALIIterDataset
from dalijax.sources import RLDS, Tar
from full import in_full
from oracle import Case
from range_server import serving, share_of_requests
from tars import write_tar

pytest.importorskip("obstore")

pytestmark = pytest.mark.slow

N, FILES, BATCH = 11, 3, 4
SOURCES = {"tar": (Tar, {"data": "bin"}), "tfrecord": (RLDS, {"data": "steps/image"})}
CASE = Case(N, 1, BATCH, "FILL", True, False)


def graph(data, draw):
    return fn.reinterpret(data, dtype=types.INT32)[1:], draw.uniform()


def iterator_of(urls, read_ahead, with_grain, kind="tar", **arguments):
    arguments = {"storage_options": {"timeout": 0.5}, **arguments}
    make_source, fields = SOURCES[kind]
    paths = [f"{url}.{kind}" for url in urls]
    source = make_source(paths, fields, read_ahead=read_ahead, **arguments)
    if with_grain:
        make = data_iterator(graph, ["x", "u"], source=source, shuffle=False)
        call = {"num_epochs": 3, "batch_size": BATCH, "num_threads": 1, "pad": "mask"}
        return iter(DALIIterDataset(make, **call))
    make = data_iterator(
        graph, ["x", "u"], source=source, shuffle=False, mask="mask", last_batch_padded=True
    )
    return make(batch_size=BATCH, num_threads=1)


def expected():
    epochs = []
    for number, streams in CASE.epochs(3):
        batches = [
            {
                "x": np.array([[s[0]] for s in samples], np.int32),
                "mask": np.array(CASE.mask(samples, number)),
            }
            for samples in streams[0]
        ]
        epochs.append(batches)
    return Expected(epochs, state_bytes=2048)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for file, records in enumerate(np.array_split(np.arange(N, dtype=np.int32), FILES)):
        images = [b"\xff\xd8\0\0" + r.tobytes() for r in records]
        write_tar(tmp_path / f"{file}.tar", [(f"{r}.bin", d) for r, d in zip(records, images)])
        write_episodes(tmp_path / f"{file}.tfrecord", images, [1, len(images) - 1])
    with serving(tmp_path) as (url, server):
        server.urls = [f"{url}/{file}" for file in range(FILES)]
        yield server


@pytest.mark.parametrize(
    ("read_ahead", "with_grain", "kind"),
    [
        ("128MB", False, "tar"),
        ("128MB", True, "tar"),
        ("1kB", False, "tar"),
        in_full("1kB", True, "tar"),
        in_full(0, False, "tar"),
        (0, True, "tar"),
        ("128MB", False, "tfrecord"),
        in_full("1kB", True, "tfrecord"),
    ],
)
def test_conformance(read_ahead, with_grain, kind, server):
    make = functools.partial(iterator_of, server.urls, read_ahead, with_grain, kind)
    batches = expected().as_stream(2048) if with_grain else expected()
    check(make, batches, process=read_ahead == "128MB")


@pytest.mark.parametrize("cache_bytes", (50_000, None))
def test_conformance_with_a_cache(cache_bytes, server, tmp_path):
    arguments = {"cache": tmp_path / "ranges", "cache_bytes": cache_bytes}
    make = functools.partial(iterator_of, server.urls, "1kB", False, **arguments)
    check(make, expected(), process=cache_bytes is None)


def test_conformance_with_faults(server):
    make = functools.partial(iterator_of, server.urls, "1kB", False)
    server.fault = share_of_requests(0.02, ("503", "reset", "short"))
    check(make, expected())
