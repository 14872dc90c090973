"""Programs that end, or fork, while an iterator is open."""

import pathlib

import exit_worker
import fork_worker
import pytest

from full import FULL, in_full
from programs import run_python

MORE = 9 if FULL else 2
FORK_WORKER = pathlib.Path(__file__).parents[1] / "support" / "fork_worker.py"


@pytest.mark.parametrize("ending", exit_worker.ENDS)
@pytest.mark.parametrize("how", exit_worker.HOWS)
def test_a_program_ends_as_without_an_iterator(how, ending):
    assert exit_worker.run(how, ending) == ""


@pytest.mark.parametrize(
    "how",
    [
        how if how in ("thread", "iterator", "functions") else in_full(how)
        for how in exit_worker.HOWS
    ],
)
def test_a_program_ends_so_repeatedly(how):
    """More exits of each kind, by forks of a process that has imported all modules."""
    program = run_python(exit_worker.__file__, "table", MORE, how, timeout=None)
    assert program.stdout.count(f"{MORE} right") == len(exit_worker.ENDS)


TENSORFLOW = """
import sys
import numpy as np
from dalijax import data_iterator, sources
from dalijax.adapters.tfdata import DALIDataset

source = sources.Arrays({"number": np.arange(64, dtype=np.int32)[:, None]})
iterator_fn = data_iterator(lambda number: number + 0, ["x"], source=source)
dataset = DALIDataset(iterator_fn, batch_size=4, num_threads=1, device_id=None).to_tf_dataset()
if sys.argv[1] == "endless":
    dataset = dataset.repeat().prefetch(4)
iterator = iter(dataset)
next(iterator)
"""


@pytest.mark.parametrize("length", ("finite", "endless"))
def test_a_program_ends_while_tensorflow_prefetches(length):
    """TensorFlow's threads do not end with Python: they are still in the generator."""
    program = run_python("-c", TENSORFLOW, length, timeout=exit_worker.HANGS)
    for line in ("Traceback", "Exception ignored", "UNKNOWN", "dalijax"):
        assert line not in program.stderr, program.stderr


@pytest.mark.parametrize("what", fork_worker.WHAT)
@pytest.mark.parametrize("which", fork_worker.WHICH)
def test_a_forked_child_has_a_parents_iterator(which, what):
    command = ["-W", "error::UserWarning", FORK_WORKER, which, what]
    program = run_python(*command, timeout=exit_worker.HANGS)
    assert program.stdout == "as it must be\n"
    assert "Traceback" not in program.stderr
