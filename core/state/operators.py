"""The operators of a pipeline, with their names and arguments, as DALI writes them."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvidia.dali import Pipeline

from ..formats import protobuf
from ..formats.decoder_windows import Window, window_of
from ..formats.image_size import ImageInput
from . import reader_files

# Kinds of operators, by nvidia.dali.fn and nvidia.dali.ops.
_IMAGE_DECODERS = re.compile(
    r"\bdecoders\.image|\bimage_decoder|^Image(Crop|RandomCrop|Slice|Decoder|$)"
)
_READ = ("io.file.read", "Read")
FIELD = "record_field_"  # begins the names of the external sources that feed fields
_ANY_DATA = 4  # of nvidia.dali.types: the decoder keeps the image's own channels
Operator = tuple[str, str, Mapping[str, Any]]  # kind ("readers.file"), name, arguments


def read_operators(pipeline: Pipeline) -> tuple[list[Operator], list[str]]:
    """Returns the operators of a pipeline in order, and a list of parts that could not be read."""
    with contextlib.suppress(RuntimeError):  # DALI can't serialize Python operators
        return list(serialized_operators(pipeline.serialize())), []
    operators: list[Operator] = []
    unchecked: list[str] = []
    # Private in DALI: without this list the graph is not compared, and the state mentions it.
    instances = getattr(pipeline, "_ops", None)
    if not instances:
        return [], ["the operators of the graph"]
    for instance in instances:
        arguments = _printed_arguments(str(getattr(instance, "spec", "")))
        kind = _kind(arguments, type(instance).__name__)
        # Private, too; the text in which DALI prints a list of paths can't be parsed.
        originals = getattr(getattr(instance, "_op", None), "_init_args", {})
        if reader_files.reader_of(kind):
            arguments |= {name: value for name, value in originals.items() if _is_text(value)}
        # The names of keyword inputs are not kept.
        if nodes := operator_inputs(instance):
            arguments["inputs"] = [[node.name, ""] for node in nodes]
        operators.append((kind, instance.name, arguments))
        if "function_id" in arguments or ("function" in kind and "run_fn" not in arguments):
            unchecked.append(f"the Python function of {instance.name}")
    return operators, unchecked


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text, or a list of texts, with a text that is not empty."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts) and any(texts)


def operators_of(pipeline: Pipeline) -> list[Operator]:
    """Returns the operators of a pipeline in order, as far as they can be read."""
    return read_operators(pipeline)[0]


def operator_inputs(operator: Any) -> list[Any]:
    """Returns the inputs of an operator; DALI stores several sets of inputs as nested lists."""
    return [
        n for inputs in operator.inputs for n in (inputs if isinstance(inputs, list) else [inputs])
    ]


def image_inputs(operators: Sequence[Operator]) -> dict[str, ImageInput]:
    """Returns how a graph decodes or reads its inputs, by the names of the inputs' operators.

    Args:
        operators: The operators of the graph, with their inputs.
    """
    first_inputs = {
        name: next(iter(arguments.get("inputs", ())), [""])[0] for _, name, arguments in operators
    }
    kinds = {name: kind for kind, name, _ in operators}
    inputs: dict[str, ImageInput] = {}
    for kind, name, arguments in operators:
        if _IMAGE_DECODERS.search(kind):
            is_path = kinds.get(first_inputs[name]) in _READ
            source = first_inputs[first_inputs[name]] if is_path else first_inputs[name]
            # Printed arguments are texts.
            keeps = str(arguments.get("output_type")) == str(_ANY_DATA)
            on_cpu = keeps and arguments.get("device") == "cpu"
            turned = keeps and str(arguments.get("adjust_orientation")) != "False"
            window = window_of(kind, arguments)
            windows: tuple[Window, ...] = (window,) if window else ()
            if previous := inputs.get(source):
                on_cpu, turned = on_cpu or previous.any_on_cpu, turned or previous.any_turned
                windows += previous.windows
            inputs[source] = ImageInput(is_path, on_cpu, turned, windows)
    for kind, name, _ in operators:
        if kind in _READ:
            inputs.setdefault(first_inputs[name], ImageInput(is_path=True, is_image=False))
    return inputs


def graph_outputs(pipeline: Pipeline, serialized: bytes = b"") -> list[str]:
    """Returns the outputs of a built pipeline, such as "__Resize_3" or "reader[1]"; [] if unknown.

    Args:
        pipeline: The pipeline.
        serialized: The serialized pipeline from which it was built, if any.
    """
    # Private in DALI; None for deserialized pipelines.
    names_and_devices = getattr(pipeline, "_names_and_devices", None)
    if names_and_devices and not serialized:
        return [name for name, _ in names_and_devices]
    with contextlib.suppress(RuntimeError):  # DALI can't serialize Python operators
        # dali.proto: PipelineDef.pipe_outputs, InputOutput.name
        fields = protobuf.fields(serialized or pipeline.serialize())
        outputs = [value for field, value in fields if field == 7]
        return [dict(protobuf.fields(value)).get(1, b"").decode() for value in outputs]
    return []


def kind_of(instance: Any) -> str:
    """Returns the name of an operator of any graph, built or not, as users write it."""
    return _kind(_printed_arguments(str(getattr(instance, "spec", ""))), type(instance).__name__)


def _kind(arguments: Mapping[str, Any], schema: str) -> str:
    """Returns an operator's name as users write it, e.g. readers.file."""
    module = str(arguments.get("_module", "")).partition("nvidia.dali.fn")[2].strip(".")
    name = str(arguments.get("_display_name", schema))
    return f"{module}.{name}" if module else name


def _printed_arguments(spec: str) -> dict[str, Any]:
    """Parses DALI's text of an operator: lines "    name: value" after "Arguments:"."""
    lines = spec.partition("Arguments:")[2].splitlines()
    pairs = (line.strip().partition(": ") for line in lines if ": " in line)
    return {name: value for name, _, value in pairs}


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
                tensor = dict(protobuf.fields(content))  # 1: its name, 4: the argument it is for
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
    """Returns name and value of a serialized argument; elements of a list are arguments, too."""
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
