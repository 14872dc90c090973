"""Operators for DALI graphs, in addition to ``nvidia.dali.fn``: ``from dalijax import fn``."""

import typing as _typing

from .core.functions.cast import cast as cast
from .core.functions.dlpack_function import dl_tensor_python_function as dl_tensor_python_function
from .core.functions.jax_function import jax_function as jax_function
from .core.functions.numba_function import numba_function as numba_function
from .core.functions.pad_rows import pad_rows as pad_rows
from .core.functions.read_file import read_file as read_file

__all__ = [
    "cast",
    "dl_tensor_python_function",
    "jax_function",
    "numba_function",
    "pad_rows",
    "read_file",
]

if not _typing.TYPE_CHECKING:  # type checkers would accept misspelled names

    def __getattr__(name: str) -> _typing.Any:
        raise AttributeError(
            f"dalijax.fn has no {name!r}. It has {__all__}. DALI's own operators are in "
            "nvidia.dali.fn, which you can import as dali_fn"
        )
