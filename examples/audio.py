"""Log-mel spectrograms of FLAC, OGG and WAV recordings, of one shape, with SpecAugment.

    python examples/audio.py                      # generated recordings
    python examples/audio.py --data LibriSpeech   # a folder with one folder for each class

It trains a small classifier, and writes a picture of a batch to examples/out/audio.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nvidia.dali.fn as dali_fn
import soundfile
from nvidia.dali import math as dali_math
from nvidia.dali import types

from dalijax import data_iterator, sources
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "audio"
RATE, BANDS, MOST = 16_000, 64, 256  # Hz; mel bands; frames of 10 ms
FLOOR = -80.0  # decibels, relative to the maximum of a recording
KINDS = ("chirp", "hum", "noise")


def draw_recordings(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes recordings of three classes, with many lengths, rates and formats."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        kind, suffix = KINDS[number % 3], ("flac", "ogg", "wav")[number // 3 % 3]
        rate = int(rng.choice([RATE, 22_050, 44_100]))
        time = np.arange(int(rate * rng.uniform(0.5, 3.0))) / rate
        pitch = rng.uniform(200, 1200)
        sound = {
            "chirp": np.sin(2 * np.pi * pitch * (1 + time) * time),
            "hum": sum(np.sin(2 * np.pi * pitch * k * time) / k for k in (1, 2, 3)),
            "noise": np.repeat(rng.normal(size=len(time) // 3 + 1), 3)[: len(time)],
        }[kind]
        sound = 0.2 * sound + 0.01 * rng.normal(size=len(time))
        (folder / kind).mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / kind / f"{number:04d}.{suffix}", sound.clip(-1, 1), rate)
    return folder


def spec_augment(mel: Any, frames: Any, draw: Any, bands: int = 12, share: float = 0.2) -> Any:
    """Erases two ranges of at most `bands` bands, and two of frames (SpecAugment, Park, 2019)."""

    def masked(mel: Any, axis: int, size: Any, limit: Any) -> Any:
        width = dali_math.floor(draw.uniform(shape=[2], name=f"width {axis}") * (limit + 1))
        start = dali_math.floor(draw.uniform(shape=[2], name=f"start {axis}") * (size - width + 1))
        return dali_fn.erase(mel, axes=[axis], anchor=start, shape=width, fill_value=FLOOR)

    size = dali_fn.cast(frames, dtype=types.FLOAT)
    return masked(masked(mel, 0, BANDS, bands), 1, size, dali_math.floor(size * share))


@data_iterator(output_map=["mel", "augmented", "frames", "label"], mask=True)
def recordings(data: Any, label: Any, *, draw: Any, bucket: int = 0) -> Any:
    """Defines spectrograms padded to MOST frames, or to a multiple of `bucket` frames."""
    sound, _ = dali_fn.decoders.audio(data, sample_rate=RATE, downmix=True)
    power = dali_fn.spectrogram(sound, nfft=512, window_length=400, window_step=160)
    mel = dali_fn.mel_filter_bank(power, sample_rate=RATE, nfilter=BANDS)
    mel = dali_fn.to_decibels(mel, multiplier=10.0, cutoff_db=FLOOR)
    mel = dali_fn.slice(mel, 0, MOST, axes=[1], out_of_bounds_policy="trim_to_shape")
    frames = mel.shape(dtype=types.INT32)[1]
    shape = {"align": [bucket]} if bucket else {"shape": [MOST]}
    mel, augmented = (
        dali_fn.pad(spectrogram, axes=[1], fill_value=FLOOR, **shape)
        for spectrogram in (mel, spec_augment(mel, frames, draw))
    )
    return mel, augmented, frames, label


@jax.jit
def step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Trains a linear classifier on the mean and the deviation of each band over time."""
    inside = jnp.arange(batch["augmented"].shape[2]) < batch["frames"][:, None]
    mel, inside = batch["augmented"] / 40 + 1, inside[:, None]
    x = jnp.concatenate([mel.mean(2, where=inside), mel.std(2, where=inside)], axis=1)

    def loss_of(weights: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(x @ weights)
        loss = -jnp.take_along_axis(log, batch["label"][:, None], axis=1)[:, 0]
        return loss.mean(where=batch["mask"])

    loss, slope = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * slope, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on spectrograms of recordings.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--count", type=int, default=120, help="number of generated recordings")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--bucket", type=int, default=0, help="pad to a multiple of these frames; 0: one shape"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    source = sources.Files(options.data or draw_recordings(options.out / "data", options.count))
    weights = jnp.zeros((2 * BANDS, len(source.classes)))
    with recordings(source=source, batch_size=12, seed=1, bucket=options.bucket) as batches:
        show(batches, classes={"label": source.classes}).save(options.out / "batch.png")
        for epoch, epoch_batches in batches.epochs(options.epochs):
            losses = []
            for batch in epoch_batches:
                weights, loss = step(weights, batch)
                losses.append(float(loss))
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    print(f"{source}; {options.out / 'batch.png'}; compiled {step._cache_size()} times")


if __name__ == "__main__":
    main()
