"""Recordings from examples/audio.py: spectrograms as in NumPy, one shape, states, bad files."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import run_fork
from labelled import check_resumes, expected_labels, rows_of, write_labelled_tar
from PIL import Image
from shardings import rows_over

from conformance import check
from dalijax import sources
from dalijax.errors import BatchError
from dalijax.show import show

soundfile = pytest.importorskip("soundfile", reason="needs soundfile, of the extra test")

import audio  # noqa: E402 - of examples/

N, BATCH = 11, 4
RATE = audio.RATE
SHORT = {"batch_size": BATCH, "num_threads": 1, "device_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return audio.draw_recordings(tmp_path_factory.mktemp("recordings"), N, seed=4)


def batches_of(source, **options):
    return audio.recordings(source=source, **{**SHORT, **options})


def mel_scale(hertz):
    """Slaney's scale: linear up to 1 kHz, logarithmic above."""
    step = np.log(6.4) / 27
    return np.where(
        hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1e-9) / 1000) / step
    )


def log_mel(sound):
    """Computes a log-mel spectrogram with NumPy: centered Hann windows, triangles of equal area."""
    sound = np.pad(sound.astype(np.float64), 256, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(sound, 512)[::160]
    # Zero half a sample outside the window, in the middle of the transform's 512 samples.
    hann = np.pad(np.sin(np.pi * (np.arange(400) + 0.5) / 400) ** 2, 56)
    power = np.abs(np.fft.rfft(windows * hann, axis=1)).T ** 2
    bins = np.linspace(0, RATE / 2, 257)
    edges = np.interp(
        np.linspace(0, mel_scale(np.array(RATE / 2)), audio.BANDS + 2),
        mel_scale(fine := np.linspace(0, RATE / 2, 200_001)),
        fine,
    )
    low, middle, high = (edges[k : k + audio.BANDS, None] for k in range(3))
    triangles = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    mel = (triangles.clip(0) * 2 / (high - low)) @ power
    return 10 * np.log10(np.maximum(mel / mel.max(), 1e-8))


def test_spectrograms_match_numpy(folder):
    paths = [
        path for path in sorted(folder.glob("*/*")) if soundfile.info(path).samplerate == 16000
    ]
    assert {path.suffix for path in paths} >= {".flac", ".wav"}
    rows = rows_of(batches_of(sources.Files(paths=paths, labels=range(len(paths))), shuffle=False))
    for path, mel, frames in zip(paths, rows["mel"], rows["frames"], strict=True):
        sound = soundfile.read(path, dtype="float32")[0]
        wanted = log_mel(sound)[:, : audio.MOST]
        assert frames == wanted.shape[1]
        np.testing.assert_allclose(mel[:, :frames], wanted, atol=0.02, err_msg=str(path))
        assert (mel[:, frames:] == audio.FLOOR).all()


def test_another_rate_is_resampled(folder):
    """A recording at 44.1 kHz has the length and pitch of a recording at 16 kHz."""
    time = np.arange(44_100) / 44_100
    path = folder.parent / "pitch.wav"
    soundfile.write(path, 0.5 * np.sin(2 * np.pi * 1000 * time), 44_100)
    rows = rows_of(batches_of(sources.Files(paths=[path], labels=[0]), batch_size=1))
    assert rows["frames"] == [101]
    wanted = log_mel(0.5 * np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE))
    assert rows["mel"][0, :, 50].argmax() == wanted[:, 50].argmax()


def test_masks_are_bands_and_spans_within_a_recording(folder):
    rows = rows_of(batches_of(sources.Files(folder)))
    masked = 0
    for mel, augmented, frames in zip(rows["mel"], rows["augmented"], rows["frames"]):
        changed = (mel != augmented)[:, :frames]
        assert (augmented[:, :frames][changed] == audio.FLOOR).all()
        assert (augmented[:, frames:] == audio.FLOOR).all()
        quiet = augmented[:, :frames] == audio.FLOOR
        bands, spans = quiet.all(1), quiet.all(0)
        # The changes are whole bands, or whole spans of time, at most two of each.
        assert not changed[np.ix_(~bands, ~spans)].any()
        for inside, most in ((bands, 12), (spans, frames // 5)):
            assert np.count_nonzero(np.diff(inside.astype(int), prepend=0) == 1) <= 2
            assert inside.sum() <= 2 * most
        masked += changed.any()
    assert masked >= N - 1


def losses(iterator):
    """Returns the shapes for which a step was traced, the shapes of the batches, and the losses.

    JAX's count of a function's programs depends on the other functions of the process, which share
    one cache.
    """
    traced, shapes, out = [], set(), []

    @jax.jit
    def step(weights, batch):
        traced.append(batch["augmented"].shape)
        return audio.step(weights, batch)

    weights = jnp.zeros((2 * audio.BANDS, 3))
    for batch in iterator:
        shapes.add(batch["augmented"].shape)
        weights, loss = step(weights, batch)
        out.append(float(loss))
    iterator.close()
    return traced, shapes, out


def test_one_shape_compiles_once_and_buckets_a_few_times(folder):
    source = sources.Files(folder)
    call = {"batch_size": 2, "last_batch_padded": True}
    traced, _, wanted = losses(batches_of(source, **call))
    assert traced == [(2, audio.BANDS, audio.MOST)]
    traced, buckets, same = losses(batches_of(source, **call, bucket=64))
    assert buckets <= {(2, audio.BANDS, 64 * k) for k in range(1, 5)}
    assert 1 < len(buckets) == len(traced) <= 4
    np.testing.assert_allclose(same, wanted, rtol=1e-5)


def test_every_state_resumes(folder):
    source = sources.Files(folder)
    call = {"shuffle": False, "last_batch_padded": True}
    check(lambda: batches_of(source, **call), expected_labels(source, BATCH), tail=3)


@pytest.mark.parametrize("first", ({}, {"batch_size": 8, "sharding": rows_over(4)}))
@pytest.mark.parametrize(
    "then", ({"batch_size": 3}, {"batch_size": 6, "sharding": rows_over(2)}, {"as_numpy": True})
)
def test_a_state_resumes_with_any_batch_size_and_devices(folder, first, then):
    source = sources.Files(folder)
    saved = batches_of(source, seed=9, last_batch_padded=True, **first)
    check_resumes(saved, batches_of(source, last_batch_padded=True, **then))


def test_an_archive_has_the_same_spectrograms(folder, tmp_path):
    paths = sorted(folder.glob("*/*.flac"))
    tar = write_labelled_tar(tmp_path / "recordings.tar", paths, "flac")
    archive = sources.Tar(tar, {"data": "flac", "label": "cls"}, cache_dir=tmp_path)
    wanted = rows_of(batches_of(sources.Files(paths=paths, labels=range(len(paths)))))
    rows = rows_of(batches_of(archive))
    for name in ("mel", "frames", "label"):
        np.testing.assert_array_equal(rows[name], wanted[name], name)


def test_show_draws_spectrograms_with_their_labels(folder):
    source = sources.Files(folder)
    page = show(batches_of(source), classes={"label": source.classes})
    outputs = {output.name: output for output in page.batches[0].outputs}
    assert outputs["mel"].layout == outputs["augmented"].layout == "HW"
    caption = page.batches[0].caption(0)
    assert any(f"label: {kind}" in caption for kind in audio.KINDS)
    assert any(line.startswith("frames: ") for line in caption)


@pytest.mark.parametrize("suffix", ("flac", "ogg", "wav"))
def test_bad_recordings_are_named_masked_and_skipped(folder, tmp_path, suffix):
    """Truncated in the middle; of an OGG, only the first bytes remain."""
    source = sources.Files(folder)
    paths = [source.name(index) for index in range(N)]
    bad = next(number for number, path in enumerate(paths) if path.endswith(suffix))
    data = pathlib.Path(paths[bad]).read_bytes()
    file = tmp_path / f"bad.{suffix}"
    file.write_bytes(data[:30] if suffix == "ogg" else data[: len(data) // 2])
    paths[bad] = str(file)
    source = sources.Files(paths=paths, labels=range(N))
    call = {"shuffle": False, "last_batch_padded": True}
    iterator = batches_of(source, **call)
    good = []
    with pytest.raises(BatchError, match=rf"bad\.{suffix} can't be (read|decoded)") as error:
        for batch in iterator:
            good += batch["label"].tolist()
    assert bad // BATCH == len(good) // BATCH
    iterator.close()
    assert error.value.files == (paths[bad],)
    rows = rows_of(batches_of(source, on_error="mask", **call))
    assert rows["label"].tolist() == [k for k in range(N) if k != bad]
    rows = rows_of(batches_of(source, on_error="skip", **call))
    assert rows["label"].tolist() == [k for k in range(N) if k // BATCH != bad // BATCH]


def test_a_truncated_ogg_is_a_shorter_recording(tmp_path):
    """DALI reports no error, as docs/audio.md explains."""
    path = tmp_path / "cut.ogg"
    soundfile.write(path, np.random.default_rng(0).normal(size=5 * RATE) * 0.1, RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    rows = rows_of(batches_of(sources.Files(paths=[path], labels=[0]), batch_size=1))
    assert 0 < rows["frames"][0] < 250


def test_the_example_draws_a_picture(tmp_path):
    script = audio.__file__
    said = run_fork(script, "--count", "24", "--epochs", "2", "--out", tmp_path).stdout
    assert "compiled 1 times" in said
    low, high = Image.open(tmp_path / "batch.png").convert("L").getextrema()
    assert high - low > 50
