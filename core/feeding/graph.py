"""Graph functions whose parameters are named inputs, which ``fn.external_source`` feeds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.fn.io import file
from nvidia.dali.pipeline import do_not_convert

from ..arguments import function_parameters, name_of
from ..arrays.dtypes import dali_type
from ..formats.field import Field
from ..formats.image_size import FileInput, ImageInput
from ..messages.replacements import suggest_name
from ..messages.user_warnings import warn_user
from ..pipeline.alternatives import GraphDescription
from ..pipeline.output_notes import notes_of
from ..random.draw import DRAW, Draw, DrawnRows, described_draws, draw_inputs
from ..sources.buckets import BUCKET, Buckets
from ..sources.rows import PACK, RowSource
from ..sources.values import without_type
from ..state.fingerprint import graph_lines, operator_line
from ..state.operators import FIELD, Operator, file_inputs, operator_inputs, operators_before
from . import schema
from .joined_draws import offer_joined
from .schema import Schema


@do_not_convert
def _pack(draw: Draw, source: Any) -> Any:
    """Returns the argument ``pack``. The package imports ``augment`` when it is first used."""
    from ..augment.pack import Pack

    return Pack(draw, source)


@do_not_convert
def _bucket(draw: Draw, source: Any) -> Any:
    """Returns the argument ``bucket``; see `_pack`."""
    from ..augment.bucket import Bucket

    return Bucket(draw, source)


@do_not_convert
def _by_name(outputs: Any) -> dict[Any, Any]:
    """Returns the outputs of a graph's function by key, or by number from 0."""
    several = isinstance(outputs, (list, tuple))
    if several and len(outputs) == 1:
        return _by_name(outputs[0])  # perhaps a dict; see `note_outputs`
    if isinstance(outputs, Mapping):
        return {**outputs}
    return dict(enumerate(outputs if several else [outputs]))


@do_not_convert
def _plan_draws(draw: Draw, outputs: Any) -> None:
    """Chooses how to feed the draws of a graph, given its outputs."""
    if not draw._outputs:
        return
    ends = [*_by_name(outputs).values()]
    inputs = [node for operator in operators_before(ends) for node in operator_inputs(operator)]
    draw._note_copies([*ends, *inputs])
    offer_joined(draw, [*ends, *inputs])


# Parameters of graph functions that only some sources have: the type of the source, its name, and
# a function that makes the argument.
_OF_SOURCES: dict[str, tuple[type[Any], str, Callable[[Draw, Any], Any]]] = {
    PACK: (RowSource, "sources.Packed or sources.MultiImage", _pack),
    BUCKET: (Buckets, "sources.Buckets", _bucket),
}


class FedGraph:
    """Defines graphs by a function whose parameters are inputs, ``draw`` and settings.

    Args:
        function: The function.
        inputs: The kind of each input that the function takes, by name.
        passed: The names of values that bypass the graph, such as text.
        call: Calls the function with the nodes of the inputs, and with ``draw`` if there is one.
        draws: Whether to create a `Draw`, for the parameter ``draw`` and for keys of functions.
        example: Returns the value of an input in the first record.
        stacked: Batches a list of values that bypass the graph, given the values and their name.
        no_copy: Whether DALI reads the fed arrays without a copy; then the arrays must not change.

    Attributes:
        function, inputs, passed, draws, stacked: The arguments of the same names.
        file_inputs: By name, the inputs that the graph decodes or reads as files, or whose image
            sizes it requests. `read_operators` and definitions of the graph add them.
        lost_numbers: By name of an input, the first record whose numbers a decoder loses, and how.
        read: The names of the inputs whose values draws take. Definitions of the graph add them.
        used: The names of the inputs that operators of the graph take.
        unfed: The names of the other inputs. Both are empty until `read_operators` is called.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Field],
        passed: Sequence[str],
        call: Callable[[dict[str, Any], Draw | None], Any],
        draws: bool,
        example: Callable[[str], Any],
        stacked: Callable[[Sequence[Any], str], Any],
        no_copy: bool,
    ):
        self.function = function
        self.inputs = inputs
        self.passed = list(passed)
        self.draws = draws
        self.stacked = stacked
        self.file_inputs: dict[str, FileInput] = {}
        self.lost_numbers: dict[str, str] = {}
        self.read: set[str] = set()
        self.used: set[str] = set()
        self.unfed: set[str] = set()
        self._warned: set[str] = set()
        self._example = example
        self._call = call
        self._no_copy = no_copy
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    @property
    def names(self) -> list[str]:
        """The names of all values to read: of the inputs, and of values that bypass the graph."""
        return [*self.inputs, *self.passed]

    def read_operators(self, operators: Iterable[Operator]) -> None:
        """Sets `used`, `unfed` and `file_inputs` from the operators of a built pipeline.

        Raises:
            TypeError: If an input that the graph decodes, or reads as a file, is not bytes.
        """
        operators = list(operators)
        nodes, built = file_inputs(operators), {name for _, name, _ in operators}
        for name, field in self.inputs.items():
            node = f"{FIELD}{name}"
            if node in nodes:
                _check_is_encoded(name, field)
                self.file_inputs[name] = nodes[node]
            if node in built:
                self.used.add(name)
        if operators:
            self.unfed.update({*self.inputs} - self.used)

    def warn_of_lost_numbers(self) -> None:
        """Warns of the numbers that decoders lose, once for each input of the graph."""
        for name in list(self.lost_numbers):  # reading threads add to it
            if name not in self._warned:
                self._warned.add(name)  # before the warning, which may be raised as an error
                warn_user(f"{name} of {self.lost_numbers[name]}")

    def __call__(
        self,
        input_of: Callable[[str], Callable[[int], Any]],
        rows_of: Callable[[int], DrawnRows],
    ) -> Any:
        """Defines the graph of one pipeline, and returns its outputs.

        Args:
            input_of: Returns the callback of an input's external source, given its name. DALI calls
                it with the number of each run. Its arrays have the layout of the input's field,
                because DALI would spend 0.1 ms of ``next()`` to set it.
            rows_of: Returns the rows of a run, for draws, given its number.

        Returns:
            The outputs of the function.
        """
        nodes: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, field in self.inputs.items():
            # Without a copy, DALI keeps the fed memory alive.
            node = fn.external_source(
                source=input_of(name),
                name=f"{FIELD}{name}",  # states contain this name
                batch=True,
                dtype=None if field.dtype is None else dali_type(field.dtype),
                ndim=None if field.dtype is None else field.ndim,
                no_copy=self._no_copy or None,
            )
            # Memory-mapping small files takes twice as long as reading them.
            nodes[name] = file.read(node, dont_use_mmap=True) if field.is_path else node
            names[nodes[name].name] = name
        sized: dict[str, bool] = {}
        draw = None
        if self.draws:
            draw = Draw(rows_of, names, sized, self.inputs, self._example, self.read)
        outputs = self._call(nodes, draw)
        if draw is not None:
            _plan_draws(draw, outputs)
        for name, are_paths in sized.items():
            # The graph may use only the sizes of the images, and not decode them.
            is_path = are_paths or self.inputs[name].is_path
            self.file_inputs.setdefault(name, ImageInput(is_path=is_path))
        return outputs


def _check_is_encoded(name: str, field: Field) -> None:
    """Raises TypeError if an input that a graph decodes or reads as a file is not bytes."""
    if field.dtype is not None and (field.dtype != np.uint8 or field.ndim != 1):
        raise TypeError(
            f"the graph decodes {name!r} or reads it as a file, but it is {field.dtype} with "
            f"{field.ndim} dimensions in the records. If it is decoded already, such as the pixels "
            "of an image, omit the decoder, or keep it encoded. With HuggingFace, take its bytes: "
            "{'data': 'image/bytes'} as fields of Records, or image['bytes'] after "
            "ds.cast_column('image', datasets.Image(decode=False))"
        )


def field_graph(
    function: Callable[..., Any],
    fields: Mapping[str, Field],
    settings: Mapping[str, Any],
    value_of: Callable[[str], Any],
    source: Any = None,
) -> FedGraph:
    """Returns a `FedGraph` whose inputs are the fields of a record source.

    Args:
        function: The function.
        fields: The fields of the record source.
        settings: The values of the function's other parameters, by name.
        value_of: Returns the value of a field in the first record.
        source: The source. Over a `RowSource`, the function takes ``pack``; over `Buckets`, it
            takes ``bucket``.

    Raises:
        TypeError: If a parameter is neither a field nor a setting, or is a field without a DALI
            type, or if the function takes neither a field nor ``draw``.
    """
    name = name_of(function).removesuffix("()")
    parameters = inspect.signature(function).parameters
    taken = {*_OF_SOURCES} & {*parameters} - {*fields, *settings}
    of_source: dict[str, Callable[[Draw, Any], Any]] = {}
    for parameter, (kind, label, argument) in _OF_SOURCES.items():
        if isinstance(source, kind):
            of_source[parameter] = argument
        elif parameter in taken and parameters[parameter].default is inspect.Parameter.empty:
            raise TypeError(
                f"{name}() needs {parameter}, which only {label} has: pass it as source"
            )
    for parameter in of_source.keys() - taken:
        raise TypeError(
            f"{name}() does not take {parameter}, which {_OF_SOURCES[parameter][1]} requires: name "
            f"a parameter {parameter}"
        )
    missing = [
        k
        for k, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and k not in {*fields, *settings, *of_source, DRAW}
    ]
    if missing:
        cures = filter(None, (suggest_name(k, [*fields, DRAW], {}) for k in missing))
        suggestions = f" ({'; '.join(cures)})".replace(" ()", "")
        if missing[0] == "self":
            suggestions = " (decorate the bound method instead, by data_iterator(object.method))"
        raise TypeError(
            f"{name}() needs {missing}{suggestions}, which the records do not "
            f"have: the fields of the source are {sorted(fields)}, and 'draw' has random "
            "numbers. Pass other arguments by keyword in the call"
        )
    inputs = {k: f for k, f in fields.items() if k in parameters and k not in settings}
    takes_draw = DRAW in parameters and DRAW not in settings
    for field in inputs:
        if fields[field].dtype is None:
            try:
                reason = without_type(value_of(field))
            except Exception:  # the first record can't be read
                reason = "it is text, an object, or has a dtype like bfloat16"
            raise TypeError(
                f"{name}() takes the field {field!r}, for which DALI has no type: {reason}. Such "
                "fields bypass the graph into the batch. Remove the parameter, or return arrays of "
                "numbers or bytes from the source"
            )
    if not inputs and not takes_draw:
        raise TypeError(
            f"{name}() takes no field of the source. Name its parameters after the fields, "
            f"{sorted(fields)}"
        )
    passed = [k for k, f in fields.items() if k not in inputs and (f.dtype is None or f.bypass)]
    settings = dict(settings)

    def call(nodes: dict[str, Any], draw: Draw | None) -> Any:
        drawn: dict[str, Any] = {DRAW: draw} if takes_draw else {}
        if draw is not None:
            drawn |= {parameter: make(draw, source) for parameter, make in of_source.items()}
        outputs = function(**nodes, **drawn, **settings)
        if isinstance(source, RowSource):
            drawn[PACK].check(_by_name(outputs))
        return outputs

    return FedGraph(
        function, inputs, passed, call, True, value_of, schema.batched_field, no_copy=True
    )


def record_graph(
    function: Callable[..., Any],
    record: Any,
    spec: Any,
    settings: Mapping[str, Any],
    further: Iterable[Any] = (),
) -> tuple[FedGraph, Schema]:
    """Returns a `FedGraph` whose inputs are keys of the records of a stream, and the schema.

    Args:
        function: The function.
        record: The first record.
        spec: The structure of a record, if the first record doesn't show it; otherwise None.
        settings: The values of the function's other parameters, by name.
        further: The next records; see `dalijax.core.feeding.schema.schema_of`.

    Returns:
        The graph, and the schema of the records.

    Raises:
        TypeError: If the function can't be called with these records.
    """
    structure = record if spec is None else spec
    unset = function_parameters(function) - {*settings}
    # If the records have a key named "draw", the parameter takes its values.
    draws = DRAW in unset and not (isinstance(structure, Mapping) and DRAW in structure)
    record_schema = schema.schema_of(
        record, function, {**settings, DRAW: None} if draws else settings, spec, further
    )
    inputs = {
        name: column.field
        for name, column in zip(record_schema.names, record_schema.columns, strict=True)
    }

    def call(nodes: dict[str, Any], draw: Draw | None) -> Any:
        """Returns the outputs of the function; adds explanations to its errors about keys."""
        drawn = {DRAW: draw} if draws else {}
        args, kwargs = do_not_convert(record_schema.arguments)(
            [nodes[name] for name in record_schema.names]
        )
        try:
            outputs = function(*args, **kwargs, **drawn, **settings)
            output_list = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            if isinstance(outputs, dict) and not (args and outputs is args[0]):
                output_list = list(outputs.values())
            dicts_of_record = [v for v in (*args, *kwargs.values()) if isinstance(v, dict)]
            if any(output is value for output in output_list for value in dicts_of_record):
                raise TypeError("an output of the graph's function is a dict")
            return outputs
        except StopIteration as error:
            raise RuntimeError(f"the graph's function raised StopIteration: {error}") from error
        except KeyError as error:
            if not record_schema.nested:
                raise
            keys = ["/".join(column.path) for column in record_schema.columns]
            raise KeyError(f"{error} in the graph's function: the records have {keys}") from error
        except (AttributeError, TypeError) as error:
            dicts = {name: list(value) for name, value in kwargs.items() if isinstance(value, dict)}
            if dicts and "dict" in str(error):
                name, keys = next(iter(dicts.items()))
                raise TypeError(
                    f"{error}\nIn the records, {sorted(dicts)} are dicts. Index them in the "
                    f"graph's function, e.g. {name}[{keys[0]!r}] of the keys {keys}"
                ) from error
            if not (args and isinstance(args[0], dict)) or "dict" not in str(error):
                raise
            names = sorted(function_parameters(function) - {*settings, DRAW})
            close = " or ".join(filter(None, (suggest_name(name, args[0], {}) for name in names)))
            raise TypeError(
                f"{error}\nThe parameter {names} of the graph's function is not one of the keys "
                f"{sorted(args[0])} of the records, and therefore receives the whole record, a "
                f"dict. Rename it to a key, or index the dict{f' ({close})' if close else ''}"
            ) from error

    def example(name: str) -> Any:
        return record_schema.column(record_schema.names.index(name), [record], 0)[0]

    graph = FedGraph(
        function, inputs, record_schema.passed, call, draws, example, schema.stacked, no_copy=False
    )
    return graph, record_schema


def description(
    pipeline: Pipeline,
    described: GraphDescription,
    batch_map: Sequence[str],
    inputs: Mapping[str, Field],
) -> Callable[[], tuple[str, ...]]:
    """Returns a function that describes a graph, to be called when a state is saved.

    Args:
        pipeline: A built pipeline of the graph.
        described: The description of the graph.
        batch_map: Names of the functions of ``batch_map``.
        inputs: The kinds of the graph's inputs, by name; their layouts are described, too.

    Returns:
        A function that returns a line for each draw, operator and function of ``batch_map``. States
        contain these lines, and a restore compares them.
    """
    drawn, draws = draw_inputs(pipeline), described_draws(pipeline)
    bfloat16 = notes_of(pipeline).bfloat16
    layouts = {f"{FIELD}{name}": field.dali_layout for name, field in inputs.items()}
    operators = [
        (kind, name, {**arguments, "layout": layouts[name]} if layouts.get(name) else arguments)
        for kind, name, arguments in described.operators
    ]

    def lines() -> tuple[str, ...]:
        graph = graph_lines(
            operators, described.outputs, drawn, batch_map, bfloat16, described.resized_by
        )
        return *(operator_line(*draw) for draw in draws), *graph.operators

    return functools.cache(lines)
