"""Which Python functions keep state from one call to the next, as far as can be seen.

DALI's checkpoints know nothing of what a Python function keeps: a counter goes on from where
it is, in a new process from its start. So a function that is seen to keep state makes the
pipeline one that can't be resumed, and the error says which function and why.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import functools
import inspect
import random
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import Pipeline

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, dict, set, bytearray, collections.deque, np.ndarray)
# Of numpy.random and random: what makes a generator of one's own, where it gets a seed.
_MAKERS = frozenset(
    ("default_rng", "Generator", "RandomState", "SeedSequence", "PCG64", "Philox", "Random")
)
_ADDING = ("add", "append", "appendleft", "extend", "insert", "setdefault", "update")
_TAKING = ("clear", "discard", "pop", "popitem", "popleft", "remove")
_CHANGES = frozenset(_ADDING + _TAKING)
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
            "it depend on its arguments alone (an argument `key` has random numbers that resume), "
            "or pass stateful=False where that is so"
        )


def noted(pipeline: Pipeline) -> str:
    """Why a pipeline's functions can't be resumed; "" where they can."""
    return _keeping.get(pipeline, "")


def kept_state(function: Any, depth: int = _DEPTH) -> str:
    """What a function keeps from one call to the next, as a phrase; "" where nothing is seen."""
    if isinstance(function, functools.partial):
        held = {f"argument {k}": v for k, v in enumerate(function.args)} | function.keywords
        return _held(held) or kept_state(function.func, depth)
    if depth < 0:
        return ""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and wrapped is not function:  # jit, vmap, functools.wraps
        found = kept_state(wrapped, depth)
        if found or not isinstance(function, types.FunctionType):
            return found
        home = str(function.__globals__.get("__name__")).partition(".")[0]
        return "" if home in _LIBRARIES else _seen(function, None, depth)
    if isinstance(function, types.MethodType):
        return _seen(function.__func__, function.__self__, depth)
    if isinstance(function, types.FunctionType):
        return _seen(function, None, depth)
    return _seen(type(function).__call__, function, depth) if callable(function) else ""


def _seen(function: Any, owner: Any, depth: int) -> str:
    """What a plain function keeps; ``owner`` is the object that it is a method of."""
    if not isinstance(function, types.FunctionType):
        return ""  # of C, as NumPy's are
    own = _outside(function)
    first = next(iter(inspect.signature(function, follow_wrapped=False).parameters), "")
    if owner is not None:
        own[first] = owner
    tree = _source(function)
    why = _held(own) or (_written(tree, own, function) if tree is not None else "")
    if not why and owner is not None and tree is not None:
        why = _of_owner(tree, first, owner, depth)
    for name, value in own.items() if depth and not why else ():
        plain = isinstance(value, types.FunctionType) and name != first
        if plain and value.__module__ == function.__module__:
            why = why or kept_state(value, depth - 1)
    return why


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """What a function reads outside of itself, and its defaults, by name."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    own = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = {
        step.argval
        for step in dis.get_instructions(function.__code__)
        if step.opname == "LOAD_GLOBAL"
    }
    own |= {k: v for k, v in function.__globals__.items() if k in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # bound later
            own[name] = cell.cell_contents
    return own


def _source(function: types.FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return None  # no source, or a part of an expression


def _held(own: dict[str, Any]) -> str:
    for name, value in own.items():
        if isinstance(value, _GENERATORS):
            return f"it draws from {name}, a {type(value).__name__}"
        if isinstance(value, Iterator):
            return f"it has {name}, an iterator"
    return ""


def _written(tree: ast.AST, own: dict[str, Any], function: types.FunctionType) -> str:
    """What its source changes outside of itself."""
    local = set(function.__code__.co_varnames) - set(own)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (
            isinstance(node, ast.Nonlocal) and set(node.names) & set(function.__code__.co_freevars)
        ):
            return f"it assigns {', '.join(node.names)} outside of itself"
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            name = _root(node)
            if name in local or name not in own or isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node, ast.Attribute) or isinstance(_value(node.value, own), _CONTAINERS):
                return f"it changes {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, method = _root(node.func), node.func.attr
            if name in local or name not in own:
                continue
            value = _value(node.func.value, own)
            if method in _CHANGES and isinstance(value, _CONTAINERS):
                return f"it changes {name}"
            if isinstance(value, _GENERATORS):
                return f"it draws from {name}, which has a {type(value).__name__}"
            if any(value is module for module in (random, np.random)) and (
                method not in _MAKERS or not node.args
            ):
                return "it draws from a generator that all of Python shares"
    return ""


def _of_owner(tree: ast.AST, first: str, owner: Any, depth: int) -> str:
    """What the methods keep that a method calls on its own object."""
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and _root(node.func) == first:  # type: ignore[attr-defined]
            value = _value(node.func, {first: owner})  # type: ignore[attr-defined]
            if depth and isinstance(value, types.MethodType) and value.__self__ is owner:
                why = kept_state(value, depth - 1)
                if why:
                    return why
    return ""


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes and indices begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.AST, own: dict[str, Any]) -> Any:
    """What a chain of attributes is, as far as it is plain data of instances and modules."""
    if isinstance(node, ast.Name):
        return own.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, own)
        if owner is None or isinstance(getattr(type(owner), node.attr, None), property):
            return None  # a property may do anything
        return getattr(owner, node.attr, None)
    return None
