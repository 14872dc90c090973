"""`Draw`: random numbers of a graph that belong to the records of a batch.

A number is a function of (seed, epoch, record, name), computed in NumPy and handed to the graph as
an input: so it is the same on any shard, device or batch, and needs no state.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from .. import replacements
from ..arguments import knows_its_names
from ..dtypes import dali_type
from .hashing import Bits, column_keys, uniform

# Numbers from 0 up to and without 1, float32 [rows, columns], and the pictures' heights and widths,
# int32 [rows, 2], or None: to an array [rows, ...].
Compute = Callable[[NDArray[np.float32], Any], NDArray[Any]]
_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)
_MOST_PACKED = 64  # values of an output that shares an input of the graph


def _size(shape: Sequence[int]) -> int:
    """The number of values of a shape.

    Raises:
        TypeError, ValueError: If it is none.
    """
    if not isinstance(shape, Sequence):
        raise TypeError(
            f"shape must be a tuple of whole numbers, such as ({shape!r},), not {shape!r}"
        )
    if not all(isinstance(extent, (int, np.integer)) and extent >= 0 for extent in shape):
        raise ValueError(f"shape must be whole numbers, 0 or more, not {shape}")
    return math.prod(shape)


def _packs(forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[list[int]]:
    """Numbers of outputs, small ones of a dtype together: they are one input of the graph.

    DALI takes 60 us of the loop's thread for each input, and cuts one in the pipeline's threads.
    """
    packs: dict[str, list[int]] = {}
    for number, (shape, dtype) in enumerate(forms):
        small = 0 < math.prod(shape) <= _MOST_PACKED
        packs.setdefault(dtype.name if small else str(number), []).append(number)
    return list(packs.values())


def joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [rows, ...] one behind another, [rows, numbers]; a single one as it is."""
    if len(arrays) == 1:
        return arrays[0]
    return np.hstack([a.reshape(len(a), math.prod(a.shape[1:])) for a in arrays])


def part_of(numbers: Any, shapes: Sequence[tuple[int, ...]], k: int) -> DataNode:
    """The k-th of the arrays of some shapes that are `joined` for each sample."""
    first, shape = sum(map(math.prod, shapes[:k])), shapes[k]
    part = numbers[first : first + math.prod(shape)] if shape else numbers[first]
    if len(shape) > 1:
        part = fn.reshape(part, shape=list(shape))
    node: DataNode = part
    return node


def check_draw(draw: Any) -> None:
    """Raises TypeError unless it is a `Draw`."""
    if not isinstance(draw, Draw):
        raise TypeError(
            f"draw must be the draw that the graph's function gets, not {draw!r}: give the "
            "function a parameter of that name, and pass it on"
        )


def check_numbers(call: str, **values: Any) -> None:
    """Checks that arguments are numbers.

    Args:
        call: The call with numbers, for the message: "draw.uniform(-10, 10)".
        **values: The arguments.

    Raises:
        TypeError: If one is not a number.
    """
    for name, value in values.items():
        if not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{name} must be a number, not {value!r}: write {call}")


def check_share(name: str, value: float) -> None:
    """Raises TypeError or ValueError unless a value is a probability."""
    check_numbers(f"{name}=0.5", **{name: value})
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {value}")


def _outputs(
    name: str, function: Callable[..., Sequence[Any]], count: int, *arguments: Any
) -> list[Any]:
    """What a draw's function gives, an array for each output."""
    try:
        given = [*function(*arguments)]
    except StopIteration as error:  # which would end the epoch
        raise RuntimeError(f"the function of the draw {name!r} stopped") from error
    if len(given) != count:
        raise ValueError(
            f"the function of the draw {name!r} gave {len(given)} arrays, not {count}: give one "
            "for each output"
        )
    return given


def _check_pure(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raises ValueError where two calls of a function with the same did not give the same anew.

    Threads call it for several batches at once: an array that is written again would have numbers
    of another batch.
    """
    for one, other in zip(first, second):
        reused = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        if reused and one.flags.writeable and np.may_share_memory(one, other):
            raise ValueError(
                f"the function of the draw {name!r} gives the same array at each call, which "
                "threads that draw ahead would write over: return a new one, e.g. array.copy()"
            )
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            raise ValueError(
                f"the function of the draw {name!r} gave other numbers when it was called again "
                "with the same: no state could go on with it. Make all of the numbers and sizes "
                "that it gets"
            )


def _both(first: Any, second: Any) -> str:
    """Two numbers as a call takes them; a pair that was passed as the first one is unpacked."""
    pair = first if isinstance(first, (tuple, list)) and len(first) == 2 else (first, second)
    return f"{pair[0]!r}, {pair[1]!r}"


def _raise(row: int, error: Exception) -> None:
    raise error


@dataclasses.dataclass(frozen=True)
class DrawRows:
    """The rows of one run of a pipeline, as far as drawing goes.

    Attributes:
        records: A hash of the seed, epoch and record of each row, shape [rows].
        sizes: Heights and widths of the pictures of a field, int32 [rows, 2].
        refuse: Called with a row whose record can't be augmented, and why.
        ahead: Gives what a draw of a name computes, where it may have been computed before the
            pipeline asks for it.
    """

    records: Bits
    sizes: Callable[[str], NDArray[np.int32]]
    refuse: Callable[[int, Exception], None] = _raise
    ahead: Callable[[str, DrawFunction], Sequence[Any]] | None = None

    def drawn(self, name: str, function: DrawFunction) -> Sequence[Any]:
        """What a draw gives for the rows, an array or DALI's batch for each of its outputs."""
        return function(self) if self.ahead is None else self.ahead(name, function)


# What a draw computes: an array of [rows, ...] for each of its outputs.
DrawFunction = Callable[[DrawRows], list[NDArray[Any]]]
DRAW = "draw"  # the parameter of a graph that gets it
_DRAW = "_dalijax_draw"
# Methods of NumPy's and JAX's generators.
_OF_NUMPY = {
    **dict.fromkeys(("randint", "integers", "categorical"), "choice(range(10))"),
    **dict.fromkeys(("bernoulli", "binomial"), "coin_flip(probability)"),
    **dict.fromkeys(("rand", "random", "range"), "uniform(low, high)"),
    **dict.fromkeys(("randn", "gaussian"), "normal(mean, stddev)"),
}


def _draw_of(pipeline: Pipeline | None) -> Draw | None:
    draw: Draw | None = None if pipeline is None else vars(pipeline).get(_DRAW)
    return draw


def described_draws(pipeline: Pipeline) -> list[tuple[str, str, dict[str, Any]]]:
    """The kind, the name and the settings of each draw of a pipeline, as of an operator.

    No operator has the settings of a draw as its arguments: without them, a state of another
    augmentation would be restored.
    """
    draw = _draw_of(pipeline)
    return [] if draw is None else draw.described()


def draw_inputs(pipeline: Pipeline) -> dict[str, str]:
    """The operators that a pipeline's random numbers come by: labels by DALI's names."""
    draw = _draw_of(pipeline)
    return {} if draw is None else dict(draw._inputs)


def draw_of_pipeline() -> Draw | None:
    """The draw of the pipeline that is being defined, if its records have numbers."""
    return _draw_of(Pipeline.current())


class Draw:
    """Draws numbers that belong to records: the ``draw`` of a graph over records or a source.

    Each method gives a DataNode, an input of operators, with one value for each sample::

        angle = draw.uniform(-10, 10)
        images = fn.rotate(images, angle=angle)

    A draw has a name. Those without one are numbered in the order of their calls, so that a draw
    that is added in front of them changes the numbers of all that follow; a name keeps them.

    Functions of the graph that want a key get one of such numbers, too.

    Args:
        rows: Gives the rows of a run of the pipeline, by the run's number, for the draw of a name.
        fields: The field of each input of the graph, by the name of its node.
        sized: Gets each field whose pictures' sizes are asked for; True: those of the files that it
            has paths of.
    """

    def __init__(
        self,
        rows: Callable[[int, str], DrawRows],
        fields: Mapping[str, str],
        sized: dict[str, bool] | None = None,
    ):
        self._rows = rows
        self._fields = fields
        self._sized = {} if sized is None else sized
        self._draws: dict[str, Mapping[str, Any]] = {}  # settings, by the draw's name
        self._inputs: dict[str, str] = {}  # labels of the operators that give them
        # By the name of a node of images: a field whose pictures have their sizes, or one size.
        self._sizes: dict[str, str | NDArray[np.int32]] = {}
        pipeline = Pipeline.current()
        if pipeline is not None:  # an attribute: a table of ours would keep the pipeline
            vars(pipeline)[_DRAW] = self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise replacements.no_attribute("draw", name, dir(type(self)), _OF_NUMPY)

    @do_not_convert
    @knows_its_names
    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        shape: Sequence[int] = (),
        name: str | None = None,
    ) -> DataNode:
        """Numbers from ``low`` up to and without ``high``, float32 of the given shape.

        Args:
            low: The least.
            high: The bound.
            shape: Shape for each sample; (): a scalar.
            name: The draw's name.
        """
        check_numbers(f"uniform({_both(low, high)})", low=low, high=high)
        width = float(high) - float(low)
        if not math.isfinite(width) or width < 0:
            raise ValueError(f"low must be at most high, and both finite: not {low}, {high}")

        def scaled(u: NDArray[np.float32], _: Any) -> NDArray[np.float32]:
            # In double precision, and rounded once: alike on every CPU.
            return (u.astype(np.float64) * width + low).astype(np.float32)

        settings = {"low": low, "high": high}
        return self.compute(scaled, shape, _FLOAT, settings=settings, name=name)

    @do_not_convert
    @knows_its_names
    def normal(
        self,
        mean: float = 0.0,
        stddev: float = 1.0,
        *,
        shape: Sequence[int] = (),
        name: str | None = None,
    ) -> DataNode:
        """Numbers of a normal distribution, float32 of the given shape; at most 5.8 stddev off.

        Args:
            mean: The mean.
            stddev: The standard deviation, 0 or more.
            shape: Shape for each sample; (): a scalar.
            name: The draw's name.
        """
        check_numbers(f"normal({_both(mean, stddev)})", mean=mean, stddev=stddev)
        if not (math.isfinite(mean) and math.isfinite(stddev) and stddev >= 0):
            raise ValueError(
                f"mean and stddev must be finite, stddev not below 0: {mean}, {stddev}"
            )

        def box_muller(u: NDArray[np.float32], _: Any) -> NDArray[np.float32]:
            first, second = np.split(u.astype(np.float64), 2, axis=1)
            radius = np.sqrt(-2.0 * np.log(1.0 - first))
            return (radius * np.cos(2 * np.pi * second) * stddev + mean).astype(np.float32)

        return self.compute(
            box_muller,
            shape,
            _FLOAT,
            columns=2 * _size(shape),
            settings={"mean": mean, "stddev": stddev},
            name=name,
        )

    @do_not_convert
    @knows_its_names
    def coin_flip(
        self, probability: float = 0.5, *, shape: Sequence[int] = (), name: str | None = None
    ) -> DataNode:
        """1 with a probability, else 0: int32 of the given shape, as ``fn.random.coin_flip``.

        Args:
            probability: From 0 to 1.
            shape: Shape for each sample; (): a scalar.
            name: The draw's name.
        """
        check_share("probability", probability)
        settings = {"probability": probability}
        return self.compute(lambda u, _: u < probability, shape, _INT, settings=settings, name=name)

    @do_not_convert
    @knows_its_names
    def choice(
        self,
        values: Sequence[float] | NDArray[Any],
        *,
        p: Sequence[float] | None = None,
        shape: Sequence[int] = (),
        name: str | None = None,
    ) -> DataNode:
        """One of some numbers: int32 where they are whole, else float32, of the given shape.

        Args:
            values: The numbers.
            p: The probability of each; None: all alike.
            shape: Shape for each sample; (): a scalar.
            name: The draw's name.
        """
        table = np.asarray(values)
        if table.ndim != 1 or not len(table) or table.dtype.kind not in "biuf":
            raise ValueError(f"values must be a list of numbers, at least one, not {values!r}")
        if table.dtype.kind in "iu" and (table.astype(_INT) != table).any():
            raise ValueError(f"whole values must fit into int32, not {values!r}")
        shares = np.ones(len(table)) if p is None else np.asarray(p, np.float64)
        if shares.shape != table.shape or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
            raise ValueError(f"p must have a probability for each of {len(table)} values, not {p}")
        bounds = np.cumsum(shares / shares.sum())[:-1]
        dtype = _FLOAT if table.dtype.kind == "f" else _INT

        def chosen(u: NDArray[np.float32], _: Any) -> NDArray[Any]:
            return table[np.searchsorted(bounds, u.astype(np.float64), side="right")]

        settings = {"values": table.tolist(), "p": None if p is None else bounds.tolist()}
        return self.compute(chosen, shape, dtype, settings=settings, name=name)

    @do_not_convert
    def compute(
        self,
        function: Compute,
        shape: Sequence[int] = (),
        dtype: Any = _FLOAT,
        *,
        columns: int | None = None,
        images: DataNode | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> DataNode:
        """The values that a function makes of uniform numbers, and of the sizes of pictures.

        Args:
            function: Called with float32 [rows, columns] and the heights and widths of the
                pictures, int32 [rows, 2] (None without ``images``), gives an array of
                [rows, *shape]. It must give the same each time it is called with the same, in a
                new array: over a source threads that read call it, some batches ahead and several
                at once. The first time it is called twice, and refused where it does not.
            shape: Shape for each sample.
            dtype: The dtype that the result gets.
            columns: Numbers that it takes for each sample; None: as many as the shape has.
            images: What ``fn.decoders.image`` gave of a field, or images whose size `sized` says.
            settings: What the function depends on, JSON values: states of others are refused.
            name: The draw's name.

        Raises:
            ValueError: If the name is taken, or another graph is being defined, or none.
            TypeError: If nothing says the sizes of the images.
        """
        return self.compute_outputs(
            lambda u, sizes: (function(u, sizes),),
            [(shape, dtype)],
            columns=_size(shape) if columns is None else columns,
            images=images,
            settings=settings,
            name=name,
        )[0]

    @do_not_convert
    def compute_outputs(
        self,
        function: Callable[[NDArray[np.float32], Any], Sequence[NDArray[Any]]],
        outputs: Sequence[tuple[Sequence[int], Any]],
        *,
        columns: int,
        images: DataNode | None = None,
        unfit: Callable[[NDArray[np.int32]], Mapping[int, str]] | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> tuple[DataNode, ...]:
        """As `compute`, for a function of several outputs.

        Args:
            function: As in `compute`; gives an array of [rows, *shape] for each output.
            outputs: Shape for each sample, and dtype, of each output.
            columns: Numbers that it takes for each sample.
            images: As in `compute`.
            unfit: Called with the sizes of the images, gives a message for each row whose record
                can't be augmented: it counts as a bad record, whatever the function gives.
            settings: As in `compute`.
            name: The draw's name.

        Raises:
            ValueError: If the name is taken, or another graph is being defined, or none.
            TypeError: If nothing says the sizes of the images.
        """
        if draw_of_pipeline() is not self:
            raise ValueError(
                "the draw of another graph, or of one that is defined already: use the one that "
                "the graph's function gets, within that function"
            )
        known = None if images is None else self._sizes_of(images)
        if name is None:
            name = f"#{len(self._draws)}"
        if not isinstance(name, str):
            raise TypeError(f"a draw's name must be text, not {name!r}")
        if name in self._draws:
            raise ValueError(f"two draws have the name {name!r}: give each one of its own")
        for shape, _ in outputs:
            _size(shape)
        keys = column_keys(name, columns)
        rows_of = self._rows
        forms = [(tuple(shape), np.dtype(dtype)) for shape, dtype in outputs]
        form = [[*shape, dtype.name] for shape, dtype in forms]
        self._draws[name] = {"outputs": form, **({} if settings is None else settings)}
        packs = _packs(forms)
        checked = False

        @do_not_convert
        def drawn(rows: DrawRows) -> list[NDArray[Any]]:
            nonlocal checked
            sizes: Any = known
            if isinstance(known, str):
                sizes = rows.sizes(known)
            elif known is not None:
                sizes = np.broadcast_to(known, (len(rows.records), 2))
            for row, text in (unfit(sizes) if unfit else {}).items():
                rows.refuse(row, ValueError(text))

            def call() -> list[Any]:
                own = None if sizes is None else sizes.copy()
                return _outputs(name, function, len(forms), uniform(rows.records, keys), own)

            given = call()
            if not checked:
                _check_pure(name, given, call())
                checked = True
            arrays = [
                np.ascontiguousarray(values, dtype).reshape(len(rows.records), *shape)
                for values, (shape, dtype) in zip(given, forms)
            ]
            return [joined([arrays[k] for k in pack]) for pack in packs]

        nodes = fn.external_source(
            source=lambda run: rows_of(run, name).drawn(name, drawn),
            num_outputs=len(packs),
            batch=True,
            dtype=[dali_type(forms[pack[0]][1]) for pack in packs],
            ndim=[len(forms[pack[0]][0]) if len(pack) == 1 else 1 for pack in packs],
        )
        parts: dict[int, DataNode] = {}
        for node, pack in zip(nodes, packs):
            which = f".{pack[0]}" if len(packs) > 1 else ""
            self._inputs[node.source.name] = f"drawn.{name}{which}"
            shapes = [forms[k][0] for k in pack]
            for place, k in enumerate(pack):
                parts[k] = node if len(pack) == 1 else part_of(node, shapes, place)
        return tuple(parts[k] for k in range(len(forms)))

    def described(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The kind, the name and the settings of each draw; see `described_draws`."""
        return [
            ("draw", f"draw.{name}", {key: _text(value) for key, value in settings.items()})
            for name, settings in self._draws.items()
        ]

    @do_not_convert
    def words(self) -> DataNode:
        """Random bytes that functions of the graph get their keys of, uint8 of shape [8]."""
        return self.compute(lambda u, _: np.floor(u * 256), (8,), np.uint8)

    @do_not_convert
    def sized(self, images: DataNode, like: DataNode | tuple[int, int]) -> DataNode:
        """Says the sizes of images, where a draw depends on them.

        They are known of decoded fields, and behind the functions of ``dalijax.augment``. Else::

            images = draw.sized(fn.resize(images, size=(224, 224)), (224, 224))

        Args:
            images: Images.
            like: Height and width of all of them, in pixels, or images of the same sizes.

        Returns:
            The images.
        """
        if isinstance(like, tuple):
            self._sizes[images.name] = np.array(like, np.int32)
        else:
            try:
                self._sizes[images.name] = self._sizes_of(like)
            except TypeError:  # no draw may depend on them
                self._sizes.pop(images.name, None)
        return images

    def _sizes_of(self, images: DataNode) -> str | NDArray[np.int32]:
        """The field that pictures were decoded from, or the size of all."""
        operator: Any = getattr(images, "source", None)
        # Not public: the operator's name in DALI, and its arguments.
        while (kind := _kind(operator)).endswith("_conditional__Split"):  # in a branch of if
            images = operator.inputs[0]
            operator = images.source
        known = self._sizes.get(getattr(images, "name", ""))
        if known is not None:
            return known
        if kind.endswith("decoders__Image"):
            encoded = operator.inputs[0]
            are_paths = encoded.name not in self._fields and _is_read(encoded)
            if are_paths:
                encoded = encoded.source.inputs[0]
            field = self._fields.get(encoded.name)
            turned = getattr(operator._op, "_init_args", {}).get("adjust_orientation", True)
            if field is not None and turned:
                self._sized[field] = are_paths
                return field
        raise TypeError(
            "the sizes of pictures are known for what fn.decoders.image gives of a record's field, "
            f"with adjust_orientation=True, and not behind {kind}: call it right behind the "
            "decoder, or say their size by draw.sized(images, (height, width))"
        )


def _is_read(node: DataNode) -> bool:
    """Whether a node has the contents of files, of which an input has the paths."""
    return _kind(node.source) == "io__file__Read"


def _kind(operator: Any) -> str:
    """DALI's name of what gave a node."""
    return str(getattr(getattr(operator, "_op", None), "schema_name", "another value"))


def _text(value: Any) -> str:
    """A setting as JSON without spaces; NumPy's numbers become Python's."""
    return json.dumps(
        value, separators=(",", ":"), default=lambda array: np.asarray(array).tolist()
    )
