"""Detects functions that are not pure, so that a state can't restore their results.

The values that a function reaches are its closure, its defaults, and the globals and attributes
that its code names. They are digested before the function is used and when a state is requested,
and the digests are compared. The check does not detect the clock, generators that a call creates
without a seed, state within installed libraries, and changes between sampled elements of large
arrays.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import io
import itertools
import pickle
import random
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LIBRARIES = {"flax", "jax", "jaxlib", "numba", "numpy", "nvidia", *sys.stdlib_module_names}
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"], "<frozen")
_DYNAMIC = {"getattr", "setattr", "vars", "__dict__"}  # access to attributes that are not named
_PLAIN = (int, float, complex, str, bytes, bytearray, np.generic)
_RANDOM = (
    *(np.random.BitGenerator, np.random.Generator, np.random.RandomState, np.random.SeedSequence),
    random.Random,
)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, collections.deque, np.ndarray)
_MOST_VALUES, _MOST_ELEMENTS, _MOST_SAMPLED = 10_000, 1000, 1 << 18
_ITERATOR = "an iterator"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns a description of the values that differ between two results of `reachable_values`.

    An iterator counts as a difference, because its position can't be compared. Returns "" if there
    is no difference.
    """
    if iterators := [name for name, value in after.items() if value == _ITERATOR]:
        return f"it has {iterators[0]}, {_ITERATOR}"
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return f"{', '.join(names[:3])} changed" if names else ""


def reachable_values(function: Any) -> dict[str, Any]:
    """Returns digests of the values that a function can reach, by paths such as "self.weights"."""
    home, names = _home(inspect.unwrap(function)), set[str]()  # names in the code of functions
    while True:
        num_names, digests, seen = len(names), dict[str, Any](), dict[int, Any]()
        todo = [("", function)]
        while todo and len(seen) < _MOST_VALUES:
            path, value = todo.pop()
            with contextlib.suppress(Exception):  # users' objects may raise anything
                if (digest := _digest(value)) is not None:
                    digests[path] = digest
                elif value is not None and id(value) not in seen:
                    seen[id(value)] = value
                    todo += [
                        (f"{path}.{k}".strip("."), part) for k, part in _parts(value, names, home)
                    ]
        if len(names) == num_names:  # otherwise repeat: attributes may have the new names
            return digests


def _digest(value: Any) -> Any:
    """Returns a digest of a number, text, array, random generator or iterator, otherwise None."""
    if isinstance(value, _PLAIN):
        return hash(repr((type(value), value)))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (np.ndarray, jax.Array)) and value.dtype != object:
        flat = value.ravel()
        sampled = flat[:: 1 + flat.size // _MOST_SAMPLED], flat[-1:]
        return hash((value.shape, str(value.dtype), *(np.asarray(x).tobytes() for x in sampled)))
    if isinstance(value, _RANDOM):
        return hash(pickle.dumps(value))
    return _ITERATOR if isinstance(value, Iterator) and not isinstance(value, io.IOBase) else None


def _parts(value: Any, names: set[str], home: str) -> Iterator[tuple[Any, Any]]:
    """Yields the parts of a value as pairs of a key and a part.

    Args:
        value: The value.
        names: Names that the code of functions uses; names in the code of ``value`` are added.
        home: Package of the function that is examined. Its functions are examined even if it is
            installed, unless it is one of `_LIBRARIES`.
    """
    for key in ("__self__", "__func__", "__wrapped__", "fget"):  # methods, jit, vmap, properties
        yield "self" if key == "__self__" else "", getattr(value, key, None)
    if isinstance(value, types.FunctionType):
        installed = any(part in value.__code__.co_filename for part in _INSTALLED)
        if not installed or _home(value) == home not in _LIBRARIES:
            yield from _outer_values(value, names)
    elif isinstance(value, partial):
        yield from [("", value.func), *enumerate(value.args), *value.keywords.items()]
    elif isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from [("len", len(value)), *itertools.islice(items, _MOST_ELEMENTS)]
    else:
        kind = value if isinstance(value, (type, types.ModuleType)) else type(value)
        owners = [value, *getattr(kind, "__mro__", [])]
        for owner in (owner for owner in owners if _home(owner) not in _LIBRARIES):
            for key, part in list(getattr(owner, "__dict__", {}).items()):
                special = key[:2] == "__" and key != "__init__" and callable(part)
                if special or key in names or (names & _DYNAMIC and key[:2] != "__"):
                    slot = isinstance(part, types.MemberDescriptorType)
                    yield key, getattr(value, key) if slot else part


def _home(value: Any) -> str:
    """Returns the name of the top-level package of a module, class, function or object."""
    key = "__name__" if isinstance(value, types.ModuleType) else "__module__"
    return str(getattr(value, key, "builtins")).split(".")[0]


def _outer_values(function: types.FunctionType, names: set[str]) -> Iterator[tuple[Any, Any]]:
    """Yields the closure, the defaults and the named globals of a function, as (key, value).

    The names in its code are added to ``names``.
    """
    codes = [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        names.update(code.co_names)
        global_names = [name for name in code.co_names if name in function.__globals__]
        yield from ((name, function.__globals__[name]) for name in global_names)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # bound later
            yield name, cell.cell_contents
    yield from [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
