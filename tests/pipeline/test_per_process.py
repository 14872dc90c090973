"""Forked children make their own values; threads of a process share its value."""

import functools
import os
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from dalijax.core.threads.per_process import PerProcess


class Value:
    """An object that can be referred to weakly."""


def code_of_child(function):
    """Returns the exit code of a forked child: 0 if the function returns True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
@pytest.mark.parametrize("keeps", (False, True))
def test_a_child_makes_its_own_value(keeps):
    values = PerProcess(Value, keeps)
    own = values.get()
    number, ref = id(own), weakref.ref(own)
    del own

    def has_its_own():
        value = values.get()
        is_kept = ref() is not None
        return values.get() is value and is_kept == keeps and (id(value) != number or not keeps)

    assert code_of_child(has_its_own) == 0
    assert values.get() is ref()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_child_can_take_a_lock_that_its_parent_holds():
    locks = PerProcess(threading.Lock)
    with locks.get():
        assert code_of_child(lambda: locks.get().acquire(timeout=20)) == 0


def test_threads_share_a_value():
    barrier = threading.Barrier(8)

    def make():
        barrier.wait(20)  # so that every thread makes a value
        return Value()

    values = PerProcess(make)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: values.get(), range(8)))) == 1


def test_values_are_not_pickled():
    values = PerProcess(functools.partial(list, "ab"))
    values.get().append("c")
    assert pickle.loads(pickle.dumps(values)).get() == ["a", "b"]
