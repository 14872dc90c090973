"""CUDA's hardware queues are set at import, unless the user has set them or CUDA has started."""

import os
import warnings

import pytest

from dalijax.core.environment import cuda_queues
from dalijax.core.environment.cuda_queues import (
    KEEP,
    VARIABLE,
    has_started,
    should_set,
    warn_if_too_late,
)
from full import FULL
from programs import run_python


@pytest.mark.parametrize(
    "environment,sets",
    [
        ({}, True),
        ({KEEP: ""}, True),
        ({KEEP: "keep"}, False),
        ({VARIABLE: "8"}, False),
        ({VARIABLE: "1", KEEP: "keep"}, False),
        ({VARIABLE: ""}, False),
    ],
)
def test_a_users_setting_is_kept(environment, sets):
    assert should_set(environment) is sets


def test_an_invalid_setting_is_refused():
    with pytest.raises(ValueError, match="'8' must be 'keep'.*set CUDA_DEVICE_MAX_CONNECTIONS"):
        should_set({KEEP: "8"})


IMPORT = """
import os
import sys

def then_import(first, settings):
    if os.fork() == 0:
        os.environ.update(settings)
        exec(first)
        import dalijax
        print(os.environ.get({variable!r}, ""), flush=True)
        os._exit(0)
    os.wait()

assert not {{"jax", "nvidia"}} & sys.modules.keys()
for first in {first!r}:
    then_import(first, {{}})
import jax, nvidia.dali.fn  # most of the time of an import of this package
for settings in {settings!r}:
    then_import("jax.devices()", settings)
"""


@pytest.mark.slow
def test_importing_the_package_sets_it():
    # No test starts CUDA, whatever was imported before.
    queues = {"32": {}, "8": {VARIABLE: "8"}, "": {KEEP: "keep"}}
    env = {k: v for k, v in os.environ.items() if k not in (VARIABLE, KEEP)}
    # Each imports JAX and DALI.
    first = ["", "import nvidia.dali.fn", "import jax; jax.devices()"] if FULL else [""]
    code = IMPORT.format(first=first, settings=list(queues.values()), variable=VARIABLE)
    printed = run_python("-c", code, env=env).stdout.splitlines()
    assert printed == ["32"] * len(first) + list(queues)


def test_a_setting_that_comes_too_late_warns_once(monkeypatch):
    monkeypatch.setattr(cuda_queues, "_too_late", True)
    with pytest.warns(UserWarning, match=f"Import dalijax before.*{VARIABLE}=32") as caught:
        warn_if_too_late()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_too_late()


@pytest.mark.skipif(os.environ.get("DALIJAX_TEST_GPU") == "1", reason="CUDA has started there")
def test_the_check_does_not_start_cuda():
    assert has_started() is False
    assert cuda_queues._too_late is False
