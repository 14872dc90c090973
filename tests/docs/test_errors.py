"""The page of errors is up to date, and contains the errors that are raised."""

import functools
import importlib.util
import re

import numpy as np
import pytest
from nvidia.dali import fn

from dalijax import DALIGenericIterator, augment, data_iterator, sources
from pages import DOCS


@functools.cache
def make_errors():
    spec = importlib.util.spec_from_file_location("make_errors", DOCS / "make_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def messages():
    return list(make_errors().messages())


def test_it_is_up_to_date():
    assert (DOCS / "errors.md").read_text() == make_errors().page(), "run docs/make_errors.py"


def numbers(**options):
    @data_iterator(output_map=["x"], **options)
    def graph(x):
        return x

    return graph(source=sources.Arrays({"x": np.arange(8, dtype=np.int32)}), batch_size=4)


def flipped(images, *, draw):
    return augment.flip(images, draw=draw, probability=2.0)


RAISED = {
    "an empty source": lambda: sources.Arrays({}),
    "an argument of nobody": lambda: data_iterator(fn.copy, output_map=["x"])(bach_size=4),
    "no state": lambda: numbers().set_state({"what": 1}),
    "no batch": lambda: numbers().seek(0, 100),
    "a mask named as an output": lambda: numbers(mask="x"),
    "no pipeline": lambda: DALIGenericIterator(flipped, ["x"]),
    "another size": lambda: data_iterator(flipped, output_map=["x"], size=0)(batch_size=4),
}


@pytest.mark.parametrize("case", RAISED)
def test_it_contains_the_raised_errors(case):
    with pytest.raises(Exception) as caught:
        RAISED[case]()
    raised = " ".join(str(caught.value).split())
    patterns = {
        re.sub(r"\\\{.*?\\\}", ".*", re.escape(message.text)): message for message in messages()
    }
    matching = [m for pattern, m in patterns.items() if re.fullmatch(pattern, raised)]
    assert type(caught.value).__name__ in {m.error for m in matching}, raised
