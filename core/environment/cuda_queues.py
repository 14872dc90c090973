"""The number of CUDA's hardware queues, shared by the streams of DALI and JAX.

CUDA has 8 queues by default. If a model trains on the GPU that decodes, DALI's kernels then wait
for training steps that were dispatched earlier; with 32 queues they don't. CUDA reads the
environment variable CUDA_DEVICE_MAX_CONNECTIONS (CUDA C++ Programming Guide, "CUDA Environment
Variables") when it starts in a process: later changes have no effect.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from ..messages.user_warnings import warn_user

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
KEEP = "DALIJAX_CUDA_QUEUES"
QUEUES = "32"  # the maximum

_too_late = False


def should_set(environment: Mapping[str, str]) -> bool:
    """Returns whether this package should set CUDA_DEVICE_MAX_CONNECTIONS in an environment.

    It should, unless the variable is set already, or DALIJAX_CUDA_QUEUES is "keep".

    Raises:
        ValueError: If DALIJAX_CUDA_QUEUES is neither "keep" nor "".
    """
    keep = environment.get(KEEP, "")
    if keep not in ("", "keep"):
        raise ValueError(
            f"{KEEP}={keep!r} must be 'keep', which leaves {VARIABLE} unchanged, or unset. To use "
            f"another number of queues, set {VARIABLE}"
        )
    return not keep and VARIABLE not in environment


def set_at_import() -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, if `should_set` agrees and CUDA has not started."""
    global _too_late
    if should_set(os.environ):
        _too_late = has_started()
        if not _too_late:
            os.environ[VARIABLE] = QUEUES


def warn_if_too_late() -> None:
    """Warns once, at the first GPU pipeline, if CUDA had started before dalijax was imported."""
    global _too_late
    if _too_late:
        _too_late = False
        warn_user(
            f"CUDA was initialized with its default of 8 queues before dalijax was imported, so "
            f"that decoding waits for steps dispatched earlier. Import dalijax before the first "
            f"use of the GPU, or start Python with {VARIABLE}={QUEUES}. {KEEP}=keep silences "
            "this warning",
            UserWarning,
        )


def has_started() -> bool:
    """Returns whether CUDA was initialized in this process, without initializing or loading it.

    CUDA reads CUDA_DEVICE_MAX_CONNECTIONS at initialization, before any context exists (observed on
    an H200).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        failed = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # no driver is loaded, or an unknown driver
        return False
    return not failed  # e.g. CUDA_ERROR_NOT_INITIALIZED
