"""Generates short labeled videos (Motion JPEG in AVI), so that the examples need no download.

Pillow encodes the frames, and an AVI file is a list of frames, so no video library is needed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

MOTIONS = ("rising", "sinking", "turning")
FRAMES = 24  # frames of a clip
RATE = 25  # frames per second
Pixels = NDArray[np.uint8]


def draw_clip(motion: str, rng: np.random.Generator, size: tuple[int, int] = (96, 72)) -> Pixels:
    """Draws the frames of a moving square: uint8 of shape [FRAMES, height, width, 3]."""
    width, height = size
    paper, ink = rng.integers(0, 90, 3), rng.integers(150, 256, 3)
    x, y, phase = rng.uniform(0.3, 0.7) * width, height / 2, rng.uniform(0, np.pi)
    speed, half = rng.uniform(0.6, 1.2) * height / FRAMES, 0.15 * height
    frames = []
    for time in range(FRAMES):
        shift = {"rising": -speed, "sinking": speed, "turning": 0}[motion] * (time - FRAMES / 2)
        angle = phase + (0.2 * time if motion == "turning" else 0)
        corners = [
            (x + 1.4 * half * np.cos(angle + k), y + shift + 1.4 * half * np.sin(angle + k))
            for k in np.pi / 4 * np.array([1, 3, 5, 7])
        ]
        frame = Image.new("RGB", size, tuple(paper.tolist()))
        ImageDraw.Draw(frame).polygon(corners, fill=tuple(ink.tolist()))
        frames.append(np.asarray(frame))
    return np.stack(frames)


def _chunk(name: bytes, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def write_avi(path: Path, frames: Sequence[Pixels], quality: int = 90) -> None:
    """Writes frames of equal size, uint8 [height, width, 3], as Motion JPEG."""
    height, width, _ = frames[0].shape
    jpegs = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "jpeg", quality=quality)
        jpegs.append(_chunk(b"00dc", buffer.getvalue()))
    count, largest = len(jpegs), max(map(len, jpegs))
    # The headers avih, strh and strf of the AVI format; most of their fields are 0.
    video = [10**6 // RATE, 0, 0, 0x10, count, 0, 1, largest, width, height, 0, 0, 0, 0]
    stream = [0, 0, 0, 0, 1, RATE, 0, count, largest, 0xFFFFFFFF, 0, 0, 0, width, height]
    bitmap = [40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0]
    header = _chunk(
        b"LIST",
        b"hdrl",
        _chunk(b"avih", struct.pack("<14I", *video)),
        _chunk(
            b"LIST",
            b"strl",
            _chunk(b"strh", b"vidsMJPG", struct.pack("<IHHIIIIIIII4H", *stream)),
            _chunk(b"strf", struct.pack("<IiiHH4sIiiII", *bitmap)),
        ),
    )
    places = np.cumsum([4, *map(len, jpegs)]).tolist()  # offsets after the word "movi"
    index = [
        struct.pack("<4sIII", b"00dc", 0x10, place, struct.unpack("<I", jpeg[4:8])[0])
        for place, jpeg in zip(places, jpegs)
    ]
    movie = _chunk(b"LIST", b"movi", *jpegs)
    path.write_bytes(_chunk(b"RIFF", b"AVI ", header, movie, _chunk(b"idx1", *index)))


def draw_clips(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes a folder with one folder of clips for each motion."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        motion = MOTIONS[number % len(MOTIONS)]
        (folder / motion).mkdir(parents=True, exist_ok=True)
        write_avi(folder / motion / f"{number:04d}.avi", list(draw_clip(motion, rng)))
    return folder
