"""Reads the frames of videos at given times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...environment.extras import extra
from ...formats.media import rotation_of

# Seconds by which to seek further back if the first decoded frame is after the wanted frame:
# decoders drop frames that depend on frames before a key frame.
_STEPS_BACK = (0.0, 1.0, 10.0, math.inf)


def frames_at(path: str, times: Sequence[float], tolerance: float, fps: float) -> Iterator[Any]:
    """Yields the frame of a video that is nearest to each time.

    Args:
        path: The video.
        times: Increasing times in seconds.
        tolerance: Largest distance between a time and its frame, in seconds.
        fps: Frames per second.

    Yields:
        An av.VideoFrame for each time.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the video is damaged, or has no frame within the tolerance of a time.
        ImportError: If PyAV is not installed.
    """
    with extra("lerobot", "av"):
        import av

    if not len(times):
        return
    if rotation := rotation_of(path):  # its errors are OSErrors, unlike some of FFmpeg
        raise ValueError(
            f"its frames are {rotation} for display. Store them upright, by ffmpeg -i video.mp4 "
            "upright.mp4"
        )
    try:
        with av.open(path) as container:
            yield from _nearest(_from(container, times[0], tolerance, fps), times, tolerance)
    except av.FFmpegError as error:
        raise ValueError(f"the video can't be decoded: {error.strerror}") from error


def _from(container: Any, first: float, tolerance: float, fps: float) -> Iterator[Any]:
    """Yields the frames of a video, beginning at or before a time if there is such a frame.

    Args:
        container: The open video.
        first: The time, in seconds.
        tolerance: As for `frames_at`.
        fps: Frames per second.

    Raises:
        ValueError: If the file contains no video.
    """
    if not container.streams.video:
        raise ValueError("it has no video")
    (stream, *_) = container.streams.video
    stream.codec_context.thread_count = 1  # the processes are the parallelism
    begin = stream.start_time or 0
    for back in _STEPS_BACK:
        wanted = begin
        if math.isfinite(back):
            wanted = max(begin, math.floor((first - tolerance - back) / stream.time_base))
        container.seek(wanted, stream=stream)
        frames = (frame for frame in container.decode(stream) if frame.pts is not None)
        frame = next(frames, None)
        is_early = frame is not None and frame.time <= first + min(tolerance, 0.25 / fps)
        if is_early or wanted == begin:
            if frame is not None:
                yield frame
                yield from frames
            return


def _nearest(frames: Iterator[Any], times: Sequence[float], tolerance: float) -> Iterator[Any]:
    """Yields the frame that is nearest to each time; see `frames_at`."""
    earlier, current = None, next(frames, None)
    for step, time in enumerate(times):
        while current is not None and current.time < time:
            earlier, current = current, next(frames, None)
        candidates = [frame for frame in (earlier, current) if frame is not None]
        if not candidates:
            raise ValueError(f"has no frame at {time:.6f} s or later, for step {step}")
        frame = min(candidates, key=lambda frame: abs(frame.time - time))
        if abs(frame.time - time) > tolerance:
            raise ValueError(
                f"step {step} needs a frame at {time:.6f} s, but the nearest is at "
                f"{frame.time:.6f} s, {abs(frame.time - time):.6f} s away. Repair the timestamps, "
                f"or pass a --tolerance above {tolerance} s"
            )
        if frame.is_corrupt:
            raise ValueError(f"the frame at {frame.time:.6f} s is damaged, for step {step}")
        yield frame
