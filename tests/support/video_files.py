"""A clip in several containers and codecs, and its frames."""

import pathlib

import numpy as np

from clips import draw_clip

FOLDER = pathlib.Path(__file__).resolve().parent / "clips"
SIZE = (160, 144)  # NVDEC decodes no H.265 below 144 x 144, and no VP9 below 128 x 128
# Files in FOLDER, and PyAV's names of their codecs.
ON_CPU = {"mjpeg.mp4": "mjpeg", "vp8.webm": "libvpx", "vp9.webm": "libvpx-vp9"}
ON_GPU = {"h264.mp4": "libx264", "hevc.mp4": "libx265", "mpeg4.mp4": "mpeg4"}
CLIPS = ON_CPU | ON_GPU
ON_BOTH = ("vp8.webm", "vp9.webm")  # NVDEC does not decode Motion JPEG


def drawn():
    """Returns the frames in each clip, uint8 [frames, height, width, 3]."""
    return draw_clip("turning", np.random.default_rng(5), SIZE)
