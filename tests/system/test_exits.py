"""Programs that end, or fork, while an iterator is open."""

import functools
import itertools
import pathlib

import exit_worker
import fork_worker
import pytest
from forks import run_fork

from full import FULL, in_full
from programs import run_python

pytestmark = pytest.mark.slow

TIMES = 9 if FULL else 1
run_program = run_python if FULL else functools.partial(run_fork, frees=True)
FORK_WORKER = pathlib.Path(__file__).parents[1] / "support" / "fork_worker.py"
HOWS, ENDS = exit_worker.HOWS, list(exit_worker.ENDS)
NEW = [("iterator", "ctrl-c"), ("dataset", "normal"), ("functions", "exit")]
# Each iterator with a normal exit, and some with one of the others; `make test-full` has each pair.
SOME = {
    how: ["normal"] if k % 2 else ["normal", ENDS[1 + (k // 2 + 2) % 3]]
    for k, how in enumerate(HOWS)
}
EXITS = [pair if pair in NEW else in_full(*pair) for pair in itertools.product(HOWS, ENDS)]


@pytest.mark.parametrize(("how", "ending"), EXITS)
def test_a_program_ends_as_without_an_iterator(how, ending):
    """A new process for each exit; the next test has more pairs of an iterator and an exit."""
    assert exit_worker.run(how, ending) == ""


@pytest.mark.parametrize("hows", (HOWS[:5], HOWS[5:]), ids=",".join)
def test_a_forked_program_ends_as_without_an_iterator(hows):
    """Forks of a process that has imported all modules; a new process would take seconds."""
    ends = [ENDS if FULL else SOME[how] for how in hows]
    told = [f"{how}:{','.join(own)}" for how, own in zip(hows, ends)]
    modules = {} if FULL else {"modules": ["dalijax.adapters.clu", "dalijax.adapters.grain"]}
    program = run_program(exit_worker.__file__, "table", TIMES, *told, timeout=3600, **modules)
    assert program.stdout.count(f"{TIMES} right") == sum(map(len, ends))


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
if sys.argv[1] == "endless":
    del iterator
"""


@pytest.mark.parametrize("length", ("finite", "endless"))
def test_a_program_ends_while_tensorflow_prefetches(length, tmp_path):
    """TensorFlow's threads do not end with Python: they are still in the generator.

    With an endless dataset, TensorFlow itself hangs in one of five programs at exit (2.21, also
    over a generator in plain Python), unless the iterator is deleted before.
    """
    (tmp_path / "program.py").write_text(TENSORFLOW)
    modules = {} if FULL else {"modules": ["tensorflow"]}
    program = run_program(tmp_path / "program.py", length, timeout=exit_worker.HANGS, **modules)
    for line in ("Traceback", "Exception ignored", "UNKNOWN", "dalijax"):
        assert line not in program.stderr, program.stderr


@pytest.mark.parametrize("which", fork_worker.WHICH)
def test_a_forked_child_has_a_parents_iterator(which):
    modules = {} if FULL else {"modules": ["dalijax.adapters.grain"]}
    program = run_program(FORK_WORKER, which, timeout=exit_worker.HANGS, **modules)
    assert program.stdout.splitlines() == [f"{what} as it must be" for what in fork_worker.WHAT]
    assert "Traceback" not in program.stderr
