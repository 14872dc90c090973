"""Finds videos and sounds that DALI can't decode, and videos that players rotate.

DALI's errors do not name the codec, and its decoders ignore the rotation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .containers import Read, Track, read_tracks
from .regular_file import regular_file


class MediaInput(NamedTuple):
    """The use of a graph's input by operators that decode videos or sounds, or only read files.

    Attributes:
        kind: "video" or "sound"; "" if files are only read.
        is_path: Whether the input is the path of a file.
        devices: Devices of the decoders, "cpu" or "mixed".
    """

    kind: str
    is_path: bool = False
    devices: tuple[str, ...] = ()


# The devices that decode a codec. On a CPU, by trial with DALI 2.4. On a GPU, DALI passes these
# codecs to NVDEC (GetCodecType in its frames_decoder_gpu.cc), and its error names a codec that the
# GPU lacks, such as AV1 or Motion JPEG on Hopper; see
# https://docs.nvidia.com/video-technologies/video-codec-sdk/13.0/nvdec-application-note
_DEVICES = {
    **dict.fromkeys(("VP8", "VP9", "Motion JPEG"), ("cpu", "mixed")),
    **dict.fromkeys(("H.264", "H.265", "MPEG-4", "AV1"), ("mixed",)),
    **dict.fromkeys(("FLV", "MPEG program stream", "MPEG transport stream"), ("mixed",)),
}
# The files' names of codecs; see `Track`. DALI gets files with other names, and decides.
_VIDEOS = {
    "H.264": "avc1 avc2 avc3 avc4 h264 x264 v_mpeg4/iso/avc",
    "H.265": "hvc1 hev1 hevc h265 dvh1 dvhe v_mpegh/iso/hevc",
    "H.266": "vvc1 vvi1 v_mpegi/iso/vvc",
    "AV1": "av01 v_av1",
    "VP8": "vp80 vp08 v_vp8",
    "VP9": "vp90 vp09 v_vp9",
    "Motion JPEG": "jpeg mjpg v_mjpeg mp4v.6c",
    "MPEG-4": "mp4v.20 fmp4 xvid divx dx50 v_mpeg4/iso/sp v_mpeg4/iso/asp v_mpeg4/iso/ap",
    "MPEG-2": "mp4v.60 mp4v.61 mp4v.62 mp4v.63 mp4v.64 mp4v.65 m2v1 mp2v mpg2 v_mpeg2",
    "MPEG-1": "mp4v.6a m1v1 mpeg mpg1 v_mpeg1",
    "H.263": "h263 s263 flv1",
    "Sorenson Video": "svq1 svq3",
    "Microsoft MPEG-4": "mpg4 mp42 mp43 div3 v_mpeg4/ms/v3",
    "Windows Media Video": "wmv1 wmv2 wmv3 wvc1 vc-1",
    "RealVideo": "v_real/rv10 v_real/rv20 v_real/rv30 v_real/rv40",
    "Theora": "theo v_theora",
    "ProRes": "apcn apch apcs apco ap4h ap4x v_prores",
    "DNxHD": "avdn avdh",
    "DV": "dvc dvcp dvpp dvsd",
    "JPEG 2000": "mjp2 mp4v.6e",
    "PNG": "png mpng mp4v.6d",
    "FFV1": "ffv1 v_ffv1",
    "HuffYUV": "hfyu ffvh",
    "Ut Video": "ulrg ulra uly0 uly2 uly4 ulh0 ulh2 ulh4",
    "Cinepak": "cvid",
    "QuickTime Animation": "rle",
    "uncompressed frames": "raw dib 2vuy yuv2 yuy2 uyvy i420 v210 v_uncompressed",
    "encrypted frames": "encv",
}
_SOUNDS = {
    "AAC": "mp4a.40 mp4a.66 mp4a.67 mp4a.68 a_aac ..00ff",
    "MP3": "mp4a.69 mp4a.6b .mp3 a_mpeg/l3 ..0055",
    "MPEG audio": "a_mpeg/l1 a_mpeg/l2 ..0050",
    "ALAC": "alac a_alac",
    "AC-3": "ac-3 mp4a.a5 a_ac3 ..2000",
    "E-AC-3": "ec-3 mp4a.a6 a_eac3",
    "AMR": "samr sawb",
    "Opus": "opus a_opus",
    "Vorbis": "mp4a.dd a_vorbis",
    "FLAC": "flac a_flac",
    "WMA": "..0160 ..0161 ..0162 ..0163",
    "PCM": "sowt twos lpcm a_pcm/int/lit a_pcm/int/big a_pcm/float/ieee",
}
_NAMES = {name: codec for codec, names in (_VIDEOS | _SOUNDS).items() for name in names.split()}

_WMV = re.compile(rb"WMV[123A]|WVC1")
UNSUPPORTED = "not supported by DALI's decoders: "  # begins the reasons about codecs
_HEAD = 400  # bytes that are compared
_MANY = 8192  # bytes that are searched for a codec's name
# The first bytes of other videos. Raw streams of H.264 and H.265 begin with a parameter set.
_OTHER_VIDEOS = (
    *((b"GIF8", "GIF"), (b"\x89PNG", "PNG"), (b"YUV4MPEG2", "uncompressed frames")),
    *((b".RMF", "RealVideo"), (b"FLV", "FLV"), (b"\0\0\1\xba", "MPEG program stream")),
    *((b"\0\0\1\xb3", "MPEG-1 or MPEG-2"), (b"\0\0\0\1\x40\1", "H.265")),
    *((b"\0\0\0\1\x67", "H.264"), (b"\0\0\0\1\x27", "H.264")),
)
# The first bytes of sounds that DALI doesn't decode, except MPEG's, which begin with 11 set bits.
_OTHER_SOUNDS = (
    *((b"#!AMR", "AMR"), (b"MAC ", "Monkey's Audio"), (b"wvpk", "WavPack"), (b"TTA1", "TTA")),
    *((b"MPCK", "Musepack"), (b"MP+", "Musepack"), (b"DSD ", "DSD"), (b"FRM8", "DSD")),
    *((b"\x0bw", "AC-3"), (b"\x7f\xfe\x80\1", "DTS"), (b"0&\xb2u\x8ef\xcf\x11", "WMA")),
    *((b".ra\xfd", "RealAudio"), (b".RMF", "RealAudio"), (b"FLV", "FLV")),
)
_LAYERS = ("AAC", "MP3", "MPEG audio", "MPEG audio")
_TO_VIDEO = "convert it, e.g. by ffmpeg -i video.mp4 -c:v libvpx-vp9 video.webm"
_TO_SOUND = (
    "they read AIFF, AU, CAF, FLAC, OGG with Opus or Vorbis, and WAV. Convert it, e.g. by "
    "ffmpeg -i sound.mp3 sound.flac"
)


def media_fault(value: Any, media_input: MediaInput) -> str:
    """Returns the reason not to feed a video or a sound to a graph; "" if the graph can decode it.

    Returns "" also for damaged files and for files that can't be read, because DALI reports them.

    Args:
        value: The encoded file or the path, with the buffer protocol.
        media_input: The graph's use of the input that ``value`` is fed to.
    """
    if not media_input.kind:
        return ""
    if not media_input.is_path:
        view = memoryview(value).cast("B")
        return _fault(lambda at, count: bytes(view[at : at + count]), len(view), media_input)
    try:
        with regular_file(value) as (file, size):
            return _fault(lambda at, count: os.pread(file, count, at), size, media_input)
    except (OSError, ValueError):
        return ""


def rotation_of(path: str) -> str:
    """Returns the rotation of a local video for display, e.g. "mirrored"; "" if there is none.

    Raises:
        OSError: If the file can't be opened.
        ValueError: If it isn't a regular file.
    """
    with regular_file(os.fsencode(path)) as (file, size):
        _, tracks = read_tracks(lambda at, count: os.pread(file, count, at), size)
    return next((track.rotation for track in _shown(tracks) if track.rotation), "")


def _fault(read: Read, size: int, media_input: MediaInput) -> str:
    if not size:
        return "it is empty"
    form, tracks = read_tracks(read, size)
    if media_input.kind == "sound":
        name = _sound_in(form, tracks) if form else _sound_kind(read)
        return f"{UNSUPPORTED}{name}; {_TO_SOUND}" if name else ""
    videos = list(_shown(tracks))
    names = [_NAMES.get(track.codec, "") for track in videos] if form else [_video_kind(read)]
    for device in media_input.devices:
        faults = [_codec_fault(name, device) for name in names]
        if faults and all(faults):
            return f"{UNSUPPORTED}{faults[0]}"
    rotation = next((track.rotation for track in videos if track.rotation), "")
    if not rotation:
        return ""
    return (
        f"its frames are {rotation} for display, which DALI's decoders ignore. To store the frames "
        f"as they are displayed, {_TO_VIDEO}. To decode them as they are stored, pass "
        "fn.copy(data) to the decoder instead of data"
    )


def _shown(tracks: list[Track]) -> Iterator[Track]:
    """Yields the tracks from which DALI chooses: the enabled videos, or all disabled videos."""
    videos = [track for track in tracks if track.kind == "video"]
    any_enabled = any(track.enabled for track in videos)
    yield from (track for track in videos if track.enabled or not any_enabled)


def _codec_fault(name: str, device: str) -> str:
    """Returns the fault of a codec and its fix; "" if a device decodes it, or it has no name."""
    devices = _DEVICES.get(name, ())
    if not name or device in devices:
        return ""
    if devices:
        return f"{name} on a CPU; pass device='mixed' to decode it on a GPU, or {_TO_VIDEO}"
    return f"{name}; {_TO_VIDEO}"


def _video_kind(read: Read) -> str:
    """Returns the name of a video's codec or format by its first bytes; "" if it is unknown."""
    head = read(0, _HEAD)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if _is_transport_stream(head):
        return "MPEG transport stream"
    if head.startswith(b"OggS") and head[28:35] == b"\x80theora":
        return "Theora"
    if head.startswith(b"0&\xb2u") and _WMV.search(read(0, _MANY)):
        return "Windows Media Video"
    return next((name for magic, name in _OTHER_VIDEOS if head.startswith(magic)), "")


def _is_transport_stream(head: bytes) -> bool:
    """Returns whether a file consists of packets of 188 bytes, or of 192 with a time each."""
    return b"GGG" in (head[0:377:188], head[4:389:192])


def _sound_in(form: str, tracks: list[Track]) -> str:
    """Returns the name of the sound in a video file, such as "AAC in MP4"."""
    codecs = [_NAMES.get(track.codec, "") for track in tracks if track.kind == "sound"]
    return f"{codecs[0]} in {form}" if codecs and codecs[0] else form


def _sound_kind(read: Read) -> str:
    """Returns the name of a sound that DALI doesn't decode; "" for other files."""
    head = read(0, _HEAD)
    if head.startswith(b"ID3") and len(head) > 10:  # a tag before the sound
        bits = (byte << 7 * (3 - place) for place, byte in enumerate(head[6:10]))
        head = read(10 + sum(bits) + (10 if head[5] & 0x10 else 0), _HEAD)
    if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt ":
        name = _NAMES.get(f"..{int.from_bytes(head[20:22], 'little'):04x}", "")
        return f"{name} in WAV" if name else ""
    if head.startswith(b"OggS"):
        return "Speex" if head[28:36] == b"Speex   " else ""
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return _LAYERS[head[1] >> 1 & 3]
    if len(head) > 1 and head[0] == 0x56 and head[1] & 0xE0 == 0xE0:
        return "AAC"
    if _is_transport_stream(head):
        return "MPEG transport stream"
    return next((name for magic, name in _OTHER_SOUNDS if head.startswith(magic)), "")
