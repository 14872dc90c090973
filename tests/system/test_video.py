"""Videos from examples/video.py: codecs, sequences, states, bad files, and DALI's video reader."""

import numpy as np
import pytest
from forks import run_fork
from labelled import check_resumes, expected_labels, rows_of, write_labelled_tar
from nvidia.dali import fn
from PIL import Image
from shardings import rows_over

import clips as drawing
import video
from conformance import Expected, check
from dalijax import data_iterator, sources
from dalijax.errors import BatchError
from dalijax.show import show
from video_files import FOLDER, ON_CPU, ON_GPU, drawn

N, BATCH = 7, 3
CALL = {"batch_size": BATCH, "num_threads": 1, "device_id": None, "last_batch_padded": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return drawing.draw_clips(tmp_path_factory.mktemp("clips"), N, seed=4)


def opened(folder):
    return sources.Files(folder, extensions=video.EXTENSIONS)


def batches_of(source, **options):
    return video.clips(source=source, device="cpu", **{**CALL, **options})


def sequences(data, start, length, stride):
    return fn.decoders.video(
        data, start_frame=start, sequence_length=length, stride=stride, pad_mode="edge"
    )


def decoded(path, start=0, length=drawing.FRAMES, stride=1):
    make = data_iterator(sequences, ["frames"], source=sources.Files(paths=[path]), as_numpy=True)
    with make(batch_size=1, device_id=None, start=start, length=length, stride=stride) as iterator:
        return next(iterator)["frames"][0]


def assert_close(frames, wanted):
    """Equal except for the codec's loss, and nearer to their frame than to its neighbors."""
    assert frames.shape == wanted.shape
    assert np.abs(frames.astype(int) - wanted).mean() < 6
    off = [np.abs(frames.astype(int) - np.roll(wanted, k, axis=0)).mean() for k in (0, 1, -1)]
    assert off[0] == min(off)


@pytest.mark.parametrize("name", (*ON_CPU, "drawn.avi"))
@pytest.mark.parametrize(("start", "length", "stride"), ((0, 24, 1), (3, 5, 2), (10, 6, 4)))
def test_frames_match_the_drawn_frames(name, start, length, stride, tmp_path):
    path = FOLDER / name
    if name == "drawn.avi":
        drawing.write_avi(path := tmp_path / name, list(drawn()))
    rows = np.minimum(start + stride * np.arange(length), drawing.FRAMES - 1)  # repeats the last
    assert_close(decoded(path, start, length, stride), drawn()[rows])


@pytest.mark.parametrize(
    ("name", "codec"), [*zip(ON_GPU, (r"H\.264", r"H\.265", "MPEG-4"), strict=True)]
)
def test_videos_that_a_cpu_cannot_decode_are_named(name, codec):
    source = sources.Files(paths=[FOLDER / "vp9.webm", FOLDER / name])
    make = data_iterator(sequences, ["frames"], source=source)
    settings = {"start": 0, "length": 2, "stride": 1}
    with (
        make(batch_size=2, device_id=None, **settings) as iterator,
        pytest.raises(BatchError, match=rf"{name} can't be .*: {codec} on a CPU; pass device="),
    ):
        next(iterator)


def test_starts_are_drawn_so_that_sequences_fit(folder):
    source = opened(folder)
    starts = set()
    with batches_of(source, length=4, stride=5) as batches:
        for _ in range(4):
            starts |= {start for batch in batches for start in batch["start"].tolist()}
            batches.reset()
    assert starts <= set(range(drawing.FRAMES - 15)) and len(starts) > 4
    rows = rows_of(batches_of(source, length=40))
    assert set(rows["start"].tolist()) == {0}
    assert (rows["frames"][:, drawing.FRAMES :] == rows["frames"][:, -1:]).all()


def test_all_frames_of_a_clip_are_cropped_and_flipped_equally(folder, tmp_path):
    """A still clip has equal frames, and no two clips the same crop."""
    still = np.random.default_rng(0).integers(0, 256, (72, 96, 3), np.uint8)
    drawing.write_avi(tmp_path / "still.avi", [still] * drawing.FRAMES)
    source = sources.Files(paths=[tmp_path / "still.avi"] * N, labels=range(N))
    frames = rows_of(batches_of(source))["frames"]
    assert (frames == frames[:, :1]).all()
    assert len({clip[0].tobytes() for clip in frames}) == N


def test_every_state_resumes(folder):
    source = opened(folder)
    call = {"shuffle": False, "length": 3, "side": 16}
    check(lambda: batches_of(source, **call), expected_labels(source, BATCH), tail=3)


@pytest.mark.parametrize("first", ({}, {"batch_size": 4, "sharding": rows_over(4)}))
@pytest.mark.parametrize(
    "then", ({"batch_size": 2}, {"batch_size": 6, "sharding": rows_over(2)}, {"as_numpy": True})
)
def test_a_state_resumes_with_any_batch_size_and_devices(folder, first, then):
    source = opened(folder)
    check_resumes(batches_of(source, seed=9, **first), batches_of(source, **then))


def test_an_archive_has_the_same_clips(folder, tmp_path):
    paths = sorted(folder.glob("*/*"))
    tar = write_labelled_tar(tmp_path / "clips.tar", paths, "avi")
    archive = sources.Tar(tar, {"data": "avi", "label": "cls"}, cache_dir=tmp_path)
    wanted = rows_of(batches_of(sources.Files(paths=paths, labels=range(N))))
    rows = rows_of(batches_of(archive))
    for name in ("frames", "label"):
        np.testing.assert_array_equal(rows[name], wanted[name], name)


def test_show_draws_rows_of_frames(folder, tmp_path):
    source = opened(folder)
    with batches_of(source) as batches:
        page = show(batches, classes={"label": source.classes})
    outputs = {output.name: output for output in page.batches[0].outputs}
    assert outputs["frames"].layout == "FHWC"
    assert any(f"label: {motion}" in page.batches[0].caption(0) for motion in drawing.MOTIONS)
    page.save(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 8 * 64  # eight frames side by side


# DALI may deliver uninitialized memory for a truncated AVI.
BAD = [
    ("mp4", "mjpeg.mp4", 0.9),
    *(("avi", None, share) for share in (0.1, 0.35, 0.5, 0.7, 0.95)),
    ("webm", "vp8.webm", 0.02),
]


@pytest.mark.parametrize("suffix,name,share", BAD)
def test_truncated_clips_are_named_masked_and_skipped(folder, tmp_path, suffix, name, share):
    source = opened(folder)
    paths, bad = [source.name(index) for index in range(N)], 4
    verb = "read" if suffix == "avi" else "decoded"
    data = (FOLDER / name if name else folder / "rising" / "0000.avi").read_bytes()
    paths[bad] = str(tmp_path / f"cut.{suffix}")
    (tmp_path / f"cut.{suffix}").write_bytes(data[: int(share * len(data))])
    source = sources.Files(paths=paths, labels=range(N))
    iterator = batches_of(source, shuffle=False)
    assert next(iterator)["label"].tolist() == [0, 1, 2]
    with pytest.raises(BatchError, match=rf"cut\.{suffix} can't be {verb}") as error:
        next(iterator)
    assert error.value.files == (paths[bad],)
    assert next(iterator)["label"].tolist() == [6, 6, 6]
    iterator.close()
    rows = rows_of(batches_of(source, shuffle=False, on_error="mask"))
    assert rows["label"].tolist() == [0, 1, 2, 3, 5, 6]
    rows = rows_of(batches_of(source, shuffle=False, on_error="skip"))
    assert rows["label"].tolist() == [0, 1, 2, 6]


def test_a_truncated_webm_is_a_shorter_clip(tmp_path):
    """DALI reports no error, as docs/video.md explains."""
    data = (FOLDER / "vp9.webm").read_bytes()
    (tmp_path / "cut.webm").write_bytes(data[: len(data) * 2 // 3])
    frames = decoded(tmp_path / "cut.webm")
    count = drawing.FRAMES - int((frames == frames[-1:]).all((1, 2, 3)).sum()) + 1
    assert 4 < count < 20
    assert_close(frames[:count], drawn()[:count])


def read(files, shuffle=False):
    frames, label, first = fn.experimental.readers.video(
        filenames=files,
        labels=list(range(len(files))),
        sequence_length=4,
        step=6,
        enable_frame_num="scalar",
        random_shuffle=shuffle,
        initial_fill=4,
        pad_last_batch=True,
        name="reader",
    )
    return frames, label, first, fn.random.uniform()


def of_reader(files, **options):
    outputs = ["frames", "label", "first", "u"]
    return data_iterator(read, outputs, reader_name="reader", mask="mask", **options)


@pytest.mark.parametrize("shuffle", (False, True))
def test_every_state_of_dalis_video_reader_resumes(folder, shuffle):
    files = sorted(map(str, folder.glob("*/*")))[:3]
    wanted = [(label, first) for label in range(3) for first in (0, 6, 12, 18)]
    epoch = []
    for start in range(0, 12, 5):
        own = wanted[start : start + 5]
        own += own[-1:] * (5 - len(own))
        label, first = (np.array([[one[k]] for one in own], np.int32) for k in (0, 1))
        mask = np.arange(5) < 12 - start
        epoch.append({"label": label, "first": first, "mask": mask})
    if shuffle:
        epoch = [{"label": batch["label"], "mask": batch["mask"]} for batch in epoch]
    call = {"files": files, "batch_size": 5, "num_threads": 1, "device_id": None}
    check(
        lambda: of_reader(files)(shuffle=shuffle, **call),
        Expected([epoch] * 2, ordered=not shuffle),
        tail=2,
    )


@pytest.mark.parametrize("name", ("cut.mp4", "h264.mp4"))
def test_dalis_video_reader_skips_files_that_it_cannot_open(folder, tmp_path, name):
    """It only prints to stderr; docs/video.md warns of it."""
    (tmp_path / "cut.mp4").write_bytes((FOLDER / "mjpeg.mp4").read_bytes()[:9_000])
    bad = tmp_path / name if name == "cut.mp4" else FOLDER / name
    files = [str(bad), *sorted(map(str, folder.glob("*/*")))[:2]]
    with of_reader(files)(files=files, batch_size=4, num_threads=1, device_id=None) as iterator:
        assert [batch["label"].ravel().tolist() for batch in iterator] == [[1] * 4, [2] * 4]


def test_the_example_draws_a_picture(tmp_path):
    said = run_fork(video.__file__, "--count", "8", "--out", tmp_path).stdout
    assert "restores the state and has the same clips: True" in said
    low, high = Image.open(tmp_path / "batch.png").convert("L").getextrema()
    assert high - low > 50
