"""Errors about missing packages, with the command that installs them."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

from ..messages.user_warnings import warn_user

_WHEELS = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")


@contextlib.contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
    """Context manager for imports of optional packages; its error names the extra to install.

    Args:
        name: Name of the extra, or several names with commas.
        needed_by: The module or function that needs the packages, for the message.

    Raises:
        ImportError: If a package can't be imported; the message has the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f'{needed_by} can\'t be imported ({error}): pip install "dalijax[{name}]"',
            name=error.name,
            path=error.path,
        ) from error


def check_dali() -> None:
    """Checks that a wheel of DALI is installed, and warns if two wheels are installed.

    Raises:
        ImportError: If no wheel is installed; the message has the commands that install one.
    """
    try:
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("nvidia", "nvidia.dali"):
            raise
        raise ImportError(
            'NVIDIA DALI is not installed: pip install "dalijax[cuda12]" or "dalijax[cuda13]" for '
            'a GPU, "dalijax[cpu]" without a GPU (in a clone ".[cuda12]")',
            name=error.name,
        ) from error
    installed = [name for name in _WHEELS if version_of(name)]
    if len(installed) > 1:
        warn_user(
            f"{' and '.join(installed)} install into the same directory: Python uses the wheel "
            "that was installed last, and uninstalling either wheel breaks the other. Uninstall "
            "both, then install the wheel for your CUDA version",
            UserWarning,
        )


def version_of(name: str) -> str | None:
    """Returns the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
