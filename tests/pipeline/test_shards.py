"""Readers read the shard of their pipeline; epochs of unknown length."""

import warnings

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from nvidia.dali import fn, pipeline_def, types
from shardings import rows_over

from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIIterDataset
from dalijax.adapters.tfdata import DALIDataset

LINE = r"fn\.readers\.file\(\.\.\., shard_id=shard_id, num_shards=num_shards\)"


def reader(files, name="reader", **shard):
    labels = list(range(len(files)))
    return fn.readers.file(files=files, labels=labels, name=name, pad_last_batch=True, **shard)[1]


def handed_on(files, shard_id=0, num_shards=1):
    return reader(files, shard_id=shard_id, num_shards=num_shards, stick_to_shard=True)


def forgotten(files, shard_id=0, num_shards=1):
    return reader(files, stick_to_shard=True)


def constant(files, shard_id=0, num_shards=1):
    return reader(files, shard_id=0, num_shards=num_shards, stick_to_shard=True)


def too_many(files, shard_id=0, num_shards=1):
    return reader(files, shard_id=shard_id, num_shards=2 * num_shards, stick_to_shard=True)


def sliced(files, shard_id=0, num_shards=1):
    return reader(files[shard_id::num_shards])


def samples(iterator):
    """Returns the unmasked samples of an epoch, sorted."""
    batches = [(np.asarray(b["x"]).ravel(), np.asarray(b["mask"]).ravel()) for b in iterator]
    return sorted(int(x) for values, mask in batches for x in values[mask])


WRONG = ((forgotten, "shard 0 of 1"), (constant, "shard 0 of 2"), (too_many, "shard [01] of 4"))


@pytest.mark.parametrize("graph,read", WRONG)
@pytest.mark.parametrize("where", ("sharding", "devices"))
@pytest.mark.parametrize("named", (True, False))
def test_a_graph_that_does_not_pass_on_its_shard(jpegs_many, graph, read, where, named):
    placed = {"sharding": rows_over(2)} if where == "sharding" else {"devices": jax.devices()[:2]}
    told = {"reader_name": "reader", "mask": "mask"} if named else {"size": 32}
    make = data_iterator(graph, ["x"], **told, **placed)
    with pytest.raises(ValueError, match=rf"'reader' reads {read}.* of 2.*{LINE}"):
        make(jpegs_many, batch_size=4)


@pytest.mark.parametrize("graph", (handed_on, sliced))
@pytest.mark.parametrize("where", ("sharding", "devices"))
def test_each_sample_is_delivered_once(jpegs_many, graph, where):
    placed = {"sharding": rows_over(2)} if where == "sharding" else {"devices": jax.devices()[:2]}
    make = data_iterator(graph, ["x"], reader_name="reader", mask="mask", **placed)
    twice = [i // 2 for i in range(32)] if graph is sliced else list(range(32))
    assert samples(make(jpegs_many, batch_size=6)) == twice


@pytest.mark.parametrize(
    "sharding",
    (
        rows_over(1),
        SingleDeviceSharding(jax.devices()[0]),
        NamedSharding(Mesh(np.array(jax.devices()[:4]), ("model",)), PartitionSpec()),
    ),
)
@pytest.mark.parametrize("graph", (handed_on, forgotten, lambda files: reader(files)))
def test_a_single_shard_needs_no_arguments(jpegs_many, sharding, graph):
    make = data_iterator(graph, ["x"], reader_name="reader", mask="mask", sharding=sharding)
    assert samples(make(jpegs_many, batch_size=6)) == list(range(32))


def host_arguments(graph):
    """Yields ways to request shard 1 of 2 without a sharding."""
    made = data_iterator(graph, ["x"], reader_name="reader")
    options = grain.sharding.ShardOptions(shard_index=1, shard_count=2)
    say = {"batch_size": 4, "num_threads": 1}
    shard = {"shard_id": 1, "num_shards": 2}
    return {
        "call": lambda files: made(files, **shard, **say),
        "positional": lambda files: made(files, 1, 2, **say),
        "clu": lambda files: DALIDatasetIterator(made, files=files, **shard, **say),
        "tf.data": lambda files: iter(DALIDataset(made, files=files, **shard, **say)),
        "grain": lambda files: iter(
            DALIIterDataset(made, shard_options=options, files=files, **say)
        ),
    }


@pytest.mark.parametrize("way", list(host_arguments(handed_on)))
def test_a_shard_of_hosts(jpegs_many, way):
    for graph, read in WRONG:
        with pytest.raises(ValueError, match=rf"reads {read}.* for shard 1 of 2.*{LINE}"):
            next(host_arguments(graph)[way](jpegs_many))
    for graph, first in ((handed_on, [16, 17, 18, 19]), (sliced, [0, 1, 2, 3])):
        batch = next(host_arguments(graph)[way](jpegs_many))
        assert np.asarray(batch["x"]).ravel().tolist() == first


def hand_made(graph, files, shards, **call):
    """Creates pipelines of some shards, each with its own data if the graph takes only files."""
    return [
        pipeline_def(graph)(
            files, *shard, batch_size=2, num_threads=1, device_id=None, enable_checkpointing=True
        )
        for shard in shards
    ]


@pytest.mark.parametrize("placed", (False, True))
def test_hand_made_pipelines(jpegs_many, placed):
    placement = {"sharding": rows_over(2)} if placed else {}

    def make(pipelines, **told):
        told = told or {"reader_name": "reader", "mask": "mask"}
        return DALIGenericIterator(pipelines, ["x"], **told, **placement)

    both = [(0, 2), (1, 2)]
    assert samples(make(hand_made(handed_on, jpegs_many, both))) == list(range(32))
    assert samples(make(hand_made(handed_on, jpegs_many, both[::-1]))) == list(range(32))
    assert samples(make(hand_made(sliced, jpegs_many, both))) == [i // 2 for i in range(32)]
    for graph in (forgotten, constant):
        for told in ({"reader_name": "reader"}, {"size": 32}):
            with pytest.raises(ValueError, match=rf"'reader' reads shard 0 of.*{LINE}"):
                make(hand_made(graph, jpegs_many, both), **told)


def test_hand_made_pipelines_of_one_device_may_read_any_shard(jpegs_many):
    pipelines = hand_made(handed_on, jpegs_many, [(1, 4)])
    iterator = DALIGenericIterator(pipelines, ["x"], reader_name="reader", mask="mask")
    assert samples(iterator) == list(range(8, 16))


def test_additional_readers(jpegs_many):
    def beside(files, others, shard_id=0, num_shards=1):
        more = reader(others, name="more")
        return reader(files, shard_id=shard_id, num_shards=num_shards), more

    make = data_iterator(
        beside, ["x", "y"], reader_name="reader", sharding=rows_over(2), mask="mask"
    )
    # with different data, such as backgrounds
    with pytest.warns(UserWarning, match="If they are independent, ignore this warning"):
        assert samples(make(jpegs_many, jpegs_many[:5], batch_size=4)) == list(range(32))
    with pytest.raises(ValueError, match=f"reader 'more' reads shard 0 of 1.*{LINE}"):
        make(jpegs_many, jpegs_many, batch_size=4)


# Epochs of unknown length


def test_a_reader_without_its_name_is_warned_of_once(jpegs_many):
    make = data_iterator(lambda: reader(jpegs_many), ["x"])
    text = r"readers are \['reader'\].* never raises StopIteration.*pass reader_name='reader'$"
    with pytest.warns(UserWarning, match=text) as caught:
        iterator = make(batch_size=20, num_threads=1)
        state = iterator.get_state()
        for _ in range(3):
            next(iterator)
        iterator.set_state(state)
        next(iterator)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"\['__File_0'\].*name='reader' to the reader"):
        data_iterator(lambda: reader(jpegs_many, name=None), ["x"])(batch_size=2)
    with pytest.warns(UserWarning, match="pass reader_name='reader'"):
        DALIGenericIterator(hand_made(handed_on, jpegs_many, [()]), ["x"])
    with pytest.warns(UserWarning, match="pass reader_name='reader'"):
        next(DALIDatasetIterator(make, batch_size=2))


def test_a_known_epoch_does_not_warn(jpegs_many):
    def ends(info):
        if info.iteration == 3:
            raise StopIteration
        return np.array([info.idx_in_epoch], np.int32)

    def beside():
        return fn.external_source(ends, batch=False), reader(jpegs_many)

    call = {"batch_size": 8, "num_threads": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(data_iterator(beside, ["x", "y"])(**call))) == 3
        assert len(list(data_iterator(beside, ["x", "y"], mask="mask")(**call))) == 3
        for told in ({"size": 32}, {"reader_name": "reader"}):
            assert len(data_iterator(lambda: reader(jpegs_many), ["x"], **told)(**call)) == 4
        next(data_iterator(lambda: fn.random.uniform(), ["x"])(**call))


@pytest.mark.parametrize("graph", (handed_on, lambda files: fn.random.uniform()))
def test_a_mask_without_an_epoch_is_refused(jpegs_many, graph):
    make = data_iterator(graph, ["x"], mask="mask")
    cure = "reader_name='reader'" if graph is handed_on else "pass size"
    with pytest.raises(ValueError, match=f"mask='mask' marks .*no epochs: .*{cure}"):
        make(jpegs_many, batch_size=4)
    with pytest.raises(ValueError, match=f"mask='mask' marks .*no epochs: .*{cure}"):
        DALIGenericIterator(
            pipeline_def(graph)(jpegs_many, batch_size=4, num_threads=1, device_id=None),
            ["x"],
            mask="mask",
        )
    with pytest.raises(ValueError, match=f"mask='mask' marks .*no epochs: .*{cure}"):
        next(DALIDatasetIterator(make, files=jpegs_many, batch_size=4))


# Shards stay in step


def of_numbers(source, size=80):
    """An iterator over two shards, which count batches from 0 and from 100.

    Args:
        source: A function of DALI's batch info and the shard that may raise.
        size: The number of samples of an epoch.
    """

    def graph(shard_id=0, num_shards=1):
        def rows(info):
            source(info, shard_id)
            return np.full((2, 1), info.iteration + 100 * shard_id, np.float32)

        return fn.external_source(rows, batch_info=True, dtype=types.FLOAT, ndim=1)

    made = data_iterator(graph, ["x"], size=size, sharding=rows_over(2))
    return made(batch_size=4, num_threads=1)


@pytest.mark.parametrize("by_hand", (False, True))
def test_a_source_that_fails_in_one_shard_loses_no_batch_of_the_others(by_hand):
    failed = []

    def source(info, shard):
        if shard == 1 and info.iteration == 2 and not failed:
            failed.append(shard)
            raise OSError("not there now")

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def graph(shard):
        def rows(info):
            source(info, shard)
            return np.full((2, 1), info.iteration + 100 * shard, np.float32)

        return fn.external_source(rows, batch_info=True, dtype=types.FLOAT, ndim=1)

    got = []
    if by_hand:
        iterator = DALIGenericIterator([graph(0), graph(1)], ["x"], size=40)
    else:
        iterator = of_numbers(source)
    with iterator:
        for _ in range(5):
            try:
                got.append(np.asarray(next(iterator)["x"]).ravel()[1:3].tolist())
            except OSError:
                got.append("not there now")
    assert got == [[0, 100], [1, 101], "not there now", [2, 102], [3, 103]]


@pytest.mark.parametrize("counts", ((3, 4), (4, 3)))
def test_shards_that_end_one_after_the_other_begin_the_next_epoch_together(counts):
    def source(info, shard):
        if info.iteration == counts[shard]:
            raise StopIteration

    with of_numbers(source, size=12) as iterator:
        for _ in range(3):
            got = [np.asarray(batch["x"]).ravel()[1:3].tolist() for batch in iterator]
            assert got == [[k, 100 + k] for k in range(3)]


def test_a_batch_that_fails_in_one_shard_fails_in_all(jpegs, tmp_path):
    bad = tmp_path / "broken.jpg"
    bad.write_bytes(b"not an image")
    files = [*jpegs[:8]]
    files[5] = str(bad)  # the second shard's second batch

    def graph(shard_id=0, num_shards=1):
        data, label = fn.readers.file(
            files=files, labels=[*range(8)], name="reader", shard_id=shard_id, num_shards=num_shards
        )
        return fn.cast(label, dtype=types.FLOAT) + 0 * fn.decoders.image(data)[0, 0, :1]

    made = data_iterator(graph, ["x"], reader_name="reader", sharding=rows_over(2))
    got = []
    with made(batch_size=2, num_threads=1) as iterator:
        for _ in range(4):
            try:
                got.append(np.asarray(next(iterator)["x"]).ravel().tolist())
            except RuntimeError as error:
                got.append("failed" if "counts as delivered" in str(error) else str(error))
    assert got == [[0, 4], "failed", [2, 6], [3, 7]]


# Shards of different sizes


def test_partial_over_uneven_shards_is_refused(jpegs_many):
    def make(count, policy=LastBatchPolicy.PARTIAL, **told):
        pipelines = hand_made(handed_on, jpegs_many[:count], [(0, 2), (1, 2)])
        return DALIGenericIterator(pipelines, ["x"], last_batch_policy=policy, **told)

    for told in ({"reader_name": "reader"}, {"size": 7}):
        with pytest.raises(ValueError, match=r"'partial' over 2 pipelines.*7 samples in 2 shards"):
            make(7, **told)
    assert [b["x"].shape for b in make(6, reader_name="reader")] == [(2, 2, 1), (2, 1, 1)]
    filled = make(7, LastBatchPolicy.FILL, reader_name="reader", mask="mask")
    assert samples(filled) == list(range(7))
