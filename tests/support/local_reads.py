"""The reader in C of `read_ranges`, and a kernel that a test simulates in C and in Python."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import pytest

from dalijax.core.formats import read_ranges
from dalijax.core.native.library import LIBRARY

SOURCE = LIBRARY.with_name("read_ranges.c")
HEADER = pathlib.Path(__file__).with_name("kernel.h")
READ = ctypes.CFUNCTYPE(
    *(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
)
ADVISE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def compiled(folder, *options):
    """Compiles the reader in C; None without a compiler or its source."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCE.exists():
        return None
    library = folder / "helper.so"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, *options, "-o", library, SOURCE], check=True)
    return library


def reader_library(folder):
    """Returns the library of the reader in C, compiled from its source if possible."""
    library = compiled(folder) or LIBRARY
    if not library.exists():
        pytest.skip("no C compiler, and dalijax was installed without one")
    return library


class Kernel:
    """A simulated kernel: reads at most `most` bytes at once, of ranges with a cached part.

    Attributes:
        cached: Returns the size of the cached part of a range, or raises OSError.
        most: The maximum number of bytes that a call reads.
        faults: The errors of the next calls that may wait.
        flagged: The offsets of the calls that must not wait.
        advised: The file, offset and size of each advice.
    """

    def __init__(self, cached=lambda size: 0, most=1 << 40, faults=()):
        self.cached, self.most, self.faults = cached, most, list(faults)
        self.flagged, self.advised = [], []

    def read(self, fd, part, offset, flags):
        """Reads into a memoryview."""
        size = len(part)
        if flags:
            self.flagged.append(offset)
            size = self.cached(size)
        elif self.faults and (error := self.faults.pop(0)):
            raise OSError(error, os.strerror(error))
        data = os.pread(fd, min(size, self.most), offset)
        part[: len(data)] = data
        return len(data)

    def use(self, monkeypatch, language, folder):
        """Makes `read_ranges` use this kernel."""
        if language == "Python":
            monkeypatch.setattr(read_ranges, "_read", read_ranges.read_in_python)
            monkeypatch.setattr(
                *(os, "preadv"), lambda fd, parts, at, flags=0: self.read(fd, *parts, at, flags)
            )
            monkeypatch.setattr(
                os, "posix_fadvise", lambda *arguments: self.advised.append(arguments[:3])
            )
            return
        library = compiled(folder, "-include", str(HEADER))
        if library is None:
            pytest.skip("no C compiler")

        def read(fd, address, size, offset, flags):
            try:
                part = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                return self.read(fd, part, offset, flags)
            except OSError as error:
                return -error.errno

        callbacks = READ(read), ADVISE(lambda *arguments: self.advised.append(arguments))
        functions = ctypes.CDLL(str(library))
        for name, callback in zip(("kernel_read", "kernel_advise"), callbacks):
            ctypes.c_void_p.in_dll(functions, name).value = ctypes.cast(
                callback, ctypes.c_void_p
            ).value
        reader = read_ranges.read_in_c(str(library))
        reader.callbacks = callbacks  # the library has their addresses; the test may drop `self`
        monkeypatch.setattr(read_ranges, "_read", reader)
