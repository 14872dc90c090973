"""Checks the arguments of an iterator over a record source, and creates its engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import (
    checked_arguments,
    function_parameters,
    is_pipeline_def,
    name_of,
    whole_number,
)
from ..config import CONFIG_NAMES, OF_DATA_ITERATOR, IteratorConfig
from ..messages.printable import printable_repr
from ..pipeline.pipeline_factory import default_device_id
from ..random.hashing import fold
from ..sources.source import Source, check_names, check_source, read_records
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
    """Checks the arguments of an iterator over a record source; returns a factory of its engine.

    Args:
        source: The record source.
        function: The graph's function.
        args: Positional arguments, which must be empty.
        call: Settings of the function, and arguments of ``nvidia.dali.pipeline_def``.
        config: The iterator's arguments.

    Returns:
        A function that returns the engine of a new iterator, given the iterator's arguments.

    Raises:
        TypeError: If an argument is unknown, a parameter has no value, the source lacks a method,
            or its ``read_threads`` isn't an integer.
        ValueError: If an argument belongs to DALI's readers, or may mean a field, batch_size is
            missing, the source has no records or no threads, or its labels have several meanings.
    """
    name, parameters = name_of(function), function_parameters(function)
    if args:
        raise TypeError(
            f"{name} got {printable_repr(args)} by position, but it has a source, so its "
            "parameters are fields of the records. Pass settings by keyword, such as batch_size=128"
        )
    if is_pipeline_def(function):
        raise TypeError(
            f"{name} is decorated by pipeline_def, but a source requires the plain graph function. "
            "Remove the decorator, and pass its arguments in the call"
        )
    check_source(source)
    hidden = sorted({"batch_size"} & parameters - {*source.fields})
    if hidden:
        raise ValueError(
            f"{name} has a parameter {hidden[0]}, which hides the argument {hidden[0]}= of the "
            "call. Rename the parameter"
        )
    ambiguous = sorted({*call} & parameters & {*source.fields} & CONFIG_NAMES)
    if ambiguous:
        raise ValueError(
            f"{ambiguous[0]}= in the call of {name} is ambiguous, because the source has a field "
            f"{ambiguous[0]!r}. Pass {ambiguous[0]}= to data_iterator, or rename the field"
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

    def value_of(field: str) -> Any:
        first = np.zeros(1, np.int64)
        return read_records(source, first, [field], fold(0, 0, first))[0][field][0]

    graph = field_graph(function, source.fields, settings, value_of, source)
    check_names(source, graph.names)
    return functools.partial(SourceEngine, source, graph, pipeline_call)
