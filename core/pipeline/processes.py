"""Agreement between the processes of `jax.distributed` on the descriptions of their iterators.

Processes exchange descriptions by the key-value store of JAX's coordination service, and use no
device: every process would have to call a collective in the same order as the user's collectives,
and it might deadlock with a step in another thread. The lowest process of a sharding compares the
descriptions, so that the number of calls is linear in the number of processes::

    each process   dalijax/GROUP/offers/PROCESS/NUMBER     its description, an `Offer`
    the lowest     dalijax/GROUP/verdicts/PROCESS/NUMBER   for each process: agreed, or the error

A process that can't take part notifies the others, so that they do not wait for it::

    a next() that raised    dalijax/GROUP/failures/PROCESS/FROM/NUMBER   for each process: the error
    the end of a program    dalijax/ends/FROM

A process that moves, e.g. by seek(), waits for the others before its next batch. The others see the
move in their next call of next(), and raise an error if they have not moved after the same batch::

    a move                  dalijax/GROUP/moves/ROUND/FROM   batches since the round, new position
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from ..arrays.placement import placement_text
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
    move_text,
    repeated_host,
    repeated_host_text,
)
from ..state.envelope import digest

__all__ = ["Agreement", "agreement_of", "is_one_of_several"]

_SECONDS = 300.0  # the default timeout of jax.distributed.initialize
_SLICE = 1.0  # seconds between checks for Ctrl-C while waiting
_PAUSES = (0.0005, 0.25)  # shortest and longest pause of the comparing process between checks
# Seconds after which another process's offer counts as different, if this process has no equal
# offer: another thread of this process may be about to make the equal offer. The second number
# applies if an iterator of this process has the same outline, and has made no offer yet.
_PATIENCE = (1.0, 60.0)
_LOOKS = 0.25  # seconds between checks whether a process can't take part
_LATER = 5.0  # additional seconds that the other processes wait for the comparing process
_LONGEST = 2000  # characters of an error sent to other processes
_LONGEST_PLACEMENT = 200  # characters of a sharding in an error

_numbers = itertools.count()
_comparing = threading.Lock()  # one comparison at a time: threads may compare several iterators
# Weak, so that it does not keep iterators alive.
_agreements: weakref.WeakSet[Agreement] = weakref.WeakSet()
_ends = "dalijax/ends"
_listing = threading.Lock()  # guards `_agreements`, which must not change while it is iterated


def _global_state() -> Any:
    """Returns JAX's object with the client of the coordination service and the process's index."""
    # Private in JAX; jax.experimental.multihost_utils only offers collectives.
    from jax._src import distributed

    return getattr(distributed, "global_state", None)


def _client() -> Any:
    """Returns the client of JAX's coordination service; None if the service was not started."""
    return getattr(_global_state(), "client", None)


def is_one_of_several() -> bool:
    """Returns whether `jax.distributed` has several processes, without initializing devices."""
    started = getattr(jax.distributed, "is_initialized", lambda: False)  # since JAX 0.4.36
    return (started() or _client() is not None) and jax.process_count() > 1


@atexit.register  # registered after JAX's handler, so that it runs earlier
def _tell_end() -> None:
    """Notifies the other processes that this process ends, and will take no further batch."""
    client, process = _client(), getattr(_global_state(), "process_id", None)
    if client is not None and process is not None:
        with contextlib.suppress(Exception):  # the service may have ended already
            client.key_value_set(f"{_ends}/{process}", "", allow_overwrite=True)


def _shardings(config: IteratorConfig) -> dict[str, Sharding]:
    """Returns the shardings of outputs by name; see `IteratorConfig.shardings`."""
    return {name: s for name, s in config.shardings.items() if isinstance(s, Sharding)}


def _placement(config: IteratorConfig) -> dict[str, str]:
    """Returns descriptions of an iterator's shardings, by name, as values to compare."""
    texts = {}
    for name, sharding in _shardings(config).items():
        text = placement_text(sharding)
        if len(text) > _LONGEST_PLACEMENT:
            text = f"{text[:_LONGEST_PLACEMENT]}... ({digest(text.encode())})"
        texts[f"sharding of {name}" if name else "sharding"] = text
    return texts


def _processes_of(config: IteratorConfig) -> tuple[int, ...]:
    """Returns the indices of a global batch's processes; empty if this process has all of it."""
    if config.over_processes:
        devices: set[Any] = {d for s in _shardings(config).values() for d in s.device_set}
        return tuple(sorted({device.process_index for device in devices}))
    # For another number of hosts, the process of a host is unknown.
    if config.hosts[1] > 1 and is_one_of_several() and config.hosts[1] == jax.process_count():
        return tuple(range(config.hosts[1]))
    return ()


def agreement_of(config: IteratorConfig, name: str, outline: Values) -> Agreement | None:
    """Returns the `Agreement` of a new iterator; None without other processes, or if disabled.

    Args:
        config: Arguments of the iterator.
        name: Name of the iterator, for errors.
        outline: Values to compare that are known without reading and without pipelines.
    """
    seconds = _SECONDS if config.check_processes is True else float(config.check_processes)
    if not seconds:
        return None
    processes = _processes_of(config)
    if len(processes) < 2 or jax.process_index() not in processes or _client() is None:
        return None
    epochs = {
        "epochs": "no end" if config.epochs is None else config.epochs,
        "auto_reset": str(config.auto_reset),
    }
    host = -1 if config.over_processes else config.hosts[0]
    return Agreement(name, processes, seconds, {**outline, **epochs, **_placement(config)}, host)


class Agreement:
    """Compares an iterator of this process with its counterparts in other processes.

    Args:
        name: Name of the iterator, for errors.
        processes: Indices of the processes to compare, including this process.
        seconds: Seconds to wait for the other processes.
        outline: Values to compare that are known without reading and without pipelines.
        host: The index of the host whose rows the process delivers, which no other process may
            deliver; -1 if a sharding determines the rows.

    Attributes:
        outline: The argument ``outline``.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[int],
        seconds: float,
        outline: Values,
        host: int = -1,
    ):
        self._name = name
        self._host = host
        self._processes = processes
        self._seconds = seconds
        self.outline = outline
        self._has_offered = False
        self._failure_keys: list[str] = []  # keys of errors sent to other processes
        self._last_round = ""  # the number of the last comparison
        # The comparison since which the engine counts batches; "" before the first.
        self._round = ""
        self._move_key = ""  # key of this process's move since the round, if any
        group = "-".join(map(str, processes))
        self._prefix = f"dalijax/{digest(group.encode())}"
        with _listing:
            _agreements.add(self)

    def agree(
        self,
        values: Values,
        goal: str = "the next batch",
        batches: Batches | None = None,
        cure: str = "",
    ) -> dict[int, Batches | None]:
        """Waits for all processes, compares their values, and returns their ``batches``.

        Args:
            values: The values that must be equal. They replace those of the outline.
            goal: The point that the processes must reach, for errors.
            batches: The batches of this process.
            cure: The fix for a difference, for errors.

        Returns:
            The argument ``batches`` of each process, by the index of the process.

        Raises:
            ProcessError: In every process, if values differ, or a process is late or can't take
                part.
        """
        client = _client()
        for failure in self._failure_keys:  # this process takes part after all
            client.key_value_delete(failure)
        self._failure_keys.clear()
        values = {**self.outline, **values}
        offer = Offer(jax.process_index(), next(_numbers), values, batches, self._host)
        key = f"{offer.process}/{offer.number}"
        self._has_offered = True
        client.key_value_set(f"{self._prefix}/offers/{key}", offer.to_json())
        agreed = False
        try:
            if offer.process == self._processes[0]:
                verdict = self._compare(client, offer, goal, cure)
            else:
                verdict = self._wait(client, offer, goal, cure)
            agreed = bool(verdict["batches"])
            self._last_round = str(verdict.get("round", ""))
        finally:
            if not agreed:  # e.g. after Ctrl-C: other processes must not find the offer
                client.key_value_delete(f"{self._prefix}/offers/{key}")
        if verdict["error"]:
            raise ProcessError(verdict["error"])
        batches_by_process = verdict["batches"].items()
        return {
            int(process): batch_values and Batches(*batch_values)
            for process, batch_values in batches_by_process
        }

    def begin_round(self) -> None:
        """Begins a round after the last `agree`, in which the positions were equal."""
        self.retract_move()
        self._round = self._last_round

    def tell_move(self, batches: int, position: str) -> None:
        """Notifies the other processes that this process has moved.

        Args:
            batches: The number of batches of this process since the last round.
            position: The new position, for errors.
        """
        if self._round:
            self._move_key = f"{self._prefix}/moves/{self._round}/{jax.process_index()}"
            text = json.dumps([batches, position])
            _client().key_value_set(self._move_key, text, allow_overwrite=True)

    def retract_move(self) -> None:
        """Withdraws the notification of `tell_move`, if there is one."""
        if self._move_key:
            _client().key_value_delete(self._move_key)
            self._move_key = ""

    def continue_round(self, other: Agreement) -> None:
        """Continues the round of another iterator with the same outline."""
        self._round, self._move_key = other._round, other._move_key

    def check_moves(self, batches: int) -> None:
        """Checks that no other process moved after a batch after which this process did not move.

        Assumes that this process has not moved since the last round. Does nothing in a thread that
        prefetches: it may request a batch before the main thread moves.

        Args:
            batches: The number of batches of this process since the last round.

        Raises:
            ProcessError: If a process did. The other processes are notified.
        """
        self.retract_move()  # the move was interrupted or refused
        if threading.current_thread() is not threading.main_thread():
            return
        for key, text in _client().key_value_dir_get(f"{self._prefix}/moves/{self._round}/"):
            num_before, position = json.loads(text)
            if num_before <= batches:
                process = int(key.split("/")[-1])
                error = ProcessError(
                    move_text(self._name, process, jax.process_index(), num_before, position)
                )
                self.tell(error)
                raise error

    def tell(self, error: BaseException) -> None:
        """Notifies the other processes that this process can't take part because of an error."""
        client, index = _client(), jax.process_index()
        if client is None:
            return
        text = json.dumps([self.outline, f"{type(error).__name__}: {error}"[:_LONGEST]])
        number = next(_numbers)
        for process in self._processes:
            if process != index:
                key = f"{self._prefix}/failures/{process}/{index}/{number}"
                client.key_value_set(key, text)
                self._failure_keys.append(key)

    def _departed(self, client: Any, offer: Offer, goal: str) -> str:
        """Returns an error text if a process has notified that it can't take part; otherwise ""."""
        texts = {}
        for key, text in client.key_value_dir_get(f"{self._prefix}/failures/{offer.process}/"):
            outline, error = json.loads(text)
            if all(offer.values.get(name) == value for name, value in outline.items()):
                client.key_value_delete(key)
                texts[int(key.split("/")[-2])] = error
        for key, _ in client.key_value_dir_get(f"{_ends}/"):
            process = int(key.split("/")[-1])
            if process in self._processes:
                texts.setdefault(process, "")
        return departure_text(self._name, goal, texts) if texts else ""

    def _offers(self, client: Any) -> list[Offer]:
        """Returns the pending offers of all processes, which are in the key-value store."""
        entries = client.key_value_dir_get(f"{self._prefix}/offers/")
        offers = []
        for key, text in entries:
            process, number = map(int, key.split("/")[-2:])
            offers.append(Offer.from_json(process, number, text))
        return offers

    def _compare(self, client: Any, offer: Offer, goal: str, cure: str) -> dict[str, Any]:
        """Compares the offers, in the lowest process, and returns the verdict.

        Returns:
            The verdict: {"error": message or "", "batches": `Batches` by process, "round": number
            of the round}.
        """
        deadline = time.monotonic() + self._seconds
        pause, longest = _PAUSES
        looks = time.monotonic() + _LOOKS
        since: dict[tuple[int, int], float] = {}
        while True:
            now = time.monotonic()
            with _comparing:
                offers = self._offers(client)
                matching = counterparts(offer, offers, self._processes)
                stuck = [
                    since.setdefault((o.process, o.number), now)
                    for o in matching.different.values()
                ]
                waits = [self._patience(offer.values) for offer in matching.different.values()]
                certain = all(now - start >= wait for start, wait in zip(stuck, waits))
                late = now >= deadline
                if late or (certain and not matching.absent):
                    error = self._error(matching, offers, goal, cure)
                    return self._conclude(client, matching, error)
            if matching.absent and now >= looks:
                looks = now + _LOOKS
                if error := self._departed(client, offer, goal):
                    return {"error": error, "batches": {}}
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _patience(self, values: Values) -> float:
        """Returns how many seconds to wait until this process makes an offer with equal values."""
        with _listing:
            agreements = list(_agreements)
        expected = any(
            all(values.get(name) == value for name, value in agreement.outline.items())
            for agreement in agreements
            if not agreement._has_offered and agreement is not self
        )
        return _PATIENCE[expected]

    def _error(self, matching: Round, offers: Sequence[Offer], goal: str, cure: str) -> str:
        """Returns the error text of a comparison; "" if all processes agree."""
        texts = []
        if matching.absent:
            texts.append(
                absence_text(self._name, goal, matching.absent, offers, self._seconds, cure)
            )
        if matching.different:
            texts.append(difference_text(self._name, matching.offers, cure))
        elif repeated := repeated_host(matching.offers):
            texts.append(repeated_host_text(self._name, repeated))
        return ". ".join(texts)

    def _conclude(self, client: Any, matching: Round, error: str) -> dict[str, Any]:
        """Sends the verdict of a comparison to each process, and returns the verdict."""
        offers: Iterable[Offer] = matching.offers.values()
        verdict = {
            "error": error,
            "batches": {o.process: o.batches for o in offers},
            "round": matching.offers[self._processes[0]].number,
        }
        text = json.dumps(verdict)
        for offer in offers:
            key = f"{offer.process}/{offer.number}"
            client.key_value_delete(f"{self._prefix}/offers/{key}")
            if offer.process != self._processes[0]:
                client.key_value_set(f"{self._prefix}/verdicts/{key}", text)
        result: dict[str, Any] = json.loads(text)
        return result

    def _wait(self, client: Any, offer: Offer, goal: str, cure: str) -> dict[str, Any]:
        """Waits for the verdict of the lowest process; returns it, or an error if none comes."""
        key = f"{self._prefix}/verdicts/{offer.process}/{offer.number}"
        deadline = time.monotonic() + self._seconds + _LATER
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                text = client.blocking_key_value_get(
                    key, max(1, int(1000 * min(remaining, _SLICE)))
                )
            except RuntimeError as error:  # JaxRuntimeError of the service
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if departed := self._departed(client, offer, goal):
                    return {"error": departed, "batches": {}}
                continue
            client.key_value_delete(key)
            verdict: dict[str, Any] = json.loads(text)
            return verdict
        offers = self._offers(client)
        matching = counterparts(offer, offers, self._processes)
        # The comparing process is absent, otherwise it would have sent a verdict.
        absent = sorted({self._processes[0], *matching.absent})
        return {
            "error": absence_text(self._name, goal, absent, offers, self._seconds, cure),
            "batches": {},
        }
