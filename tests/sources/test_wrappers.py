"""Each wrapper of a source passes on each member of the source, required or optional."""

import collections
import re
import types

import numpy as np
import pytest

from dalijax import sources
from dalijax.core.order.windows import Groups
from dalijax.core.sources import source as protocol

NAMES, ROWS = ["x"], np.array([2, 0])
METHODS = (
    *("_read_keyed", "sizes", "_range_bytes", "_announce", "_record_names", "_check_names"),
    "_heads",
)


class Complete(sources.Source):
    """A source with all members of the protocol, which record their calls."""

    fields = {"x": sources.Field(np.int32)}
    read_threads = 5
    classes = ("cat", "dog")
    _gives_new_arrays = True
    _read_ahead = 100
    _mixture = "a mixture"
    _version = "3"
    _record_count = 8  # an epoch has 6
    _maps = (("", types.SimpleNamespace(depth=0, place=0, is_random=True)),)
    _mapped_fields = frozenset("x")
    _groups = Groups(np.array([0, 2, 6]), np.array([20, 40]), window=30)

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 6

    def identity(self):
        return "complete"

    def name(self, index):
        return f"record number {index}"

    def order(self, seed, shuffle):
        return self._called("order", seed, shuffle)

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(name)
        return lambda *arguments: self._called(name, *arguments)

    def _called(self, name, *arguments):
        self.calls.append((name, [np.asarray(a).tolist() for a in arguments[:2]]))
        return ({"x": arguments}, {}) if name == "_read_keyed" else 7

    sizes = property(lambda self: self.__getattr__("sizes"))


class Plain(Complete):
    order = None

    def __getattribute__(self, name):
        if name == "order":
            raise AttributeError(name)
        return super().__getattribute__(name)


SELECTED = [1, 3, 4]
WRAPPERS = {
    "Selection": (lambda: Plain(), lambda source: sources.Selection(source, SELECTED), [4, 1]),
    "Named": (Complete, lambda source: sources.Named(source, "name", index="number"), [2, 0]),
    "Named of Selection": (
        *(Plain, lambda source: sources.Named(sources.Selection(source, SELECTED), "name")),
        [4, 1],
    ),
    "Selection of Named": (
        *(Plain, lambda source: sources.Selection(sources.Named(source, "name"), SELECTED)),
        [4, 1],
    ),
    "map": (
        Complete,
        lambda source: source.map(dict, inputs=[], fields={"y": sources.Field(np.int32)}),
        [2, 0],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_member_is_passed_on(name):
    make, wrap, rows = WRAPPERS[name]
    inner = make()
    outer = wrap(inner)
    inner.calls.clear()
    outer.read(ROWS, NAMES)
    outer.sizes(ROWS, "x", [])
    protocol.range_bytes(outer, ROWS, NAMES)
    protocol.announce(outer, ROWS, NAMES, ROWS, collections.deque())
    protocol.names_of(outer, ROWS)
    protocol.check_names(outer, NAMES)
    inner._mapped_fields = frozenset()  # heads of mapped fields are not read
    protocol.heads_of(outer, ROWS, "x", 100)
    del inner._mapped_fields
    assert inner.calls == [
        ("_read_keyed", [rows, NAMES]),
        ("sizes", [rows, "x"]),
        ("_range_bytes", [rows, NAMES]),
        ("_announce", [rows, NAMES]),
        ("_record_names", [rows]),
        ("_check_names", [NAMES]),
        ("_heads", [rows, "x"]),
    ]
    assert outer.name(2) == f"record number {rows[0]}" and outer.identity().startswith("complete")
    assert outer.classes == inner.classes and outer.read_threads == 5
    assert outer._gives_new_arrays == (name != "map") and protocol.read_ahead_of(outer) == 100
    assert protocol.version_of(outer) == "3" and protocol.mixture_of(outer) == "a mixture"
    assert list(protocol.maps_of(outer))[:1] == list(inner._maps)
    assert protocol.mapped_fields(outer) == ({"x", "y"} if name == "map" else {"x"})
    kept = [0, 1, 3] if isinstance(inner, Plain) else [0, 2, 6]
    assert protocol.groups_of(outer).starts.tolist() == kept
    assert hasattr(outer, "order") == hasattr(inner, "order")
    if hasattr(inner, "order"):
        assert protocol.order_of(outer, 3, True) == 7 and inner.calls[-1] == ("order", [3, True])
        assert protocol.record_count(outer) == 8
    else:  # no mixture
        assert protocol.record_count(outer) == len(outer) == 3


def test_the_members_above_are_those_of_the_protocol():
    members = set(re.findall(r"``(_?[a-z_]+)(?:\(|``)", protocol.__doc__)) - {"len"}
    wrapper = {"order", "classes", "_gives_new_arrays", "_read_ahead", "_range_bytes"}
    wrapper |= {"_read_keyed", "_maps", "_mapped_fields", "_record_count", "_heads", "_version"}
    wrapper |= {"_mixture", "_groups"}
    assert members == wrapper | {"_announce", "_record_names", "_check_names"}
