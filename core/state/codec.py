"""States: an iterator's position as a plain JSON value, and back.

Nothing is ever unpickled: a state from elsewhere can at worst be refused. DALI's checkpoints,
and long lists of operators, are deflated (RFC 1950) in base64, so that a graph of dozens of
operators stays within the 4 KiB that a state may have for each pipeline.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import nvidia.dali

from ..errors import Difference, StateError
from .fingerprint import Fingerprint, differences, unknown
from .position import Checkpoints, Position

T = TypeVar("T")
VERSION = 2
_MOST_COUNT = 1 << 53  # epochs, or batches: what every reader of JSON keeps exactly
_MOST_LAG = 1 << 16  # batches; what a position really may have is checked once its epochs are known
_MOST = 1 << 24  # bytes of anything deflated: a state may come from elsewhere
_READABLE = 1024  # characters of a list of operators that stays as it is
_FORMAT = "dalijax"
# What most states have in common (a preset dictionary, RFC 1950): part of the format.
_COMMON = (
    b"crop_mirror_normalize __CropMirrorNormalize_ random_resized_crop __RandomResizedCrop_ "
    b"decoders.image __Image_ random.coin_flip __CoinFlip_ random.uniform __Uniform_ cast __Cast_ "
    b"resize __Resize_ color_twist __ColorTwist_ external_source __ExternalSource_ reshape "
    b" add ___ArithmeticGenericOp_ expression_desc=#3be22e inputs=# size=[224.0,224.0] dtype=9 "
    b"output_layout=CHW mean=# std=# mirror=probability=0.5 range=[0.0,1.0] crop=[224.0,224.0] "
    b'"lag":0,"epoch_lag":0,"outputs":["images","labels"],"lengths":[["labels"]"image","label",'
    b'false","true","sources":["reader.file_root: ","reader.files: 1,000 files, 1,000 bytes #",'
    b'"reader.initial_fill: 1024",'
    b'"reader.num_shards: 1","reader.pad_last_batch: true","reader.random_shuffle: true","reader.'
    b'stick_to_shard: true","reader.shuffle_after_epoch: "],"unchecked":[]},"digest":"'
    b'"padded":1,"stick":1,"seed":0,"operators":["readers.file reader","'
    b'{"format":"dalijax","version":2,"dali":"2.4.0","epoch":0,"step":0,"errors":0,"fingerprint":'
    b'{"epoch_size":-1,"batch_size":-1,"num_shards":1,"shard_ids":"0","policy":"FILLDROPPARTIAL",'
    b"__MakeContiguous_CpuToCpu____MakeContiguous_CpuToGpu____MakeContiguous_GpuToGpu___"
    b'\x12;Philox_00000000_0000000000000000:0000000000000000_0\n{"iter": 0, "epoch_idx": 0}\x12\x00'
)
_TYPES: Mapping[str, type] = {
    "format": str,
    "version": int,
    "dali": str,
    "epoch": int,
    "step": int,
    "errors": int,
    "lag": int,
    "checkpoints": list,
    "epoch_lag": int,
    "epoch_checkpoints": list,
    "outputs": list,
    "fingerprint": dict,
    "digest": str,
}


def encode(position: Position, outputs: Sequence[str], fingerprint: Fingerprint) -> dict[str, Any]:
    """A position as a dict of str, int, list and dict that JSON keeps.

    Args:
        position: The consumer's position.
        outputs: Names of the outputs.
        fingerprint: What the pipelines read; see `dalijax.core.state.fingerprint`.
    """
    here, start = position.checkpoints or Checkpoints(), position.epoch_start or Checkpoints()
    state = {
        "format": _FORMAT,
        "version": VERSION,
        "dali": nvidia.dali.__version__,
        "epoch": position.epoch,
        "step": position.step,
        "errors": position.errors,
        "lag": here.to_drop,
        "checkpoints": _to_text(here.data),
        "epoch_lag": start.to_drop,
        "epoch_checkpoints": _to_text(start.data),
        "outputs": list(outputs),
        "fingerprint": json.loads(json.dumps(fingerprint)),
    }
    # The digest is of what is deflated: another zlib may deflate it otherwise.
    digest = _digest(state)
    now, before = here.data or (), start.data or ()
    state["checkpoints"] = [pack(one) for one in now]
    state["epoch_checkpoints"] = [pack(one, like) for one, like in _beside(before, now)]
    state["fingerprint"]["operators"] = _short(fingerprint["operators"])
    return state | {"digest": digest}


def _short(operators: list[str]) -> list[str]:
    """A list of operators as it is, or a long one deflated into a single text."""
    text = json.dumps(operators)
    return [pack(text.encode())] if len(text) > _READABLE else operators


def _readable(operators: list[str]) -> list[str]:
    """What `_short` made shorter."""
    if len(operators) == 1 and " " not in operators[0]:
        return list(json.loads(unpack(operators[0])))
    return operators


def _beside(before: Sequence[T], now: Sequence[bytes]) -> list[tuple[T, bytes]]:
    """Each checkpoint of the epoch's start, and the one of now, which is much like it."""
    return list(zip(before, now if len(now) == len(before) else (b"",) * len(before)))


def pack(data: bytes, like: bytes = b"") -> str:
    """Bytes as text, short where they repeat themselves or those of ``like``."""
    return base64.b64encode(deflate(data, like)).decode()


def unpack(text: str, like: bytes = b"") -> bytes:
    """What `pack` made a text of.

    Raises:
        ValueError: If it is no such text.
    """
    try:
        return inflate(base64.b64decode(text, validate=True), like)
    except (binascii.Error, TypeError) as error:
        raise ValueError(f"no deflated text: {error}") from None


def deflate(data: bytes, like: bytes = b"", level: int = -1) -> bytes:
    """Bytes deflated (RFC 1950) with a preset dictionary, whose bytes then cost little."""
    made = zlib.compressobj(level, zdict=like)
    return made.compress(data) + made.flush()


def inflate(data: bytes, like: bytes = b"") -> bytes:
    """What was deflated with a preset dictionary, up to 16 MiB.

    Raises:
        ValueError: If it is no such data, or was made with another dictionary.
    """
    inflate = zlib.decompressobj(zdict=like)
    try:
        plain = inflate.decompress(data, _MOST)
    except zlib.error as error:
        raise ValueError(f"no deflated text: {error}") from None
    if not inflate.eof:
        raise ValueError("no deflated text: it ends too soon, or never")
    return plain


def to_text(state: Mapping[str, Any]) -> str:
    """A state as one short ASCII text without quotes, for those who must keep it small.

    Args:
        state: What `encode` gave.
    """
    now = [unpack(text) for text in state["checkpoints"]]
    before = [unpack(text, like) for text, like in _beside(state["epoch_checkpoints"], now)]
    rest = {k: v for k, v in state.items() if k not in ("checkpoints", "epoch_checkpoints")}
    rest["lengths"] = [[len(one) for one in own] for own in (now, before)]
    own = dict(rest["fingerprint"])
    own["operators"] = _readable(own["operators"])
    rest["fingerprint"] = own
    data = json.dumps(rest, separators=(",", ":")).encode() + b"\0" + b"".join([*now, *before])
    return base64.b85encode(deflate(data, _COMMON, 9)).decode()


def from_text(text: str) -> dict[str, Any]:
    """The state that `to_text` made a text of.

    Raises:
        StateError: If it is no such text.
    """
    try:
        head, _, tail = inflate(base64.b85decode(text), _COMMON).partition(b"\0")
        state: dict[str, Any] = json.loads(head)
        pieces: list[list[bytes]] = []
        at = 0
        for lengths in state.pop("lengths"):
            pieces.append([])
            for length in lengths:
                pieces[-1].append(tail[at : at + length])
                at += length
        now, before = pieces
        operators = state["fingerprint"]["operators"]
        state["fingerprint"]["operators"] = _short(operators)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damaged(str(error)) from None
    state["checkpoints"] = [pack(one) for one in now]
    state["epoch_checkpoints"] = [pack(one, like) for one, like in _beside(before, now)]
    return {key: state[key] for key in _TYPES if key in state}


def shortened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as a dict of one int and one short text, for those who must keep it small."""
    return {"version": VERSION, "dali": to_text(state)}


def parsed(saved: Mapping[str, Any] | str | bytes) -> Any:
    """A JSON value, of text and bytes of it.

    Raises:
        StateError: If they are no JSON.
    """
    if not isinstance(saved, (str, bytes)):
        return saved
    try:
        return json.loads(saved)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"no state of dalijax, since it is no JSON ({error}): {str(saved)[:80]!r}. Of a file, "
            "pass what is in it, as json.load(file) gives it"
        ) from None


def loaded(saved: Mapping[str, Any] | str | bytes) -> Mapping[str, Any]:
    """The state in what any of the adapters saved.

    Args:
        saved: A state, its JSON as text or bytes (CLU's files, tf.train.Checkpoint, Pax), or what
            `shortened` made of it (Grain).

    Raises:
        StateError: If it is none of these.
    """
    state = parsed(saved)
    if isinstance(state, Mapping) and set(state) == {"version", "dali"}:
        if state["version"] != VERSION or type(state["version"]) is not int:
            raise _another_version(state["version"])
        if type(state["dali"]) is not str:
            raise _damaged("its text is none")
        state = from_text(state["dali"])
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise StateError(
            f"no state of dalijax: {brief(saved)}. Pass what get_state() of an iterator gave"
        )
    return state


def brief(value: Any) -> str:
    """A value in at most 80 characters, however deep or long it is."""
    return repr(value[:80]) if isinstance(value, (str, bytes)) else reprlib.repr(value)[:80]


def _another_version(version: object) -> StateError:
    return StateError(
        f"the state has format version {brief(version)}, this dalijax reads version {VERSION}: use "
        f"the {'newer' if isinstance(version, int) and version > VERSION else 'older'} "
        "dalijax that saved it"
    )


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a state says.

    Attributes:
        position: Where the consumer stood.
        outputs: Names of the outputs.
        fingerprint: What the pipelines read.
    """

    position: Position
    outputs: list[str]
    fingerprint: Fingerprint

    def differences(self, outputs: Sequence[str], now: Fingerprint) -> list[Difference]:
        """What differs from an iterator's outputs and fingerprint; unknown fields agree."""
        lines = differences(self.fingerprint, now)
        if self.outputs != list(outputs):
            lines.insert(0, Difference("outputs", str(self.outputs), str(list(outputs))))
        return lines


def read(saved: Mapping[str, Any] | str | bytes) -> Saved:
    """What a state says, once it is known to be a whole one.

    Args:
        saved: What `encode` gave, or what `loaded` takes; it is neither kept nor changed.

    Raises:
        StateError: If it is no state, of another version, or damaged.
    """
    state = loaded(saved)
    _check_shape(state)
    plain, (now, start) = _unpacked(state)
    built = now.data is not None
    first = (state["epoch"], state["step"], state["errors"], now, start, plain["fingerprint"])
    if not built and first != (0, 0, 0, Checkpoints(), Checkpoints(), unknown()):
        raise _damaged("it has no checkpoint of DALI's, and is not a first one")
    position = Position(
        epoch=state["epoch"],
        step=state["step"],
        checkpoints=now if built else None,
        epoch_start=start if built else None,
        errors=state["errors"],
    )
    return Saved(position, list(state["outputs"]), plain["fingerprint"])


def decode(
    saved: Mapping[str, Any] | str | bytes, outputs: Sequence[str], fingerprint: Fingerprint
) -> tuple[Position, Fingerprint]:
    """The position that a state describes, and its fingerprint, once it is known to fit.

    Args:
        saved: As for `read`.
        outputs: Names of the outputs now.
        fingerprint: That of the pipelines now; unknown fields are not compared.

    Raises:
        StateError: If it is no state, of another version, damaged, or of other data; the
            message has each field that differs as saved -> now.
    """
    own = read(saved)
    if lines := own.differences(outputs, fingerprint):
        raise StateError.of_other_data(lines)
    return own.position, own.fingerprint


def _unpacked(state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Checkpoints, Checkpoints]]:
    """The state with nothing deflated, whose digest is right, and its marks."""
    own = dict(state["fingerprint"])
    plain = {k: v for k, v in state.items() if k != "digest"} | {"fingerprint": own}
    try:
        now = tuple(unpack(text) for text in state["checkpoints"])
        texts = _beside(state["epoch_checkpoints"], now)
        before = tuple(unpack(text, like) for text, like in texts)
        own["operators"] = _readable(own["operators"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _damaged(str(error)) from None
    if not _are_texts(own["operators"]):
        raise _damaged("its operators are no list of texts")
    plain["checkpoints"], plain["epoch_checkpoints"] = _to_text(now), _to_text(before)
    if state["digest"] != _digest(plain):
        raise _damaged("its digest does not match")
    return plain, (
        Checkpoints(now or None, state["lag"]),
        Checkpoints(before or None, state["epoch_lag"]),
    )


def _damaged(why: str) -> StateError:
    return StateError(
        f"the state is damaged ({why}): it was cut short or changed after get_state()"
    )


def _check_shape(state: Mapping[str, Any]) -> None:
    """Raises StateError where a field is missing, of another type, or out of any range."""
    if state.get("version") != VERSION or type(state["version"]) is not int:
        raise _another_version(state.get("version"))
    wrong = [k for k, t in _TYPES.items() if type(state.get(k)) is not t]
    if wrong:
        raise _damaged(f"{wrong} missing, or of another type")
    blank = unknown()
    own = state["fingerprint"]
    wrong = [f"fingerprint.{k}" for k, v in blank.items() if type(own.get(k)) is not type(v)]
    lists = {k: state[k] for k in ("checkpoints", "epoch_checkpoints", "outputs")}
    lists |= {f"fingerprint.{k}": own.get(k) for k, v in blank.items() if isinstance(v, list)}
    wrong += [k for k, texts in lists.items() if k not in wrong and not _are_texts(texts)]
    if wrong:
        raise _damaged(f"{wrong} missing, or of another type")
    more = sorted(map(str, {*state} - {*_TYPES} | {*own} - {*blank}))
    if more:
        raise _damaged(f"nobody knows {more}")
    # After DALI's own DROP the batch that it dropped is behind: a lag of less than 0.
    ranges = {"epoch": 0, "step": 0, "errors": 0, "lag": -_MOST_LAG, "epoch_lag": 0}
    for key, least in ranges.items():
        most = _MOST_LAG if "lag" in key else _MOST_COUNT
        if not least <= state[key] <= most:
            raise _damaged(f"{key} is {state[key]}, and not from {least} to {most}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is str for one in value)


def _digest(state: Mapping[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_text(checkpoints: Sequence[bytes] | None) -> list[str]:
    return [base64.b64encode(one).decode() for one in checkpoints or ()]
