"""Rewrites the clips of this folder with PyAV: `python tests/support/clips/write.py`.

The clips are stored in the repository, so that tests of containers and codecs do not need PyAV.
"""

import pathlib
import sys

import av

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from video_files import CLIPS, SIZE, drawn

FOLDER = pathlib.Path(__file__).resolve().parent

for name, codec in CLIPS.items():
    with av.open(str(FOLDER / name), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in drawn():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
