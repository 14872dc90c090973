"""Images and packed captions from examples/packing.py: pairs, every state, bad files."""

import json
from itertools import chain

import image_text  # of examples/
import numpy as np
import packing  # of examples/
import pytest
from forks import run_fork
from host_batches import on_host
from PIL import Image, ImageColor

from dalijax.errors import RecordError

N = 40


@pytest.fixture
def folder(tmp_path):
    return image_text.draw_pairs(tmp_path / "pairs", N, seed=3)


def batches_of(iterator):
    batches = [on_host(batch) for batch in iterator]
    iterator.close()
    return batches


def test_each_caption_belongs_to_its_image(folder):
    captions = json.loads((folder / "captions.json").read_text())
    colors = np.array([ImageColor.getrgb(name) for name in image_text.COLORS])
    seen = []
    for batch in batches_of(iter(packing.dataset(folder, epochs=1))):
        assert batch["image"].shape == (4, 4, 48, 48, 3) and batch["tokens"].shape == (4, 96)
        for row in range(packing.ROWS):
            texts = packing.captions_of(batch, row)
            assert batch["used"][row].tolist() == [k < len(texts) for k in range(4)]
            assert not batch["image"][row, len(texts) :].any()
            for text, image in zip(texts, batch["image"][row]):
                apart = np.abs(image.reshape(-1, 1, 3).astype(int) - colors).sum(axis=2)
                assert image_text.COLORS[apart.min(axis=0).argmin()] in text
            seen += texts
    # A last batch with fewer rows is dropped.
    assert len(seen) > N - packing.ROWS * packing.SLOTS
    for text in seen:
        assert seen.count(text) <= [*chain(*captions.values())].count(text)


def test_every_state_resumes(folder):
    saved = iter(packing.dataset(folder, epochs=3))
    states, batches = [saved.get_state()], []
    for batch in saved:
        batches.append(on_host(batch))
        states.append(json.loads(json.dumps(saved.get_state())))
    saved.close()
    assert len(batches) >= 6
    for number, state in enumerate(states):
        other = iter(packing.dataset(folder, epochs=3))
        other.set_state(state)
        rest = batches_of(other)
        assert len(rest) == len(batches) - number
        for batch, wanted in zip(rest, batches[number:]):
            for name in wanted:
                np.testing.assert_array_equal(batch[name], wanted[name], name)


def test_a_bad_image_is_named(folder):
    captions = json.loads((folder / "captions.json").read_text())
    name = list(captions)[7]
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    iterator = iter(packing.dataset(folder, epochs=1))
    batches = errors = 0
    while True:
        try:
            next(iterator)
            batches += 1
        except RecordError as error:
            assert "can't take record" in str(error) and f"{name}'" in str(error)
            errors += 1
        except StopIteration:
            break
    iterator.close()
    assert errors == 1 and batches >= 1


@pytest.mark.parametrize("texts", ([], [""], ["a disc", None]))
def test_an_image_without_a_text_is_named(folder, texts):
    captions = json.loads((folder / "captions.json").read_text())
    name = list(captions)[7]
    (folder / "captions.json").write_text(json.dumps(captions | {name: texts}))
    with pytest.raises(ValueError, match=f"no text for .'{name}'."):
        packing.dataset(folder)


def test_the_example_draws_a_picture(tmp_path):
    said = run_fork(packing.__file__, "--out", tmp_path).stdout
    assert said.count("['") == packing.ROWS
    low, high = Image.open(tmp_path / "batch.png").convert("L").getextrema()
    assert high - low > 50
