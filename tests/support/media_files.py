"""Videos and sounds in several codecs and formats, which PyAV encodes."""

import io
import math
import struct
import tempfile

import av
import numpy as np

VIDEOS = {  # name, with the format as suffix: codec, pixel format, PyAV's name of the format
    "h264.mp4": ("libx264", "yuv420p", "mp4"),
    "h264.mkv": ("libx264", "yuv420p", "matroska"),
    "h264.avi": ("libx264", "yuv420p", "avi"),
    "h264.ts": ("libx264", "yuv420p", "mpegts"),
    "h264.flv": ("libx264", "yuv420p", "flv"),
    "h264.h264": ("libx264", "yuv420p", "h264"),
    "hevc.mov": ("libx265", "yuv420p", "mov"),
    "av1.webm": ("libsvtav1", "yuv420p", "webm"),
    "mpeg4.mp4": ("mpeg4", "yuv420p", "mp4"),
    "mpeg4.avi": ("mpeg4", "yuv420p", "avi"),
    "mpeg2.mpg": ("mpeg2video", "yuv420p", "mpeg"),
    "mpeg2.mkv": ("mpeg2video", "yuv420p", "matroska"),
    "wmv.wmv": ("wmv2", "yuv420p", "asf"),
    "gif.gif": ("gif", "rgb8", "gif"),
    "ffv1.mkv": ("ffv1", "yuv420p", "matroska"),
    "prores.mov": ("prores_ks", "yuv422p10le", "mov"),
    "raw.avi": ("rawvideo", "bgr24", "avi"),
    "jpeg2000.mp4": ("jpeg2000", "yuv420p", "mp4"),
    "vp8.webm": ("libvpx", "yuv420p", "webm"),
    "vp8.avi": ("libvpx", "yuv420p", "avi"),
    "vp9.mp4": ("libvpx-vp9", "yuv420p", "mp4"),
    "vp9.ivf": ("libvpx-vp9", "yuv420p", "ivf"),
    "mjpeg.mp4": ("mjpeg", "yuvj420p", "mp4"),
    "mjpeg.mov": ("mjpeg", "yuvj420p", "mov"),
    "mjpeg.mkv": ("mjpeg", "yuvj420p", "matroska"),
    "mjpeg.mjpeg": ("mjpeg", "yuvj420p", "mjpeg"),
}
SOUNDS = {  # name: codec, PyAV's name of the format
    "mp3.mp3": ("libmp3lame", "mp3"),
    "mp2.mp2": ("mp2", "mp2"),
    "aac.m4a": ("aac", "ipod"),
    "aac.aac": ("aac", "adts"),
    "alac.m4a": ("alac", "ipod"),
    "opus.webm": ("libopus", "webm"),
    "opus.opus": ("libopus", "ogg"),
    "mp3.wav": ("libmp3lame", "wav"),
    "ac3.ac3": ("ac3", "ac3"),
    "wavpack.wv": ("wavpack", "wv"),
    "adpcm.wav": ("adpcm_ms", "wav"),
    "flac.flac": ("flac", "flac"),
    "aiff.aiff": ("pcm_s16be", "aiff"),
    "au.au": ("pcm_mulaw", "au"),
    "caf.caf": ("pcm_s16le", "caf"),
}
_RATE = 48_000


def video(codec, pixels, form, options=(), sound=""):
    """Returns a clip of four frames of 48 x 64 pixels; ``sound`` is the codec of a first track."""
    with tempfile.NamedTemporaryFile() as file:  # to move an index to the front, FFmpeg reads it
        with av.open(file.name, "w", format=form, options=dict(options)) as container:
            if sound:
                audio = container.add_stream(sound, rate=_RATE, layout="mono")
            stream = container.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
            for number in range(4):
                frame = np.full((48, 64, 3), 60 * number, np.uint8)
                frame = av.VideoFrame.from_ndarray(frame, "rgb24").reformat(format=pixels)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            if sound:
                container.mux(_encoded(audio))
        return file.read()


def sound(codec, form):
    """Returns a tone of 0.1 s."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=_RATE, layout="mono")
        container.mux(_encoded(stream))
    return file.getvalue()


def _encoded(stream):
    """Returns the packets of a tone."""
    codec = stream.codec_context
    form = codec.codec.audio_formats[0].name if codec.codec.audio_formats else "s16"
    size = codec.frame_size or 1024
    resampler = av.AudioResampler(format=form, layout="mono", rate=_RATE, frame_size=size)
    tone = 0.3 * np.sin(np.arange(_RATE // 10) * 0.06).astype(np.float32)[None]
    frame = av.AudioFrame.from_ndarray(tone, "fltp", "mono")
    frame.rate = _RATE
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return [packet for part in (*frames, None) for packet in stream.encode(part)]


def matrix(degrees, mirrored=False):
    """Returns the matrix of an MP4 that rotates frames clockwise, after a mirror."""
    turn = round(65536 * math.cos(math.radians(degrees)))
    sine = round(65536 * math.sin(math.radians(degrees)))
    sign = -1 if mirrored else 1
    return sign * turn, sign * sine, 0, -sine, turn, 0, 0, 0, 1 << 30


def turned(data, values, box=b"tkhd"):
    """Returns an MP4 with a matrix in the first header of its kind."""
    data = bytearray(data)
    at = data.index(box) + 4
    times = 32 if data[at] == 1 else 20
    at += 4 + times + 16 if box == b"tkhd" else 4 + times - 4 + 16
    data[at : at + 36] = struct.pack(">9i", *values)
    return bytes(data)


def with_long_times(data):
    """Returns an MP4 whose index is last and whose first track header has 64-bit times."""
    at = data.index(b"tkhd") + 4
    created, modified, track, reserved, duration = struct.unpack_from(">5I", data, at + 4)
    header = bytes([1]) + data[at + 1 : at + 4]
    header += struct.pack(">2Q2IQ", created, modified, track, reserved, duration)
    data = bytearray(data[:at] + header + data[at + 24 :])
    for kind in (b"tkhd", b"trak", b"moov"):
        size_at = data.index(kind) - 4
        data[size_at : size_at + 4] = struct.pack(
            ">I", int.from_bytes(data[size_at : size_at + 4], "big") + 12
        )
    return bytes(data)


def remuxed(data, form):
    """Returns the packets of a video in another format."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=form) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return file.getvalue()


def rotation(data):
    """Returns the angle in degrees by which FFmpeg's players rotate a video counterclockwise."""
    with av.open(io.BytesIO(data)) as container:
        return next(container.decode(video=0)).rotation
