"""Batches of samples of different shapes: padded to a common shape, or grouped by shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .batch_function import BatchFunction

Samples = Sequence[Any]  # an array for each sample of an input


def padded(called: BatchFunction, align: int) -> Callable[..., Any]:
    """Returns a function of lists of samples, which pads them and calls ``called`` once.

    ``called`` receives an array [batch, ...] for each input, whose other extents are rounded up to
    multiples of ``align``, and the shapes of the samples as the keyword argument ``lengths``.
    """

    def run(*inputs: Samples) -> tuple[Any, ...] | None:
        samples, keywords = _with_key(called, inputs)
        lengths = tuple(_shapes(column) for column in samples)
        keywords["lengths"] = lengths[0] if len(lengths) == 1 else lengths
        arrays = [
            _filled(called, column, shapes, align) for column, shapes in zip(samples, lengths)
        ]
        _wait(called, arrays)
        return called(arrays, len(inputs[0]) if inputs else None, **keywords) or None

    run.__qualname__ = called.name  # for messages and profiles
    return run


def by_groups(called: BatchFunction) -> Callable[..., Any]:
    """Returns a function of lists of samples, which calls ``called`` for each group of samples.

    The samples of a group have equal shapes in each input. The results have the order of the
    samples.
    """

    def run(*inputs: Samples) -> tuple[list[Any], ...] | None:
        samples, keywords = _with_key(called, inputs)
        key: Any = keywords.get("key")
        groups: dict[Any, list[int]] = {}
        for number, row in enumerate(zip(*samples)):
            groups.setdefault(tuple(tuple(sample.shape) for sample in row), []).append(number)
        columns: list[list[Any]] = []
        kinds: list[Any] = []
        for members in groups.values():
            arrays = [_stacked(called, [column[k] for k in members]) for column in samples]
            _wait(called, arrays)
            if called.keyed:
                keywords = {"key": jax.random.fold_in(key, members[0])}
            outputs = called(arrays, len(members), **keywords)
            dtypes = [(output.dtype, output.ndim) for output in outputs]
            kinds = kinds or dtypes
            if kinds != dtypes:
                raise ValueError(
                    f"{called.name}() returned arrays of (dtype, dimensions) {kinds} for some "
                    f"samples and {dtypes} for samples of another shape. All samples of a batch "
                    "must have the same dtype and number of dimensions in DALI"
                )
            columns = columns or [[None] * len(samples[0]) for _ in outputs]
            for rows, output in zip(columns, outputs):
                for number, row in zip(members, output):
                    rows[number] = row
        return tuple(columns) or None

    run.__qualname__ = called.name
    return run


def _wait(called: BatchFunction, arrays: Sequence[Any]) -> None:
    # JAX copies the arrays from DALI's samples, and DALI reuses their memory after the function
    # returns. If the function has outputs, DALI waits for them, and they depend on the copies.
    if called.device_type == "gpu" and not called.num_outputs:
        jax.block_until_ready(arrays)


def _with_key(
    called: BatchFunction, inputs: Sequence[Samples]
) -> tuple[list[Samples], dict[str, Any]]:
    """Returns the samples of each input, and the keyword arguments of ``called``.

    The keyword arguments are {"key": key}, or {} if ``called`` takes no key.
    """
    samples = list(inputs)
    if not called.keyed:
        return samples, {}
    return samples, {"key": called.key(samples.pop())}


def _shapes(samples: Samples) -> np.ndarray:
    """Returns the shapes of the samples of an input, as an int32 array [batch, dimensions]."""
    return np.array([sample.shape for sample in samples], np.int32).reshape(len(samples), -1)


def _filled(called: BatchFunction, samples: Samples, shapes: np.ndarray, align: int) -> Any:
    """Returns the samples of an input as an array [batch, ...], padded with zeros at their ends."""
    most = tuple(-(-int(extent) // align) * align for extent in shapes.max(axis=0, initial=0))
    if called.device_type == "cpu":
        batch = np.zeros((len(samples), *most), samples[0].dtype)
        for number, sample in enumerate(samples):
            index: Any = (number, *map(slice, sample.shape))
            batch[index] = sample
        return called.arrays([batch])[0]
    pads = [[(0, m - n) for m, n in zip(most, sample.shape)] for sample in samples]
    return jnp.stack([jnp.pad(sample, pad) for sample, pad in zip(samples, pads)])


def _stacked(called: BatchFunction, samples: Samples) -> Any:
    if called.device_type == "cpu":
        return called.arrays([np.stack(samples)])[0]
    return jnp.stack(list(samples))
