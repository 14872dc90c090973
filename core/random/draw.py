"""Random numbers in DALI graphs that depend only on the record.

A number is a function of (seed, epoch, record, name). It is computed in NumPy and passed to the
graph as an input: it does not depend on the shard, device or batch, and needs no state. DALI
requests it for each run of the pipeline. Over a source, the reading threads compute it ahead, once
the first run has shown what the graph draws (`core.feeding.read_rows`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert
from nvidia.dali.tensors import TensorListCPU

from ..arguments import arguments_of, call_fault, knows_its_names, turns_images
from ..arrays.dtypes import as_dtype, dali_type
from ..messages import replacements
from ..native.operators import MOST_RESULTS
from .hashing import Bits, column_keys, uniform

# Maps uniform numbers in [0, 1), float32 [rows, columns], and image heights and widths,
# int32 [rows, 2] or None, to an array [rows, ...]. Each row belongs to a sample of the batch.
Compute = Callable[[NDArray[np.float32], Any], NDArray[Any]]
_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


def _size(shape: Sequence[int]) -> int:
    """Returns the number of elements of a shape.

    Raises:
        TypeError: If the shape is not a sequence.
        ValueError: If an extent is negative or not an integer.
    """
    if not isinstance(shape, Sequence):
        raise TypeError(
            f"shape must be a tuple of whole numbers, such as ({shape!r},), not {shape!r}"
        )
    if not all(isinstance(extent, (int, np.integer)) and extent >= 0 for extent in shape):
        raise ValueError(f"shape must be whole numbers, 0 or more, not {shape}")
    return math.prod(shape)


def check_images(images: Any) -> None:
    """Raises TypeError unless ``images`` is an output of a DALI operator."""
    if not isinstance(images, DataNode):
        raise TypeError(
            "images must be an output of DALI's operators in a graph function, not "
            f"{type(images).__name__}. Decode images in the graph function, and augment them "
            "there. To change the arrays of a batch, use batch_map or the training step"
        )


def check_draw(draw: Any, images: Any) -> None:
    """Raises TypeError unless ``draw`` is a `Draw`, and ``images`` an output of an operator."""
    if not isinstance(draw, Draw):
        raise TypeError(
            f"draw must be the draw argument of the graph function, not {draw!r}. Add a parameter "
            "named draw to the function, and pass it on"
        )
    check_images(images)


def check_numbers(call: str, **values: Any) -> None:
    """Checks that arguments are numbers.

    Args:
        call: A correct call, for the message: "draw.uniform(-10, 10)".
        **values: The arguments.

    Raises:
        TypeError: If an argument is not a number.
    """
    for name, value in values.items():
        if not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{name} must be a number, not {value!r}: write {call}")


def check_share(name: str, value: float) -> None:
    """Raises TypeError or ValueError unless a value is a probability."""
    check_numbers(f"{name}=0.5", **{name: value})
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {value}")


def _reshaped(name: str, values: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the result of a draw's function as an array of a shape and dtype.

    Raises:
        ValueError: If the result has another number of elements.
    """
    array = np.asarray(values)
    if array.size != math.prod(shape):
        raise ValueError(
            f"the function of the draw {name!r} returned the shape {array.shape} for {shape[0]} "
            f"records. Return an array of shape {shape}, [rows, *shape]"
        )
    return np.ascontiguousarray(array, dtype).reshape(shape)


def _check_pure(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Checks that two calls of a draw's function returned equal, new arrays.

    Threads call the function for several batches concurrently. If the function returned the same
    array each time, a batch would contain the numbers of another batch.

    Args:
        name: The draw's name.
        first, second: The results of the two calls.

    Raises:
        ValueError: If the results share memory or differ.
    """
    for first_array, second_array in zip(first, second):
        are_arrays = isinstance(first_array, np.ndarray) and isinstance(second_array, np.ndarray)
        if (
            are_arrays
            and first_array.flags.writeable
            and np.may_share_memory(first_array, second_array)
        ):
            raise ValueError(
                f"the function of the draw {name!r} returns the same array at each call, which "
                "concurrent calls would overwrite. Return a new array, e.g. array.copy()"
            )
        if np.asarray(first_array).tobytes() != np.asarray(second_array).tobytes():
            raise ValueError(
                f"the function of the draw {name!r} returned different numbers for equal inputs, "
                "so that no state could restore it. Compute its results only from the numbers and "
                "sizes that it receives"
            )


def _as_arguments(first: Any, second: Any) -> str:
    """Formats two numbers as call arguments; a pair passed as the first argument is unpacked."""
    pair = first if isinstance(first, (tuple, list)) and len(first) == 2 else (first, second)
    return f"{pair[0]!r}, {pair[1]!r}"


def _raise(row: int, error: Exception) -> None:
    raise error


def _unknown(name: str) -> Any:
    raise TypeError(f"the values of {name!r} are unknown")


class ImageField(NamedTuple):
    """A field of images, and how a graph gets their pixels.

    Attributes:
        name: The name of the field.
        is_encoded: Whether the graph decodes the images; otherwise they are arrays.
        turns: Whether the decoder applies the EXIF orientation.
    """

    name: str
    is_encoded: bool = True
    turns: bool = True


class DrawnRows(Protocol):
    """The rows of one run of a pipeline, for which draws have results."""

    def drawn(self, name: str, function: DrawFunction) -> Sequence[Any]:
        """Returns the results of a draw: an array for each output."""
        ...


@dataclasses.dataclass(frozen=True)
class DrawRows:
    """Inputs for drawing the random numbers of one run of a pipeline.

    Attributes:
        records: Hash of the seed, epoch and record of each row, shape [rows].
        sizes: Returns heights and widths of the images of a field, int32 [rows, 2]; -1 if the
            header does not contain the size.
        refuse: Called with the row of a record that can't be augmented, and the error.
        values: Returns the values of a field, one for each row.
        orientations: Returns the EXIF orientations of the images of a field, int32 [rows].
        shared: Results that several draws or operators of the rows use.
        own_records: The number of each row's own record in the source, even if a stand-in replaces
            it, int64 [rows]; None for records of streams.
        replaced: Whether a stand-in replaces the record of each row, bool [rows] or False.
        layouts: The `core.order.packing.RowLayout` of each pipeline's rows in the batch, if these
            contain several records; the other attributes then have an element for each record.
    """

    records: Bits
    sizes: Callable[[str], NDArray[np.int32]]
    refuse: Callable[[int, Exception], None] = _raise
    values: Callable[[str], Sequence[Any] | NDArray[Any]] = _unknown
    orientations: Callable[[str], NDArray[np.int32]] = _unknown
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
    own_records: Any = None
    replaced: Any = False
    layouts: Sequence[Any] = ()

    def image_sizes(self, name: str) -> NDArray[np.int32]:
        """Returns heights and widths of the images of a field, int32 [rows, 2].

        A record whose image has no pixels, or whose header can't be read, is refused, with the
        size 1 x 1.
        """
        found: NDArray[np.int32] | None = self.shared.get(("sizes", name))
        if found is not None:
            return found
        sizes = np.asarray(self.sizes(name), np.int32)
        unknown = (sizes < 1).any(axis=1)
        for row in np.flatnonzero(unknown).tolist():
            header = "the size of the image can't be read from its header"
            text = header if (sizes[row] < 0).any() else "the image has no pixels"
            self.refuse(row, ValueError(text))
        found = self.shared["sizes", name] = np.where(unknown[:, np.newaxis], np.int32(1), sizes)
        return found

    def sizes_of(self, images: ImageField | NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns heights and widths of images, int32 [rows, 2].

        Args:
            images: A field of images, or the common size of the images, int32 [2].
        """
        if not isinstance(images, ImageField):
            return np.broadcast_to(images, (len(self.records), 2))
        sizes = self.image_sizes(images.name)
        if images.turns or not images.is_encoded:
            return sizes
        orientations = self.orientations(images.name)
        swapped = (orientations >= 5) & (orientations < 9)
        return np.where(swapped[:, np.newaxis], sizes[:, ::-1], sizes)

    def turned(self, images: ImageField) -> NDArray[np.bool_]:
        """Returns whether the decoder turns or mirrors each image by its EXIF orientation."""
        if not (images.is_encoded and images.turns):
            return np.zeros(len(self.records), np.bool_)
        orientations = self.orientations(images.name)
        return (orientations > 1) & (orientations < 9)

    def uniform(self, keys: Bits) -> NDArray[np.float32]:
        """Returns uniform numbers in [0, 1), float32 [rows, keys]; see `column_keys`."""
        return uniform(self.records, keys)

    def drawn(self, name: str, function: DrawFunction) -> Sequence[Any]:
        """Returns the results of a draw for the rows, which the first call computes."""
        key = "drawn", name
        if key not in self.shared:
            self.shared[key] = function(self)
        results: Sequence[Any] = self.shared[key]
        return results


@dataclasses.dataclass(eq=False)
class DrawFunction:
    """Computes the arrays of a draw for a run of a pipeline; threads call it for several runs.

    Attributes:
        name: The draw's name.
        function: Returns an array [rows, *shape] for each output.
        forms: Shape per sample and dtype of each output.
    """

    name: str
    function: Callable[[DrawRows], Sequence[Any]]
    forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]

    def __post_init__(self) -> None:
        self._is_pure = False  # set by the first call, after a check

    @do_not_convert
    def __call__(self, rows: DrawRows) -> list[NDArray[Any]]:
        """Returns an array [rows, *shape] for each output."""
        outputs = self._outputs(rows)
        if not self._is_pure:
            _check_pure(self.name, outputs, self._outputs(rows))
            self._is_pure = True
        return [
            _reshaped(self.name, values, (len(rows.records), *shape), dtype)
            for values, (shape, dtype) in zip(outputs, self.forms)
        ]

    def _outputs(self, rows: DrawRows) -> list[Any]:
        """Calls the function, checks the number of its outputs, and returns them."""
        try:
            arrays = [*self.function(rows)]
        except StopIteration as error:  # would end the epoch
            raise RuntimeError(
                f"the function of the draw {self.name!r} raised StopIteration"
            ) from error
        if len(arrays) != len(self.forms):
            raise ValueError(
                f"the function of the draw {self.name!r} returned {len(arrays)} arrays, not "
                f"{len(self.forms)}. Return one array for each output"
            )
        return arrays


@dataclasses.dataclass
class DrawnOutput:
    """An output of a draw, which feeds an input of a graph.

    Attributes:
        draw: Computes all outputs of the draw.
        index: The index of this output.
        label: A readable label of the input.
        is_copied: Whether the graph copies it to the GPU.
    """

    draw: DrawFunction
    index: int
    label: str
    is_copied: bool = False

    @property
    def form(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape per sample, and the dtype."""
        return self.draw.forms[self.index]

    def of(self, rows: DrawnRows) -> NDArray[Any]:
        """Returns the output for the rows of a run, [rows, *shape]."""
        array: NDArray[Any] = rows.drawn(self.draw.name, self.draw)[self.index]
        return array

    def as_input(self, rows: DrawnRows) -> TensorListCPU:
        """Returns the output as an input of the graph.

        DALI copies inputs from pageable memory to memory of its own, and then, for a copy to the
        GPU, sample by sample to pinned memory. With ``is_pinned``, the first copy is in pinned
        memory, and there is no second one: it takes 2.4 ms of CPU time per batch of 256.
        """
        return TensorListCPU(self.of(rows), is_pinned=self.is_copied)


class _JoinedDraws:
    """Draws that compute the same function of different numbers; see `Draw._joined`.

    Attributes:
        keys: The keys of each draw's numbers.
    """

    def __init__(
        self,
        function: Callable[[NDArray[np.float32], Any], Sequence[NDArray[Any]]],
        image_sizes: ImageField | NDArray[np.int32] | None,
    ):
        self.keys: list[Bits] = []
        self._function, self._image_sizes = function, image_sizes

    def results(self, rows: DrawRows) -> Sequence[NDArray[Any]]:
        """Returns arrays [draws, rows, ...], which the first call computes."""
        found: Sequence[NDArray[Any]] | None = rows.shared.get(self)
        if found is None:
            draws, count = len(self.keys), len(rows.records)
            sizes = None if self._image_sizes is None else rows.sizes_of(self._image_sizes)
            numbers = rows.uniform(np.concatenate(self.keys)).reshape(count, draws, -1)
            found = self._function(
                numbers.swapaxes(0, 1).reshape(draws * count, numbers.shape[-1]),
                None if sizes is None else np.tile(sizes, (draws, 1)),
            )
            found = [np.asarray(a).reshape(draws, count, *np.shape(a)[1:]) for a in found]
            for array in found:
                array.flags.writeable = False  # several draws receive it
            rows.shared[self] = found
        return found


DRAW = "draw"  # the parameter of a graph function that receives the Draw
_DRAW = "_dalijax_draw"
# Methods of `Draw` that replace methods of NumPy's and JAX's generators.
_NUMPY_METHODS = {
    **dict.fromkeys(("randint", "integers", "categorical"), "choice(range(10))"),
    **dict.fromkeys(("bernoulli", "binomial"), "coin_flip(probability)"),
    **dict.fromkeys(("rand", "random", "range"), "uniform(low, high)"),
    **dict.fromkeys(("randn", "gaussian"), "normal(mean, stddev)"),
}


def _draw_of(pipeline: Pipeline | None) -> Draw | None:
    draw: Draw | None = None if pipeline is None else vars(pipeline).get(_DRAW)
    return draw


def described_draws(pipeline: Pipeline) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns the kind, name and settings of each draw of a pipeline.

    Draws are described like operators of DALI and their arguments. Without these descriptions, a
    state that was saved with different augmentation would be restored silently.
    """
    draw = _draw_of(pipeline)
    return [] if draw is None else draw._described()


def draw_inputs(pipeline: Pipeline) -> dict[str, str]:
    """Returns a readable label of each operator that feeds random numbers, by its name in DALI."""
    draw = _draw_of(pipeline)
    return {} if draw is None else {name: o.label for name, o in draw._outputs.items()}


def draw_of_pipeline() -> Draw | None:
    """Returns the `Draw` of the pipeline that is being defined, if it has one."""
    return _draw_of(Pipeline.current())


class Draw:
    """Draws random numbers for each record; the argument ``draw`` of a graph function.

    Each method returns a DataNode, an operator input with one value for each sample::

        angle = draw.uniform(-10, 10)
        images = fn.rotate(images, angle=angle)

    Each draw has a name, which determines its numbers. Draws without a name are numbered in call
    order, so that inserting a draw changes the numbers of all unnamed draws after it.

    Functions of the graph that take a key receive it from a draw as well.

    Args:
        rows: Returns the rows of a run of the pipeline, given the number of the run.
        fields: The field of each input of the graph, by the name of the input's node.
        sized: A dict to which the draw adds each field of encoded images whose sizes are needed.
            The value is True if the field contains paths of image files.
        kinds: The `Field` of each field, by name.
        example: Returns the value of a field in the first record.
        read: A set to which the draw adds each field whose values it needs.
    """

    def __init__(
        self,
        rows: Callable[[int], DrawnRows],
        fields: Mapping[str, str],
        sized: dict[str, bool] | None = None,
        kinds: Mapping[str, Any] = MappingProxyType({}),
        example: Callable[[str], Any] = _unknown,
        read: set[str] | None = None,
    ):
        self._rows = rows
        self._fields = fields
        self._sized = {} if sized is None else sized
        self._kinds, self._example = kinds, example
        self._read = set() if read is None else read
        # By the draw's name: its kind ("draw.uniform"), its name in states, and its settings.
        self._draws: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
        # The same for results of another draw, such as the boxes of a window.
        self._derived: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
        # By the name of each operator that feeds random numbers: what it feeds.
        self._outputs: dict[str, DrawnOutput] = {}
        # By the name of a node of images: images of the same sizes, or the common size.
        self._sizes: dict[str, ImageField | NDArray[np.int32]] = {}
        # By the name of a node of images: the images of a field, pixel for pixel at the same place.
        self._unmoved: dict[str, ImageField] = {}
        self._joins: dict[str, _JoinedDraws] = {}  # keys: all that a function depends on
        # By the name of a node of images: the images before a change that kept all but the colors.
        self._forms: dict[str, DataNode] = {}
        pipeline = Pipeline.current()
        if pipeline is not None:  # an attribute, since a table here would keep the pipeline alive
            vars(pipeline)[_DRAW] = self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise replacements.no_attribute("draw", name, dir(type(self)), _NUMPY_METHODS)

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
        """Draws float32 numbers from a uniform distribution on [low, high) for each sample.

        Args:
            low: Lower bound.
            high: Upper bound, exclusive except for rounding to float32.
            shape: Shape for each sample; (): a scalar.
            name: Name of the draw; see `dalijax.Draw`.
        """
        check_numbers(f"uniform({_as_arguments(low, high)})", low=low, high=high)
        width = float(high) - float(low)
        if not math.isfinite(width) or width < 0:
            raise ValueError(f"low and high must be finite, with low <= high, not {low}, {high}")

        def scaled(u: NDArray[np.float32], _: Any) -> NDArray[np.float32]:
            # In double precision, rounded once, so that all CPUs give equal results.
            return (u.astype(np.float64) * width + low).astype(np.float32)

        settings = {"low": low, "high": high}
        return self.compute(
            scaled, shape, _FLOAT, settings=settings, name=name, kind="draw.uniform"
        )

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
        """Draws float32 numbers from a normal distribution, within 5.8 stddev of the mean.

        Args:
            mean: The mean.
            stddev: The standard deviation, at least 0.
            shape: Shape for each sample; (): a scalar.
            name: Name of the draw; see `dalijax.Draw`.
        """
        check_numbers(f"normal({_as_arguments(mean, stddev)})", mean=mean, stddev=stddev)
        if not (math.isfinite(mean) and math.isfinite(stddev) and stddev >= 0):
            raise ValueError(
                f"mean and stddev must be finite, and stddev at least 0, not {mean}, {stddev}"
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
            kind="draw.normal",
        )

    @do_not_convert
    @knows_its_names
    def coin_flip(
        self, probability: float = 0.5, *, shape: Sequence[int] = (), name: str | None = None
    ) -> DataNode:
        """Draws 1 with a probability, otherwise 0, as int32, like ``fn.random.coin_flip``.

        Args:
            probability: Probability of 1, from 0 to 1.
            shape: Shape for each sample; (): a scalar.
            name: Name of the draw; see `dalijax.Draw`.
        """
        check_share("probability", probability)
        settings = {"probability": probability}
        return self.compute(
            lambda u, _: u < probability,
            shape,
            _INT,
            settings=settings,
            name=name,
            kind="draw.coin_flip",
        )

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
        """Draws from a list of numbers, for each sample.

        Args:
            values: The numbers. Integers and bools are returned as int32, floats as float32.
            p: Probability of each number, normalized to a sum of 1; None: equal probabilities.
            shape: Shape for each sample; (): a scalar.
            name: Name of the draw; see `dalijax.Draw`.
        """
        table = np.asarray(values)
        if table.ndim != 1 or not len(table) or table.dtype.kind not in "biuf":
            raise ValueError(f"values must be a non-empty list of numbers, not {values!r}")
        if table.dtype.kind in "iu" and (table.astype(_INT) != table).any():
            raise ValueError(f"integer values must fit into int32, not {values!r}")
        shares = np.ones(len(table)) if p is None else np.asarray(p, np.float64)
        if shares.shape != table.shape or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
            raise ValueError(f"p must have a probability for each of {len(table)} values, not {p}")
        bounds = np.cumsum(shares / shares.sum())[:-1]
        dtype = _FLOAT if table.dtype.kind == "f" else _INT

        def chosen(u: NDArray[np.float32], _: Any) -> NDArray[Any]:
            return table[np.searchsorted(bounds, u.astype(np.float64), side="right")]

        settings = {"values": table.tolist(), "p": None if p is None else bounds.tolist()}
        return self.compute(chosen, shape, dtype, settings=settings, name=name, kind="draw.choice")

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
        kind: str = "draw.compute",
    ) -> DataNode:
        """Computes values for each sample from uniform random numbers, and optionally image sizes.

        Args:
            function: Receives uniform numbers, float32 [rows, columns], and image heights and
                widths, int32 [rows, 2] (None without ``images``); returns an array [rows, *shape].
                The function must be pure and return a new array: over a source, reading threads
                call it for several batches ahead and concurrently. The first call is repeated to
                check this.
            shape: Shape for each sample.
            dtype: Dtype of the result, in NumPy's, JAX's or DALI's form, or its name.
            columns: Number of uniform numbers for each sample; None: the number of elements of
                ``shape``.
            images: A field of arrays, the output of ``fn.decoders.image`` for a field, or images
                passed to `sized`.
            settings: JSON values that the function depends on. A state with other settings is
                rejected.
            name: Name of the draw; see `dalijax.Draw`.
            kind: Name of the calling function, for errors about states.

        Returns:
            A DataNode of the dtype and of shape ``shape`` for each sample.

        Raises:
            ValueError: If the name is taken, or the draw's own graph is not being defined.
            TypeError: If the sizes of the images are unknown.
        """
        if fault := call_fault(function, None, None):
            raise TypeError(
                "the function of a draw is called with (u, sizes), uniform numbers [rows, columns] "
                f"and image sizes: {fault}. Write e.g. lambda u, sizes: u"
            )
        return self._compute_outputs(
            lambda u, sizes: (function(u, sizes),),
            [(shape, dtype)],
            columns=_size(shape) if columns is None else columns,
            images=images,
            settings=settings,
            name=name,
            kind=kind,
        )[0]

    @do_not_convert
    def _compute_outputs(
        self,
        function: Callable[[NDArray[np.float32], Any], Sequence[NDArray[Any]]],
        outputs: Sequence[tuple[Sequence[int], Any]],
        *,
        columns: int,
        images: DataNode | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        kind: str = "draw.compute",
        joins: bool = False,
    ) -> tuple[DataNode, ...]:
        """Computes several outputs from uniform random numbers; see `compute`.

        Args:
            function: As in `compute`, but returns an array [rows, *shape] for each output.
            outputs: The shape per sample and the dtype of each output.
            columns: Number of uniform numbers for each sample.
            images: As in `compute`.
            settings: As in `compute`.
            name: Name of the draw; see `dalijax.Draw`.
            kind: As in `compute`.
            joins: Whether draws of equal settings are computed at once; see `_joined`.

        Raises:
            ValueError: If the name is taken, or the draw's own graph is not being defined.
            TypeError: If the sizes of the images are unknown.
        """
        name, settings = self._named(name), settings or {}
        image_sizes = None if images is None else self._sizes_of(images)
        keys = column_keys(name, columns)

        @do_not_convert
        def from_numbers(rows: DrawRows) -> Sequence[NDArray[Any]]:
            sizes = None if image_sizes is None else rows.sizes_of(image_sizes)
            return function(rows.uniform(keys), None if sizes is None else sizes.copy())

        joined = self._joined(function, keys, image_sizes, kind, settings) if joins else None
        return self._compute_from_rows(
            joined or from_numbers, outputs, name=name, kind=kind, settings=settings
        )

    def _joined(
        self,
        function: Callable[[NDArray[np.float32], Any], Sequence[NDArray[Any]]],
        keys: Bits,
        image_sizes: ImageField | NDArray[np.int32] | None,
        kind: str,
        settings: Mapping[str, Any],
    ) -> Callable[[DrawRows], Sequence[NDArray[Any]]]:
        """Returns a function of rows for a draw; it computes all draws of equal settings at once.

        NumPy takes nearly the same time for the crops of eight views as for those of one.

        Args:
            function: As in `_compute_outputs`. Each row of its results depends on the same row of
                its arguments, on ``kind`` and on ``settings``.
            keys: The keys of the draw's uniform numbers.
            image_sizes: The images whose sizes the function needs, or None.
            kind, settings: As in `compute`.
        """
        images = image_sizes.tolist() if isinstance(image_sizes, np.ndarray) else image_sizes
        joined = self._joins.setdefault(
            _text([kind, settings, len(keys), images]), _JoinedDraws(function, image_sizes)
        )
        place = len(joined.keys)
        joined.keys.append(keys)
        return lambda rows: [array[place] for array in joined.results(rows)]

    def _named(self, name: str | None) -> str:
        """Returns the name of a new draw: a given name, or "#" and its place.

        Raises:
            ValueError: If the name is taken, or the draw's own graph is not being defined.
        """
        if draw_of_pipeline() is not self:
            raise ValueError(
                "a draw may only be used while its own graph function runs. Use the draw argument "
                "of the function, inside that function"
            )
        if name is None:
            name = f"#{len(self._draws)}"
        if not isinstance(name, str):
            raise TypeError(f"a draw's name must be a string, not {name!r}")
        self._check_free(name)
        return name

    def _check_free(self, name: str) -> None:
        """Raises ValueError if a draw, or a part of a draw, has a name."""
        if name in self._draws or name in self._derived:
            raise ValueError(f"two draws have the name {name!r}. Give each draw its own name")

    def _compute_from_rows(
        self,
        function: Callable[[DrawRows], Sequence[NDArray[Any]]],
        outputs: Sequence[tuple[Sequence[int], Any]],
        *,
        name: str,
        kind: str,
        settings: Mapping[str, Any],
        of: str | None = None,
    ) -> tuple[DataNode, ...]:
        """Computes several outputs from the `DrawRows` of a run.

        Args:
            function: Returns an array [rows, *shape] for each output.
            outputs: The shape per sample and the dtype of each output.
            name: The name of the draw, from `_named`; with ``of``, of the part of the other draw.
            kind, settings: As in `compute`; a part without a kind is in no state.
            of: The name of the draw whose results the function uses; None for a draw of its own.
                Its outputs then do not change the numbers of draws without a name.
        """
        for shape, _ in outputs:
            _size(shape)
        rows_of = self._rows
        forms = [(tuple(shape), as_dtype(dtype)) for shape, dtype in outputs]
        form = [[*shape, dtype.name] for shape, dtype in forms]
        described: dict[str, Any] = {"outputs": form, **settings}
        if of is not None:
            described = {"of": of, **described}
            number = len(self._derived)
            label = f"__part_{number}" if of.startswith("#") else f"draw.{of}.{name}.{number}"
            name = f"{of}.{name}.{number}"
            self._check_free(name)
            self._derived[name] = kind, label, described
        elif name.startswith("#"):  # the numbers of a draw without a name depend on its place
            label = f"__draw_{len(self._draws)}"
            self._draws[name] = kind, label, {"place": name, **described}
        else:
            self._draws[name] = kind, f"draw.{name}", described
        drawn = DrawFunction(name, function, forms)
        nodes: list[DataNode] = []
        # An input for each output, which `core.feeding.joined_draws` joins. A source of several
        # inputs would warn of those that are not used.
        for k, (shape, dtype) in enumerate(forms):
            suffix = f".{k}" if len(forms) > 1 else ""
            output = DrawnOutput(drawn, k, f"drawn.{name}{suffix}")
            node = fn.external_source(
                source=_source(rows_of, output),
                name=self._input_name(output),
                batch=True,
                dtype=dali_type(dtype),
                ndim=len(shape),
            )
            self._outputs[node.source.name] = output
            nodes.append(node)
        return tuple(nodes)

    def _input_name(self, output: DrawnOutput) -> str:
        """Returns a name for the operator that feeds an output.

        It has the form in which DALI names one of several results of an operator, because such an
        operator may replace those that feed outputs of the same shape and dtype.
        """
        shape, dtype = output.form
        place = sum(other.form == output.form for other in self._outputs.values())
        number, index = divmod(place, MOST_RESULTS)
        return f"dalijax_drawn_{dtype.name}_{'x'.join(map(str, shape))}_{number}[{index}]"

    def _note_copies(self, used: Iterable[Any]) -> None:
        """Notes which outputs of draws are copied to the GPU.

        Only the first GPU, because DALI takes the device of pinned memory from the calling thread,
        and would start CUDA on another GPU of the host.

        Args:
            used: The outputs of the graph, and the inputs of its operators.
        """
        for node in used:
            output = self._outputs.get(getattr(getattr(node, "source", None), "name", ""))
            if output is not None and node.device == "gpu":
                output.is_copied = Pipeline.current().device_id == 0

    def _described(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Returns the kind, name and settings of each draw; see `described_draws`."""
        return [
            (kind, name, {key: _text(value) for key, value in settings.items()})
            for kind, name, settings in [*self._draws.values(), *self._derived.values()]
            if kind
        ]

    @do_not_convert
    def _words(self) -> DataNode:
        """Returns random bytes, uint8 [8], from which functions of the graph derive their keys."""
        return self.compute(lambda u, _: np.floor(u * 256), (8,), np.uint8)

    @do_not_convert
    def sized(self, images: DataNode, like: DataNode | tuple[int, int]) -> DataNode:
        """Declares the sizes of images, for draws that depend on them.

        The sizes of decoded fields, of fields of arrays and of results of ``dalijax.augment`` are
        known, and are not replaced. After other operators, declare the sizes::

            images = draw.sized(fn.resize(images, size=(224, 224)), (224, 224))

        Args:
            images: Images.
            like: Height and width of all images, in pixels, or images of the same sizes.

        Returns:
            The images.
        """
        if isinstance(like, tuple):
            self._sizes[images.name] = np.array(like, np.int32)
        else:
            try:
                self._sizes[images.name] = self._sizes_of(like)
            except TypeError:  # unknown sizes are an error only if a draw depends on them
                self._sizes.pop(images.name, None)
        return images

    def _recolored(self, images: DataNode, like: DataNode, *, keeps_form: bool = True) -> DataNode:
        """Declares that only the colors of images differ from those of other images.

        Args:
            images: Images.
            like: The images before the change.
            keeps_form: Whether layout, channels and dtype are those before the change.

        Returns:
            The images.
        """
        if keeps_form:
            self._forms[images.name] = like
        if (field := self._image_field(like)) is not None:
            self._unmoved[images.name] = field
        return self.sized(images, like)

    def _before_recoloring(self, images: DataNode) -> DataNode:
        """Returns the images before the changes of colors that kept layout, channels and dtype."""
        node = before_branches(images)
        while (like := self._forms.get(getattr(node, "name", ""))) is not None:
            node = before_branches(like)
        result: DataNode = node
        return result

    def _array_field(self, node: Any) -> Any:
        """Returns the field that a node is, if its arrays have a height and a width, else None."""
        node = before_branches(node)
        field = self._kinds.get(self._fields.get(getattr(node, "name", ""), ""))
        return field if field is not None and field.image_layout else None

    def _layouts_of(self, node: DataNode) -> tuple[str, str] | None:
        """Returns the layout of a field of arrays, and their layout as images; else None."""
        field = self._array_field(node)
        return None if field is None else (field.dali_layout, field.image_layout)

    def _field_of(self, node: Any, argument: str) -> str:
        """Returns the field that a node is, whose values a draw needs.

        Raises:
            TypeError: If the node is not a field, but the result of an operator.
        """
        node = before_branches(node)
        field = self._fields.get(getattr(node, "name", ""))
        if field is None:
            operator = getattr(node, "source", None)
            raise TypeError(
                f"{argument} must be a field of the records, a parameter of the graph function, "
                f"not the result of {operator_kind(operator)}, because they are computed before "
                "the graph runs. Change the values in the records, by source.map"
            )
        self._read.add(field)
        return field

    def _image_field(self, images: DataNode) -> ImageField | None:
        """Returns the field whose images a node has, pixel for pixel at the same place."""
        images = before_branches(images)
        name = getattr(images, "name", "")
        operator: Any = getattr(images, "source", None)
        if name in self._unmoved:
            return self._unmoved[name]
        if self._array_field(images) is not None:
            return ImageField(self._fields[name], is_encoded=False)
        if not operator_kind(operator).endswith("decoders__Image"):
            return None
        encoded = operator.inputs[0]
        are_paths = encoded.name not in self._fields and _is_read(encoded)
        if are_paths:
            encoded = encoded.source.inputs[0]
        field = self._fields.get(encoded.name)
        if field is None:
            return None
        self._sized[field] = are_paths
        return ImageField(field, turns=turns_images(arguments_of(operator)))

    def _sizes_of(self, images: DataNode) -> ImageField | NDArray[np.int32]:
        """Returns the images of a field with the same sizes, or the common size, int32 [2].

        Raises:
            TypeError: If neither is known.
        """
        images = before_branches(images)
        field = self._image_field(images)
        if field is not None:
            return field
        declared = self._sizes.get(getattr(images, "name", ""))
        if declared is None:
            raise TypeError(
                "image sizes are known for fields of arrays, and for the output of "
                "fn.decoders.image over a field, and not after "
                f"{operator_kind(getattr(images, 'source', None))}. Call the function directly "
                "after the decoder, or declare the sizes by draw.sized(images, (height, width))"
            )
        return declared


def _source(rows_of: Callable[[int], DrawnRows], output: DrawnOutput) -> Callable[[int], Any]:
    """Returns a callback of DALI that returns an output of a draw, given the run."""
    return lambda run: output.as_input(rows_of(run))


def on_device(node: DataNode, device: str) -> DataNode:
    """Returns a node whose data is copied to the GPU if the device is "gpu"."""
    return node.gpu() if device == "gpu" else node


def before_branches(node: Any) -> Any:
    """Returns the node from which a branch of an ``if`` in a graph received a node."""
    operator: Any = getattr(node, "source", None)
    while operator_kind(operator).endswith("_conditional__Split"):  # private in DALI
        node = operator.inputs[0]
        operator = node.source
    return node


def _is_read(node: DataNode) -> bool:
    """Returns whether a node is the output of ``fn.io.file.read``."""
    return operator_kind(node.source) == "io__file__Read"


def operator_kind(operator: Any) -> str:
    """Returns DALI's name of an operator: "decoders__Image"; "another value" for other values."""
    return str(getattr(getattr(operator, "_op", None), "schema_name", "another value"))


def _text(value: Any) -> str:
    """Returns a setting as JSON without spaces; NumPy numbers become Python numbers."""
    return json.dumps(
        value, separators=(",", ":"), default=lambda array: np.asarray(array).tolist()
    )
