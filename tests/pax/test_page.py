"""docs/pax.md: its block runs, and its inputs deliver the documented batches."""

import runpy

import numpy as np
from images import draw_folder
from page_data import TRAIN, train
from praxis import pax_fiddle

from pages import DOCS, NOT_RUN, Page


def test_the_page_trains_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_folder(TRAIN)  # 300 images
    TRAIN.with_name("val").symlink_to(TRAIN.name)
    (block,) = [b for b in Page(DOCS / "pax.md").blocks if b.language == "python"]
    assert block.lines[0].startswith(NOT_RUN)
    (tmp_path / "page.py").write_text("\n".join(block.lines))
    page = runpy.run_path("page.py", {"train": train})
    training = pax_fiddle.instantiate(page["training"])
    batches = [training.get_next() for _ in range(6)]  # an epoch has five: it is endless
    assert {batch.images.shape for batch in batches} == {(64, 32, 32, 3)}
    specs = pax_fiddle.instantiate(page["specs"]).get_input_specs()
    assert specs.images.shape == (64, 32, 32, 3) and specs.images.dtype == np.uint8
    held_out = pax_fiddle.instantiate(page["held_out"])
    for _ in range(2):  # the same again after reset()
        weights = []
        while True:
            try:
                weights.append(held_out.get_next().eval_sample_weights)
            except StopIteration:
                break
        held_out.reset()
        assert [w.sum() for w in weights] == [64, 64, 64, 64, 44]
