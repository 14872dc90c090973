"""Results that the workers of xdist compute once and share."""

import fcntl
import json
import os


def shared(tmp_path_factory, name, make):
    """Returns the result of a function, which only one worker calls.

    Args:
        tmp_path_factory: The fixture of pytest.
        name: The name of the result, unique among all tests.
        make: Returns the result, as JSON.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"{name}.json"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            result = json.dumps(make())
            path.write_text(result)
    return json.loads(path.read_text())
