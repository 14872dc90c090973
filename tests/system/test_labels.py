"""Labels of training examples have the shape of their mask.

DALI's readers deliver labels of shape (batch, 1). A loss for each sample or a mask of shape
(batch,) would silently broadcast them to (batch, batch).
"""

import importlib
import pathlib

import numpy as np
import pytest

from conftest import NUM_FILES
from pages import ROOT, Page

BATCH = 4
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def quickstart(module, files, classes):
    return module.training_data(files, classes, False, batch_size=BATCH)


def quickstart_held_out(module, files, classes):
    return module.held_out_data(files, classes, False, batch_size=BATCH)


def grain_train(module, files, classes):
    return iter(module.dataset(files, classes, BATCH))


def check(labels, mask):
    assert labels.shape == mask.shape == (BATCH,)
    assert np.issubdtype(labels.dtype, np.integer)
    assert (labels * mask).shape == (BATCH,)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("quickstart", quickstart),
        ("quickstart", quickstart_held_out),
        ("grain_train", grain_train),
    ],
)
def test_an_examples_labels(jpegs, monkeypatch, name, batches):
    monkeypatch.syspath_prepend(EXAMPLES)
    iterator = batches(importlib.import_module(name), jpegs, list(range(NUM_FILES)))
    batch = next(iterator)
    labels = np.asarray(batch["label" if name == "grain_train" else "labels"])
    check(labels, np.asarray(batch.get("mask", np.ones(BATCH, bool))))
    iterator.close()


def test_the_readmes_labels(jpegs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = Page(ROOT / "README.md").program().replace("batch_size=16", f"batch_size={BATCH}")
    names = {}
    exec(code.partition("get_state()")[0].rpartition("\n")[0], names)  # noqa: S102 - ours
    with names["train"](
        source=names["sources"].Files(pathlib.Path(jpegs[0]).parent.parent), batch_size=BATCH
    ) as iterator:
        batches = list(iterator)
    for batch in batches:
        check(np.asarray(batch["labels"]), np.asarray(batch["mask"]))
    assert len(batches) == NUM_FILES // BATCH
    names["iterator"].close()
