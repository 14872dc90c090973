"""Comparisons with torchvision, in an environment of their own: `make test-parity`."""

import importlib.util

import pytest

if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("skimage") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from parity import photographs, table


@pytest.fixture(scope="session")
def photos():
    """Four photographs of other sizes."""
    return photographs()


def pytest_terminal_summary(terminalreporter) -> None:
    """The figures of docs/imagenet.md: differences, median / 99th percentile / maximum."""
    for line in table() if "table" in globals() else ():
        terminalreporter.write_line(line)
