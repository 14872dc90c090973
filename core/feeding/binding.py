"""Checks a call with a source, and binds it to the engine of an iterator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import (
    OF_DATA_ITERATOR,
    IteratorConfig,
    checked_arguments,
    function_parameters,
    name_of,
    whole_number,
)
from ..pipeline.pipeline_source import default_device_id
from ..sources.source import Field, Source
from .graph import field_graph
from .source_engine import SourceEngine

_OF_READERS = ("shard_id", "num_shards")


def bind(
    source: Source,
    function: Callable[..., Any],
    args: Sequence[Any],
    call: Mapping[str, Any],
    config: IteratorConfig,
    hosts: tuple[int, int],
) -> Callable[[IteratorConfig], SourceEngine]:
    """Checks a call of an iterator function with a source.

    Returns a function that makes the engine of a new iterator.

    Args:
        source: The source.
        function: The graph's function.
        args: Positional arguments; an error if there are any.
        call: Settings of the function, and arguments of ``nvidia.dali.pipeline_def``.
        config: The iterator's arguments.
        hosts: Number of this process and of all, where each makes a slice of the global batch.

    Raises:
        TypeError: For an unknown argument, a parameter without a value, or a ``read_threads`` that
            is not a number.
        ValueError: For an argument of readers, a missing batch_size, or a source without threads.
    """
    name, parameters = name_of(function), function_parameters(function)
    if args:
        raise TypeError(
            f"{name} got {args!r:.80} by position, and has a source: its parameters are fields of "
            "the records. Pass settings by keyword, such as batch_size=128"
        )
    check_source(source)
    taken = sorted({"batch_size"} & parameters - {*source.fields})
    if taken:
        raise ValueError(
            f"{name} has a parameter {taken[0]}, which would hide the argument {taken[0]}= of the "
            "call: rename the parameter"
        )
    settings = {k: v for k, v in call.items() if k in parameters}
    of_readers = [
        k for k in _OF_READERS if k in call or (k in parameters and k not in source.fields)
    ]
    of_readers += [k for k in ("reader_name",) if config.reader_name is not None]
    of_readers += [k for k in ("size",) if config.size != -1]
    if of_readers:
        raise ValueError(
            f"{of_readers} of {name} with a source: they belong to DALI's readers. A source says "
            "its size, and every pipeline makes its rows of the global batch: leave them out"
        )
    rest = {k: v for k, v in call.items() if k not in parameters}
    rest = checked_arguments(function, rest, OF_DATA_ITERATOR)
    if rest.get("batch_size") is None:
        raise ValueError(
            f"batch_size is missing: pass the number of samples of a batch, {name[:-2]}(..., "
            "batch_size=128)"
        )
    if rest.get("exec_dynamic") is False:
        raise ValueError("exec_dynamic=False with a source, which runs on DALI's newer executor")
    what = "a number of threads, at least 1"
    whole_number(f"read_threads of {type(source).__name__}", source.read_threads, what, 1)
    if config.sharding is None and config.devices is None:
        rest.setdefault("device_id", default_device_id())
    graph = field_graph(function, source.fields, settings)
    return functools.partial(SourceEngine, source, graph, rest, hosts)


def check_source(source: Source) -> None:
    """Raises TypeError if a source lacks a part of the protocol."""
    name, fields = type(source).__name__, getattr(source, "fields", None)
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields of {name} must be a dict like {{'x': Field(np.float32, 1)}}, not {fields!r}"
        )
    for key, field in fields.items():
        if not isinstance(field, Field):
            dtype = field if isinstance(field, str) else "uint8"
            raise TypeError(
                f"fields of {name} must hold dalijax.sources.Field, and {key!r} is {field!r}: "
                f"write Field(np.{dtype}, ndim), with ndim=0 for a number and 1 for a vector"
            )
    for method, call in _METHODS.items():
        if getattr(type(source), method, None) in (None, getattr(Source, method)):
            raise TypeError(f"{name} has no method {method}: define {call}")


_METHODS = {
    "__len__": "__len__(self), the number of records",
    "read": "read(self, indices, names), which returns a dict of a list or array for each name",
    "identity": "identity(self), a text that changes if the records change",
}
