"""Tests of the Pax adapter, in a separate environment (`make test-pax`): Python 3.10."""

import importlib.util

if importlib.util.find_spec("praxis") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import praxis.base_input  # noqa: F401 - its own imports warn, which tests take for errors
