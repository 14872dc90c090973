"""The threads of `dalijax.core.threads.workers`: results, errors, ends and interruptions."""

import gc
import threading

import interrupt_worker
import pytest
from forks import run_fork
from interrupts import interrupt_at, lines_of

from dalijax.core.threads.workers import Result, Workers, WorkersEnded, call_each

WAIT = 60  # seconds, for calls that take milliseconds


def get_in_thread(result):
    """Gets the result or raises its error, in a thread that is abandoned after a timeout."""
    seen = []

    def wait():
        try:
            seen.append(result.get())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert seen, "the result never came"
    return seen[0]


def test_results_come_in_order_and_errors_are_raised_again():
    workers = Workers(3, "test")
    results = [workers.call(divmod, 7, number) for number in range(4)]
    with pytest.raises(ZeroDivisionError):
        results[0].get()
    assert [result.get() for result in results[1:]] == [divmod(7, k) for k in range(1, 4)]
    assert [result.get() for result in results[1:]] == [divmod(7, k) for k in range(1, 4)]
    assert call_each(abs, [-3, 2, -1], 2, "test") == [3, 2, 1]
    with pytest.raises(TypeError):
        call_each(abs, [1, "a", 2], 2, "test")
    assert workers.future(lambda: 5).result(WAIT) == 5


def test_a_result_is_set_once():
    result = Result()
    result.set(1)
    result.fail(ValueError())
    result.set(2)
    assert result.get() == 1


def test_tasks_that_have_not_started_are_dropped_or_finished():
    for drop in (True, False):
        name = f"dropped_{drop}_"
        workers, goes_on, begun, done = Workers(1, name), threading.Event(), [], []
        began = threading.Event()
        workers.submit(lambda: (began.set(), goes_on.wait(WAIT), begun.append(1)))
        assert began.wait(WAIT)
        second = workers.call(done.append, 2)
        threads = [t for t in threading.enumerate() if t.name.startswith(name)]
        workers.end(drop)  # does not wait: the first task is still running
        goes_on.set()
        for thread in threads:
            thread.join(WAIT)
        assert begun == [1] and done == ([] if drop else [2])
        if drop:
            with pytest.raises(WorkersEnded):
                workers.submit(print)
        else:
            assert second.get() is None


def test_threads_end_with_the_pool():
    gc.disable()
    try:
        workers = Workers(2, "freed")
        assert workers.call(abs, -1).get() == 1
        own = [thread for thread in threading.enumerate() if thread.name.startswith("freed_")]
        assert len(own) == 2 and all(thread.daemon for thread in own)
        del workers
        for thread in own:
            thread.join(WAIT)
        assert not any(thread.is_alive() for thread in own)
    finally:
        gc.enable()


def test_an_interruption_at_any_line_does_not_deadlock():
    workers = Workers(2, "test")
    lines = lines_of(lambda: workers.call(abs, -1).get())
    assert len(lines) > 10
    for line in lines:
        result = []
        interrupt_at(line, lambda result=result: result.append(workers.call(abs, -1)))
        interrupt_at(line, lambda: workers.call(abs, -2).get())
        if result:
            interrupt_at(line, result[0].get)
            assert get_in_thread(result[0]) == 1
        assert get_in_thread(workers.call(abs, -3)) == 3
    workers.end()


def test_interruptions_within_the_standard_library_lose_no_batch():
    program = run_fork(interrupt_worker.__file__, timeout=200)
    assert program.stdout == "no batch was lost\n"
