"""Programs with PyTorch in docs/moving, and the programs that replace them."""

import runpy

import numpy as np
import torch
from images import draw_folder
from scenes import draw_scenes

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
    for (module, *of_torch), (jax, *of_jax) in zip(trained["torch"], trained["jax"], strict=True):
        assert module.startswith("torch") and jax.startswith("jax")
        for one, other in zip(of_torch, of_jax, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_torchvision_and_dalijax_deliver_the_same_objects(tmp_path, monkeypatch):
    """The random numbers differ, so the averages of an epoch are compared."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    draw_scenes(tmp_path / "scenes", 60, least=1)
    page = Page(DOCS / "moving" / "torchvision.md")
    constants = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    _, before, after, _ = [b for b in page.blocks if b.language == "python"]
    assert before.lines[0].startswith(NOT_RUN)
    programs = []
    for name, block in (("torch", before), ("jax", after)):
        program = tmp_path / f"{name}_side.py"
        program.write_text("\n".join(block.lines))
        programs.append(runpy.run_path(str(program), constants))
    pytorch, jax = programs
    assert pytorch["images"].shape == (8, 3, 96, 96)
    assert jax["batch"]["image"].shape == (8, 96, 96, 3)

    colors, labels = [], []
    for images, targets in pytorch["loader"]:
        colors += [image.numpy().mean(axis=(1, 2)) for image in images]
        labels += [target["labels"].numpy() - 1 for target in targets]  # category ids count from 1
    jax_colors, jax_labels = [], []
    for batch in jax["train"](source=jax["source"], batch_size=20):
        jax_colors += list(np.asarray(batch["image"]).mean(axis=(1, 2)))
        jax_labels += [row[row >= 0] for row in np.asarray(batch["label"])]
    assert len(colors) == len(jax_colors) == 60
    np.testing.assert_allclose(np.mean(colors, axis=0), np.mean(jax_colors, axis=0), atol=0.15)
    shares = [np.bincount(np.concatenate(rows)) / 60 for rows in (labels, jax_labels)]
    np.testing.assert_allclose(*shares, atol=0.25)
