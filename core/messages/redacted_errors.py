"""Removes secrets from the texts of errors and of their causes, which tracebacks contain."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from .redaction import redacted

E = TypeVar("E", bound=BaseException)
Hide = Callable[[str], str]


def redacted_error(
    error: E, urls: Sequence[str] = (), options: Mapping[str, Any] = MappingProxyType({})
) -> E:
    """Returns an error whose text, notes, causes and contexts contain no secrets.

    Args:
        error: The error.
        urls: URLs that the texts may contain; see `redacted`.
        options: Storage options, whose values are replaced by their names.

    Returns:
        The error itself if its own text contains no secrets. Otherwise an error of a subclass, with
        the attributes and the traceback of the error.
    """
    hide = functools.partial(redacted, urls=urls, options=options)
    pairs: dict[int, tuple[Any, Any]] = {}  # each error and its redacted form, by id
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is not None and id(current) not in pairs:
            pairs[id(current)] = current, _with_text(current, hide)
            todo += [current.__cause__, current.__context__]
    for before, after in pairs.values():
        is_suppressed = before.__suppress_context__
        if before.__context__ is not None:
            after.__context__ = pairs[id(before.__context__)][1]
        if before.__cause__ is not None:
            after.__cause__ = pairs[id(before.__cause__)][1]
        after.__suppress_context__ = is_suppressed  # which the assignment of a cause sets
        if notes := getattr(before, "__notes__", ()):
            after.__notes__ = [hide(str(note)) for note in notes]
    result: E = pairs[id(error)][1]
    return result


@contextlib.contextmanager
def without_secrets(urls: Sequence[str], options: Mapping[str, Any]) -> Iterator[None]:
    """Replaces errors that the block raises by their `redacted_error`."""
    try:
        yield
    except Exception as error:
        raise_redacted(error, urls, options)
        raise


def raise_redacted(
    error: Exception, urls: Sequence[str] = (), options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises the `redacted_error` of an error, unless it is the error itself."""
    redacted_form = redacted_error(error, urls, options)
    if redacted_form is not error:
        context, is_suppressed = redacted_form.__context__, redacted_form.__suppress_context__
        try:
            raise redacted_form
        finally:  # the context is now the error itself, whose handler calls this function
            redacted_form.__context__ = context
            redacted_form.__suppress_context__ = is_suppressed
            del redacted_form, error, context  # the traceback refers to this frame


def _with_text(error: Any, hide: Hide) -> Any:
    """Returns an error with redacted texts, or the error itself if its texts have no secrets."""
    try:
        texts = str(error), repr(error)
    except Exception:  # a faulty method of a user's class
        return error
    shown = tuple(map(hide, texts))
    if shown == texts:
        return error
    result = _stand_in(type(error), *shown)
    result.__dict__.update(vars(error))
    if isinstance(error, OSError) and isinstance(result, OSError):
        result.errno = error.errno
    return result.with_traceback(error.__traceback__)


def _stand_in(kind: type[BaseException], text: str, representation: str) -> BaseException:
    """Returns an error of a subclass, with the name and module of a class of errors.

    The constructor and ``__str__`` of the class are not called, because they may have any form.
    """
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": lambda self: text,
        "__repr__": lambda self: representation,
        "__reduce__": lambda self: (_stand_in, (kind, text, representation)),
    }
    try:
        subclass: Any = type(kind.__name__, (kind,), members)
        result: BaseException = subclass.__new__(subclass)
    except TypeError:  # the class can't be subclassed, or can't be created without arguments
        return RuntimeError(representation)
    result.args = (text,)
    return result
