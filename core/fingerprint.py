"""What a state belongs to: the epochs and the graph of the pipelines, as plain JSON values.

DALI restores a checkpoint into a pipeline of another shuffle, padding, shard count, file list
or batch size without a word and goes on with wrong data. A fingerprint is saved with each
state, and a restore compares it field by field.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nvidia.dali import Pipeline

from .epochs import EpochPlan

Fingerprint = dict[str, Any]


class StateError(ValueError):
    """A state that was refused; the iterator is as it was."""

    @classmethod
    def of_other_data(cls, lines: Sequence[str]) -> StateError:
        """The error for a state of other data, by the lines of `differences`."""
        return cls(
            "the state was saved by an iterator of other data; what differs (saved -> now):\n  "
            + "\n  ".join(lines)
            + "\nMake the iterator as it was when the state was saved, or start anew without it"
        )


# Arguments that change how fast data comes, not which.
_IGNORED = frozenset(
    {
        *("_display_name", "_module", "_origin_stack_filename", "_origin_stack_line"),
        *("_origin_stack_lineno", "_origin_stack_name", "bytes_per_sample_hint", "device"),
        *("dont_use_mmap", "function_id", "hw_decoder_load", "num_threads", "preserve"),
        *("prefetch_queue_depth", "preserve_name", "read_ahead", "tensor_init_bytes"),
        *("run_fn", "setup_fn", "use_o_direct"),  # Numba's functions are addresses
    }
)
_PATHS = ("file_root", "file_list", "path", "index_path", "annotations_file")
_LONGEST = 80


def digest(*parts: bytes, length: int = 12) -> str:
    """The first hexadecimal digits of a hash (SHA-256) of all parts."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:length]


def unknown() -> Fingerprint:
    """The fingerprint of pipelines that were not built yet: the same keys and types."""
    return {
        "epoch_size": -1,
        "batch_size": -1,
        "num_shards": -1,
        "shard_ids": "",
        "policy": "",
        "padded": -1,
        "stick": -1,
        "seed": -1,
        "operators": [],
        "sources": [],
        "unchecked": [],
    }


def fingerprint(
    pipelines: Sequence[Pipeline],
    plan: EpochPlan | None,
    streams: Sequence[int],
    serialized: Sequence[bytes] = (),
) -> Fingerprint:
    """What identifies the data of built pipelines, beside the names of their outputs.

    Args:
        pipelines: The pipelines, whose graphs are alike.
        plan: Their epochs; None where the source says their end.
        streams: The shard of each pipeline in epoch 0.
        serialized: What DALI serialises of the pipelines, where it is at hand.

    Returns:
        A dict of str, int and list of str. ``operators`` has the name of each
        operator in order and a hash of its arguments; ``sources`` the arguments of readers
        and external sources, file lists as a hash; ``unchecked`` names what can't be read.
    """
    first = pipelines[0]
    made = unknown()
    made["batch_size"] = first.max_batch_size
    made["seed"] = -1 if first.seed is None else first.seed
    made["shard_ids"] = " ".join(map(str, streams))
    if plan is not None:
        made |= {
            "epoch_size": plan.num_samples,
            "num_shards": plan.num_shards,
            "policy": plan.policy.name,
            "padded": int(plan.padded),
            "stick": int(plan.stick),
        }
    unchecked: list[str] = []
    if serialized:
        operators = list(serialized_operators(serialized[0]))
    else:
        operators, unchecked = _operators(first)
    for kind, name, arguments in operators:
        own = {k: v for k, v in arguments.items() if k not in _IGNORED}
        if kind.startswith("readers") or kind == "external_source":
            # A shard's own number is compared as shard_ids.
            made["sources"] += [
                f"{name}.{k}: {_described(k, v)}" for k, v in sorted(own.items()) if k != "shard_id"
            ]
            made["operators"].append(f"{kind} {name}")
            if kind == "external_source":
                unchecked.append(f"what the source of {name} gives")
        else:
            if "run_fn" in arguments:
                unchecked.append(f"the Numba function of {name}")
            content = json.dumps(own, sort_keys=True, default=repr).encode()
            made["operators"].append(f"{kind} {name} {digest(content, length=8)}")
    made["unchecked"] = unchecked
    return made


def differences(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """One line for each field that differs, ``field: saved -> now``; unknown ones agree."""
    lines: list[str] = []
    before: Any
    after: Any
    for key, empty in unknown().items():
        before, after = saved.get(key, empty), now.get(key, empty)
        if key == "unchecked" or before == after or empty in (before, after):
            continue
        if key == "sources":
            before, after = (
                dict(line.partition(": ")[::2] for line in own) for own in (before, after)
            )
            for name in sorted({*before, *after}):
                if before.get(name) != after.get(name):
                    told = [one.get(name, "(left out)") for one in (before, after)]
                    lines.append(f"{name}: {told[0]} -> {told[1]}")
        elif key == "operators":
            for i in range(max(len(before), len(after))):
                told = [one[i] if i < len(one) else "(none)" for one in (before, after)]
                if told[0] != told[1]:
                    lines.append(f"operators[{i}]: {told[0]} -> {told[1]}")
        else:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _described(name: str, value: Any) -> str:
    """An argument as short text; a file or folder also by what it lists."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    shown = text if len(text) <= _LONGEST else f"#{digest(text.encode())}"
    if name in _PATHS:
        paths = value if isinstance(value, list) else [value]
        shown += f" #{digest(*(line for path in paths for line in _listing(str(path))))}"
    return shown


def _listing(path: str) -> Iterator[bytes]:
    """The names below a folder (two levels, as DALI's readers look), or a file's size."""
    if os.path.isfile(path):
        yield str(os.path.getsize(path)).encode()
        return
    if not os.path.isdir(path):
        return
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            yield os.fsencode(entry.name)
            if entry.is_dir():
                with os.scandir(entry.path) as files:
                    yield b"\n".join(sorted(os.fsencode(e.name) for e in files))


Operator = tuple[str, str, Mapping[str, Any]]


def _operators(pipeline: Pipeline) -> tuple[list[Operator], list[str]]:
    """Kind, name and arguments of each operator in order, and what could not be read."""
    try:
        return list(serialized_operators(pipeline.serialize())), []
    except RuntimeError:
        pass  # a graph with Python operators doesn't serialise
    found: list[Operator] = []
    unchecked: list[str] = []
    # Not public: where a DALI has no such list, the graph goes unchecked, and the state says so.
    instances = getattr(pipeline, "_ops", None)
    if not instances:
        return [], ["the operators of the graph"]
    for instance in instances:
        arguments = _printed_arguments(str(getattr(instance, "spec", "")))
        kind = _kind(arguments, type(instance).__name__)
        found.append((kind, instance.name, arguments))
        if "function_id" in arguments or ("function" in kind and "run_fn" not in arguments):
            unchecked.append(f"the Python function of {instance.name}")
    return found, unchecked


def operators_of(pipeline: Pipeline) -> list[Operator]:
    """Kind, name and arguments of each operator in order, as far as they can be read."""
    return _operators(pipeline)[0]


def _kind(arguments: Mapping[str, Any], schema: str) -> str:
    """An operator's name as users write it, e.g. readers.file."""
    module = str(arguments.get("_module", "")).partition("nvidia.dali.fn")[2].strip(".")
    name = str(arguments.get("_display_name", schema))
    return f"{module}.{name}" if module else name


def _printed_arguments(spec: str) -> dict[str, Any]:
    """Arguments as DALI prints an operator's spec: '    name: value' below 'Arguments:'."""
    lines = spec.partition("Arguments:")[2].splitlines()
    pairs = (line.strip().partition(": ") for line in lines if ": " in line)
    return {name: value for name, _, value in pairs}


def serialized_operators(serialized: bytes) -> Iterator[Operator]:
    """The operators of a serialised pipeline (dali.proto: PipelineDef.op, OpDef)."""
    for field, value in wire_fields(serialized):
        if field != 5 or not isinstance(value, bytes):
            continue
        schema, name, arguments, inputs = "", "", {}, []
        for part, content in wire_fields(value):
            if part == 1:
                schema = content.decode()
            elif part == 2:
                own = dict(wire_fields(content))  # {1: name, 2: device, 3: ..., 4: its argument}
                inputs.append([own.get(k, b"").decode() for k in (1, 4)])
            elif part == 4:
                key, argument = _argument(content)
                arguments[key] = argument
            elif part == 5:
                name = content.decode()
        if inputs:
            arguments["inputs"] = inputs
        yield _kind(arguments, schema), name, arguments


def _argument(content: bytes) -> tuple[str, Any]:
    """Name and value of a serialised argument; a list's elements are arguments, too."""
    name, values, is_list = "", [], False
    for field, value in wire_fields(content):
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


def wire_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message (protobuf.dev, 'Encoding').

    Raises:
        ValueError: If the bytes are no protobuf message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def take(count: int) -> bytes:
        nonlocal at
        piece = data[at : at + count]
        if len(piece) < count:
            raise IndexError
        at += count
        return piece

    try:
        while at < len(data):
            key = varint()
            kind = key & 7
            if kind == 0:
                yield key >> 3, varint()
            elif kind in (1, 5):
                yield key >> 3, take(8 if kind == 1 else 4)
            elif kind == 2:
                yield key >> 3, take(varint())
            else:
                raise ValueError(f"no protobuf message: wire type {kind} at byte {at}")
    except IndexError:
        raise ValueError("no protobuf message: it ends inside a field") from None


def wire_message(fields: Iterable[tuple[int, int | bytes]]) -> bytes:
    """A protobuf message of numbered fields, each a varint or bytes."""

    def varint(value: int) -> bytes:
        most = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
        return bytes([*(digit | 128 for digit in most[:-1]), most[-1]])

    made = b""
    for number, value in fields:
        if isinstance(value, bytes):
            made += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            made += varint(number << 3) + varint(value)
    return made
