"""The comparison of processes within one of them."""

import sys
import threading
import time

from dalijax.core.pipeline.processes import Agreement


def test_iterators_may_be_made_while_another_thread_compares():
    """A thread looks through the iterators of its process, to which others add."""
    interval = sys.getswitchinterval()

    def agreement(number):
        return Agreement("graph", (0, 1), 1.0, {"number": number})

    made, ended = [agreement(k) for k in range(200)], threading.Event()

    def make():
        while not ended.is_set():
            agreement(0)

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert made[0]._patience({"number": -1}) == 1
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
