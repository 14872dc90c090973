"""Errors for packages that are not installed, with the line that installs them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from collections.abc import Iterator

_WHEELS = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """A ``with`` block for imports of an extra's packages.

    Args:
        name: The extra's name; several with commas.
        what: The module or function that needs them, for the message.

    Raises:
        ImportError: If one of them can't be imported, with the line that installs them.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f'{what} can\'t be imported ({error}): pip install "dalijax[{name}]"',
            name=error.name,
            path=error.path,
        ) from error


def check_dali() -> None:
    """Checks that one of DALI's wheels is installed, and warns if both are.

    Raises:
        ImportError: If none is, with the lines that install one.
    """
    try:
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("nvidia", "nvidia.dali"):
            raise
        raise ImportError(
            'NVIDIA DALI is not installed, and dalijax needs it: pip install "dalijax[cuda12]" or '
            '"dalijax[cuda13]" for a GPU, "dalijax[cpu]" without one (in a clone ".[cuda12]")',
            name=error.name,
        ) from error
    installed = [name for name in _WHEELS if _is_installed(name)]
    if len(installed) > 1:
        warnings.warn(
            f"{' and '.join(installed)} are both installed, and fill the same folder: whichever "
            "came last is used, and uninstalling one breaks the other. Uninstall both, then "
            "install the one of your CUDA",
            stacklevel=3,
        )


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
