"""Whether the Python functions of a graph keep state from one call to the next.

DALI's checkpoints do not have the state of Python functions: a counter just goes on, and in a new
process begins anew. So all values that a function can reach (its closure, defaults, the globals and
attributes that its code names, and their contents) are digested when the graph is defined, and
again when a state is asked for. A value that differs is state, and the pipelines can't be resumed.
Nothing is guessed from sources; a value that was not changed so far is not seen as state.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import io
import itertools
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pipeline import function_notes
from ..pipeline.function_notes import FunctionNote
from ..state.envelope import digest
from .checks import name_of

# Their wrappers and modules keep caches, on which no output depends.
_LIBRARIES = frozenset({"flax", "jax", "jaxlib", "numba", "numpy", "nvidia"})
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"], "<frozen")
# Functions that make a generator, seeded by the system's random bytes if they get no seed.
_MAKERS = (
    *(np.random.default_rng, np.random.RandomState, np.random.SeedSequence, random.Random),
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64),
)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, np.generic)
# With these a function reaches attributes that its code does not name.
_BY_NAME = frozenset({"getattr", "setattr", "vars", "__dict__", "attrgetter"})
_MOST_ELEMENTS = 1000  # of one container
_MOST_VALUES = 10_000  # that one function reaches
_MOST_BYTES = 1 << 20  # of one array; of a larger one, evenly spaced blocks
_BLOCKS, _BLOCK = 64, 4096
_SILENT = ("CACHE", "PRECALL", "PUSH_NULL", "RESUME", "EXTENDED_ARG", "NOP")
_STATE = object()  # stands for state that has no digest
_ALWAYS = ""  # the digest of that

Memory = Mapping[str, str]


def note(function: Callable[..., Any], stateful: bool | None) -> None:
    """Leaves a note of a function, and of its state, with the pipeline that is being defined."""

    def kept_state(before: Memory) -> str:
        if stateful is not None:
            return "as stateful=True says" if stateful else ""
        return changes(before, memory(function))

    before = memory(function) if stateful is None else {}
    function_notes.add(FunctionNote(name_of(function), before, kept_state))


def changes(before: Memory, after: Memory) -> str:
    """The differences between two memories of a function, as a phrase; "" if there are none."""
    always = [name for name, value in after.items() if value == _ALWAYS]
    if always:
        return always[0]
    names = [name for name in after if before.get(name) != after[name]]
    names += [name for name in before if name not in after]
    return f"{', '.join(names[:3])} changed" if names else ""


def memory(function: Any) -> Memory:
    """A digest of each value that a function can reach and change, by the path to it."""
    with contextlib.suppress(Exception):  # users' objects may raise anything
        return _Reached(function).digests
    return {}


class _Reached:
    """The values that a function reaches; of objects, the attributes that code names.

    Attributes:
        digests: The digest of each plain value, by the path to it.
    """

    def __init__(self, function: Any):
        self.digests: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # holds the values, so that no id is used again
        self._names: set[str] = set()  # in the code of the functions
        # Objects with the paths to them, and their attributes that were read.
        self._objects: list[tuple[str, Any, set[tuple[str, int]]]] = []
        self._todo: list[tuple[str, Any]] = [(_name_of(function), function)]
        self._home = _home(inspect.unwrap(function))
        while len(self._seen) < _MOST_VALUES and (self._todo or self._expand()):
            self._visit(*self._todo.pop())

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, (types.ModuleType, type(None), io.IOBase)):
            return
        if value is _STATE:
            self.digests[name] = _ALWAYS
            return
        state = _state_of(value)
        if state is not None:
            self.digests[name] = digest(state)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Iterator):
            if not _is_file(value):
                self.digests[f"it has {name}, an iterator"] = _ALWAYS
            return
        inside = list(self._inside(name, value))
        self._todo += reversed(inside)

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The parts of a value, each with the path to it."""
        wrapped = getattr(value, "__wrapped__", None)  # jit, vmap, functools.wraps
        if wrapped is not None and wrapped is not value:
            yield name, wrapped
        if isinstance(value, functools.partial):
            yield name, value.func
            yield from ((f"argument {k} of {name}", one) for k, one in enumerate(value.args))
            yield from value.keywords.items()
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            yield name.rpartition(".")[0] or "self", value.__self__
            yield name, getattr(value, "__func__", None)
        elif isinstance(value, types.FunctionType):
            if self._is_near(value):
                yield from self._outside(value)
        elif isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, value.fget
        elif isinstance(value, _CONTAINERS):
            yield f"len({name})", len(value)
            # In one call, since a thread of DALI may change it meanwhile.
            elements = list(itertools.islice(value, _MOST_ELEMENTS))
            yield from ((f"{name}[{k}]", one) for k, one in enumerate(elements))
        elif isinstance(value, Mapping):
            yield f"len({name})", len(value)
            items = list(itertools.islice(value.items(), _MOST_ELEMENTS))
            yield from ((f"{name}[{k!r}]", one) for k, one in items)
        elif _home(value if isinstance(value, type) else type(value)) not in _LIBRARIES:
            self._objects.append((name, value, set()))

    def _outside(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """The values that a function reads from outside: closure, defaults, and globals."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # bound later
                yield name, cell.cell_contents
        parameters = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        yield from zip(parameters[len(parameters) - len(defaults) :], defaults)
        yield from (function.__kwdefaults__ or {}).items()
        for each in _codes(code):
            self._names.update(each.co_names)
            yield from _globals_of(each, function)

    def _expand(self) -> bool:
        """Adds attributes of objects that code has named since; False if there are none."""
        for name, value, read in self._objects:
            for key, one in _attributes(value, self._names):
                if (key, id(one)) not in read:
                    read.add((key, id(one)))
                    self._todo.append((f"{name}.{key}", one))
        return bool(self._todo)

    def _is_near(self, function: types.FunctionType) -> bool:
        """Whether a function is in the first one's package, or in code that is not installed."""
        home = str(function.__globals__.get("__name__")).partition(".")[0]
        if home in _LIBRARIES:
            return False
        file = function.__code__.co_filename
        return home == self._home or not any(part in file for part in _INSTALLED)


def _attributes(value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, or a class, that code names, and its special methods."""
    attributes = getattr(value, "__dict__", {})
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    every = bool(names & _BY_NAME)
    holders = [attributes, *(vars(kind) for kind in kinds if not _is_library(kind))]
    slots = {key for kind in kinds for key in _slots(kind)} - {"__dict__", "__weakref__"}
    for holder in holders:
        for key, one in list(holder.items()):
            special = key.startswith("__") and key.endswith("__")
            called = special and isinstance(one, types.FunctionType) and key != "__init__"
            if called or (not special and (every or key in names)):
                yield key, one
    for key in slots & (slots if every else names):
        with contextlib.suppress(AttributeError):
            yield key, getattr(value, key)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_library(kind: type) -> bool:
    return _home(kind) in _LIBRARIES or _home(kind) in sys.stdlib_module_names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _globals_of(code: types.CodeType, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that code names, and the attributes of modules (``np.random.random``)."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    label, value = "", None
    in_autograph = False  # within AutoGraph's ag__.ld(name), which stands for the name
    for at, step in enumerate(steps):
        name, op = step.argval, step.opname
        if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            label, value = name, _module_or_global(name, function)
        elif op == "IMPORT_NAME":
            label, value = name, sys.modules.get(name)
        elif op in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and label == "ag__":
            in_autograph = name == "ld"
        elif op in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            here = isinstance(value, types.ModuleType)
            label, value = (f"{label}.{name}", getattr(value, name, None)) if here else ("", None)
        elif op.startswith("CALL") and in_autograph:
            in_autograph = False
            continue
        else:
            label, value = "", None
        if value is None:
            continue
        yield label, value
        if any(value is one for one in _MAKERS) and _is_called_without(steps[at + 1 : at + 3]):
            yield f"it draws from {label}() without a seed", _STATE


def _is_called_without(steps: Sequence[dis.Instruction]) -> bool:
    """Whether the next steps call the value on the stack with no argument or None."""
    arguments = [step for step in steps if step.opname == "LOAD_CONST" and step.argval is None][:1]
    calls = [step for step in steps if step.opname.startswith("CALL")]
    return bool(calls) and calls[0] is steps[len(arguments)] and calls[0].arg == len(arguments)


def _module_or_global(name: str, function: types.FunctionType) -> Any:
    """A global, or a module in the closure, whose other values `_outside` reads."""
    if name in function.__code__.co_freevars and function.__closure__:
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        with contextlib.suppress(ValueError):  # bound later
            value = cell.cell_contents
            return value if isinstance(value, types.ModuleType) else None
        return None
    return function.__globals__.get(name)


def _state_of(value: Any) -> bytes | None:
    """Bytes that differ between states of a plain value; None for a value with parts."""
    if isinstance(value, _PLAIN):
        return repr((type(value).__name__, value)).encode()
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return None
        return repr((value.shape, value.dtype.str)).encode() + _sampled(value)
    if isinstance(value, jax.Array):
        return _of_jax_array(value)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, (np.random.BitGenerator, np.random.SeedSequence)):
        return repr(value.state).encode()
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)).encode()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def _sampled(array: np.ndarray) -> bytes:
    """The bytes of an array; of a large one, evenly spaced blocks."""
    if array.nbytes <= _MOST_BYTES:
        return array.tobytes()
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    count = max(1, _BLOCK // array.itemsize)
    starts = np.linspace(0, array.size - count, _BLOCKS).astype(int)
    return b"".join(np.asarray(flat[start : start + count]).tobytes() for start in starts)


_of_arrays: dict[int, tuple[Any, bytes]] = {}


def _of_jax_array(array: jax.Array) -> bytes:
    """The state of a jax.Array, read once: it never changes, and may be on a GPU."""
    known = _of_arrays.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    try:
        data = array
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(array)
        state = repr((array.shape, str(array.dtype))).encode() + _sampled(np.asarray(data))
    except (RuntimeError, TypeError):  # traced, deleted, or of other processes
        return b"no values"
    key = id(array)
    # Weak, so that arrays are freed; their entries go with them.
    _of_arrays[key] = (weakref.ref(array, lambda _: _of_arrays.pop(key, None)), state)
    return state


def _is_file(value: Any) -> bool:
    """Whether a value is a file to write to, which has an iterator's type but keeps no state."""
    with contextlib.suppress(Exception):
        return bool(value.writable())
    return False


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
