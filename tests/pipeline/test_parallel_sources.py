"""`fn.external_source(parallel=True)` spawns workers once JAX runs, or explains the error."""

import pytest
from forks import run_fork

PROGRAM = """
import jax
import numpy as np
from nvidia.dali import fn
from dalijax import data_iterator


def number(info):
    if info.iteration == 2:
        raise StopIteration
    return np.array([info.idx_in_epoch], np.int32)


@data_iterator(output_map=["number"])
def numbers():
    return fn.external_source(number, parallel=True, batch=False)


def main():
    jax.devices()
    print([np.ravel(batch["number"]).tolist() for batch in numbers(batch_size=3)])


"""


@pytest.mark.slow
def test_workers_are_spawned(tmp_path):
    """Warnings are errors, so a fork would fail with JAX's warning."""
    program = tmp_path / "guarded.py"
    strict = "import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n"
    program.write_text(strict + PROGRAM + "if __name__ == '__main__':\n    main()\n")
    done = run_fork(program, frees=True)
    assert done.stdout.strip() == "[[0, 1, 2], [3, 4, 5]]"


HANDMADE = """
import numpy as np
from nvidia.dali import fn, pipeline_def
from dalijax import DALIGenericIterator


def number(info):
    if info.iteration == 2:
        raise StopIteration
    return np.array([info.idx_in_epoch], np.int32)


@pipeline_def(batch_size=3, num_threads=1, device_id=None)
def numbers():
    return fn.external_source(number, parallel=True, batch=False)


def main(**call):
    pipeline = numbers(**call)
    if STARTED:
        pipeline.start_py_workers()
    batches = DALIGenericIterator(pipeline, ["number"])
    print([np.ravel(batch["number"]).tolist() for batch in batches])


if __name__ == '__main__':
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call,started,warned",
    [("", False, True), ("", True, False), ("py_start_method='spawn'", False, False)],
)
def test_a_fork_is_warned_of(tmp_path, call, started, warned):
    program = tmp_path / "handmade.py"
    program.write_text(f"STARTED = {started}\n{HANDMADE}    main({call})\n")
    done = run_fork(program, warn="default", frees=True)
    assert done.stdout.strip() == "[[0, 1, 2], [3, 4, 5]]"
    assert ("Pass py_start_method='spawn' to pipeline_def" in done.stderr) == warned
    assert (f"{program}:" in done.stderr) == warned  # the line that created the iterator


@pytest.mark.slow
def test_a_missing_main_guard_is_an_error_that_shows_it(tmp_path):
    program = tmp_path / "unguarded.py"
    program.write_text(PROGRAM + "main()\n")
    said = run_fork(program, code=1).stderr
    assert "if __name__ == '__main__':\n        main()" in said
    assert "py_start_method='spawn'" in said


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_an_explicit_start_method_is_kept(method):
    from nvidia.dali import fn, types

    from dalijax.core.pipeline.pipeline_factory import GraphPipelineFactory

    def graph():
        return fn.constant(idata=[1], dtype=types.INT32)

    call = {"batch_size": 1, "device_id": None, "py_start_method": method}
    assert GraphPipelineFactory(graph, (), call).define().py_start_method == method
    del call["py_start_method"]
    assert GraphPipelineFactory(graph, (), call).define().py_start_method == "spawn"
