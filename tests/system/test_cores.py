"""The comparison of loaders by benchmarks/cores.py: its arithmetic, and the steps that it times."""

import os
import pathlib
import sys

import jax.numpy as jnp
import pytest

pytest.importorskip("grain")
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cores():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which the program changes
        import cores

        yield cores
    for name in ("cores", "recipe", "other_inputs"):
        sys.modules.pop(name, None)


def test_cores_at_the_rate_of_the_model_alone(cores):
    recipe = cores.recipe
    alone = [recipe.Timing(step=20.0, next=0.0, waiting=0.0, cores=1.0)] * 3
    # 3 cores for 25 ms are 75 ms of CPU time per step, which is 3.75 cores if a step takes 20 ms.
    # Without the 4 ms in which the GPU waits, the step of 25 ms is 5 % longer than 20 ms.
    fed = [recipe.Timing(step=25.0, next=6.0, waiting=4.0, cores=3.0)] * 3
    load = cores.loads({recipe.MODEL: alone, "loader": fed}, batch=256)
    assert load[recipe.MODEL] == cores.Load(12_800, 100, 1, 1, 0, 0)
    values = [load["loader"].rate, load["loader"].share, load["loader"].cores]
    values += [load["loader"].needed, load["loader"].cost, load["loader"].waiting]
    assert values == pytest.approx([10_240, 80, 3, 3.75, 5, 16])


def test_steps_take_the_batches_in_order(cores):
    taken = []

    def train(batch):
        taken.append(batch)
        return jnp.float32(batch)

    batches = iter(range(9))
    timing = cores.recipe.turns.time_steps(train, batches, 7)
    assert taken == [0, 1, 2, 3, 4, 5, 6]
    assert next(batches) == 7
    assert 0 <= timing.waiting <= timing.step
    with pytest.raises(RuntimeError, match="not finite"):
        cores.recipe.turns.time_steps(lambda batch: jnp.float32("nan"), iter(range(3)), 3)


def test_a_missing_package_is_printed(cores, capsys):
    assert cores.is_installed("dalijax, Files")
    cores.REQUIRED["another"] = ("not_a_package",)
    assert not cores.is_installed("another")
    assert "another is left out: not_a_package is not installed" in capsys.readouterr().out
