"""Fixtures of all tests: fake devices, and small data sets whose samples contain their number."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import tempfile

import fork_context
import forks
import hypothesis
import jax
import numpy as np
import pytest
from PIL import Image

from conformance import TALLY, use_fake_devices

# Collections during the imports of the tests would visit all objects repeatedly, for seconds.
gc.disable()

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...
if os.environ.get("DALIJAX_TEST_GPU") == "1":  # see tests/gpu
    if WORKER and "CUDA_VISIBLE_DEVICES" not in os.environ:
        # A worker has two GPUs: the driver takes minutes to open many GPUs in many processes.
        count = len(subprocess.check_output(["nvidia-smi", "-L"]).splitlines())
        first = int(WORKER[2:]) % count
        gpus = dict.fromkeys((first, (first + 1) % count))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
else:
    use_fake_devices()
    # Small programs take longer to optimize than to run.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
jax.config.update("jax_numpy_dtype_promotion", "strict")

os.environ.setdefault("NUMBA_OPT", "0")  # Numba compiles each function for seconds

# Tests compile the same programs many times. xdist's workers and the programs that tests start
# share a cache of compiled programs; the first process creates and removes it. JAX 0.4.26, which
# Pax needs, fails with programs from such a cache.
CACHE = None
reads_cache = jax.__version_info__ >= (0, 6)
if reads_cache and not {"DALIJAX_TEST_GPU", "JAX_COMPILATION_CACHE_DIR"} & set(os.environ):
    CACHE = tempfile.mkdtemp(prefix="compiled")
    for option, value in (
        ("jax_compilation_cache_dir", CACHE),
        ("jax_persistent_cache_min_compile_time_secs", 0),
    ):
        jax.config.update(option, value)
        os.environ[option.upper()] = str(value)

# CI repeats the same cases; local runs try new cases. Tests do not depend on a machine's speed.
hypothesis.settings.register_profile("ours", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("ours")

# xdist's workers share the processes of `forks`.
FORKS = None
if forks.FOLDER not in os.environ:
    FORKS = os.environ[forks.FOLDER] = tempfile.mkdtemp(prefix="forks")

NUM_FILES = 12


@pytest.hookimpl(optionalhook=True)  # Pax's environment lacks xdist
def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of workers for ``-n auto``; a worker waits for other processes often."""
    return (os.cpu_count() or 1) + 1


def write_jpegs(folder: pathlib.Path, count: int) -> list[str]:
    """Writes uniformly gray JPEGs: every pixel of image i is 8 * i."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for i in range(count):
        files.append(str(folder / f"{i:05d}.jpg"))
        Image.fromarray(np.full((16, 16, 3), 8 * i % 256, np.uint8)).save(files[-1], quality=100)
    return files


def corrupt(path: str) -> None:
    """Cuts a JPEG where its pixels begin, so that it can't be decoded."""
    data = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(data[: data.index(b"\xff\xda") + 12])


@pytest.fixture
def forked_workers(monkeypatch) -> None:
    """Lets Grain start its workers as forks; Grain asks for spawned processes."""
    monkeypatch.setattr(multiprocessing, "get_context", fork_context.get_context)


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory) -> list[str]:
    """Paths of `NUM_FILES` JPEGs; every pixel of image i is 8 * i."""
    return write_jpegs(tmp_path_factory.mktemp("jpegs") / "class", NUM_FILES)


@pytest.fixture(scope="session")
def arrays_dir(tmp_path_factory) -> str:
    """A folder of `NUM_FILES` .npy files; file i contains int32 [i]."""
    folder = tmp_path_factory.mktemp("arrays")
    for i in range(NUM_FILES):
        np.save(folder / f"{i:05d}.npy", np.array([i], np.int32))
    return str(folder)


@pytest.fixture(scope="session")
def jpegs_many(tmp_path_factory) -> list[str]:
    """Paths of 32 files that are not decoded; tests use their labels."""
    folder = tmp_path_factory.mktemp("many")
    files = [str(folder / f"{i:05d}.jpg") for i in range(32)]
    for i, file in enumerate(files):
        pathlib.Path(file).write_bytes(bytes([i]))
    return files


def pytest_collection_finish() -> None:
    """Exempts the objects of all imported modules, a million, from garbage collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Removes the cache of compiled programs, and the sockets of forks."""
    for folder in (CACHE, FORKS):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the closing table of the conformance check."""
    if TALLY.cells or TALLY.notes:
        terminalreporter.write_line(str(TALLY))
