"""docs/moving/pytorch-dali.md: both programs deliver the same batches."""

import runpy

import numpy as np
from images import draw_folder

from pages import DOCS, NOT_RUN, Page


def test_pytorch_and_jax_train_on_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_folder("imagenet/train")
    page = Page(DOCS / "moving" / "pytorch-dali.md")
    _, graph, before, after = [b for b in page.blocks if b.language == "python"]
    assert before.lines[0].startswith(NOT_RUN)
    trained = {}
    for name, block in (("torch", before), ("jax", after)):
        batches = trained[name] = []

        def train_step(images, labels, batches=batches):
            arrays = np.asarray(images).copy(), np.asarray(labels).copy()
            batches.append((type(images).__module__, *arrays))

        program = tmp_path / f"{name}_side.py"
        program.write_text("\n".join([*graph.lines, *block.lines]))
        runpy.run_path(str(program), {"train_step": train_step})
    assert len(trained["torch"]) == len(trained["jax"]) == 10  # 300 images in batches of 32
    for (torch, *of_torch), (jax, *of_jax) in zip(trained["torch"], trained["jax"], strict=True):
        assert torch.startswith("torch") and jax.startswith("jax")
        for one, other in zip(of_torch, of_jax, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
