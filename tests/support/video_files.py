"""One clip in several containers and codecs, and the frames that are in it."""

import pathlib

import numpy as np

from clips import draw_clip

FOLDER = pathlib.Path(__file__).resolve().parent / "clips"
SIZE = (160, 144)  # NVDEC takes no H.265 below 144 x 144, and no VP9 below 128 x 128
# Files of FOLDER, and PyAV's names of their codecs.
ON_CPU = {"mjpeg.mp4": "mjpeg", "vp8.webm": "libvpx", "vp9.webm": "libvpx-vp9"}
ON_GPU = {"h264.mp4": "libx264", "hevc.mp4": "libx265", "mpeg4.mp4": "mpeg4"}
CLIPS = ON_CPU | ON_GPU
ON_BOTH = ("vp8.webm", "vp9.webm")  # NVDEC does not decode Motion JPEG


def drawn():
    """The frames that are in each of them, uint8 [frames, height, width, 3]."""
    return draw_clip("turning", np.random.default_rng(5), SIZE)
