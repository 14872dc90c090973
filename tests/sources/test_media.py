"""Videos and sounds that DALI's decoders can't decode, or whose frames players rotate."""

import io

import grain
import numpy as np
import pytest
import soundfile
from media_files import (
    SOUNDS,
    VIDEOS,
    matrix,
    remuxed,
    rotation,
    sound,
    turned,
    video,
    with_long_times,
)
from nvidia.dali import Pipeline, fn
from nvidia.dali.data_node import DataNode

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.formats.media import MediaInput, media_fault
from dalijax.errors import BatchError
from dalijax.fn import read_file

CPU = {kind: MediaInput(kind, devices=("cpu",)) for kind in ("video", "sound")}
MIXED = MediaInput("video", devices=("mixed",))
H264 = "not supported by DALI's decoders: H.264 on a CPU; pass device='mixed'"
VP9 = video(*VIDEOS["vp9.mp4"])
PORTRAIT = turned(VP9, matrix(90))


def frames(data):
    return fn.decoders.video(data)


def waveform(data):
    return fn.decoders.audio(data)[0]


def shape_by_dali(data, decode):
    """Returns the shape of a decoded file; None if DALI can't decode it."""
    pipeline = Pipeline(1, 1, None, prefetch_queue_depth=1)
    with pipeline:
        array = np.frombuffer(data, np.uint8)
        pipeline.set_outputs(decode(fn.external_source(lambda: [array])))
    pipeline.build()
    try:
        return pipeline.run()[0][0].shape()
    except RuntimeError:
        return None


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_are_refused_if_dali_cannot_decode_them(name):
    data = video(*VIDEOS[name])
    fault = media_fault(data, CPU["video"])
    assert bool(fault) == (shape_by_dali(data, frames) is None)
    codec, _, kind = name.partition(".")
    names = {"h264": "H.264", "hevc": "H.265", "av1": "AV1", "mpeg4": "MPEG-4"}
    if fault:
        assert fault.startswith("not supported by DALI's decoders: ") and "ffmpeg -i" in fault
        if kind not in ("ts", "flv"):
            assert names.get(codec, "") in fault
        assert ("device='mixed'" in fault) == (codec in names or kind == "mpg")
    on_gpu = codec in (*names, "vp8", "vp9", "mjpeg") or kind == "mpg"
    assert bool(media_fault(data, MIXED)) == (not on_gpu)


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_are_refused_if_dali_cannot_decode_them(name):
    data = sound(*SOUNDS[name])
    fault = media_fault(data, CPU["sound"])
    assert bool(fault) == (shape_by_dali(data, waveform) is None)
    if fault:
        assert fault.startswith("not supported by DALI's decoders: ") and "FLAC, OGG" in fault
    if name in ("aac.aac", "flac.flac"):
        tagged = b"ID3\4\0\0\0\0\1\0" + bytes(128) + data
        assert media_fault(tagged, CPU["sound"]) == fault
        assert bool(fault) == (shape_by_dali(tagged, waveform) is None)


def test_no_sound_that_dali_decodes_is_refused():
    """Compares with all formats of libsndfile, which DALI's decoder uses."""
    tone = 0.3 * np.sin(np.arange(4800) * 0.06)
    decoded = 0
    for form in soundfile.available_formats().keys() - {"SD2"}:  # SD2 consists of two files
        for subtype in soundfile.available_subtypes(form):
            file = io.BytesIO()
            try:
                soundfile.write(file, tone, 48_000, format=form, subtype=subtype)
            except (ValueError, soundfile.LibsndfileError):  # no mono, or not for writing
                continue
            if shape_by_dali(file.getvalue(), waveform) is not None:
                assert media_fault(file.getvalue(), CPU["sound"]) == "", (form, subtype)
                decoded += 1
    assert decoded > 60


# Every turn of one format; each format has its own place for a turn.
TURNS = [
    *(
        ("mp4", degrees, mirrored)
        for degrees in (0, 90, 180, 270, 45)
        for mirrored in (False, True)
    ),
    *(
        (form, *turn)
        for form in ("matroska", "webm")
        for turn in ((0, False), (90, False), (0, True))
    ),
]


@pytest.mark.parametrize("form,degrees,mirrored", TURNS)
def test_turned_videos_are_refused(form, degrees, mirrored):
    data = turned(VP9, matrix(degrees, mirrored))
    data = data if form == "mp4" else remuxed(data, form)
    fault = media_fault(data, CPU["video"])
    if mirrored:
        assert fault.startswith("its frames are mirrored for display") and "fn.copy" in fault
    else:
        assert -rotation(data) % 360 == degrees  # FFmpeg counts counterclockwise
        assert fault.startswith(f"its frames are rotated by {degrees} degrees") == (degrees > 0)
        assert bool(fault) == (degrees > 0)


ODD = {
    "the index first": video("libvpx-vp9", "yuv420p", "mp4", {"movflags": "faststart"}),
    "fragments": video("libvpx-vp9", "yuv420p", "mp4", {"movflags": "frag_keyframe+empty_moov"}),
    "a sound first": video("libvpx-vp9", "yuv420p", "mp4", sound="aac"),
    "64-bit times": with_long_times(VP9),
}


@pytest.mark.parametrize("name", ODD)
def test_the_matrix_of_the_video_is_found(name):
    data = ODD[name]
    assert media_fault(data, CPU["video"]) == "" and shape_by_dali(data, frames)
    # Of a file with a sound, the first header is the sound's, whose matrix has no effect.
    portrait = turned(data, matrix(90))
    assert bool(media_fault(portrait, CPU["video"])) == (rotation(portrait) != 0)
    assert (rotation(portrait) != 0) == (name != "a sound first")
    whole = turned(data, matrix(180), b"mvhd")
    assert abs(rotation(whole)) == 180
    assert "rotated by 180 degrees" in media_fault(whole, CPU["video"])
    assert media_fault(turned(whole, matrix(180)), CPU["video"]) == (
        "" if name != "a sound first" else media_fault(whole, CPU["video"])
    )


@pytest.mark.parametrize("values", ((0,) * 9, (131072, 0, 0, 0, 65536, 0, 999, 7, 1 << 30)))
def test_other_matrices_have_no_effect(values):
    """An empty matrix, and one that scales and moves."""
    assert media_fault(turned(VP9, values), CPU["video"]) == ""


def test_damaged_files_are_left_to_dali():
    """Headers with other bytes raise no error, and their check ends."""
    rng = np.random.default_rng(0)
    for name in ("vp9.mp4", "mjpeg.mp4", "h264.mkv", "h264.avi", "vp9.ivf"):
        data = video(*VIDEOS[name])
        for end in range(0, len(data), 37):
            media_fault(data[:end], CPU["video"])
        for _ in range(200):
            damaged = bytearray(data)
            for at in rng.integers(0, len(data), 8):
                damaged[at] = rng.integers(0, 256)
            assert isinstance(media_fault(damaged, CPU["video"]), str)
            media_fault(damaged, CPU["sound"])
    assert media_fault(VP9[:-40], CPU["video"]) == ""  # of its index


def iterator_of(how, decode, files, folder, **options):
    """Returns an iterator over files, which are passed as bytes or as paths."""
    paths = [folder / str(number) for number in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)

    def graph(data):
        return decode(read_file(data) if how == "paths" else data)

    records = [{"data": bytes(x)} for x in (paths if how == "paths" else files)]
    options = {"batch_size": 2, "num_threads": 1, **options}
    if how == "Grain":
        transform = DALITransform(graph, output_map=["x"], seed=0, pad="mask", **options)
        return iter(grain.MapDataset.source(records).pipe(transform))
    source = sources.Files(paths=paths) if how == "Files" else sources.Records(records)
    make = data_iterator(graph, ["x"], source=source, mask=True)
    return make(shuffle=False, device_id=None, **options)


@pytest.mark.parametrize("how", ("Files", "records", "paths", "Grain"))
@pytest.mark.parametrize("bad", ("h264.mp4", "portrait"))
def test_bad_videos_are_named_and_masked(how, bad, tmp_path):
    data = PORTRAIT if bad == "portrait" else video(*VIDEOS[bad])
    said = "rotated by 90 degrees clockwise for display" if bad == "portrait" else H264
    iterator = iterator_of(how, frames, [VP9, data, VP9, VP9], tmp_path)
    with pytest.raises(Exception, match=said) as error:
        next(iterator)
    assert how == "Grain" or isinstance(error.value, BatchError)
    assert np.shape(next(iterator)["x"]) == (2, 4, 48, 64, 3)
    iterator = iterator_of(how, frames, [VP9, data, VP9, VP9], tmp_path, on_error="mask")
    assert [np.asarray(batch["mask"]).tolist() for batch in iterator] == [[1, 0], [1, 1]]


def test_each_reason_of_a_batch_is_named(tmp_path):
    names = ("h264.mp4", "ffv1.mkv", "gif.gif", "wmv.wmv", "raw.avi", "prores.mov", "mpeg2.mkv")
    files = [VP9, PORTRAIT, *(video(*VIDEOS[name]) for name in names)]
    options = {"batch_size": len(files), "on_error": "mask"}
    with iterator_of("records", frames, files, tmp_path, **options) as iterator:
        next(iterator)
        (failed,) = iterator.errors
    assert len(failed.files) == 8
    assert "record 1 can't be read. ValueError: data: its frames are rotated" in failed.message
    assert "; record 2 can't be read. ValueError: data: not supported" in failed.message
    assert failed.message.endswith("; 3 further reasons")


@pytest.mark.parametrize("how", ("Files", "records"))
def test_every_sound_of_a_source_may_be_unsupported(how, tmp_path):
    data = sound(*SOUNDS["mp3.mp3"])
    with (
        iterator_of(how, waveform, [data, data], tmp_path) as iterator,
        pytest.raises((ValueError, BatchError), match="not supported by DALI's decoders: MP3; "),
    ):
        next(iterator)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "decode",
    (
        fn.experimental.decoders.video,
        lambda data: frames(data)[0],
        lambda data: fn.python_function(frames(data), function=lambda clip: clip),
    ),
)
def test_every_decoder_of_videos_is_known(decode, tmp_path):
    with (
        iterator_of("records", decode, [PORTRAIT, VP9], tmp_path) as iterator,
        pytest.raises(BatchError, match="rotated by 90 degrees"),
    ):
        next(iterator)


@pytest.mark.parametrize("how", ("Files", "records", "Grain"))
def test_a_copy_of_the_input_is_decoded_as_it_is_stored(how, tmp_path):
    iterator = iterator_of(how, lambda data: frames(fn.copy(data)), [PORTRAIT, VP9], tmp_path)
    clips = np.asarray(next(iterator)["x"])
    np.testing.assert_array_equal(clips[0], clips[1])


def read(files, decode):
    data, label = fn.readers.file(files=files, name="reader")
    return decode(data), label


@pytest.mark.parametrize(
    ("name", "good", "decode", "said"),
    (
        ("h264.mp4", VP9, frames, H264),
        ("aac.m4a", sound("flac", "flac"), waveform, "AAC in MP4; they read AIFF"),
    ),
)
def test_codecs_are_named_if_dali_reads_the_files(name, good, decode, said, tmp_path):
    data = video(*VIDEOS[name]) if name in VIDEOS else sound(*SOUNDS[name])
    (tmp_path / "good").write_bytes(good)
    (tmp_path / name).write_bytes(data)
    make = data_iterator(read, ["x", "label"], reader_name="reader")
    files = [str(tmp_path / "good"), str(tmp_path / name)]
    with (
        make(files=files, decode=decode, batch_size=2, device_id=None) as iterator,
        pytest.raises(BatchError, match=f"{name}: .*{said}") as error,
    ):
        next(iterator)
    assert error.value.files == (files[1],)


@pytest.mark.parametrize("argument", ("filenames", "file_root", "file_list"))
def test_dalis_video_reader_warns_of_turned_videos(argument, tmp_path):
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "a" / "0.mp4", tmp_path / "a" / "1.mp4"]
    for path, data in zip(paths, (VP9, PORTRAIT), strict=True):
        path.write_bytes(data)
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{path} 0\n" for path in paths))
    value = {
        "filenames": list(map(str, paths)),
        "file_root": str(tmp_path),
        "file_list": str(listing),
    }[argument]

    def graph():
        output = fn.experimental.readers.video(
            sequence_length=2, name="reader", **{argument: value}
        )
        return output if isinstance(output, DataNode) else output[0]

    make = data_iterator(graph, ["x"], reader_name="reader")
    with pytest.warns(RuntimeWarning, match=r"1\.mp4 are rotated by 90 degrees.*readers\.video"):
        make(batch_size=2, device_id=None).close()
