"""The conformance check: tests every property of an iterator with states, in one function.

`check` takes a function that creates an iterator, and the expected batches. It walks through a few
epochs once and saves a state before every step and at every end. Then it restores each state in
every possible way, and compares the batches that follow with the walk.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np
from fork_context import fork_context

from full import FULL

Result = Any


@dataclasses.dataclass
class Tally:
    """Counts what the checks of a test run did, for the closing table."""

    cells: int = 0
    restores: int = 0
    batches: int = 0
    failed: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        table = (
            f"conformance: {self.cells} cells run, {self.restores} restores compared, "
            f"{self.batches} batches compared, failures {self.failed}"
        )
        return "\n".join([table, *self.notes])


TALLY = Tally()


@dataclasses.dataclass(frozen=True)
class Expected:
    """What an iterator must deliver.

    Attributes:
        epochs: The batches of each epoch, each a dict of some of the outputs; None for a
            batch that fails.
        auto_reset: Whether StopIteration starts the next epoch.
        sized: Whether len() is known.
        ordered: Whether the order of the batches is known. If not, only their number, their
            masks and the samples of each epoch (as a multiset) are compared.
        pipelines: Number of local pipelines.
        resets: Whether the iterator has epochs: len(), reset(), peek(). If not, the epochs
            follow one another, and the iterator ends after the last epoch.
        state_bytes: Maximum size of a state as JSON, per pipeline.
    """

    epochs: Sequence[Sequence[dict[str, Any] | None]]
    auto_reset: bool = False
    sized: bool = True
    ordered: bool = True
    pipelines: int = 1
    resets: bool = True
    state_bytes: int = 4096

    def as_stream(self, state_bytes: int) -> Expected:
        """Returns the same for an iterator that continues from epoch to epoch."""
        epoch = [batch for epoch in self.epochs for batch in epoch]
        return dataclasses.replace(
            self, epochs=[epoch], sized=False, resets=False, state_bytes=state_bytes
        )

    def steps(self) -> list[str]:
        """Returns the calls of a walk; a sticky StopIteration is called for twice."""
        calls: list[str] = []
        for epoch in self.epochs:
            calls += ["next"] * (len(epoch) + 1)
            calls += [] if self.auto_reset else ["next", "reset"] if self.resets else ["next"]
        return calls


def frozen(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a comparable batch: dtype, shape and bytes of each array, on each device."""
    out = {}
    for name, array in batch.items():
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            pieces = sorted(
                (shard.device.id, str(shard.index), np.asarray(shard.data).tobytes())
                for shard in array.addressable_shards
            )
            out[name] = (str(array.dtype), array.shape, pieces)
        else:
            host = np.asarray(array)
            data = repr(host.tolist()) if host.dtype.hasobject else host.tobytes()
            out[name] = (str(host.dtype), host.shape, data)
    return out


def do(iterator: Any, call: str) -> Result:
    """Returns the result of a call, and the length after it."""
    try:
        result: Any = frozen(next(iterator)) if call == "next" else iterator.reset()
    except StopIteration:
        result = "stop"
    except RuntimeError as error:
        # Only an iterator's first failures name files; failures after a lazy checkpoint do not.
        names = "\nFiles that can't be decoded|\nThe batch contains"
        result = "failed: " + re.split(names, str(error))[0]
    try:
        length: Any = len(iterator)
    except TypeError:
        length = "unknown"
    return result, length


def _check_oracle(results: list[Result], expected: Expected, host: list[Any]) -> None:
    """Checks the walk against the oracle: batches, masks, ends and lengths."""
    at = 0
    for number, epoch in enumerate(expected.epochs):
        samples: list[Any] = []
        wanted: list[Any] = []
        for want in epoch:
            got = host[at]
            if want is None:
                assert isinstance(got, str) and got.startswith("failed"), (number, at, got)
            else:
                assert isinstance(got, dict), (number, at, got, want)
                for name, values in want.items():
                    if expected.ordered or name == "mask":
                        np.testing.assert_array_equal(got[name], values, f"{number} {at} {name}")
                    else:
                        valid = np.asarray(want.get("mask", np.ones(len(values), bool)))
                        samples += np.ravel(got[name])[valid.ravel()].tolist()
                        wanted += np.ravel(values)[valid.ravel()].tolist()
            assert results[at][1] == (len(epoch) if expected.sized else "unknown"), (number, at)
            at += 1
        assert sorted(samples) == sorted(wanted), number
        for _ in range(1 if expected.auto_reset else 2):
            assert host[at] == "stop", (number, at, host[at])
            at += 1
        at += 0 if expected.auto_reset else 1


def _same_type(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same_type(a[k], b[k]) for k in a)
    return True


def use_fake_devices(count: int = 8) -> None:
    """Sets the number of CPU devices; call it before the first use of a device."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except AttributeError:  # jax 0.4
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"


class OtherProcess:
    """A process that restores states for all checks; a process for each check would take long."""

    def __init__(self) -> None:
        context = fork_context()
        self._pipe, pipe = context.Pipe()
        self._child = context.Process(target=_restore_states, args=(pipe,))
        self._child.start()
        pipe.close()  # so that the pipe ends if the child dies
        # The child ends with its pipe, before multiprocessing waits for it.
        multiprocessing.util.Finalize(None, self._pipe.close, exitpriority=100)

    def tails(
        self, make: Callable[[], Any], calls: list[list[str]], states: list[str]
    ) -> list[list[Result]]:
        """Returns the results of the calls after each state."""
        self._pipe.send(cloudpickle.dumps((make, calls, states)))
        try:
            tails, error = self._pipe.recv()
        except EOFError:
            _other_process.cache_clear()
            self._child.join(300)
            raise AssertionError(f"the process ended with {self._child.exitcode}") from None
        assert not error, error
        return tails


@functools.cache
def _other_process() -> OtherProcess:
    return OtherProcess()


def _restore_states(pipe: Any) -> None:
    """Runs the tails of many states, in another process, until the pipe ends."""
    use_fake_devices()
    with contextlib.suppress(EOFError):
        while True:
            tails: list[list[Result]] = []
            error = ""
            try:
                make, calls, states = cloudpickle.loads(pipe.recv())
                for state, own in zip(states, calls, strict=True):
                    iterator = make()
                    iterator.set_state(json.loads(state))
                    tails.append([do(iterator, call) for call in own])
                    iterator.close()
            except EOFError:
                raise
            except Exception:
                error = traceback.format_exc()
            pipe.send((tails, error))


def check(make: Callable[[], Any], expected: Expected, **options: Any) -> None:
    """Runs `check_properties` and counts it for the closing table."""
    try:
        check_properties(make, expected, **options)
    except BaseException:
        TALLY.failed += 1
        raise
    TALLY.cells += 1


def check_properties(
    make: Callable[[], Any],
    expected: Expected,
    *,
    process: bool = False,
    tail: int | None = None,
) -> None:
    """Checks every property of an iterator's states.

    Args:
        make: Creates an iterator; the data are the same each time.
        expected: The batches that it must deliver.
        process: Whether to restore in another process, too.
        tail: Number of steps to compare after each restore; None for all.
    """
    calls = expected.steps()
    end = len(calls) + 1
    iterator = make()
    states, results, host = [iterator.get_state()], [], []
    for call in calls:
        result = do(iterator, call)
        results.append(result)
        host.append(_readable(result[0]))
        states.append(iterator.get_state())
    _check_oracle(results, expected, host)
    last = states[-1]

    for state in states:
        assert state == json.loads(json.dumps(state))
        assert _same_type(state, states[0])
        # flax and Orbax restore into the tree of a fresh state.
        assert jax.tree.structure(state) == jax.tree.structure(states[0])
        size = len(json.dumps(state))
        assert size <= expected.state_bytes * expected.pipelines, size

    def compare(other: Any, at: int, to: int, how: str) -> None:
        for k in range(at, min(to, len(calls))):
            got = do(other, calls[k])
            assert got == results[k], (how, at, k, _readable(got[0]), host[k], got[1], results[k])
            TALLY.batches += 1
        TALLY.restores += 1

    # Restore every position, into the same iterator or into a new one; `make test-full` into both.
    # Both kinds meet each position of an epoch, as few epochs have a multiple of five calls.
    for at, state in enumerate(states):
        to = end if tail is None else at + tail
        if FULL or at % 5 in (1, 3):
            given = copy.deepcopy(state)
            iterator.set_state(given)
            assert given == state, "the caller's state was changed"
            assert iterator.get_state() == state
            given["epoch"] = "overwritten"  # must not be stored either
            compare(iterator, at, to, "same")
            if not FULL:
                continue
        new = make()
        new.set_state(json.loads(json.dumps(state)))
        assert new.get_state() == state
        new.start_prefetch()
        assert new.get_state() == state
        compare(new, at, to, "new")
        new.close()

    # Save and restore between all steps: no drift; set_state(get_state()) changes nothing.
    iterator = make()
    for at, state in enumerate(states[:-1]):
        assert iterator.get_state() == state, at
        iterator.set_state(iterator.get_state())
        compare(iterator, at, at + 1, "in place")
        if at % 4 == 0:
            again = make()
            again.set_state(iterator.get_state())
            iterator.close()
            iterator = again
    assert iterator.get_state() == last

    # Peeking changes neither the state nor the following batches.
    iterator = make()
    for at, state in enumerate(states[:-1]):
        _look_ahead(iterator, at)
        assert iterator.get_state() == state, at
        compare(iterator, at, at + 1, "looked ahead")
    iterator.close()
    _raises_value_error(lambda: next(iterator))
    if expected.resets:
        _raises_value_error(iterator.get_state)
        _raises_value_error(lambda: iterator.set_state(last))
    iterator.close()

    if process:
        tails = [calls[at:] if tail is None else calls[at : at + tail] for at in range(end)]
        texts = [json.dumps(state) for state in states]
        for at, got in enumerate(_other_process().tails(make, tails, texts)):
            assert got == results[at : at + len(got)], ("process", at)
            TALLY.restores += 1
            TALLY.batches += len(got)


def _look_ahead(iterator: Any, at: int) -> None:
    iterator.start_prefetch()
    for _ in range(at % 3 if hasattr(iterator, "peek") else 0):
        try:
            peeked = iterator.peek()
            if at % 2:
                spec = iterator.element_spec
                for name, array in peeked.items():
                    assert spec[name].dtype == array.dtype
        except (StopIteration, RuntimeError):
            pass


def _readable(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    out = {}
    for name, (dtype, shape, data) in result.items():
        if isinstance(data, str):
            out[name] = data
        elif isinstance(data, bytes):
            out[name] = np.frombuffer(data, dtype).reshape(shape)
        else:
            out[name] = _whole(dtype, shape, data)
    return out


def _whole(dtype: str, shape: tuple[int, ...], pieces: list[Any]) -> np.ndarray:
    """Assembles a sharded array from its pieces."""
    whole = np.zeros(shape, dtype)
    for _, index, data in pieces:
        # `frozen` stores the index as the text of slices.
        where = tuple(slice(*_bounds(part)) for part in index[1:-1].split("slice(")[1:])
        whole[where] = np.frombuffer(data, dtype).reshape(whole[where].shape)
    return whole


def _bounds(part: str) -> list[int | None]:
    numbers = part.split(")")[0].split(",")
    return [None if n.strip() == "None" else int(n) for n in numbers]


def _raises_value_error(use: Callable[[], Any]) -> None:
    try:
        use()
    except ValueError:
        return
    raise AssertionError("a closed iterator answered")
