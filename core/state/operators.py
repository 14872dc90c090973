"""Reads the operators of a pipeline, with their names and arguments, from DALI's descriptions."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
from nvidia.dali import Pipeline

from ..arguments import printed_arguments, turns_images
from ..formats import protobuf
from ..formats.decoder_windows import window_of
from ..formats.image_size import FileInput, ImageInput
from ..formats.media import MediaInput
from . import reader_files

# Kinds of operators, by nvidia.dali.fn and nvidia.dali.ops.
_IMAGE_DECODERS = re.compile(
    r"\bdecoders\.image|\bimage_decoder|^Image(Crop|RandomCrop|Slice|Decoder|$)"
)
_MEDIA_DECODERS = {
    "video": re.compile(r"\bdecoders\.video|^Video$"),
    "sound": re.compile(r"\bdecoders\.audio|^audio_decoder$|^Audio(Decoder)?$"),
}
_READ = ("io.file.read", "Read")
FIELD = "record_field_"  # prefix of the names of the external sources that feed record fields
# Prefix of the names of operators that choose the samples which other operators change. Graphs on
# a GPU have no such operators, because they cost more there than changing all samples.
CHOICE = "choice_of_"
_CHOICES = ("_conditional.split", "_conditional.merge")  # user operators may share the names
# Values of nvidia.dali.types, as text, because arguments that DALI has printed are texts. With
# ANY_DATA, a decoder keeps the image's own channels.
_GRAY, _ANY_DATA = "2", "4"
_8_BITS = ("0", "4", "None")  # UINT8, INT8; the default is UINT8
Operator = tuple[str, str, Mapping[str, Any]]  # kind ("readers.file"), name, arguments


def read_operators(pipeline: Pipeline) -> tuple[list[Operator], list[str]]:
    """Returns the operators of a pipeline in order, and the parts of it that can't be compared.

    Python functions, for example, can't be compared. If the operators can't be read at all, the
    list of operators is empty.
    """
    with contextlib.suppress(RuntimeError):  # DALI can't serialize Python operators
        return list(serialized_operators(pipeline.serialize())), []
    operators: list[Operator] = []
    unchecked: list[str] = []
    # Private in DALI. Without this list, the graph is not compared, and the state says so.
    instances = getattr(pipeline, "_ops", None)
    if not instances:
        return [], ["the operators of the graph"]
    for instance in instances:
        kind, arguments = _kind_and_arguments(instance)
        is_compiled = "run_fn" in arguments
        is_python = "function_id" in arguments or ("function" in kind and not is_compiled)
        # Private, too. It is needed because the text in which DALI prints lists can't be parsed.
        originals = getattr(getattr(instance, "_op", None), "_init_args", {})
        if reader_files.reader_of(kind):
            arguments |= {name: value for name, value in originals.items() if _is_text(value)}
        # DALI does not keep the names of keyword inputs.
        if nodes := operator_inputs(instance):
            arguments["inputs"] = [[node.name, ""] for node in nodes]
        operators.append((kind, instance.name, arguments))
        if is_python:
            unchecked.append(f"the Python function of {instance.name}")
    return operators, unchecked


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text that is not empty, or a list of texts, not all empty."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts) and any(texts)


def operators_of(pipeline: Pipeline) -> list[Operator]:
    """Returns the operators of a pipeline in order; an empty list if they can't be read."""
    return read_operators(pipeline)[0]


def operators(pipeline: Pipeline) -> list[Any]:
    """Returns the operators of an unbuilt pipeline in topological order."""
    # Private in DALI; without these attributes, no operators are found.
    ends = [*(getattr(pipeline, "_graph_out", None) or ()), *getattr(pipeline, "_sinks", ())]
    return operators_before(ends)


def operators_before(ends: Sequence[Any]) -> list[Any]:
    """Returns the operators from which nodes are computed, in topological order."""
    ordered: dict[int, Any] = {}
    # Each operator is pushed twice: below its inputs, and again to be added after them.
    todo = [(getattr(node, "source", None), False) for node in reversed(ends)]
    while todo:
        operator, ready = todo.pop()
        if operator is None or id(operator) in ordered:
            continue
        if ready:
            ordered[id(operator)] = operator
            continue
        inputs = [getattr(node, "source", None) for node in jax.tree.leaves(operator.inputs)]
        todo += [
            (operator, True),
            *((operator_input, False) for operator_input in reversed(inputs)),
        ]
    return list(ordered.values())


def operator_inputs(operator: Any) -> list[Any]:
    """Returns the inputs of an operator as a flat list; DALI nests several sets of inputs."""
    return jax.tree.leaves(operator.inputs)


def without_choices(
    operators: Sequence[Operator], outputs: Sequence[str]
) -> tuple[list[Operator], list[str]]:
    """Returns the operators and the outputs of a graph as if all samples were chosen; see `CHOICE`.

    Operators that supply only choices are left out, too: external sources, and the splits of their
    data by an ``if``.
    """
    names = {name for _, name, _ in operators}
    same: dict[str, str] = {}  # by the output of a choice: the data whose samples are chosen
    kept: list[Operator] = []
    suppliers: set[str] = set()
    for kind, name, arguments in operators:
        inputs = [[same.get(of, of), key] for of, key in arguments.get("inputs", ())]
        if kind in _CHOICES and name.startswith(CHOICE):
            same |= {output: inputs[0][0] for output in (name, f"{name}[0]", f"{name}[1]")}
            suppliers.add(_producer(inputs[-1][0], names))  # of the predicate
        else:
            kept.append((kind, name, {**arguments, "inputs": inputs} if inputs else arguments))
    outputs = [same.get(of, of) for of in outputs]
    used = {_producer(output, names) for output in outputs}
    result: list[Operator] = []
    for kind, name, arguments in reversed(kept):  # operators that use an output come first
        producers = {_producer(of, names) for of, _ in arguments.get("inputs", ())}
        if name in suppliers and name not in used:
            suppliers |= producers
        else:
            used |= producers
            result.append((kind, name, arguments))
    return result[::-1], outputs


def _producer(data: str, names: Set[str]) -> str:
    """Returns the name of the operator with an output: "reader" of "reader[1]"."""
    return data if data in names else data.partition("[")[0]


def file_inputs(operators: Sequence[Operator]) -> dict[str, FileInput]:
    """Returns how a graph uses each input that it decodes, or reads as a file.

    Args:
        operators: The operators of the graph, with their inputs.

    Returns:
        The use of each such input, by the name of the operator that supplies the input.
    """
    first_inputs = {
        name: next(iter(arguments.get("inputs", ())), [""])[0] for _, name, arguments in operators
    }
    kinds = {name: kind for kind, name, _ in operators}
    inputs: dict[str, FileInput] = {}
    for kind, name, arguments in operators:
        source = first_inputs[name]
        if is_path := kinds.get(source) in _READ:
            source = first_inputs[source]
        previous = inputs.get(source)
        if _IMAGE_DECODERS.search(kind):
            use = _image_input(kind, arguments, is_path)
            inputs[source] = use.union(previous) if isinstance(previous, ImageInput) else use
        for media, pattern in _MEDIA_DECODERS.items():
            if pattern.search(kind):
                devices = previous.devices if isinstance(previous, MediaInput) else ()
                devices = *devices, str(arguments.get("device"))
                inputs[source] = MediaInput(media, is_path, devices)
    for kind, name, _ in operators:
        if kind in _READ:
            inputs.setdefault(first_inputs[name], MediaInput("", is_path=True))
    return inputs


def _image_input(kind: str, arguments: Mapping[str, Any], is_path: bool) -> ImageInput:
    """Returns how a decoder of images uses its input."""
    output, window = str(arguments.get("output_type")), window_of(kind, arguments)
    return ImageInput(
        is_path,
        any_on_cpu=output == _ANY_DATA and arguments.get("device") == "cpu",
        any_turned=output == _ANY_DATA and turns_images(arguments),
        windows=(window,) if window else (),
        any_gray=output in (_GRAY, _ANY_DATA),
        any_8_bits=str(arguments.get("dtype")) in _8_BITS,
    )


def graph_outputs(pipeline: Pipeline, serialized: bytes = b"") -> list[str]:
    """Returns the outputs of a built pipeline, such as "__Resize_3" or "reader[1]".

    The list is empty if DALI can't tell the outputs.

    Args:
        pipeline: The pipeline.
        serialized: The serialized pipeline from which it was built, if any.
    """
    # Private in DALI; None in pipelines that were deserialized.
    names_and_devices = getattr(pipeline, "_names_and_devices", None)
    if names_and_devices and not serialized:
        return [name for name, _ in names_and_devices]
    with contextlib.suppress(RuntimeError):  # DALI can't serialize Python operators
        # dali.proto: PipelineDef.pipe_outputs, InputOutput.name
        fields = protobuf.fields(serialized or pipeline.serialize())
        outputs = [value for field, value in fields if field == 7]
        return [dict(protobuf.fields(value)).get(1, b"").decode() for value in outputs]
    return []


def calls_function(instance: Any) -> bool:
    """Returns whether an operator object of DALI calls a function of Python or Numba."""
    kind, arguments = _kind_and_arguments(instance)
    return "function_id" in arguments or "function" in kind.lower()


def kind_of(instance: Any) -> str:
    """Returns the kind of an operator object of DALI ("readers.file"), in a built graph or not."""
    return _kind_and_arguments(instance)[0]


def _kind_and_arguments(instance: Any) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the printed arguments of an operator object of DALI."""
    arguments = printed_arguments(str(getattr(instance, "spec", "")))
    return _kind(arguments, type(instance).__name__), arguments


def _kind(arguments: Mapping[str, Any], schema: str) -> str:
    """Returns an operator's kind as users write it below nvidia.dali.fn, such as "readers.file".

    Args:
        arguments: The arguments of the operator.
        schema: DALI's name of the operator, used if the arguments do not contain its kind.
    """
    module = str(arguments.get("_module", "")).partition("nvidia.dali.fn")[2].strip(".")
    name = str(arguments.get("_display_name", schema))
    return f"{module}.{name}" if module else name


def serialized_operators(serialized: bytes) -> Iterator[Operator]:
    """Yields the operators of a serialized pipeline (dali.proto: PipelineDef.op, OpDef)."""
    for field, value in protobuf.fields(serialized):
        if field != 5 or not isinstance(value, bytes):
            continue
        schema, name, arguments, inputs = "", "", {}, []
        for part, content in protobuf.fields(value):
            if part == 1:
                schema = content.decode()
            elif part == 2:
                tensor = dict(protobuf.fields(content))  # 1: its name, 4: its argument's name
                inputs.append([tensor.get(k, b"").decode() for k in (1, 4)])
            elif part == 4:
                key, argument = _argument(content)
                arguments[key] = argument
            elif part == 5:
                name = content.decode()
        if inputs:
            arguments["inputs"] = inputs
        yield _kind(arguments, schema), name, arguments


def _argument(content: bytes) -> tuple[str, Any]:
    """Returns the name and the value of a serialized argument (dali.proto: Argument).

    Elements of a list are serialized as arguments, too.
    """
    name, values, is_list = "", [], False
    for field, value in protobuf.fields(content):
        if field == 1:
            name = value.decode()
        elif field == 3:
            values.append(struct.unpack("<f", value)[0])
        elif field == 4:
            values.append(value - (1 << 64) if value >> 63 else value)
        elif field == 5:
            values.append(value.decode(errors="replace"))
        elif field == 6:
            values.append(bool(value))
        elif field == 7:
            values.append(_argument(value)[1])
        elif field == 8:
            is_list = bool(value)
    return name, values if is_list or len(values) != 1 else values[0]
