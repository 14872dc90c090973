"""A training process that is killed repeatedly loses and repeats no sample."""

import json
import os
import pathlib
import random
import signal
import time

import pytest
from forks import Fork

from conftest import write_jpegs
from full import FULL

SEED = int(os.environ.get("DALIJAX_SEED", random.SystemRandom().randrange(2**31)))
FILES, EPOCHS, EVERY, KILLS = 158, 2, 4, 5 if FULL else 3
STEPS = 2 * 40  # in batches of 4, the last one padded
SCRIPT = str(pathlib.Path(__file__).parents[1] / "support" / "kill_trainer.py")


class Trainer:
    """A training process that resumes from its checkpoint, if there is one."""

    def __init__(self, folder, checkpoint):
        self.checkpoint = checkpoint
        self.process = Fork(SCRIPT, folder, checkpoint, EPOCHS, EVERY, warn="error", piped=True)

    def kill(self, steps, more, delay):
        """Kills the process after some steps and a short delay, in which it may do more steps.

        Returns:
            The number of steps that the whole run has certainly done.
        """
        self.process.stdin.write("\n" * (steps + more))
        self.process.stdin.flush()
        for _ in range(steps):
            reached = int(self.process.stdout.readline())
        time.sleep(delay)
        self.process.kill()
        assert self.process.result(300)[0] == -signal.SIGKILL
        return reached

    def finish(self):
        code, out, errors = self.process.result(300)
        assert code == 0, errors
        assert "Traceback" not in errors
        return out.split(), json.loads(self.checkpoint.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "images"
    write_jpegs(folder, FILES)
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_equals_an_unbroken_run(folder, tmp_path):
    print(f"DALIJAX_SEED={SEED}")  # noqa: T201
    chance = random.Random(SEED)
    checkpoint = tmp_path / "killed.json"
    for kill in range(KILLS):
        # Without a delay, the kill hits the step or the save after it.
        steps, more = chance.randint(EVERY + 2, 11), chance.randint(0, 3)
        reached = Trainer(folder, checkpoint).kill(steps, more, chance.choice([0, 0.001, 0.003]))
        saved = json.loads(checkpoint.read_text())  # never half a file
        print(f"kill {kill}: after step {reached}, saved at {len(saved['log'])}")  # noqa: T201
        assert reached - EVERY <= len(saved["log"]) <= reached + more
        assert saved["state"]["epoch"] * STEPS // EPOCHS + saved["state"]["step"] == len(
            saved["log"]
        )
    assert reached + more < STEPS
    done, killed = Trainer(folder, checkpoint).finish()
    assert len(done) < STEPS  # it resumed instead of restarting

    done, whole = Trainer(folder, tmp_path / "whole.json").finish()
    assert len(done) == STEPS
    assert killed["state"] == whole["state"]
    assert killed["log"] == whole["log"]
    for epoch in range(EPOCHS):
        seen = [i for b in killed["log"] if b["epoch"] == epoch for i in b["samples"]]
        assert sorted(seen) == list(range(FILES))
    assert seen != sorted(seen)
    assert len({b["image"] for b in killed["log"]}) == len({b["u"] for b in killed["log"]}) == STEPS
