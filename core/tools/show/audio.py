"""Draws sounds: envelopes of waveforms, and spectrograms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pixels import Brightness, heat_colors

_FFT_SIZE, _HOP = 256, 64  # samples
_DECIBELS = 80.0  # values this far below the loudest value are black


def envelope(sound: NDArray[Any], columns: int) -> NDArray[np.float64]:
    """Returns the minimum and maximum of a sound in columns of equal width.

    Args:
        sound: Samples, [time]; non-finite values count as 0.
        columns: Number of columns; a shorter sound has a column for each sample.

    Returns:
        The minimum and maximum of each column, [columns, 2].
    """
    values = np.where(np.isfinite(sound), sound, 0).astype(np.float64)
    edges = np.linspace(0, len(values), min(columns, len(values)) + 1).astype(int)[:-1]
    return np.stack([np.minimum.reduceat(values, edges), np.maximum.reduceat(values, edges)], 1)


def spectrogram(sound: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the power of a sound relative to its maximum, in sections of 256 samples every 64.

    Args:
        sound: Samples, [time]. A sound shorter than a section is padded with zeros; non-finite
            values count as 0.

    Returns:
        Decibels from -80 to 0, [129, sections], with the lowest frequency first.
    """
    values = np.where(np.isfinite(sound), sound, 0).astype(np.float64)
    values = np.pad(values, (0, max(0, _FFT_SIZE - len(values))))
    sections = np.lib.stride_tricks.sliding_window_view(values, _FFT_SIZE)[::_HOP]
    power = np.abs(np.fft.rfft(sections * np.hanning(_FFT_SIZE + 1)[:-1], axis=1)).T ** 2
    loudest = power.max()
    if loudest == 0:
        return np.full(power.shape, -_DECIBELS)
    return (10 * np.log10(np.maximum(power / loudest, 1e-12))).clip(-_DECIBELS, 0)


def spectrogram_picture(sound: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the spectrogram of a sound as an RGB image, uint8 [129, sections, 3].

    High frequencies are above.
    """
    return heat_colors(spectrogram(sound)[::-1], Brightness(-_DECIBELS, 0, "decibels"))
