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
import itertools
import random
import sys
import sysconfig
import textwrap
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import Pipeline

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, dict, set, bytearray, collections.deque, np.ndarray)
_SHARED = [random.random.__self__, np.random.random.__self__]  # type: ignore[attr-defined]
# What makes a generator of one's own, where it gets a seed.
_MAKERS = [
    *(np.random.default_rng, np.random.RandomState, np.random.SeedSequence, random.Random),
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64),
]
_STDLIB = sysconfig.get_paths()["stdlib"]
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
            "it depend on its arguments alone (a keyword-only `key`, or `rng` of DLPack functions, "
            "has random numbers that resume), or pass stateful=False where that is so"
        )


def noted(pipeline: Pipeline) -> str:
    """Why a pipeline's functions can't be resumed; "" where they can."""
    return _keeping.get(pipeline, "")


def kept_state(function: Any, depth: int = _DEPTH) -> str:
    """What a function keeps from one call to the next, as a phrase; "" where nothing is seen."""
    if isinstance(function, functools.partial):
        held = {f"argument {k}": v for k, v in enumerate(function.args)} | function.keywords
        return _first(_kept_by(k, v, depth) for k, v in held.items()) or kept_state(
            function.func, depth
        )
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


def _first(found: Iterable[str]) -> str:
    return next((why for why in found if why), "")


def _seen(function: Any, owner: Any, depth: int) -> str:
    """What a plain function keeps; ``owner`` is the object that it is a method of."""
    if not isinstance(function, types.FunctionType):
        return ""  # of C, as NumPy's are
    own = _outside(function)
    if owner is not None:
        first = next(iter(inspect.signature(function, follow_wrapped=False).parameters), "")
        own[first] = owner
    tree = _source(function)
    if tree is None:
        chains = {name: value for name, value in own.items() if value is not owner}
    else:
        own |= _aliases(tree, own)
        why = _written(tree, own, function)
        if why:
            return why
        chains = {text: value for text, value in _chains(tree, own) if value is not owner}
    home = str(function.__module__).partition(".")[0]
    return _first(_kept_by(text, value, depth, home) for text, value in chains.items())


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
    if isinstance(value, Iterator):
        return f"it has {text}, an iterator"
    if depth <= 0 or isinstance(value, type):
        return ""
    if isinstance(value, (list, tuple, set, dict)):
        inside = itertools.islice(value.values() if isinstance(value, dict) else value, 100)
        return _first(_kept_by(f"{text}[...]", one, depth - 1, home) for one in inside)
    return kept_state(value, depth - 1) if callable(value) and _is_near(value, home) else ""


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


def _aliases(tree: ast.AST, own: dict[str, Any]) -> dict[str, Any]:
    """What a function imports, and other names that it gives to what is outside of it."""
    found: dict[str, Any] = {}
    given = collections.Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _stores(node)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.name if one.asname else one.name.partition(".")[0]
                found[one.asname or name] = sys.modules.get(name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                module = sys.modules.get(str(node.module))
                found[one.asname or one.name] = getattr(module, one.name, None)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if given[name] == 1 and _root(node.value) in own:
                found[name] = _value(node.value, own)
    return {name: value for name, value in found.items() if value is not None}


def _stores(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _chains(tree: ast.AST, own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and the chains of attributes that are read of what is outside, with values."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in inner:
            continue
        if _root(node) in own and not _stores(node):
            yield ast.unparse(node), _value(node, own)


def _source(function: types.FunctionType) -> ast.AST | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return None  # no source, or a part of an expression
    return _Unconverted().visit(tree)


class _Unconverted(ast.NodeTransformer):
    """Source as its author wrote it, of what DALI's conditionals make of it."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Calls of AutoGraph, ``ag__.ld(name)`` and ``ag__.converted_call(function, ...)``."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or _root(node.func) != "ag__":
            return node
        if node.func.attr == "ld":
            return node.args[0]
        if node.func.attr == "converted_call":
            function, given, named, *_ = node.args
            return ast.Call(
                func=function,
                args=given.elts if isinstance(given, ast.Tuple) else [],
                keywords=named.keywords if isinstance(named, ast.Call) else [],
            )
        return node


def _written(tree: ast.AST, own: dict[str, Any], function: types.FunctionType) -> str:
    """What its source changes outside of itself, or draws where nothing says from which seed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (
            isinstance(node, ast.Nonlocal) and set(node.names) & set(function.__code__.co_freevars)
        ):
            return f"it assigns {', '.join(node.names)} outside of itself"
        if (
            isinstance(node, (ast.Subscript, ast.Attribute))
            and _stores(node)
            and _root(node) in own
        ):
            indexed = isinstance(node, ast.Subscript)
            if not indexed or isinstance(_value(node.value, own), _CONTAINERS):
                return f"it changes {_root(node)}"
        if isinstance(node, ast.Call):
            if _is_unseeded(node, own):
                return "it draws from a generator without a seed"
            changed = _changed_by(node, own)
            if changed is not None and _root(changed) in own:
                return f"it changes {_root(changed)}"
    return ""


def _changed_by(call: ast.Call, own: dict[str, Any]) -> ast.AST | None:
    """What a call changes, by what it is called."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _CHANGES:
        changed: ast.AST = function.value
        if isinstance(_value(changed, own), _CONTAINERS):
            return changed
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and call.args:
        return call.args[0]
    for keyword in call.keywords:  # of NumPy's functions
        if keyword.arg == "out" and isinstance(_value(keyword.value, own), np.ndarray):
            return keyword.value
    return None


def _is_unseeded(call: ast.Call, own: dict[str, Any]) -> bool:
    """Whether it makes a generator, of numpy.random or random, and gives it no seed."""
    made = _value(call.func, own)
    if not any(made is one for one in _MAKERS):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(isinstance(one, ast.Constant) and one.value is None for one in given)


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
