"""Arrays as images and sounds, compared with NumPy."""

import ml_dtypes
import numpy as np
import pytest

from dalijax.core.tools.show.audio import envelope, spectrogram, spectrogram_picture
from dalijax.core.tools.show.contents import contents_of, figures_of
from dalijax.core.tools.show.layouts import channels_of, guess_layout, pictures_of
from dalijax.core.tools.show.pixels import NOT_FINITE, brightness, chosen_frames, to_rgb

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "shape,dtype,layout",
    [
        ((32, 48, 3), "u1", "HWC"),
        ((32, 48, 1), "f4", "HWC"),
        ((32, 48, 4), "u1", "HWC"),
        ((3, 32, 48), "f2", "CHW"),
        ((1, 28, 28), "f4", "CHW"),
        ((28, 28), "u1", "HW"),
        ((28, 28), "?", "HW"),
        ((8, 32, 48, 3), "u1", "FHWC"),
        ((8, 3, 32, 48), "f4", "FCHW"),
        ((3, 8, 32, 48), "f4", "CFHW"),
        ((16000,), "f4", "T"),
        ((16000,), "i2", "T"),
        ((16000, 2), "f4", "TC"),
        ((2, 16000), "f4", "CT"),
        ((), "i4", "numbers"),
        ((1,), "i4", "numbers"),
        ((24,), "i4", "numbers"),
        ((1000,), "i4", "numbers"),  # tokens
        ((10,), "f4", "numbers"),
        ((4, 4), "f4", "numbers"),
        ((12, 16, 9), "f4", "FHW"),  # a volume
        ((12, 16, 7), "f4", "numbers"),
        ((2, 2, 2, 2, 2), "f4", "numbers"),
    ],
)
def test_layouts(shape, dtype, layout):
    assert guess_layout([np.zeros(shape, dtype)]) == layout


def test_layouts_of_bytes():
    text = np.frombuffer("a läbel\0\0".encode(), np.uint8)
    assert guess_layout([text]) == "text"
    assert guess_layout([np.array([200, 1, 2], np.uint8)]) == "numbers"
    assert guess_layout([np.frombuffer(b"\xff\xd8\xff\xe0 and more", np.uint8)]) == "encoded"
    assert guess_layout([b"\x89PNG\r\n\x1a\n"]) == "encoded"
    assert guess_layout(["text"]) == guess_layout([b"text"]) == "text"


def test_pictures_have_channels_last():
    video = RNG.random((5, 6, 7, 3))
    for layout, axes in (("FHWC", (0, 1, 2, 3)), ("FCHW", (0, 3, 1, 2)), ("CFHW", (3, 0, 1, 2))):
        np.testing.assert_array_equal(pictures_of(video.transpose(axes), layout), video)
    np.testing.assert_array_equal(pictures_of(np.moveaxis(video[0], -1, 0), "CHW"), video[:1])
    np.testing.assert_array_equal(pictures_of(video[..., 0], "FHW"), video[..., :1])
    np.testing.assert_array_equal(pictures_of(video[0, ..., 0], "HW"), video[:1, ..., :1])
    sound = RNG.random((2, 100))
    np.testing.assert_array_equal(channels_of(sound, "CT"), sound)
    np.testing.assert_array_equal(channels_of(sound.T, "TC"), sound)
    np.testing.assert_array_equal(channels_of(sound[0], "T"), sound[:1])
    with pytest.raises(ValueError, match="layout 'HWC' does not fit a sample of shape"):
        pictures_of(video, "HWC")
    with pytest.raises(ValueError, match="layout 'TC' does not fit a sample of shape"):
        channels_of(sound[0], "TC")


@pytest.mark.parametrize(
    "dtype,least,most,channels,black,white",
    [
        ("u1", 30, 90, True, 0, 255),
        ("u1", 0, 3, False, 0, 3),  # classes
        ("i4", 0, 200, True, 0, 255),
        ("i4", -5, 200, True, -5, 200),
        ("f4", 0.2, 0.9, True, 0, 1),
        ("f2", 3, 250, True, 0, 255),
        ("f4", -0.8, 0.7, True, -1, 1),
        ("f4", -2.1, 2.6, True, -2.1, 2.6),  # minus the mean, divided by the deviation
        ("f4", -0.02, 1.03, True, 0, 1),  # interpolated
        ("f4", -9, 260, True, 0, 255),
        ("f4", -0.2, 1.5, True, -0.2, 1.5),
        ("f4", 0, 1000, True, 0, 1000),
        ("f4", 7000, 7000, True, 6999, 7001),
        ("?", 0, 1, False, 0, 1),
    ],
)
def test_brightness(dtype, least, most, channels, black, white):
    how = brightness(np.dtype(dtype), least, most, channels)
    assert (how.black, how.white) == (black, white)


def test_pixels():
    bytes_ = RNG.integers(0, 256, (4, 5, 3)).astype(np.uint8)
    as_they_are = brightness(np.uint8, 0, 255)
    np.testing.assert_array_equal(to_rgb(bytes_, as_they_are), bytes_)
    # Scaled to floats (also of half precision) and normalized, they look the same.
    unit = brightness(np.float32, 0, 1)
    np.testing.assert_array_equal(to_rgb((bytes_ / 255).astype(np.float16), unit), bytes_)
    signed = brightness(np.float32, -1, 1)
    np.testing.assert_array_equal(to_rgb(bytes_ / 127.5 - 1, signed), bytes_)
    values = bytes_ * 0.01 - 2
    expected = (bytes_ - bytes_.min()) / np.ptp(bytes_) * 255
    drawn = to_rgb(values, brightness(np.float64, values.min(), values.max()))
    np.testing.assert_allclose(drawn, expected, atol=0.5 + 1e-9)
    gray = to_rgb(bytes_[..., :1], as_they_are)
    np.testing.assert_array_equal(gray, np.repeat(bytes_[..., :1], 3, -1))
    two = to_rgb(bytes_[..., :2], as_they_are)
    np.testing.assert_array_equal(two[..., :2], bytes_[..., :2])
    assert not two[..., 2].any()
    four = np.concatenate([bytes_, bytes_[..., :1]], -1)
    np.testing.assert_array_equal(to_rgb(four, as_they_are), bytes_)


def test_non_finite_values_are_magenta():
    picture = np.full((4, 4, 3), 0.5)
    picture[0, 1, 2], picture[3, 3, 0] = np.nan, np.inf
    drawn = to_rgb(picture, brightness(np.float64, 0, 1))
    marked = (drawn == NOT_FINITE).all(-1)
    assert marked[0, 1] and marked[3, 3] and marked.sum() == 2
    assert (drawn[~marked] == 128).all()


def test_frames_are_spread_over_a_video():
    assert chosen_frames(3, 8) == [0, 1, 2] and chosen_frames(1, 8) == [0]
    frames = chosen_frames(100, 8)
    assert len(frames) == 8 and frames[0] == 0 and frames[-1] == 99
    assert set(np.diff(frames)) <= {14, 15}


def test_envelope():
    sound = RNG.normal(size=1000)
    parts = sound.reshape(100, 10)
    expected = np.stack([parts.min(1), parts.max(1)], 1)
    np.testing.assert_array_equal(envelope(sound, 100), expected)
    np.testing.assert_array_equal(envelope(sound[:3], 100), sound[:3, None].repeat(2, 1))
    assert envelope(sound, 77).shape == (77, 2)
    assert np.isfinite(envelope(np.array([np.nan, 1.0]), 2)).all()


def test_a_tone_is_a_line_of_the_spectrogram():
    time = np.arange(8000) / 8000
    tone = np.sin(2 * np.pi * 1000 * time)  # at 8 kHz in windows of 256 it is bin 32
    loudness = spectrogram(tone)
    assert loudness.shape == (129, (8000 - 256) // 64 + 1)
    assert (loudness.argmax(0) == 32).all() and loudness.max() == 0 and loudness.min() == -80
    # By the definition, without an optimization.
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    power = [np.abs(np.fft.rfft(tone[s : s + 256] * window)) ** 2 for s in range(0, 7745, 64)]
    decibels = 10 * np.log10(np.maximum(np.array(power).T / np.max(power), 1e-12))
    np.testing.assert_allclose(loudness, decibels.clip(-80, 0), atol=1e-6)
    picture = spectrogram_picture(tone).astype(int).sum(-1)
    assert picture.shape == loudness.shape and (picture.argmax(0) == 128 - 32).all()
    assert (spectrogram(np.zeros(10)) == -80).all()


def test_figures():
    values = RNG.normal(3, 2, (50, 8)).astype(np.float16)
    values[0, :3], values[1, 0] = np.nan, -np.inf
    figures = figures_of(values)
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (figures.nans, figures.infinities) == (3, 1)
    assert (figures.least, figures.most) == (finite.min(), finite.max())
    np.testing.assert_allclose((figures.mean, figures.deviation), (finite.mean(), finite.std()))
    np.testing.assert_array_equal(figures.counts, np.histogram(finite, 32)[0])
    labels = RNG.integers(2, 7, 100)
    np.testing.assert_array_equal(figures_of(labels).counts, np.bincount(labels)[2:])
    assert figures_of(np.full(3, 2**63 - 1)).counts.tolist() == [3]
    assert figures_of(np.full(3, np.nan)) is None and figures_of(np.zeros(0)) is None


def test_dtypes_of_jax():
    values = np.linspace(0, 1, 4 * 8 * 8 * 3).reshape(4, 8, 8, 3)
    contents = contents_of({"x": values.astype(ml_dtypes.bfloat16)}, "")
    (output,) = contents.outputs
    assert output.dtype == "bfloat16" and output.layout == "HWC"
    np.testing.assert_allclose(np.stack(output.samples), values, atol=4e-3)
    small = contents_of({"x": np.arange(4).astype(ml_dtypes.int4)}, "").outputs[0]
    assert [small.caption(row) for row in range(4)] == ["0", "1", "2", "3"]
