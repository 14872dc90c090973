"""The comparison of processes, within a single process."""

import collections
import sys
import threading
import time

from dalijax.core.pipeline.processes import Agreement


def test_iterators_may_be_created_while_another_thread_compares():
    """A thread iterates over the iterators of its process while other threads add iterators."""
    interval = sys.getswitchinterval()

    def agreement(number):
        return Agreement("graph", (0, 1), 1.0, {"number": number})

    first, ended = agreement(0), threading.Event()
    made = collections.deque([agreement(1) for _ in range(200)], maxlen=5000)

    def make():
        while not ended.is_set():
            made.append(agreement(1))

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert first._patience({"number": -1}) == 1
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
