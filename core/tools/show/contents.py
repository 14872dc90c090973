"""The contents of a batch: its outputs, their statistics, and samples to draw."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ...augment.geometry import BoxForm
from .layouts import OTHERS, PICTURES, STEPS, VIDEOS, as_text, guess_layout
from .pixels import Brightness, brightness

_BINS = 32
MOST_NUMBERS = 8  # numbers of a sample in a caption


@dataclasses.dataclass(frozen=True)
class Figures:
    """Statistics of the numbers of an output.

    Attributes:
        least: Minimum finite value.
        most: Maximum finite value.
        mean: Mean of the finite values.
        deviation: Standard deviation of the finite values.
        nans: Number of NaNs.
        infinities: Number of infinities.
        counts: Number of finite values in each bin of a histogram, [bins].
    """

    least: float
    most: float
    mean: float
    deviation: float
    nans: int
    infinities: int
    counts: NDArray[Any]


def figures_of(values: NDArray[Any]) -> Figures | None:
    """Returns statistics of an array of numbers or bools; None if no value is finite."""
    flat: NDArray[Any] = values.astype(np.float64).ravel()
    finite: NDArray[Any] = flat[np.isfinite(flat)]
    if not finite.size:
        return None
    bins: Any = _BINS
    is_integer = values.dtype.kind in "biu"
    if is_integer and finite.max() - finite.min() < _BINS:  # a bin for each value
        bins = np.arange(np.ptp(finite) + 2) - 0.5
    nans = int(np.isnan(flat).sum())
    return Figures(
        least=float(finite.min()),
        most=float(finite.max()),
        mean=float(finite.mean()),
        deviation=float(finite.std()),
        nans=nans,
        infinities=flat.size - finite.size - nans,
        counts=np.histogram(finite - finite.min(), bins)[0],
    )


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a batch.

    Attributes:
        name: The name of the output.
        shape: Shape of the global array.
        dtype: The dtype of the array.
        device: The devices of the array.
        sharding: The sharding of the array; "" for an array of NumPy.
        samples: A NumPy array, text or bytes for each sample of this process.
        layout: Layout of a sample; one of `LAYOUTS`.
        figures: Statistics of the numbers of this process; None if no number is finite.
        brightness: Mapping of values to pixels; None if the output has no images.
        classes: Names of the classes that the output's numbers represent.
        steps: Mask of the steps of each sample, [samples, steps]; None without a mask.
        annotations: The masks, boxes and points that are drawn over images.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    sharding: str
    samples: Sequence[Any]
    layout: str
    figures: Figures | None
    brightness: Brightness | None = None
    classes: Sequence[str] = ()
    steps: NDArray[np.bool_] | None = None
    annotations: Sequence[Annotation] = ()

    def class_name(self, number: int) -> str:
        """Returns the name of a class; the number if it has no name."""
        return self.classes[number] if 0 <= number < len(self.classes) else str(number)

    def caption(self, row: int) -> str:
        """Returns the text that describes a sample: its text, class names or first numbers.

        Args:
            row: Index of the sample.
        """
        sample = self.samples[row]
        if not isinstance(sample, np.ndarray) or self.layout == "text":
            text = sample if isinstance(sample, str) else as_text(sample)
            return f"{len(sample)} bytes" if text is None else text
        flat = sample.ravel()
        if self.classes and flat.dtype.kind in "iu" and (flat.size == 1 or self.layout == "labels"):
            names = [self.class_name(number) for number in flat[:MOST_NUMBERS].tolist()]
            return ", ".join(names) + " ..." * (flat.size > MOST_NUMBERS)
        if len(self.classes) == flat.size > 1:
            shares = sorted(zip(flat.tolist(), self.classes), reverse=True)
            return " + ".join(f"{share:.2f} {name}" for share, name in shares if share > 0)
        numbers = [_number(value) for value in flat[:MOST_NUMBERS].tolist()]
        suffix = f" and {flat.size - MOST_NUMBERS:,} more" if flat.size > MOST_NUMBERS else ""
        return " ".join(numbers) + suffix


@dataclasses.dataclass(frozen=True)
class Annotation:
    """An output that is drawn over the images of another output.

    Attributes:
        kind: "masks", "boxes" or "points".
        output: The masks, boxes or points.
        labels: Class numbers of the boxes of each sample, [n].
        visible: Integers that are 0 for points that are not drawn, [n] or [n, points].
        count: Number of boxes or points of each sample; None: rows of 0 or -1 are padding.
        form: Format of the boxes, and whether boxes or points are shares of the image's size.
    """

    kind: str
    output: Output
    labels: Output | None = None
    visible: Output | None = None
    count: Output | None = None
    form: BoxForm = dataclasses.field(default_factory=BoxForm)


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a batch.

    Attributes:
        title: Title of the batch.
        outputs: The outputs of the batch.
        valid: Whether each sample belongs to the epoch, bool [samples]; None if unknown.
        mask: Name of the output that contains ``valid``; "" if there is none.
        notes: Descriptions of the annotations that are drawn, or not drawn.
    """

    title: str
    outputs: Sequence[Output]
    valid: NDArray[np.bool_] | None = None
    mask: str = ""
    notes: Sequence[str] = ()

    @property
    def drawn(self) -> Sequence[Output]:
        """Returns the outputs whose samples are drawn, instead of only described."""
        return [o for o in self.outputs if o.layout == "encoded" or o.layout not in OTHERS]

    @property
    def count(self) -> int:
        """Returns the number of samples."""
        return max((len(output.samples) for output in self.outputs), default=0)

    @property
    def padding(self) -> int:
        """Returns the number of samples that are padding."""
        return 0 if self.valid is None else int((~self.valid).sum())

    def is_padding(self, row: int) -> bool:
        """Returns whether the sample with the index ``row`` is padding."""
        return self.valid is not None and row < len(self.valid) and not self.valid[row]

    def caption(self, row: int) -> list[str]:
        """Returns the texts and numbers of a sample, each in the form "name: value".

        Outputs that are drawn, also over images, and masks of steps are omitted.

        Args:
            row: Index of the sample.
        """
        omitted = {
            self.mask,
            *(o.name for o in self.drawn),
            *(f"{o.name}_mask" for o in self.outputs if o.steps is not None),
        }
        for annotation in [a for output in self.outputs for a in output.annotations]:
            drawn = (annotation.output, annotation.labels, annotation.visible, annotation.count)
            omitted |= {output.name for output in drawn if output is not None}
        return [
            f"{output.name}: {output.caption(row)}"
            for output in self.outputs
            if output.name not in omitted and row < len(output.samples)
        ]


def contents_of(
    batch: Any,
    title: str,
    *,
    mask: str | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    device_axis: bool = False,
) -> Contents:
    """Returns a description of a batch and of each of its outputs.

    Args:
        batch: Arrays of shape [batch, ...] by name, possibly nested.
        title: The title of the batch.
        mask: The name of the output that is True for samples of the epoch; None: "mask", if an
            output of bools has this name.
        classes: Names of the classes that the numbers of an output represent, by output.
        device_axis: Whether arrays have pmap's layout, [devices, batch, ...].

    Raises:
        ValueError: If the batch has no output with a name in ``mask`` or ``classes``.
    """
    arrays = _leaves(batch)
    classes = dict(classes or {})
    options = {*classes, *([] if mask is None else [mask])}
    if unknown := sorted(options - {*arrays}):
        raise ValueError(f"{unknown} are not outputs of the batch, which has {sorted(arrays)}")
    mask = "mask" if mask is None else mask
    valid = _local(arrays.get(mask, np.zeros(())))
    is_mask = valid.dtype == np.bool_ and valid.ndim in (1, 2)
    if is_mask and valid.ndim == 2 and not device_axis:
        shapes = [getattr(array, "shape", valid.shape) for array in arrays.values()]
        is_mask = device_axis = all(shape[:2] == valid.shape for shape in shapes)
    outputs = [
        _output(name, array, classes.get(name, ()), device_axis, arrays.get(f"{name}_mask"))
        for name, array in arrays.items()
    ]
    if not is_mask:
        return Contents(title, outputs)
    return Contents(title, outputs, valid.ravel(), mask)


def _leaves(batch: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the arrays of a batch by name, "image" or "image/pixels", in the batch's order.

    Lists are samples, not branches of a tree.
    """
    branches: Any = None
    if isinstance(batch, Mapping):
        branches = batch.items()
    elif isinstance(batch, tuple):
        branches = zip(getattr(batch, "_fields", range(len(batch))), batch)
    if branches is None:
        return {prefix or "batch": batch}
    leaves: dict[str, Any] = {}
    for key, value in branches:
        leaves |= _leaves(value, f"{prefix}/{key}" if prefix else str(key))
    return leaves


def _output(
    name: str, array: Any, classes: Sequence[str], device_axis: bool, mask: Any = None
) -> Output:
    """Returns the description of an output.

    ``mask`` is ignored unless it is bool [samples, steps].
    """
    values = _rows(array, device_axis)
    steps = None if mask is None else _rows(mask, device_axis)
    if steps is not None and (
        steps.dtype != np.bool_ or steps.ndim != 2 or steps.shape != values.shape[:2]
    ):
        steps = None
    is_number = values.dtype.kind in "biuf"
    samples: list[Any] = [values]
    if values.ndim:
        samples = [row if is_number else _plain(row) for row in values]
        if values.ndim == 1 and is_number:
            samples = [np.asarray(row) for row in values]
    figures = figures_of(values) if is_number else None
    layout = guess_layout(samples)
    # Integers with a mask are tokens, whose plot would mean nothing.
    if steps is not None and values.dtype.kind == "f" and layout in ("numbers", *PICTURES):
        layout = STEPS
    drawn = None
    if layout in (*PICTURES, *VIDEOS) and figures is not None:
        drawn = brightness(values.dtype, figures.least, figures.most, "C" in layout)
    elif layout in (*PICTURES, *VIDEOS):
        drawn = Brightness(0, 1, "no value is finite")
    device, sharding = _devices_and_sharding(array)
    return Output(
        name=name,
        shape=tuple(getattr(array, "shape", values.shape)),
        dtype=str(getattr(array, "dtype", values.dtype)),
        device=device,
        sharding=sharding,
        samples=samples,
        layout=layout,
        figures=figures,
        brightness=drawn,
        classes=classes,
        steps=steps,
    )


def _rows(array: Any, device_axis: bool) -> NDArray[Any]:
    """Returns the samples of an array in this process, [samples, ...].

    Args:
        array: The array.
        device_axis: Whether the array has pmap's layout, [devices, batch, ...].
    """
    values = _local(array)
    return values.reshape(-1, *values.shape[2:]) if device_axis and values.ndim > 1 else values


def _devices_and_sharding(array: Any) -> tuple[str, str]:
    """Returns the devices of an array, and its sharding, as text."""
    if not isinstance(array, jax.Array):
        return "host (NumPy)", ""
    ordered = sorted(array.sharding.device_set, key=operator.attrgetter("id"))
    devices = [str(device) for device in ordered]
    if len(devices) == 1:
        return devices[0], "one device"
    suffix = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
    return ", ".join(devices[:4]) + suffix, str(array.sharding)


def _plain(row: Any) -> Any:
    """Returns a sample unchanged if it is text, bytes or a numeric array; otherwise as text.

    A list of texts, such as several captions, becomes a line for each.
    """
    if isinstance(row, (str, bytes)):
        return row
    if isinstance(row, (list, tuple)) and row and all(isinstance(text, str) for text in row):
        return "\n".join(row)
    if isinstance(row, np.ndarray) and row.dtype.kind in "biuf":
        return row
    return str(row)


def _local(array: Any) -> NDArray[Any]:
    """Returns the rows of an array that are in this process, in a dtype that NumPy supports."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        pieces = {str(shard.index): shard for shard in array.addressable_shards}  # no replicas
        ordered = sorted(pieces.values(), key=lambda s: [part.start or 0 for part in s.index])
        first = ordered[0].index[1:]  # if another axis is split, too, only its first part
        parts = [np.asarray(s.data) for s in ordered if s.index[1:] == first]
        values = np.concatenate(parts) if array.ndim else parts[0]
    elif isinstance(array, list):
        values = np.empty(len(array), object)
        for row, sample in enumerate(array):  # NumPy would convert sequences in a single assignment
            values[row] = sample
    else:
        values = np.asarray(array)
    for family, supported in ((jnp.floating, np.float32), (jnp.integer, np.int32)):
        if values.dtype.kind == "V" and jnp.issubdtype(values.dtype, family):
            values = values.astype(supported)  # bfloat16, int4 etc.
    return values


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
