"""The number of CUDA's hardware queues, which DALI's streams and JAX's share.

CUDA has 8 by default. Where a model trains on the GPU that decodes, DALI's work then queues up
behind steps that were dispatched before it; with 32 it does not. CUDA reads the environment
variable CUDA_DEVICE_MAX_CONNECTIONS (CUDA C++ Programming Guide, "CUDA Environment Variables") when
it starts in a process: later changes have no effect.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Mapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
KEEP = "DALIJAX_CUDA_QUEUES"
QUEUES = "32"  # the most that there are

_too_late = False


def should_set(environment: Mapping[str, str]) -> bool:
    """Whether this package should set the variable in an environment.

    Raises:
        ValueError: If DALIJAX_CUDA_QUEUES is neither "keep" nor "".
    """
    keep = environment.get(KEEP, "")
    if keep not in ("", "keep"):
        raise ValueError(
            f"{KEEP}={keep!r} must be 'keep', which leaves {VARIABLE} alone, or be left out. For "
            f"another number of queues set {VARIABLE} itself"
        )
    return not keep and VARIABLE not in environment


def set_at_import() -> None:
    """Sets the variable if it is unset and CUDA has not started in this process."""
    global _too_late
    if should_set(os.environ):
        _too_late = has_started()
        if not _too_late:
            os.environ[VARIABLE] = QUEUES


def warn_if_too_late() -> None:
    """Warns for the first pipeline on a GPU if CUDA had started before the import."""
    global _too_late
    if _too_late:
        _too_late = False
        warnings.warn(
            f"CUDA had started before dalijax was imported, with its default of 8 queues: decoding "
            f"waits for steps that were dispatched before it. Import dalijax before the first line "
            f"that uses the GPU, or start Python with {VARIABLE}={QUEUES}; {KEEP}=keep silences "
            "this",
            stacklevel=2,
        )


def has_started() -> bool:
    """Whether CUDA was initialised in this process; asking initialises and loads nothing.

    CUDA reads the variable at its initialisation, before any context exists (seen on an H200).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        failed = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # no driver is loaded, or not one that is known
        return False
    return not failed  # CUDA_ERROR_NOT_INITIALIZED, say
