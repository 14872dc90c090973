"""Detects whether the number of a dataset's records is known before they are read."""

import grain
import pytest
from grain.experimental import (
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ThreadPrefetchIterDataset,
    WindowShuffleIterDataset,
    ZipIterDataset,
)

from dalijax.adapters.grain.lengths import is_endless, number_of_records

WORKERS = grain.MultiprocessingOptions(num_workers=2)
FEW = grain.MapDataset.range(7)
ENDLESS = FEW.repeat()[1::3].to_iter_dataset()

KEEPING = {
    "map": lambda ds: ds.map(lambda x: x),
    "random_map": lambda ds: ds.seed(1).random_map(lambda x, rng: x),
    "map_with_index": lambda ds: ds.map_with_index(lambda k, x: x),
    "filter": lambda ds: ds.filter(lambda x: x % 2),
    "batch": lambda ds: ds.batch(2, batch_fn=list),
    "window shuffle": lambda ds: WindowShuffleIterDataset(ds, window_size=3, seed=1),
    "threads": lambda ds: ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    "processes": lambda ds: ds.mp_prefetch(WORKERS),
    "mix": lambda ds: grain.IterDataset.mix([ds, ds.map(lambda x: x)], [0.5, 0.5]),
    "zip": lambda ds: ZipIterDataset([ds, ds]),
    "interleave": lambda ds: InterleaveIterDataset([ds, ds], cycle_length=2),
}


class Unknown(grain.IterDataset):
    """A user's dataset, which may end."""

    def __iter__(self):
        return self._parent.__iter__()


@pytest.mark.parametrize("name", KEEPING)
def test_transformations_of_an_endless_dataset_have_no_end(name):
    assert is_endless(KEEPING[name](ENDLESS))
    finite = KEEPING[name](FEW.to_iter_dataset())
    assert not is_endless(finite) and number_of_records(finite) is None


def test_the_numbers_of_map_datasets_are_known():
    assert number_of_records(FEW.seed(1).shuffle()[1::2].map(lambda x: x).repeat(2)) == 6
    assert number_of_records(FEW.filter(lambda x: x % 2).shuffle(seed=1)) is None
    assert is_endless(FEW.filter(lambda x: x % 2).repeat())


def test_datasets_that_may_end():
    repeated = RepeatIterDataset(FEW.to_iter_dataset())
    assert is_endless(repeated) and not is_endless(RepeatIterDataset(FEW.to_iter_dataset(), 3))
    for ds in (Unknown(ENDLESS), LimitIterDataset(repeated, 3)):
        assert not is_endless(ds) and number_of_records(ds) is None
    with_end = grain.IterDataset.mix([repeated, FEW.to_iter_dataset()], [0.5, 0.5])
    assert not is_endless(with_end)
