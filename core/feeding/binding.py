"""Checks the arguments of an iterator over a record source, and binds them to its engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments import checked_arguments, function_parameters, name_of, whole_number
from ..config import OF_DATA_ITERATOR, IteratorConfig
from ..formats.field import Field
from ..pipeline.pipeline_factory import default_device_id
from ..sources.source import Source
from .graph import field_graph
from .source_engine import SourceEngine

_OF_READERS = ("shard_id", "num_shards")


def bind(
    source: Source,
    function: Callable[..., Any],
    args: Sequence[Any],
    call: Mapping[str, Any],
    config: IteratorConfig,
) -> Callable[[IteratorConfig], SourceEngine]:
    """Checks the arguments of an iterator function that is called with a record source.

    Args:
        source: The record source.
        function: The graph's function.
        args: Positional arguments, which must be empty.
        call: Settings of the function, and arguments of ``nvidia.dali.pipeline_def``.
        config: The iterator's arguments.

    Returns:
        A function that creates the engine of a new iterator.

    Raises:
        TypeError: If an argument is unknown, a parameter has no value, or ``read_threads`` isn't
            a number.
        ValueError: If an argument belongs to DALI's readers, batch_size is missing, or the source
            has no threads.
    """
    name, parameters = name_of(function), function_parameters(function)
    if args:
        raise TypeError(
            f"{name} got {args!r:.80} by position, but it has a source, so its parameters are "
            "fields of the records. Pass settings by keyword, such as batch_size=128"
        )
    check_source(source)
    hidden = sorted({"batch_size"} & parameters - {*source.fields})
    if hidden:
        raise ValueError(
            f"{name} has a parameter {hidden[0]}, which hides the argument {hidden[0]}= of the "
            "call. Rename the parameter"
        )
    settings = {k: v for k, v in call.items() if k in parameters}
    reader_arguments = [
        k for k in _OF_READERS if k in call or (k in parameters and k not in source.fields)
    ]
    reader_arguments += [k for k in ("reader_name",) if config.reader_name is not None]
    reader_arguments += [k for k in ("size",) if config.size != -1]
    if reader_arguments:
        raise ValueError(
            f"{reader_arguments} of {name} can't be used with a source, since they belong to "
            "DALI's readers. Omit them: a source has a size, and every pipeline makes its rows of "
            "the global batch"
        )
    pipeline_call = {k: v for k, v in call.items() if k not in parameters}
    pipeline_call = checked_arguments(function, pipeline_call, OF_DATA_ITERATOR)
    if pipeline_call.get("batch_size") is None:
        raise ValueError(
            "batch_size is missing. Pass the number of samples in a batch: "
            f"{name[:-2]}(..., batch_size=128)"
        )
    if pipeline_call.get("exec_dynamic") is False:
        raise ValueError(
            "exec_dynamic=False can't be used with source=, which requires DALI's dynamic "
            "executor. Omit it"
        )
    threads_wording = "a number of threads, at least 1"
    whole_number(
        f"read_threads of {type(source).__name__}", source.read_threads, threads_wording, 1
    )
    if config.sharding is None and config.devices is None:
        pipeline_call.setdefault("device_id", default_device_id())
    graph = field_graph(function, source.fields, settings)
    return functools.partial(SourceEngine, source, graph, pipeline_call)


def check_source(source: Source) -> None:
    """Checks that a source has records and implements the protocol.

    Raises:
        TypeError: If it lacks a part of the protocol.
        ValueError: If it has no records.
    """
    name, fields = type(source).__name__, getattr(source, "fields", None)
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields of {name} must be a dict like {{'x': Field(np.float32, 1)}}, not {fields!r}"
        )
    for key, field in fields.items():
        if not isinstance(field, Field):
            dtype = field if isinstance(field, str) else "uint8"
            raise TypeError(
                f"fields of {name} must be of type dalijax.sources.Field, not {key!r}: {field!r}. "
                f"Write Field(np.{dtype}, ndim), with ndim=0 for a number and 1 for a vector"
            )
    for method, call in _METHODS.items():
        if getattr(type(source), method, None) in (None, getattr(Source, method)):
            raise TypeError(f"{name} has no method {method}. Define {call}")
    if not len(source):
        raise ValueError(f"{name} has no records: its len() is 0. Check the data that it reads")


_METHODS = {
    "__len__": "__len__(self), the number of records",
    "read": "read(self, indices, names), which returns a dict of a list or array for each name",
    "identity": "identity(self), a text that changes if the records change",
}
