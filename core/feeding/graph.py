"""A graph's function over the fields of a source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nvidia.dali import fn
from nvidia.dali.fn.io import file

from ..config import name_of
from ..dtypes import dali_type
from ..random.draw import DRAW, Draw, DrawRows
from ..replacements import for_name
from ..sources.source import Field
from ..state.operators import FIELD, Operator, Picture, picture_inputs


class Feeder(Protocol):
    """What a pipeline is fed with; see `dalijax.core.feeding.read_ahead.Rows`."""

    def inputs(self, run: int, part: int, name: str) -> Any:
        """A field of the records of a run, as DALI takes it."""
        ...

    def draw_rows(self, run: int, part: int) -> DrawRows:
        """What numbers are drawn for in a run."""
        ...


class FieldGraph:
    """A graph's function, whose parameters are fields of records, ``draw`` and settings.

    Args:
        function: The function.
        fields: The fields of the source.
        settings: Its other arguments.

    Attributes:
        function: The function.
        taken: The fields that it takes.
        passed: Those that pass it by: text, dicts and the like.
        pictures: The fields that its decoders decode. Empty until `learn` has seen it built.

    Raises:
        TypeError: If a parameter is neither a field nor among the settings, or it takes no field
            and no draw.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        fields: Mapping[str, Field],
        settings: Mapping[str, Any],
    ):
        self.function = function
        self._fields = fields
        self._settings = dict(settings)
        name = name_of(function).removesuffix("()")
        parameters = inspect.signature(function).parameters
        missing = [
            k
            for k, one in parameters.items()
            if one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            and k not in {*fields, *settings, DRAW}
        ]
        if missing:
            cures = filter(None, (for_name(k, [*fields, DRAW], {}) for k in missing))
            meant = f" ({'; '.join(cures)})".replace(" ()", "")
            raise TypeError(
                f"{name}() needs {missing}{meant}, which the records do not "
                f"have: the fields of the source are {sorted(fields)}, and 'draw' has random "
                "numbers. Pass other arguments by keyword in the call"
            )
        self.taken = [k for k in fields if k in parameters and k not in settings]
        self.passed = [k for k, field in fields.items() if field.dtype is None]
        self.pictures: dict[str, Picture] = {}
        self._draws = DRAW in parameters and DRAW not in settings
        for field in self.taken:
            if fields[field].dtype is None:
                raise TypeError(
                    f"{name}() takes the field {field!r}, for which DALI has no type: it is text, "
                    "an object, or of a dtype like bfloat16. Such fields pass the graph by, into "
                    "the batch. Leave the parameter out, or have the records give arrays of "
                    "numbers, or bytes: path.encode()"
                )
        if not self.taken and not self._draws:
            raise TypeError(
                f"{name}() takes no field of the source: name its parameters like the fields that "
                f"it decodes, {sorted(fields)}"
            )
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    @property
    def names(self) -> list[str]:
        """The fields that are read."""
        return [*self.taken, *self.passed]

    def learn(self, operators: Sequence[Operator]) -> None:
        """Finds its pictures among the operators of a pipeline that was built of it."""
        nodes = picture_inputs(operators)
        own = {f"{FIELD}{name}": name for name in self.taken}
        self.pictures.update({own[node]: taken for node, taken in nodes.items() if node in own})

    def __call__(self, feeder: Feeder, part: int = 0) -> Any:
        """Defines the graph of one pipeline.

        Args:
            feeder: What the pipelines are fed with.
            part: The pipeline's number.
        """
        nodes: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name in self.taken:
            field = self._fields[name]
            # Without a copy: nobody writes to what was read, and DALI keeps it alive.
            node = fn.external_source(
                source=_inputs(feeder, part, name),
                name=f"{FIELD}{name}",  # by which a state knows what goes where
                batch=True,
                dtype=dali_type(field.dtype),  # type: ignore[arg-type]
                ndim=field.ndim,
                no_copy=True,
            )
            # Mapping small files takes twice as long as reading them.
            nodes[name] = file.read(node, dont_use_mmap=True) if field.is_path else node
            names[nodes[name].name] = name
        sized: dict[str, bool] = {}
        draw = Draw(lambda run, _: feeder.draw_rows(run, part), names, sized)
        if self._draws:
            nodes[DRAW] = draw
        outputs = self.function(**nodes, **self._settings)
        for name in (name for name, are_paths in sized.items() if are_paths):
            self.pictures.setdefault(name, Picture(is_path=True))
        return outputs


def _inputs(feeder: Feeder, part: int, name: str) -> Callable[[int], Any]:
    """A source of ``fn.external_source``, which asks for a run."""
    return lambda run: feeder.inputs(run, part, name)
