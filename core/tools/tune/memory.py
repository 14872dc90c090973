"""Measures the memory of this process, and the memory in use on the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
from pathlib import Path

from nvidia.dali import backend

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Memory:
    """An amount of memory, in MiB.

    Attributes:
        host: Resident memory of this process.
        gpu: Memory in use on the first GPU, by all processes; None if no GPU is used.
    """

    host: float
    gpu: float | None = None

    @classmethod
    def measure(cls) -> Memory:
        """Returns the memory that is in use now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * _PAGE / _MEBIBYTE, _gpu_memory())

    @classmethod
    def after_release(cls) -> Memory:
        """Releases freed memory that new pipelines would reuse, and returns the memory in use."""
        gc.collect()  # frees DALI's pipelines, which are in reference cycles even if closed
        backend.ReleaseUnusedMemory()  # frees memory in DALI's pools
        with contextlib.suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
        return Memory.measure()

    def since(self, before: Memory) -> Memory:
        """Returns the memory in addition to an earlier measurement, at least 0."""
        gpu = None
        if self.gpu is not None:
            gpu = max(0.0, self.gpu - (before.gpu or 0.0))
        return Memory(max(0.0, self.host - before.host), gpu)

    def __str__(self) -> str:
        text = f"{self.host:,.0f} MiB"
        return text if self.gpu is None else f"{text}, GPU {self.gpu:,.0f} MiB"


def _gpu_memory() -> float | None:
    """Returns the MiB in use on the first GPU; None without a GPU.

    Asks the driver, since JAX does not count DALI's memory.
    """
    try:  # finds the driver only if DALI or JAX has loaded it
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
            return None
        try:
            driver.cuCtxPushCurrent_v2(context)
            failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        finally:
            driver.cuDevicePrimaryCtxRelease_v2(0)
    except (OSError, AttributeError):
        return None
    return None if failed else (total.value - free.value) / _MEBIBYTE
