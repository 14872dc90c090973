"""A state saved through one protocol is restored exactly by every other protocol."""

import copy
import itertools
import json
import pickle

import pytest
import tensorflow as tf
from nvidia.dali import fn

from conformance import frozen
from dalijax import LastBatchPolicy, data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset
from dalijax.adapters.tfdata import DALIDataset
from full import in_full
from numbered import read_files

N, BATCH, EPOCHS = 11, 4, 3
POLICIES = {
    "FILL": {"pad": "mask"},
    "DROP": {"drop_remainder": True},
    "PARTIAL": {},
}


def graph(files):
    label = read_files(files[:N], random_shuffle=True, pad_last_batch=True)[1]
    return label, fn.random.uniform(), fn.random.normal(shape=[2])


class Protocol:
    """An ecosystem's iterator, with its way to save to a file and to restore."""

    def __init__(self, files, policy, tmp_path):
        self.policy, self.file = policy, str(tmp_path / type(self).__name__)
        mask = "mask" if policy == "FILL" else None
        self.call = {"files": files, "batch_size": BATCH, "num_threads": 1, "seed": 3}
        self.iterator_fn = data_iterator(
            graph,
            ["x", "u", "n"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy[policy],
            mask=mask,
        )
        self.iterator = self.make()

    def state(self):
        """Returns the content of the saved file, as users of the protocol read it."""
        with open(self.file) as file:
            return json.load(file)


class Core(Protocol):
    def make(self):
        return self.iterator_fn.stream(EPOCHS, **self.call)

    def save(self):
        with open(self.file, "w") as file:
            json.dump(self.iterator.get_state(), file)

    def restore(self, state):
        self.iterator.set_state(state)


class Grain(Core):
    def make(self):
        plain = data_iterator(graph, ["x", "u", "n"], reader_name="reader")
        options = POLICIES[self.policy]
        return iter(DALIIterDataset(plain, num_epochs=EPOCHS, **options, **self.call))


class CLU(Protocol):
    def make(self):
        return DALIDatasetIterator(self.iterator_fn, num_epochs=EPOCHS, **self.call)

    def save(self):
        self.iterator.save(self.file)

    def restore(self, state):
        with open(self.file + "-from", "w") as file:
            json.dump(state, file)
        self.iterator.restore(self.file + "-from")


class TensorFlow(Protocol):
    def make(self):
        return iter(DALIDataset(self.iterator_fn, **self.call).repeat(EPOCHS))

    def save(self):
        self.saved = tf.train.Checkpoint(data=self.iterator).write(self.file)

    def state(self):
        reader = tf.train.load_checkpoint(self.saved)
        (name,) = (n for n in reader.get_variable_to_shape_map() if n.startswith("data/"))
        return json.loads(reader.get_tensor(name))

    def restore(self, state):
        class Saved(tf.train.experimental.PythonState):
            def serialize(self):
                return json.dumps(state).encode()

            def deserialize(self, string_value):
                raise AssertionError

        path = tf.train.Checkpoint(data=Saved()).write(self.file + "-from")
        tf.train.Checkpoint(data=self.iterator).restore(path)


PROTOCOLS = (Core, Grain, CLU, TensorFlow)


# Every pair of protocols, and each protocol with every policy.
CASES = [
    (here, there, policy) if (a + b) % 3 == k else in_full(here, there, policy)
    for a, here in enumerate(PROTOCOLS)
    for b, there in enumerate(PROTOCOLS)
    for k, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize("here,there,policy", CASES)
def test_every_protocol_restores_every_state(jpegs_many, tmp_path, here, there, policy):
    whole = [frozen(b) for b in Core(jpegs_many, policy, tmp_path).iterator]
    assert len(whole) == EPOCHS * (2 if policy == "DROP" else 3)
    for at in range(len(whole) + 1):
        saving = here(jpegs_many, policy, tmp_path)
        got = [frozen(b) for b in itertools.islice(saving.iterator, at)]
        saving.save()
        restoring = there(jpegs_many, policy, tmp_path)
        restoring.restore(saving.state())
        got += [frozen(b) for b in restoring.iterator]
        assert got == whole


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_iterators_are_neither_copied_nor_pickled(jpegs_many, tmp_path, protocol):
    """A copy would share the position, and close the pipelines when it is freed."""
    iterator = protocol(jpegs_many, "FILL", tmp_path).iterator
    first = frozen(next(iterator))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be pickled or copied, because its pipelines"):
            duplicate(iterator)
    assert frozen(next(iterator)) != first
