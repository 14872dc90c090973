"""Interrupts next() of an iterator over a source inside the standard library, where locks are held.

Functions like ``threading.Condition.__enter__`` return with a lock. Ctrl-C at that moment, before
the caller's ``with`` statement has recorded it, leaves the lock locked. Each return of a function
in the standard library's threading modules is interrupted once, in a new iterator, whose next()
must then deliver the batch.
"""

import concurrent.futures.thread
import faulthandler
import sys
import threading

import numpy as np

from dalijax import data_iterator, sources

LIBRARY = (
    threading.__file__,
    concurrent.futures.thread.__file__,
    concurrent.futures._base.__file__,
)
SECONDS = 60  # seconds, for a call that takes milliseconds


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


def returns_until(last, call):
    """Calls a function and raises `Interrupt` at a return; False if it returns less often."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename not in LIBRARY:
            return None
        if event == "return":
            seen += 1
            if seen == last:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def opened():
    source = sources.Arrays({"number": np.arange(12, dtype=np.int32)[:, None]})
    make = data_iterator(lambda number: number + 0, ["x"], source=source, shuffle=False)
    return make(batch_size=3, num_threads=1, device_id=None, prepare_first_batch=False)


def main():
    last, iterators = 1, []
    while last < 200:
        iterator = opened()
        iterators.append(iterator)  # some are open when Python ends
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        interrupted = returns_until(last, lambda iterator=iterator: next(iterator))
        batches = [np.asarray(batch["x"]).ravel().tolist() for batch in iterator]
        whole = np.arange(12).reshape(4, 3).tolist()
        if batches != (whole if interrupted else whole[1:]):
            sys.exit(f"return {last}: {batches}")
        if last % 2:
            iterator.close()
        faulthandler.cancel_dump_traceback_later()
        if not interrupted:
            break
        last += 1
    sys.stdout.write("no batch was lost\n")


if __name__ == "__main__":
    main()
