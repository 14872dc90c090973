"""Loads obstore's native module; a forked process loads its own copy of the module.

The threads of obstore's runtime do not survive a fork, and a module has one runtime for its
lifetime: requests of a forked child would wait forever. A second copy has its own runtime.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from typing import Any

from ..environment.extras import extra
from ..threads.per_process import PerProcess

_loaded: Any = None  # the module that this process, or its parent, has loaded
_lock = PerProcess(threading.Lock)


def obstore() -> Any:
    """Returns obstore's native module, of which a forked process has its own copy.

    Raises:
        ImportError: If obstore is not installed.
        RuntimeError: If a forked process can't load its own copy.
    """
    with _lock.get():  # two copies would have two runtimes
        return _module.get()


def _load() -> Any:
    global _loaded
    _loaded = _imported() if _loaded is None else _copied(_loaded)
    return _loaded


def _imported() -> Any:
    with extra("remote", "obstore, which reads http, s3, gs and az URLs,"):
        import obstore._obstore
    return obstore._obstore


def _copied(module: Any) -> Any:
    """Loads an extension module a second time, and returns this copy.

    Raises:
        RuntimeError: If the copy can't be loaded.
    """
    try:
        with open(module.__file__, "rb") as file:
            content = file.read()
        # For the same file, the dynamic loader would return the library that is already loaded.
        descriptor = os.memfd_create("obstore", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as memory:
            memory.write(content)
            memory.flush()
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            loader = importlib.machinery.ExtensionFileLoader("_obstore", path)
            spec = importlib.util.spec_from_file_location("_obstore", path, loader=loader)
            if spec is None:
                raise ImportError(f"{path} can't be loaded")
            copy = importlib.util.module_from_spec(spec)
            loader.exec_module(copy)
    except (OSError, ImportError) as error:
        raise RuntimeError(
            "obstore does not work in a forked process, and can't be loaded again "
            f"({error}). Start processes by multiprocessing's 'spawn' or 'forkserver'"
        ) from error
    copy.__file__ = module.__file__  # for copies in children of this process
    return copy


_module = PerProcess[Any](_load, keeps=True)
