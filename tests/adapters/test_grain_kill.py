"""examples/grain_train.py, killed repeatedly, has the losses of an uninterrupted run."""

import itertools
import json
import os
import pathlib
import random
import time

import pytest
from forks import Fork
from PIL import Image

from full import FULL

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("DALIJAX_SEED", random.SystemRandom().randrange(2**31)))
SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "grain_train.py"
MODULES = ("flax.nnx", "grain", "matplotlib.figure", "optax", "orbax.checkpoint")
CPU = {"JAX_PLATFORMS": "cpu"}
STEPS, EVERY, KILLS = (24, 4, 3) if FULL else (16, 4, 1)


def start(cache, out):
    command = [SCRIPT, "--cache", cache, "--count", "120"]
    options = ["--steps", STEPS, "--save-every", EVERY, "--batch-size", "16", "--out", out]
    # Old libraries warn of each other; make test-matrix sets this.
    warn, environment = os.environ.get("PYTHONWARNINGS", "error"), {**os.environ, **CPU}
    return Fork(*command, *options, modules=MODULES, env=environment, warn=warn, piped=True)


def losses(out):
    """Returns the loss of each step, from its last execution."""
    lines = (out / "losses.jsonl").read_text().splitlines()
    # The kill may have cut a line.
    return {one["step"]: one["loss"] for one in map(json.loads, filter(whole, lines))}


def whole(line):
    return line.startswith("{") and line.endswith("}")


def test_a_killed_run_has_the_losses_of_an_uninterrupted_run(tmp_path):
    print(f"DALIJAX_SEED={SEED}")  # noqa: T201
    chance = random.Random(SEED)
    cache, killed, straight = (tmp_path / name for name in ("cache", "killed", "straight"))
    code, _, errors = start(cache, straight).result(240)
    assert code == 0, errors[-3000:]
    for kill in range(KILLS):
        process = start(cache, killed)
        # Orbax saves in a thread, and has finished a checkpoint before it begins the next.
        saves = (line for line in process.stdout if line.startswith("step"))
        if len(list(itertools.islice(saves, 2))) < 2:
            # The earlier runs left fewer than two steps.
            code, _, errors = process.result(240)
            assert kill > 0 and code == 0, errors[-3000:]
            break
        time.sleep(chance.choice([0, 0.02, 0.1, 0.3]))
        process.kill()
        process.result(240)
    code, out, errors = start(cache, killed).result(240)
    assert code == 0, errors[-3000:]
    assert "resuming after step" in out
    want = losses(straight)
    assert sorted(want) == list(range(1, STEPS + 1))
    assert losses(killed) == want
    low, high = Image.open(straight / "losses.png").convert("L").getextrema()
    assert high - low > 50
