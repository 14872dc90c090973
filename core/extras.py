"""Packages that not everybody has installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """While packages of an extra of this package are imported.

    Args:
        name: The extra's name; several with commas.
        what: What needs them.

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
