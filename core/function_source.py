"""What the source of a function reads and changes outside of itself, as far as can be seen.

What is outside, by name, is given as a dict: globals, variables of outer functions, defaults, and
the object that a method is of.
"""

from __future__ import annotations

import ast
import collections
import inspect
import itertools
import random
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

Names = dict[str, Any]

SUPER = "super()"  # how the names have what that is in a method
_CONTAINERS = (list, dict, set, bytearray, collections.deque, np.ndarray)
_FACTORIES = (list, dict, set, collections.deque)
# What makes a generator of one's own, where it gets a seed.
_MAKERS = [
    *(np.random.default_rng, np.random.RandomState, np.random.SeedSequence, random.Random),
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64),
]
_ADDING = ("add", "append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update")
_TAKING = ("clear", "discard", "pop", "popitem", "popleft", "remove", "difference_update")
_ORDERING = ("fill", "partition", "put", "resize", "reverse", "rotate", "sort")
_CHANGES = frozenset(_ADDING + _TAKING + _ORDERING)
_INTO = [np.copyto, np.fill_diagonal, np.place, np.put, np.putmask]  # their first argument
_MOST = 100  # elements of a container that are looked at
_EACH = ast.Name(id="", ctx=ast.Load())  # the index of what a loop goes through
_UNKNOWN = object()  # an index
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def tree_of(function: types.FunctionType) -> ast.AST | None:
    """Its source, as its author wrote it; None where there is none."""
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


def aliases(tree: ast.AST, own: Names) -> Names:
    """What a function imports, and other names that it gives to what is outside of it."""
    found: Names = {}
    given = collections.Counter(_bound(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.name if one.asname else one.name.partition(".")[0]
                found[one.asname or name] = sys.modules.get(name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                module = sys.modules.get(str(node.module))
                found[one.asname or one.name] = getattr(module, one.name, None)
        for target, value in _assigned(node):
            if given[target.id] == 1 and _root(value) in own:
                found[target.id] = _value(value, own)
    return {name: value for name, value in found.items() if value is not None}


def chains(tree: ast.AST, own: Names, other: Names) -> Iterator[tuple[str, Any]]:
    """The names and the chains of attributes that are read of what is outside, with values.

    Args:
        tree: The source.
        own: What is outside.
        other: Other names of that, of `aliases`.
    """
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node, names in _visible(tree, own | other, other):
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in inner:
            continue
        if _root(node) in names and not _stores(node):
            yield ast.unparse(node), _value(node, names)


def written(tree: ast.AST, own: Names, other: Names, function: types.FunctionType) -> str:
    """What its source changes outside of itself, or draws where nothing says from which seed."""
    stored = set(_bound(tree, augmented=True))
    for node, names in _visible(tree, own | other, other):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            outside = stored & set(node.names)
            if isinstance(node, ast.Nonlocal):
                outside &= set(function.__code__.co_freevars)
            if outside:
                return f"it assigns {', '.join(sorted(outside))} outside of itself"
        changed = _changed_by(node, names)
        if changed is not None and _root(changed) in names:
            return f"it changes {_root(changed).removesuffix('()')}"
        if isinstance(node, ast.Call) and _is_unseeded(node, names):
            return "it draws from a generator without a seed"
    return ""


def _visible(tree: ast.AST, names: Names, kept: Names, depth: int = 0) -> Iterator[Any]:
    """Each node, with the names that mean there what is outside.

    Functions in the function have names of their own; and a parameter means something else once
    the function has assigned it. Those of ``kept`` do not.
    """
    yield tree, names
    scope = isinstance(tree, _Scope)
    if scope and depth:
        names = _without(names, _locals(tree), kept)
    if isinstance(tree, (ast.For, ast.AsyncFor)):
        names = _without(names, {target.id for target, _ in _assigned(tree)}, kept)
    for _, field in ast.iter_fields(tree):
        there = names  # from one statement of a block to the next
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                yield from _visible(child, there, kept, depth + scope)
            if isinstance(child, (ast.Assign, ast.AnnAssign)):
                there = _without(there, {target.id for target, _ in _assigned(child)}, kept)


def _without(names: Names, gone: set[str], kept: Names) -> Names:
    return {name: value for name, value in names.items() if name not in gone or name in kept}


def _locals(scope: ast.AST) -> set[str]:
    nodes = list(ast.walk(scope))
    outer = {k for one in nodes if isinstance(one, (ast.Global, ast.Nonlocal)) for k in one.names}
    parameters = {one.arg for one in nodes if isinstance(one, ast.arg)}
    return (parameters | set(_bound(scope, augmented=True))) - outer


def _bound(tree: ast.AST, augmented: bool = False) -> Iterator[str]:
    """Names that are assigned, and parameters of the functions in the function."""
    changed = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and _stores(node) and (augmented or id(node) not in changed):
            yield node.id
    for scope in [node for node in ast.walk(tree) if isinstance(node, _Scope)][1:]:
        yield from (one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg))


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Name, ast.AST]]:
    """The names that a statement assigns, and what; of a loop, what it goes through by index."""
    pairs: list[tuple[ast.AST, ast.AST]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        several = isinstance(node.iter, (ast.List, ast.Tuple)) and node.iter.elts
        element = ast.Subscript(value=node.iter, slice=_EACH)
        pairs = [(node.target, one) for one in several or [element]]
    for target, value in pairs:
        if isinstance(target, ast.Name):
            yield target, value
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            both = zip(target.elts, value.elts)
            yield from ((name, one) for name, one in both if isinstance(name, ast.Name))


def _stores(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _changed_by(node: ast.AST, own: Names) -> ast.AST | None:
    """What a statement, or a call, changes, by what it is called."""
    if isinstance(node, ast.Attribute) and _stores(node):
        return node
    if isinstance(node, ast.Subscript) and _stores(node):
        return node if isinstance(_value(node.value, own), _CONTAINERS) else None
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target if isinstance(own.get(node.target.id), _CONTAINERS) else None
    return _changed_by_call(node, own) if isinstance(node, ast.Call) else None


def _changed_by_call(call: ast.Call, own: Names) -> ast.AST | None:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _CHANGES:
        changed: ast.AST = function.value
        if isinstance(_value(changed, own), _CONTAINERS):
            return changed
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and call.args:
        return call.args[0]
    into = [one.value for one in call.keywords if one.arg == "out"]  # of NumPy's functions
    made = _value(function, own)
    at = isinstance(getattr(made, "__self__", None), np.ufunc) and made.__name__ == "at"
    if call.args and (at or any(made is one for one in _INTO)):
        into.append(call.args[0])
    return next((one for one in into if isinstance(_value(one, own), np.ndarray)), None)


def _is_unseeded(call: ast.Call, own: Names) -> bool:
    """Whether it makes a generator, of numpy.random or random, and gives it no seed."""
    made = _value(call.func, own)
    if not any(made is one for one in _MAKERS):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(isinstance(one, ast.Constant) and one.value is None for one in given)


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes and indices begins with."""
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif _called(node, "super", 0):
            return SUPER
        elif isinstance(node, ast.Call) and _called(node, "type", 1):
            node = node.args[0]
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.AST, name: str, arguments: int) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    named = isinstance(function, ast.Name) and function.id == name
    return named and isinstance(node, ast.Call) and len(node.args) == arguments


def _value(node: ast.AST, own: Names) -> Any:
    """What a chain of attributes is, as far as it is plain data of instances and modules."""
    if isinstance(node, ast.Name):
        return own.get(node.id)
    if isinstance(node, ast.Subscript):
        return _element(_value(node.value, own), node.slice)
    if _called(node, "super", 0):
        return own.get(SUPER)
    if isinstance(node, ast.Call) and _called(node, "type", 1):
        return None if (one := _value(node.args[0], own)) is None else type(one)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value(node.value, own)
    if isinstance(owner, super):
        return _inherited(owner, node.attr)
    if owner is None or isinstance(getattr(type(owner), node.attr, None), property):
        return None  # a property may do anything
    return getattr(owner, node.attr, None)


def _inherited(owner: Any, name: str) -> Any:
    """A method of super()'s."""
    order = type(owner.__self__).__mro__
    after = order[order.index(owner.__thisclass__) + 1 :]
    found = next((vars(one)[name] for one in after if name in vars(one)), None)
    return types.MethodType(found, owner.__self__) if inspect.isfunction(found) else None


def _element(holder: Any, index: ast.AST) -> Any:
    """What an index gives of a container; where it is not known, the first of what is alike."""
    each = index is _EACH
    try:
        key = _UNKNOWN if each else ast.literal_eval(index)
    except ValueError:  # no constant
        key = _UNKNOWN
    if isinstance(holder, np.ndarray):
        return holder if _is_view(index, holder.ndim) else None
    if isinstance(holder, dict):
        if key is not _UNKNOWN and key in holder:
            return dict.get(holder, key)
        factory = getattr(holder, "default_factory", None)
        if factory in _FACTORIES:
            return factory()
        holder = holder.values()
    elif not isinstance(holder, (list, tuple, collections.deque)) or isinstance(index, ast.Slice):
        return None  # what a slice gives is a list of its own
    held = list(itertools.islice(holder, _MOST))
    if isinstance(key, int) and -len(held) <= key < len(held):
        return held[key]
    others = [one for one in held if not isinstance(one, _CONTAINERS)]
    return next(iter(others or held), None)


def _is_view(index: ast.AST, dimensions: int) -> bool:
    """Whether an index of an array gives a view; what arrays choose of it is a copy."""
    if index is _EACH:
        return dimensions > 1
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    numbers = [one for one in parts if isinstance(one, (ast.Constant, ast.UnaryOp))]
    slices = sum(isinstance(one, ast.Slice) for one in parts)
    return len(numbers) + slices == len(parts) and len(numbers) < dimensions
