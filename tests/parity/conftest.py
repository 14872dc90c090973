"""Comparisons with torchvision, in a separate environment: `make test-parity`."""

import importlib.util

import pytest

if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("skimage") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from parity import photographs, table


@pytest.fixture(scope="session")
def photos():
    """Four photographs of different sizes."""
    return photographs()


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the figures of docs/imagenet.md."""
    for line in table() if "table" in globals() else ():
        terminalreporter.write_line(line)
