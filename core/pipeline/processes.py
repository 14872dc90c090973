"""Exchanges the descriptions of iterators between the processes of `jax.distributed`.

It uses the key-value store of JAX's coordination service, and no device: a collective would need
the same order as the user's own in every process, and could deadlock with a step that another
thread runs. The lowest process of a sharding compares, so that the number of calls grows with the
number of processes and not with its square::

    each process   dalijax/GROUP/offers/PROCESS/NUMBER     the description
    the lowest     dalijax/GROUP/verdicts/PROCESS/NUMBER   for each: agreed, or the error

A process that can't come tells the others, which then don't wait for it::

    a next() that raised    dalijax/GROUP/failures/PROCESS/FROM/NUMBER   for each: the error
    the end of a program    dalijax/ends/FROM
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from ..config import IteratorConfig
from ..errors import ProcessError
from ..state.agreement import (
    Batches,
    Offer,
    Round,
    Values,
    absence_text,
    counterparts,
    departure_text,
    difference_text,
)
from ..state.envelope import digest

__all__ = ["Agreement", "agreement_of", "is_one_of_several"]

_SECONDS = 300.0  # as jax.distributed.initialize waits
_SLICE = 1.0  # of a wait, after which Ctrl-C is heard
_PAUSES = (0.0005, 0.25)  # between two looks of the process that compares, from and to
# Seconds after which an offer without an equal offer in this process counts as a difference:
# another thread of this process may be about to make the equal offer. The second number is for
# offers with the outline of an iterator of this process that has not delivered a batch.
_PATIENCE = (1.0, 60.0)
_LOOKS = 0.25  # seconds between two looks for processes that can't come
_LATER = 5.0  # seconds that the others wait longer than the process that compares

_LONGEST = 2000  # characters of an error that is told

_numbers = itertools.count()
_comparing = threading.Lock()  # of the threads of this process, each for an iterator
_made: weakref.WeakSet[Agreement] = weakref.WeakSet()
_ends = "dalijax/ends"
_listing = threading.Lock()  # of the set, which must not grow while a thread looks through it


def _client() -> Any:
    """The client of JAX's coordination service; None without one."""
    # Not public; jax.experimental.multihost_utils offers collectives alone.
    from jax._src import distributed

    return getattr(getattr(distributed, "global_state", None), "client", None)


def is_one_of_several() -> bool:
    """Whether there are other processes of `jax.distributed`; it starts no devices to know."""
    started = getattr(jax.distributed, "is_initialized", lambda: False)  # of jax 0.4.36 and later
    return (started() or _client() is not None) and jax.process_count() > 1


@atexit.register  # after jax's own function, and so called before it
def _tell_end() -> None:
    """Tells the other processes that this one ends, and comes to no batch any more."""
    from jax._src import distributed

    client, process = _client(), getattr(distributed.global_state, "process_id", None)
    if client is not None and process is not None:
        with contextlib.suppress(Exception):  # the service has ended before
            client.key_value_set(f"{_ends}/{process}", "", allow_overwrite=True)


def _processes_of(config: IteratorConfig) -> tuple[int, ...]:
    """The processes that make a global batch together; none if this one makes it alone."""
    if config.over_processes:
        every = config.sharding
        shardings = every.values() if isinstance(every, Mapping) else [every]
        devices: set[Any] = {d for s in shardings if isinstance(s, Sharding) for d in s.device_set}
        return tuple(sorted({device.process_index for device in devices}))
    # For another number of hosts, the process of each host is unknown.
    if config.hosts[1] > 1 and is_one_of_several() and config.hosts[1] == jax.process_count():
        return tuple(range(config.hosts[1]))
    return ()


def agreement_of(config: IteratorConfig, name: str, outline: Values) -> Agreement | None:
    """Makes the `Agreement` of an iterator; None without other processes, or without a check.

    Args:
        config: The iterator's arguments.
        name: Its name, for errors.
        outline: Those values to compare that need no reading and no pipeline.
    """
    seconds = _SECONDS if config.check_processes is True else float(config.check_processes)
    if not seconds:
        return None
    processes = _processes_of(config)
    if len(processes) < 2 or jax.process_index() not in processes or _client() is None:
        return None
    return Agreement(name, processes, seconds, outline)


class Agreement:
    """Compares an iterator of this process with its counterparts in others.

    Args:
        name: Name of the iterator.
        processes: The processes, including this process.
        seconds: The time to wait for the others.
        outline: As for `agreement_of`.

    Attributes:
        outline: The same.
    """

    def __init__(self, name: str, processes: Sequence[int], seconds: float, outline: Values):
        self._name = name
        self._processes = processes
        self._seconds = seconds
        self.outline = outline
        self._asked = False
        self._told: list[str] = []  # keys of failures
        group = "-".join(map(str, processes))
        self._prefix = f"dalijax/{digest(group.encode())}"
        with _listing:
            _made.add(self)

    def settle(
        self,
        values: Values,
        goal: str = "the next batch",
        batches: Batches | None = None,
        cure: str = "",
    ) -> dict[int, Batches | None]:
        """Waits until every process has come here, and compares.

        Args:
            values: The values that must be equal.
            goal: The point that the processes must reach, for errors.
            batches: The batches of this process.
            cure: What to do about a difference, for errors.

        Returns:
            ``batches`` of each process.

        Raises:
            ProcessError: In every process, if values differ, a process does not come in time, or
                it can't come.
        """
        client = _client()
        for failure in self._told:  # this process comes after all
            client.key_value_delete(failure)
        self._told.clear()
        own = Offer(jax.process_index(), next(_numbers), values, batches)
        key = f"{own.process}/{own.number}"
        self._asked = True
        client.key_value_set(f"{self._prefix}/offers/{key}", own.to_json())
        settled = False
        try:
            if own.process == self._processes[0]:
                verdict = self._compare(client, own, goal, cure)
            else:
                verdict = self._wait(client, own, goal, cure)
            settled = bool(verdict["batches"])
        finally:
            if not settled:  # after Ctrl-C, say, no process must find the offer
                client.key_value_delete(f"{self._prefix}/offers/{key}")
        if verdict["error"]:
            raise ProcessError(verdict["error"])
        every = verdict["batches"].items()
        return {int(process): found and Batches(*found) for process, found in every}

    def tell(self, error: BaseException) -> None:
        """Tells the other processes that this one does not come, because of an error."""
        client, own = _client(), jax.process_index()
        if client is None:
            return
        text = json.dumps([self.outline, f"{type(error).__name__}: {error}"[:_LONGEST]])
        number = next(_numbers)
        for process in self._processes:
            if process != own:
                key = f"{self._prefix}/failures/{process}/{own}/{number}"
                client.key_value_set(key, text)
                self._told.append(key)

    def _departed(self, client: Any, own: Offer, goal: str) -> str:
        """The error if a process can't come; "" if none has said so."""
        texts = {}
        for key, text in client.key_value_dir_get(f"{self._prefix}/failures/{own.process}/"):
            outline, error = json.loads(text)
            if all(own.values.get(name) == value for name, value in outline.items()):
                client.key_value_delete(key)
                texts[int(key.split("/")[-2])] = error
        for key, _ in client.key_value_dir_get(f"{_ends}/"):
            process = int(key.split("/")[-1])
            if process in self._processes:
                texts.setdefault(process, "")
        return departure_text(self._name, goal, texts) if texts else ""

    def _offers(self, client: Any) -> list[Offer]:
        """All offers that wait."""
        found = client.key_value_dir_get(f"{self._prefix}/offers/")
        keys = [(*map(int, key.split("/")[-2:]), text) for key, text in found]
        return [Offer.from_json(*key) for key in keys]

    def _compare(self, client: Any, own: Offer, goal: str, cure: str) -> dict[str, Any]:
        """The verdict, by the process that compares."""
        deadline = time.monotonic() + self._seconds
        pause, longest = _PAUSES
        looks = time.monotonic() + _LOOKS
        since: dict[tuple[int, int], float] = {}
        while True:
            now = time.monotonic()
            with _comparing:
                offers = self._offers(client)
                found = counterparts(own, offers, self._processes)
                stuck = [since.setdefault((o.process, o.number), now) for o in found.other.values()]
                waits = [self._patience(offer.values) for offer in found.other.values()]
                certain = all(now - begun >= wait for begun, wait in zip(stuck, waits))
                late = now >= deadline
                if late or (certain and not found.absent):
                    error = self._error(found, offers, goal, cure)
                    return self._conclude(client, found, error)
            if found.absent and now >= looks:
                looks = now + _LOOKS
                if error := self._departed(client, own, goal):
                    return {"error": error, "batches": {}}
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _patience(self, values: Values) -> float:
        """The seconds after which an offer without an equal offer counts as a difference."""
        with _listing:
            agreements = list(_made)
        expected = any(
            all(values.get(name) == value for name, value in made.outline.items())
            for made in agreements
            if not made._asked and made is not self
        )
        return _PATIENCE[expected]

    def _error(self, found: Round, offers: Sequence[Offer], goal: str, cure: str) -> str:
        """The error of a round; "" if all agree."""
        texts = []
        if found.absent:
            texts.append(absence_text(self._name, goal, found.absent, offers, self._seconds, cure))
        if found.other:
            texts.append(difference_text(self._name, found.offers, cure))
        return ". ".join(texts)

    def _conclude(self, client: Any, found: Round, error: str) -> dict[str, Any]:
        """Gives each process of a round the verdict."""
        offers: Iterable[Offer] = found.offers.values()
        verdict = {"error": error, "batches": {o.process: o.batches for o in offers}}
        text = json.dumps(verdict)
        for offer in offers:
            key = f"{offer.process}/{offer.number}"
            client.key_value_delete(f"{self._prefix}/offers/{key}")
            if offer.process != self._processes[0]:
                client.key_value_set(f"{self._prefix}/verdicts/{key}", text)
        result: dict[str, Any] = json.loads(text)
        return result

    def _wait(self, client: Any, own: Offer, goal: str, cure: str) -> dict[str, Any]:
        """The verdict, by a process that waits for it."""
        key = f"{self._prefix}/verdicts/{own.process}/{own.number}"
        deadline = time.monotonic() + self._seconds + _LATER
        while (left := deadline - time.monotonic()) > 0:
            try:
                text = client.blocking_key_value_get(key, max(1, int(1000 * min(left, _SLICE))))
            except RuntimeError as error:  # JaxRuntimeError, of the service
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if departed := self._departed(client, own, goal):
                    return {"error": departed, "batches": {}}
                continue
            client.key_value_delete(key)
            verdict: dict[str, Any] = json.loads(text)
            return verdict
        offers = self._offers(client)
        found = counterparts(own, offers, self._processes)
        # The process that compares has not come: it would have given a verdict.
        absent = sorted({self._processes[0], *found.absent})
        return {
            "error": absence_text(self._name, goal, absent, offers, self._seconds, cure),
            "batches": {},
        }
