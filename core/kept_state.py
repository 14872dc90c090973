"""Which Python functions keep state from one call to the next, as far as can be seen.

DALI's checkpoints know nothing of what a Python function keeps: a counter goes on from where
it is, in a new process from its start. So a function that is seen to keep state makes the
pipeline one that can't be resumed, and the error says which function and why.
"""

from __future__ import annotations

import ast
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
_CONTAINERS = (list, dict, set, bytearray)
_ADDING = ("add", "append", "appendleft", "extend", "insert", "setdefault", "update")
_TAKING = ("clear", "discard", "pop", "popitem", "popleft", "remove")
_CHANGES = frozenset(_ADDING + _TAKING)
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
    why = "as stateful=True says" if stateful else kept_state(function)
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


def kept_state(function: Callable[..., Any], depth: int = _DEPTH) -> str:
    """What a function keeps from one call to the next, as a phrase; "" where nothing is seen."""
    if isinstance(function, functools.partial):
        held = {f"argument {k}": v for k, v in enumerate(function.args)} | function.keywords
        return _held(held) or kept_state(function.func, depth)
    inner = inspect.unwrap(function)
    if isinstance(inner, types.MethodType):
        inner = inner.__func__
    elif callable(inner) and not isinstance(inner, types.FunctionType):
        inner = type(inner).__call__
    if not isinstance(inner, types.FunctionType):
        return ""  # of C, as NumPy's are
    outside = inspect.getclosurevars(inner)
    parameters = inspect.signature(inner).parameters.values()
    own = {p.name: p.default for p in parameters if p.default is not p.empty}
    own |= {**outside.globals, **outside.nonlocals}
    why = _held(own) or _written(inner, own)
    for value in own.values() if depth and not why else ():
        if isinstance(value, types.FunctionType) and value.__module__ == inner.__module__:
            why = why or kept_state(value, depth - 1)
    return why


def _held(own: dict[str, Any]) -> str:
    for name, value in own.items():
        if isinstance(value, _GENERATORS):
            return f"it draws from {name}, a {type(value).__name__}"
        if isinstance(value, Iterator):
            return f"it has {name}, an iterator"
    return ""


def _written(function: types.FunctionType, own: dict[str, Any]) -> str:
    """What its source changes outside of itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ""  # no source, or a part of an expression
    first = next(iter(inspect.signature(function).parameters), None)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Nonlocal, ast.Global)):
            return f"it assigns {', '.join(node.names)} outside of itself"
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = _name(node.value)
            changes = isinstance(own.get(name), _CONTAINERS)
            if changes or (name == first == "self" and isinstance(node, ast.Attribute)):
                return f"it changes {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, method = _name(node.func.value), node.func.attr
            if method in _CHANGES and isinstance(own.get(name), _CONTAINERS):
                return f"it changes {name}"
            if own.get(name) in (random, np.random) or _is_numpys_random(node.func.value, own):
                return "it draws from a generator that all of Python shares"
    return ""


def _is_numpys_random(node: ast.AST, own: dict[str, Any]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "random":
        return False
    return own.get(_name(node.value)) is np


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""
