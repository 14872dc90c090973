"""Which Python functions keep state from one call to the next, as far as can be seen.

DALI's checkpoints know nothing of what a Python function keeps: a counter goes on from where
it is, in a new process from its start. So a function that is seen to keep state makes the
pipeline one that can't be resumed, and the error says which function and why.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import random
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import Pipeline

from . import function_source
from .function_source import Names

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_SHARED = [random.random.__self__, np.random.random.__self__]  # type: ignore[attr-defined]
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARIES = ("flax", "jax", "numba")  # whose wrappers keep nothing that matters
_DEPTH = 3  # of functions that call functions

_keeping: weakref.WeakKeyDictionary[Pipeline, str] = weakref.WeakKeyDictionary()


def note(function: Callable[..., Any], stateful: bool | None) -> None:
    """Tells the pipeline that is being defined whether a function of its graph keeps state.

    Args:
        function: The function.
        stateful: What its author says; None: what can be seen of it.
    """
    pipeline = Pipeline.current()
    if pipeline is None or stateful is False:
        return  # DALI says that a pipeline is missing
    why = "as stateful=True says" if stateful else ""
    if stateful is None:
        with contextlib.suppress(Exception):  # it looks at anything that users may have
            why = kept_state(function)
    if why:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        _keeping[pipeline] = (
            f"its function {name}() keeps state ({why}), which DALI's checkpoints do not have. Let "
            "it depend on its arguments alone (a keyword-only `key`, or `rng` of DLPack functions, "
            "has random numbers that resume), or pass stateful=False where that is so"
        )


def noted(pipeline: Pipeline) -> str:
    """Why a pipeline's functions can't be resumed; "" where they can."""
    return _keeping.get(pipeline, "")


def kept_state(function: Any, depth: int = _DEPTH, bound: Names | None = None) -> str:
    """What a function keeps from one call to the next, as a phrase; "" where nothing is seen.

    Args:
        function: Anything that can be called.
        depth: Number of functions that it calls to look into.
        bound: Values that some of its parameters have, by name.
    """
    if isinstance(function, functools.partial):
        held = {f"argument {k}": v for k, v in enumerate(function.args)} | function.keywords
        return _first(_kept_by(k, v, depth) for k, v in held.items()) or kept_state(
            function.func, depth, _bound(function)
        )
    if depth < 0:
        return ""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and wrapped is not function:  # jit, vmap, functools.wraps
        found = kept_state(wrapped, depth, bound)
        if found or not isinstance(function, types.FunctionType):
            return found
        home = str(function.__globals__.get("__name__")).partition(".")[0]
        return "" if home in _LIBRARIES else _seen(function, None, depth, bound)
    if isinstance(function, types.MethodType):
        return _seen(function.__func__, function.__self__, depth, bound)
    if isinstance(function, types.FunctionType):
        return _seen(function, None, depth, bound)
    return _seen(type(function).__call__, function, depth, bound) if callable(function) else ""


def _bound(function: functools.partial[Any]) -> Names:
    """The parameters that it fills in."""
    with contextlib.suppress(TypeError, ValueError):  # no signature, or arguments that do not fit
        signature = inspect.signature(function.func)
        return signature.bind_partial(*function.args, **function.keywords).arguments
    return {}


def _first(found: Iterable[str]) -> str:
    return next((why for why in found if why), "")


def _seen(function: Any, owner: Any, depth: int, bound: Names | None = None) -> str:
    """What a plain function keeps; ``owner`` is the object that it is a method of."""
    if not isinstance(function, types.FunctionType):
        return ""  # of C, as NumPy's are
    if str(function.__module__).partition(".")[0] in _LIBRARIES:
        return ""  # flax.linen.Module.apply, say
    own = _outside(function) | (bound or {})
    if owner is not None:
        first = next(iter(inspect.signature(function, follow_wrapped=False).parameters), "")
        own[first] = owner
        if isinstance(own.get("__class__"), type) and isinstance(owner, own["__class__"]):
            own[function_source.SUPER] = super(own["__class__"], owner)
    tree = function_source.tree_of(function)
    if tree is None:
        found = own
    else:
        other = function_source.aliases(tree, own)
        if why := function_source.written(tree, own, other, function):
            return why
        found = dict(function_source.chains(tree, own, other))
    home = str(function.__module__).partition(".")[0]
    return _first(
        _kept_by(text, value, depth, home) for text, value in found.items() if value is not owner
    )


def _kept_by(text: str, value: Any, depth: int, home: str = "") -> str:
    """What a function keeps by using a value, where that is seen of the value.

    Args:
        text: How the function calls it.
        value: The value.
        depth: Number of functions and containers to look into.
        home: The package of the function: others that are installed are not looked into.
    """
    source = value if isinstance(value, _GENERATORS) else getattr(value, "__self__", None)
    if isinstance(source, _GENERATORS):
        if any(source is one for one in _SHARED):
            return "it draws from a generator that all of Python shares"
        name = text if source is value else text.rpartition(".")[0] or text
        return f"it draws from {name}, a {type(source).__name__}"
    if isinstance(source, np.random.SeedSequence) and value.__name__ == "spawn":
        return f"it calls {text}, which counts"
    if isinstance(value, Iterator) and not _is_written(value):
        return f"it has {text}, an iterator"
    if depth <= 0 or isinstance(value, type):
        return ""
    if isinstance(value, (list, tuple, set, dict)):
        inside = itertools.islice(value.values() if isinstance(value, dict) else value, 100)
        return _first(_kept_by(f"{text}[...]", one, depth - 1, home) for one in inside)
    return kept_state(value, depth - 1) if callable(value) and _is_near(value, home) else ""


def _is_written(value: Any) -> bool:
    """Whether it is a file to write to, which is an iterator by its type alone."""
    with contextlib.suppress(Exception):
        return bool(value.writable())
    return False


def _is_near(function: Any, home: str) -> bool:
    """Whether a function is of the package of the one that calls it, or is not installed."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if not isinstance(inner, (types.FunctionType, types.MethodType)):
        inner = type(inner).__call__
    file = getattr(getattr(inner, "__code__", None), "co_filename", _STDLIB)
    if str(getattr(inner, "__module__", "")).partition(".")[0] == home:
        return True
    return not ("site-packages" in file or file.startswith((_STDLIB, "<frozen")))


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """What a function reads outside of itself, and its defaults, by name."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    own = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = {
        step.argval
        for code in _codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    own |= {k: v for k, v in function.__globals__.items() if k in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # bound later
            own[name] = cell.cell_contents
    return own


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)
