"""Crafted states: values that no iterator saved, with a digest that matches."""

import base64
import json

from dalijax.core.state import envelope


def opened(form, state):
    """The fields that a state shows, and those in its data."""
    packed = json.loads(envelope.inflate(base64.b64decode(state["data"])))
    assert packed.keys() | form.optional == form.packed.keys()
    return {name: value for name, value in state.items() if name not in ("data", "digest")}, packed


def sealed(shown, data):
    """A state of fields that it shows, and of data: a value, or bytes as they are."""
    if not isinstance(data, (bytes, str)):
        data = json.dumps(data).encode()
    if isinstance(data, bytes):
        data = base64.b64encode(envelope.deflate(data)).decode()
    state = {**shown, "data": data}
    return {**state, "digest": envelope._digest(state)}


def crafted(form, state, **changes):
    """A state with other values of some of its fields."""
    shown, packed = opened(form, state)
    for name, value in changes.items():
        (packed if name in packed else shown)[name] = value
    return sealed(shown, packed)
