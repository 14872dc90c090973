"""Iterators over labelled records of media: rows, expected labels, archives."""

import json

import numpy as np

from conformance import Expected
from oracle import Case
from tars import write_tar


def rows_of(iterator):
    """Returns the unmasked rows of the rest of an epoch."""
    batches = [{name: np.asarray(array) for name, array in batch.items()} for batch in iterator]
    iterator.close()
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return {name: array[whole["mask"]] for name, array in whole.items()}


def expected_labels(source, batch):
    """Returns the labels of three unshuffled epochs whose last batch is padded."""
    count = len(source)
    labels = source.read(np.arange(count), ["label"])["label"]
    epochs = []
    case = Case(count, 1, batch, "FILL", True, False)
    for number, streams in case.epochs(3):
        epochs.append([])
        for samples in streams[0]:
            label = np.array([labels[s[0]] for s in samples], np.int32)
            epochs[-1].append({"label": label, "mask": np.array(case.mask(samples, number))})
    return Expected(epochs, state_bytes=2048)


def check_resumes(saved, other):
    """Saves after a batch, resumes in another iterator, and compares the rows that follow."""
    next(saved)
    state = json.loads(json.dumps(saved.get_state()))
    wanted = rows_of(saved)
    other.set_state(state)
    rows = rows_of(other)
    assert len(rows["label"]) >= 3
    for name in wanted:
        np.testing.assert_array_equal(rows[name], wanted[name], name)


def write_labelled_tar(path, files, suffix):
    """Writes a tar of files; the class of each file is its number."""
    entries = []
    for number, file in enumerate(files):
        entries.append((f"{number}.{suffix}", file.read_bytes()))
        entries.append((f"{number}.cls", b"%d" % number))
    return write_tar(path, entries)
