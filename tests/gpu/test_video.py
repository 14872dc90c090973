"""Videos and recordings on a GPU: NVDEC's frames, a CPU's frames, and states between the two."""

import json
import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import backend, fn, types

from dalijax import data_iterator, sources
from dalijax.errors import BatchError

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)

from labelled import rows_of  # noqa: E402
from shardings import rows_over  # noqa: E402

import clips as drawing  # noqa: E402 - of examples/
import video  # noqa: E402 - of examples/
from video_files import FOLDER, ON_BOTH, ON_GPU, drawn  # noqa: E402

N, BATCH = 9, 3
LENGTH, STRIDE = 6, 3


def of_files(paths, device="mixed", **options):
    call = {"batch_size": BATCH, "num_threads": 2, "last_batch_padded": True, **options}
    if device == "cpu":
        call["device_id"] = None
    source = sources.Files(paths=paths, labels=range(len(paths)))
    return video.clips(source=source, device=device, length=LENGTH, stride=STRIDE, **call)


def whole(data):
    return fn.decoders.video(data, device="mixed", sequence_length=drawing.FRAMES)


def assert_close(frames, wanted, most=8.0):
    off = [np.abs(frames.astype(int) - np.roll(wanted, k, axis=0)).mean() for k in (0, 1, -1)]
    assert frames.shape == wanted.shape and off[0] == min(off) and off[0] < most, off


@pytest.mark.parametrize("name", (*ON_GPU, *ON_BOTH))
def test_frames_match_the_drawn_frames(name):
    make = data_iterator(whole, ["frames"], source=sources.Files(paths=[FOLDER / name]))
    with make(batch_size=1) as iterator:
        frames = next(iterator)["frames"]
    assert frames.devices() == {jax.devices()[0]}
    assert_close(np.asarray(frames)[0], drawn())


def test_motion_jpeg_is_named():
    make = data_iterator(whole, ["frames"], source=sources.Files(paths=[FOLDER / "mjpeg.mp4"]))
    with make(batch_size=1) as iterator, pytest.raises(BatchError, match=r"mjpeg\.mp4 can't be"):
        next(iterator)


@pytest.fixture(scope="module")
def webms():
    """Clips that both a CPU and a GPU decode."""
    return [FOLDER / ON_BOTH[k % len(ON_BOTH)] for k in range(N)]


def check(rows, wanted, exact):
    for name in ("start", "label"):
        np.testing.assert_array_equal(rows[name], wanted[name], name)
    if exact:
        np.testing.assert_array_equal(rows["frames"], wanted["frames"])
    else:  # other decoders and another resize
        for frames, others in zip(rows["frames"], wanted["frames"], strict=True):
            assert np.abs(frames.astype(int) - others).mean() < 8


@pytest.mark.parametrize("to", ("mixed", "cpu"))
@pytest.mark.parametrize("device", ("mixed", "cpu"))
def test_a_state_resumes_on_a_gpu_and_on_a_cpu(webms, device, to):
    saved = of_files(webms, device, seed=7)
    next(saved)
    state = json.loads(json.dumps(saved.get_state()))
    wanted = rows_of(saved)
    for batch in (BATCH, 2):
        other = of_files(webms, to, batch_size=batch)
        # The device is an argument of the decoder, which states of sources do not contain.
        other.set_state(state)
        check(rows_of(other), wanted, device == to == "cpu")


@pytest.mark.parametrize("names", (("h264.mp4",), tuple(ON_GPU), ON_BOTH))
def test_every_state_resumes(names):
    """Saves after each step and resumes in a new iterator, with clips of several codecs."""
    paths = [FOLDER / names[k % len(names)] for k in range(N)]
    with of_files(paths, seed=7) as iterator:
        states, batches = [iterator.get_state()], []
        for batch in iterator:
            batches.append({name: np.asarray(array) for name, array in batch.items()})
            states.append(iterator.get_state())
    assert len(batches) == 3
    for at, state in enumerate(states[:-1]):
        with of_files(paths) as other:
            other.set_state(json.loads(json.dumps(state)))
            for wanted, batch in zip(batches[at:], other, strict=True):
                for name in wanted:
                    np.testing.assert_array_equal(np.asarray(batch[name]), wanted[name])


def test_a_sharding_gets_the_same_clips(webms):
    sharding = rows_over(1)
    check(
        rows_of(of_files(webms, seed=7, sharding=sharding)), rows_of(of_files(webms, seed=7)), False
    )


@pytest.mark.parametrize("name", ("h264.mp4", "hevc.mp4"))
def test_a_clip_that_is_cut_off_is_named_and_masked(webms, tmp_path, name):
    data = (FOLDER / name).read_bytes()
    bad = tmp_path / "cut.mp4"
    bad.write_bytes(data[: len(data) * 9 // 10])
    paths = [*webms[:4], bad, *webms[5:]]
    with of_files(paths, shuffle=False) as iterator:
        next(iterator)
        with pytest.raises(BatchError, match=r"cut\.mp4 can't be decoded"):
            next(iterator)
        assert next(iterator)["label"].tolist() == [6, 7, 8]
    rows = rows_of(of_files(paths, shuffle=False, on_error="mask"))
    assert rows["label"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]


def read(files):
    frames, label = fn.experimental.readers.video(
        device="gpu",
        filenames=files,
        labels=list(range(len(files))),
        sequence_length=4,
        step=6,
        pad_last_batch=True,
        name="reader",
    )
    return frames, label, fn.random.uniform()


def test_every_state_of_dalis_video_reader_resumes():
    files = [str(FOLDER / name) for name in ("h264.mp4", "hevc.mp4", "vp9.webm")]

    def make():
        outputs = ["frames", "label", "u"]
        iterator_fn = data_iterator(read, outputs, reader_name="reader", mask="mask")
        return iterator_fn(files=files, batch_size=5, num_threads=2)

    with make() as iterator:
        states, batches = [iterator.get_state()], []
        for batch in iterator:
            batches.append({name: np.asarray(array) for name, array in batch.items()})
            states.append(iterator.get_state())
    labels = np.concatenate([batch["label"][batch["mask"]] for batch in batches])
    assert labels.ravel().tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for at, state in enumerate(states[:-1]):
        with make() as other:
            other.set_state(json.loads(json.dumps(state)))
            for wanted, batch in zip(batches[at:], other, strict=True):
                for name in wanted:
                    np.testing.assert_array_equal(np.asarray(batch[name]), wanted[name])


# Recordings: decoded by a CPU, with all other operators on the GPU, as in docs/audio.md.


def recordings(data, label, *, draw, device):
    sound, _ = fn.decoders.audio(data, sample_rate=16_000, downmix=True)
    sound = sound.gpu() if device == "gpu" else sound
    power = fn.spectrogram(sound, nfft=512, window_length=400, window_step=160)
    mel = fn.mel_filter_bank(power, sample_rate=16_000, nfilter=64)
    mel = fn.to_decibels(mel, multiplier=10.0, cutoff_db=-80.0)
    mel = fn.slice(mel, 0, 100, axes=[1], out_of_bounds_policy="trim_to_shape")
    frames = mel.shape(dtype=types.INT32)[1]
    start = draw.choice(range(30), shape=[1], name="start")
    mel = fn.erase(
        mel, axes=[1], anchor=fn.cast(start, dtype=types.FLOAT), shape=[9.0], fill_value=-80.0
    )
    return fn.pad(mel, axes=[1], shape=[100], fill_value=-80.0), frames, label


def test_spectrograms_equal_a_cpus_and_compile_one_step(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(N):
        sound = rng.normal(size=8_000 + 2_000 * number) * 3_000
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(sound.astype("<i2").tobytes())
    paths = sorted(tmp_path.glob("*.wav"))
    source = sources.Files(paths=paths, labels=range(N))
    make = data_iterator(recordings, ["mel", "frames", "label"], source=source, mask="mask")
    call = {"batch_size": BATCH, "seed": 3, "last_batch_padded": True}
    wanted = rows_of(make(device="cpu", device_id=None, **call))
    rows = rows_of(make(device="gpu", **call))
    for name in ("frames", "label"):
        np.testing.assert_array_equal(rows[name], wanted[name], name)
    np.testing.assert_allclose(rows["mel"], wanted["mel"], atol=0.05)
    step = jax.jit(lambda mel, frames: jnp.where(jnp.arange(100) < frames, mel, 0).sum())
    with make(device="gpu", **call) as iterator:
        for batch in iterator:
            step(batch["mel"], batch["frames"].reshape(-1, 1, 1))
    assert step._cache_size() == 1
