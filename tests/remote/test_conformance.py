"""The conformance check over tars that a server sends."""

import functools

import numpy as np
import pytest
from nvidia.dali import fn, types

from conformance import Expected, check
from dalijax import data_iterator
from dalijax.adapters.grain import DALIIterDataset
from dalijax.core.remote import storage
from dalijax.sources import Tar
from full import in_full
from oracle import Case
from range_server import serving, share_of_requests
from tars import write_tar

N, TARS, BATCH = 11, 3, 4
CASE = Case(N, 1, BATCH, "FILL", True, False)


def graph(data, draw):
    return fn.reinterpret(data, dtype=types.INT32), draw.uniform()


def iterator_of(urls, read_ahead, with_grain, **arguments):
    arguments = {"storage_options": {"timeout": 0.5}, **arguments}
    source = Tar(urls, {"bin": "data"}, read_ahead=read_ahead, **arguments)
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
    for tar, records in enumerate(np.array_split(np.arange(N, dtype=np.int32), TARS)):
        write_tar(tmp_path / f"{tar}.tar", [(f"{r}.bin", r.tobytes()) for r in records])
    with serving(tmp_path) as (url, server):
        server.urls = [f"{url}/{tar}.tar" for tar in range(TARS)]
        yield server


@pytest.mark.parametrize(
    ("read_ahead", "with_grain"),
    [
        ("128MB", False),
        ("128MB", True),
        ("1kB", False),
        in_full("1kB", True),
        in_full(0, False),
        (0, True),
    ],
)
def test_conformance(read_ahead, with_grain, server):
    pytest.importorskip("obstore")
    make = functools.partial(iterator_of, server.urls, read_ahead, with_grain)
    batches = expected().as_stream(2048) if with_grain else expected()
    check(make, batches, process=read_ahead == "128MB")


@pytest.mark.parametrize("cache_bytes", (50_000, None))
def test_conformance_with_a_cache(cache_bytes, server, tmp_path):
    pytest.importorskip("obstore")
    arguments = {"cache": tmp_path / "ranges", "cache_bytes": cache_bytes}
    make = functools.partial(iterator_of, server.urls, "1kB", False, **arguments)
    check(make, expected(), process=cache_bytes is None)


def test_conformance_with_faults(server):
    pytest.importorskip("obstore")
    make = functools.partial(iterator_of, server.urls, "1kB", False)
    server.fault = share_of_requests(0.02, ("503", "reset", "short"))
    check(make, expected())


def test_conformance_without_obstore(server, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "_has_obstore", lambda: False)
    check(functools.partial(iterator_of, server.urls, "128MB", False), expected())
