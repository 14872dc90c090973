"""What is no picture is named before DALI decodes: of 32 and more, one ends the process."""

import json
import pathlib

import picture_worker
import pytest

from full import in_full
from programs import run_python

CASES = [(how, bad) for how in picture_worker.HOWS for bad in picture_worker.BAD]
SHORT = [
    ("records", "text"),
    ("files", "cut"),
    ("record paths", "zeros"),
    ("grain", "empty"),
    ("grain paths", "gif"),
]


@pytest.mark.parametrize(
    ("how", "bad"),
    [one if one in SHORT else in_full(*one) for one in CASES],
    ids=map(" ".join, CASES),
)
def test_a_record_that_is_no_picture_is_masked_in_a_large_batch(how, bad):
    done = run_python(pathlib.Path(picture_worker.__file__), how, bad)
    wrong = picture_worker.WRONG
    want = [[row != wrong for row in range(begin, begin + 64)] for begin in (0, 64)]
    assert json.loads(done.stdout) == want
