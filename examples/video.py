"""Sequences of video frames, with random starts, strides, and the same crop and flip for a clip.

    python examples/video.py                 # generated clips
    python examples/video.py --data Videos   # a folder with one folder of clips for each class

It writes a picture of a batch to examples/out/video, with a row of frames for each clip. GPUs
decode H.264, H.265, MPEG-4, VP8 and VP9. CPUs decode Motion JPEG, VP8 and VP9.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as dali_fn

from clips import FRAMES, draw_clips
from dalijax import data_iterator, sources
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "video"
EXTENSIONS = ("avi", "mkv", "mov", "mp4", "webm")
DEVICE = "cpu"  # GPUs can't decode the generated Motion JPEG; use "mixed" for H.264


@data_iterator(output_map=["frames", "start", "label"], mask=True)
def clips(
    data: Any,
    label: Any,
    *,
    draw: Any,
    device: str = DEVICE,
    frames: int = FRAMES,
    length: int = 8,
    stride: int = 2,
    side: int = 64,
) -> Any:
    """Defines sequences of `length` frames with a stride, uint8 [length, side, side, 3].

    `frames` is the minimum number of frames of a clip. The start is chosen so that a sequence fits.
    """
    starts = range(max(frames - stride * (length - 1), 1))
    start = draw.choice(starts, name="start")
    sequence = dali_fn.decoders.video(
        data,
        device=device,
        start_frame=start,
        sequence_length=length,
        stride=stride,
        pad_mode="edge",  # repeats the last frame of a shorter clip
    )
    # These operators process a sequence as one sample: all frames get the same crop and flip.
    sequence = dali_fn.resize(sequence, resize_shorter=side + 8)
    sequence = dali_fn.crop(
        sequence,
        crop=(side, side),
        crop_pos_x=draw.uniform(name="x"),
        crop_pos_y=draw.uniform(name="y"),
    )
    return dali_fn.flip(sequence, horizontal=draw.coin_flip(name="flip")), start, label


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws sequences of frames of videos.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--count", type=int, default=24, help="number of generated clips")
    parser.add_argument(
        "--frames", type=int, default=FRAMES, help="minimum number of frames of a clip"
    )
    parser.add_argument("--length", type=int, default=8, help="frames of a sequence")
    parser.add_argument("--stride", type=int, default=2, help="distance between frames")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.data or draw_clips(options.out / "data", options.count)
    source = sources.Files(folder, extensions=EXTENSIONS)
    call = {name: getattr(options, name) for name in ("frames", "length", "stride")}
    size = min(4, len(source))
    batches = clips.stream(source=source, batch_size=size, seed=1, **call)
    next(batches)
    state = batches.get_state()
    batch = next(batches)
    show(batch, classes={"label": source.classes}).save(options.out / "batch.png")
    print(f"{source}: {batch['frames'].shape} {options.out / 'batch.png'}")
    half = max(1, size // 2)
    again = clips.stream(source=source, batch_size=half, **call)
    again.set_state(state)
    resumed = next(again)
    same = np.array_equal(resumed["frames"], batch["frames"][:half])
    print(f"A new stream with batches of {half} restores the state and has the same clips: {same}")
    batches.close()
    again.close()


if __name__ == "__main__":
    main()
