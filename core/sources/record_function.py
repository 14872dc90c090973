"""`RecordFunction`: the function of a map of a source, with checks that it is pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arguments import qualified_name
from ..messages.printable import printable_repr
from ..random.global_states import drawn_by
from ..state.fingerprint import operator_line
from ..state.purity import changes, reachable_values
from .identity import bytes_of
from .source import SourceFault


class RecordFunction:
    """A function that changes a record, for `Source.map` and `Source.random_map`.

    Args:
        function: The function of a record, or of a record and a generator.
        is_random: Whether the function takes a generator.
        depth: The number of maps between the data and this map.
        place: The number of random maps between the data and this map.
        stateful: Whether the function keeps state; None: it is checked.

    Attributes:
        is_random, depth, place: The arguments of the same names.
        label: The kind and the name of the function, for messages.
        is_compared: Whether two calls for the same record have returned equal values.

    Raises:
        TypeError: If the function can't be called.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        is_random: bool,
        depth: int,
        place: int,
        stateful: bool | None,
    ):
        self._kind = "random_map" if is_random else "map"
        if not callable(function):
            has_method = callable(getattr(function, self._kind, None))  # as Grain's transforms
            cure = f". Pass its method {self._kind}" if has_method else ""
            raise TypeError(
                f"{self._kind}() requires a function of a record, not {printable_repr(function)}"
                f"{cure}"
            )
        self._function, self._stateful = function, stateful
        self.is_random, self.depth, self.place = is_random, depth, place
        self.label = f"{self._kind}({name_of(function)})"
        self.is_compared = False
        self._is_watched = stateful is not None
        self._drawn: set[str] = set()  # the global generators from which the function has drawn
        self._before: dict[str, Any] = {}  # what the function reached after its first calls

    def __getstate__(self) -> dict[str, Any]:
        # The hashes of the values that a function reaches differ between processes.
        return vars(self) | {"is_compared": False, "_before": {}}

    def __call__(self, record: dict[str, Any], *generator: np.random.Generator) -> Any:
        """Returns the function's result for a record, a mapping of fields.

        Raises:
            ValueError: If the function raises any error, such as StopIteration.
            SourceFault: If the function does not return a mapping.
        """
        try:
            returned = self._function(record, *generator)
        except Exception as error:
            cure = ""
            if isinstance(error, (TypeError, AttributeError)) and "ndarray" in str(error):
                cure = ". Fields of bytes are uint8 arrays: convert them by bytes(record[...])"
            raise ValueError(
                f"{self.label} raised {type(error).__name__}: {error}{cure}"
            ) from error
        if isinstance(returned, Mapping):
            return returned
        cure = "A map can't drop records: use dalijax.sources.Selection. " * (returned is None)
        raise SourceFault(
            f"{self.label} returned {printable_repr(returned, 60)}. {cure}Return a dict of fields"
        )

    def compare(self, call: Callable[[], Any]) -> Any:
        """Calls the function twice for the same record, and returns its first result.

        Args:
            call: Calls the function with new, equal arguments.

        Raises:
            SourceFault: If the results differ. The function then depends on earlier calls, the time
                or other random numbers.
        """
        if self._stateful:
            self.is_compared = True
            return call()
        results: list[tuple[Any, dict[str, bytes]]] = []

        def note_result() -> None:
            returned = call()
            # At once, since a further call may change lists that this call returned.
            results.append((returned, {name: _comparable(v) for name, v in returned.items()}))

        if self._stateful is None:
            self._drawn |= drawn_by(note_result)
        while len(results) < 2:
            note_result()
        (first, values), (_, values_again) = results[:2]
        for name, value in values.items():
            if values_again.get(name) != value:
                raise SourceFault(
                    f"{self.label} returned different values of {name!r} for the same record, so "
                    "that batches can't be repeated. Let it depend only on its arguments, and do "
                    "not change these; rng of random_map() provides random numbers"
                )
        if self._stateful is None:
            # After the first calls, which may load a tokenizer.
            self._before = reachable_values(self._function)
        self.is_compared = True
        return first

    def watch(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call that calls the function for several records.

        The first such call detects draws from global generators, of NumPy or Python. It is repeated
        if it seems to draw.
        """
        if self._is_watched:
            return call()
        self._is_watched = True
        results: list[Any] = []
        self._drawn |= drawn_by(lambda: results.append(call()))
        return results[0]

    def kept_state(self) -> str:
        """Returns a description of the state that the function keeps between calls; or ""."""
        if self._stateful is not None:
            return "declared by stateful=True" if self._stateful else ""
        if not self.is_compared:
            return ""  # it was not called in this process
        after = reachable_values(self._function) | dict.fromkeys(self._drawn, "drawn")
        return changes(self._before, after)

    def line(self, part: str) -> str:
        """Returns the line of the function in a state.

        Args:
            part: The part of the mixture that contains the map, such as "0."; "" without a mixture.
        """
        arguments = {"position": f"{part}{self.depth}"}
        if self.is_random:  # NumPy may change the numbers of a Generator in a minor version
            arguments["numpy"] = ".".join(np.__version__.split(".")[:2])
        return operator_line(self._kind, name_of(self._function), arguments)


def _comparable(value: Any) -> bytes:
    """Returns bytes that represent a value; b"" if that is impossible, as for a dict of tuples."""
    try:
        return bytes_of(value)
    except Exception:  # users' objects may raise anything
        return b""


def name_of(function: Any) -> str:
    """Returns a name that is equal in every process: "partial(crop)", or the class of an object."""
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    return qualified_name(function)
