"""Records the functions of a graph, so that iterators can detect functions that keep state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import qualified_name
from ..pipeline.function_notes import FunctionNote, add
from ..random.global_states import changed_by
from ..state.purity import changes, reachable_values


def note(
    function: Callable[..., Any], stateful: bool | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a `FunctionNote` of a function to the pipeline that is being defined.

    The function must be pure unless ``stateful`` is given. Iterators can't return a state if the
    function changes a value that it reaches, or if its first call changes the global random state
    of NumPy or Python. The check of the random state is a false alarm if another thread draws from
    a global generator during the first call.

    Args:
        function: The function.
        stateful: Whether the function keeps state; None: it is checked.

    Returns:
        A decorator for the callback that calls the function. The decorated callback compares the
        global random state before and after its first call, if the function is checked.
    """
    drawn: list[set[str]] = []  # global generators that changed during the first call

    def kept_state(before: Mapping[str, Any]) -> str:
        if stateful is not None:
            return "declared by stateful=True" if stateful else ""
        generators = dict.fromkeys(set[str]().union(*drawn), "drawn")
        return changes(before, reachable_values(function) | generators)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if drawn:  # only the first call is checked
                return call(*arguments)
            results: list[Any] = []
            drawn.append(changed_by(lambda: results.append(call(*arguments))))
            return results[0]

        run.__qualname__ = qualified_name(call)
        return run if stateful is None else call

    before = reachable_values(function) if stateful is None else {}
    add(FunctionNote(qualified_name(function), before, kept_state))
    return watched
