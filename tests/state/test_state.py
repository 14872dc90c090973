"""States: refusals and their reasons, sizes, hand-made pipelines, threads."""

import dataclasses
import itertools
import json
import threading

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, pipeline_def, types

from conformance import TALLY, Expected, check
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from dalijax.core.state import reader_state
from dalijax.core.state.fingerprint import unknown
from dalijax.core.state.operators import serialized_operators
from dalijax.errors import StateError
from full import FULL, in_full
from numbered import numbers_and_draws, read_files

BASE = dict(
    n=10, shuffle=False, after=False, pad=True, stick=True, fill=8, shard_id=0, shards=1, gain=2.0
)


def graph(files, n, shuffle, after, pad, stick, fill, shard_id, shards, gain):
    label = read_files(
        files[:n],
        random_shuffle=shuffle,
        shuffle_after_epoch=after,
        pad_last_batch=pad,
        stick_to_shard=stick,
        initial_fill=fill,
        shard_id=shard_id,
        num_shards=shards,
    )[1]
    return label, fn.random.uniform(range=(0.0, gain))


def make(files, config=None, call=None, **changed):
    config = {"output_map": ["x", "u"], "reader_name": "reader", "mask": "mask", **(config or {})}
    iterator_fn = data_iterator(graph, **config)
    return iterator_fn(files, **{**BASE, **changed}, **{"batch_size": 3, **(call or {})})


CHANGES = [
    (dict(changed=dict(n=9)), "epoch_size: 10 -> 9"),
    (dict(call=dict(batch_size=4)), "batch_size: 3 -> 4"),
    (dict(changed=dict(shards=2)), "num_shards: 1 -> 2"),
    (dict(config=dict(last_batch_policy=LastBatchPolicy.DROP)), "policy: FILL -> DROP"),
    (dict(changed=dict(pad=False)), "padded: 1 -> 0"),
    (dict(changed=dict(stick=False)), "stick: 1 -> 0"),
    (dict(call=dict(seed=5)), "seed: 0 -> 5"),
    (dict(config=dict(output_map=["y", "u"])), r"outputs: \['x', 'u'\] -> \['y', 'u'\]"),
    (dict(changed=dict(shuffle=True)), "reader.random_shuffle: false -> true"),
    (dict(changed=dict(fill=9)), "reader.initial_fill: 8 -> 9"),
    (dict(changed=dict(gain=3.0)), r"operators.random.uniform.range: \[0.0,2.0\] -> \[0.0,3.0\]"),
    (dict(files=True), "reader.files: 10 files, 10 bytes #.* -> 10 files, 10 bytes #"),
]


@pytest.mark.parametrize("change,words", CHANGES, ids=[w for _, w in CHANGES])
def test_each_field_is_compared_by_itself(jpegs_many, change, words):
    saved = make(jpegs_many).get_state()
    files = jpegs_many[::-1] if change.get("files") else jpegs_many
    args = (change.get("config"), change.get("call"))
    iterator = make(files, *args, **change.get("changed", {}))
    first = next(iterator)
    before = iterator.get_state()
    with pytest.raises(ValueError, match=f"(?s)saved -> now.*{words}") as caught:
        iterator.set_state(saved)
    told = str(caught.value)
    lines = [line for line in told.splitlines() if line.startswith("  ")]
    # Only the changed field, and the reader's argument of the same meaning.
    assert len(lines) == {"epoch_size": 3, "num_shards": 2, "padded": 2, "stick": 2}.get(
        words.split(":")[0], 1
    ), lines
    # A refused restore has no effect: it continues like a new iterator.
    assert iterator.get_state() == before
    reference = make(files, *args, **change.get("changed", {}))
    names = [k for k in first if k != "mask"]
    for name in names:
        assert np.array_equal(first[name], next(iter([reference.peek()]))[name])
    next(reference)
    for a, b in zip(iterator, reference, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_shuffle_after_epoch_and_shard_ids_are_compared(jpegs_many):
    after = make(jpegs_many, stick=False, after=True).get_state()
    with pytest.raises(ValueError, match="reader.shuffle_after_epoch: true -> false"):
        make(jpegs_many, stick=False).set_state(after)
    other = make(jpegs_many, shards=2, shard_id=1)
    with pytest.raises(ValueError, match="shard_ids: 0 -> 1"):
        other.set_state(make(jpegs_many, shards=2).get_state())


def elsewhere(state, name=b"__MakeContiguous_CpuToCpu_", other=b"__MakeContiguous_GpuToCpu_"):
    """Returns the state of a pipeline on a GPU, where DALI's copies have other names."""
    saved = reader_state.decode(state)
    position = saved.position
    marks = [
        one and dataclasses.replace(one, data=tuple(c.replace(name, other) for c in kept))
        for one in (position.checkpoints, position.epoch_start)
        for kept in [one.data if one else ()]
    ]
    position = dataclasses.replace(position, checkpoints=marks[0], epoch_start=marks[1])
    return reader_state.encode(position, saved.fingerprint)


@pytest.mark.parametrize("count", (1, 4, 7))
@pytest.mark.parametrize("built", (False, True))
def test_a_state_resumes_if_dali_copies_outputs_differently(jpegs_many, count, built):
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader")
    call = {**BASE, "shuffle": True, "batch_size": 3}
    ours, other = (iterator_fn.stream(None, jpegs_many, **call) for _ in range(2))
    if built:
        next(other)
    for _ in range(count):
        next(ours)
    state = ours.get_state()
    moved = elsewhere(state)
    assert moved["data"] != state["data"]
    other.set_state(moved)
    for _ in range(5):
        assert numbers_and_draws(next(other)) == numbers_and_draws(next(ours))


def kind(files, operator):
    """A graph with an operator of the same name and another kind."""
    label = fn.readers.file(files=files, name="reader", pad_last_batch=True)[1]
    if operator == "reader":
        return label, fn.readers.file(files=files, name="own", pad_last_batch=True)[1]
    made = {"uniform": fn.random.uniform, "flip": fn.random.coin_flip}.get(operator)
    return label, made(name="own") if made else fn.copy(label, name="own")


# Each kind before and after another kind.
KINDS = ("uniform", "flip", "copy", "reader", "uniform")


@pytest.mark.parametrize("saved,now", [*itertools.pairwise(KINDS)])
def test_a_lazy_state_of_another_graph_is_refused_and_the_next_accepted(jpegs_many, saved, now):
    iterator_fn = data_iterator(kind, ["x", "u"], reader_name="reader")
    bad, good = (iterator_fn(jpegs_many[:10], of, batch_size=3) for of in (saved, now))
    next(bad), next(good)
    state = good.get_state()
    other = iterator_fn.stream(1, jpegs_many[:10], now, batch_size=3)
    first = other.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)saved -> now.* own.* -> .* own"):
            other.set_state(bad.get_state())
        assert other.get_state() == first
    other.set_state(state)
    for one, two in zip(good, other, strict=True):
        np.testing.assert_array_equal(one["u"], two["u"])


@pytest.mark.parametrize("tried", (False, True))
def test_states_of_two_graphs_at_the_same_position_are_distinguished(jpegs_many, tried):
    def stream(gain):
        iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader")
        return iterator_fn.stream(None, jpegs_many, **{**BASE, "gain": gain, "batch_size": 3})

    bad, good = stream(2.0), stream(1.0)
    next(bad), next(good)
    other = stream(1.0)
    if tried:
        with pytest.raises(ValueError, match="saved -> now"):
            other.set_state(bad.get_state())
    other.set_state(good.get_state())
    with pytest.raises(ValueError, match="saved -> now"):
        other.set_state(bad.get_state())
    assert numbers_and_draws(next(other)) == numbers_and_draws(next(good))


def test_a_state_over_a_graph_without_checkpoints_is_refused_by_name(jpegs_many):
    saved = make(jpegs_many)
    next(saved)
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader", mask="mask")
    call = {**BASE, "batch_size": 3, "exec_dynamic": False}
    call["prefetch_queue_depth"] = {"cpu_size": 2, "gpu_size": 2}
    other = iterator_fn.stream(None, jpegs_many, **call)
    for what in (lambda: other.set_state(saved.get_state()), other.get_state):
        with pytest.raises(ValueError, match="state of the pipelines .*`separated`"):
            what()
    assert numbers_and_draws(next(other)) == numbers_and_draws(next(make(jpegs_many)))


def test_the_word_checkpoint_in_a_path_has_no_effect(tmp_path):
    root = tmp_path / "checkpoint_root"

    @data_iterator(output_map=["x"], reader_name="reader", auto_reset=True)
    def by_root():
        return fn.readers.file(file_root=str(root), name="reader", pad_last_batch=True)[1]

    stream = by_root.stream(None, batch_size=1)
    with pytest.raises(RuntimeError, match="checkpoint_root"):
        next(stream)
    for name in "abc":
        (root / name).mkdir(parents=True)
        (root / name / "1.jpg").write_bytes(b"x")
    next(stream)
    state = stream.get_state()
    other = by_root.stream(None, batch_size=1)
    other.set_state(state)
    assert [int(next(other)["x"][0, 0]) for _ in range(3)] == [1, 2, 0]


def test_errors_of_the_graph_are_unchanged(jpegs_many):
    builds = []

    @data_iterator(output_map=["x"], reader_name="reader")
    def failing():
        builds.append(0)
        if len(builds) == 3:
            raise RuntimeError("no space left")
        return fn.readers.file(files=jpegs_many[:10], name="reader", pad_last_batch=True)[1]

    iterator = failing(batch_size=3)
    next(iterator)
    state = iterator.get_state()
    with pytest.raises(RuntimeError, match="no space left"):  # while it moves
        iterator.set_state(elsewhere(state))
    assert iterator.get_state() == state
    iterator.set_state(elsewhere(state))
    assert next(iterator)["x"].ravel().tolist() == [3, 4, 5]


def test_hand_made_pipelines_resume_if_dali_copies_outputs_differently(jpegs_many):
    def given():
        @pipeline_def(batch_size=3, num_threads=1, device_id=None, seed=0)
        def definition():
            label = fn.readers.file(files=jpegs_many[:10], name="reader", pad_last_batch=True)[1]
            return label, fn.random.uniform()

        pipeline = definition(enable_checkpointing=True)
        return DALIGenericIterator([pipeline], ["x", "u"], reader_name="reader")

    ours, other = given(), given()
    next(ours)
    other.set_state(elsewhere(ours.get_state()))
    for one, two in zip(ours, other, strict=True):
        assert numbers_and_draws(one) == numbers_and_draws(two)


def test_operators_are_compared_but_not_their_devices(jpegs_many):
    @pipeline_def(batch_size=3, num_threads=1, device_id=None)
    def definition():
        data, _ = fn.readers.file(files=jpegs_many[:10], name="reader")
        mirror = fn.random.coin_flip()
        return fn.flip(fn.decoders.image(data), horizontal=mirror), mirror

    def told(text):
        operators = list(serialized_operators(text))
        return [
            (kind, name, {k: v for k, v in own.items() if k != "device"})
            for kind, name, own in operators
        ]

    pipeline = definition()
    text = pipeline.serialize()
    moved = text.replace(b"\x03cpu", b"\x03gpu")
    assert moved != text and told(moved) == told(text)
    flip = told(text)[-1]
    assert flip[:2] == ("flip", "__Flip_2")
    assert flip[2]["inputs"] == [["__Image_1", ""], ["__CoinFlip_0", "horizontal"]]


def test_a_folder_is_compared_by_its_files(tmp_path):
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    for name in ("a.jpg", "b.jpg"):
        (folder / name).write_bytes(b"x")

    @data_iterator(output_map=["x"], reader_name="reader")
    def by_root():
        return fn.readers.file(file_root=str(folder.parent), name="reader")[1]

    saved = by_root(batch_size=1).get_state()
    (folder / "b.jpg").rename(folder / "c.jpg")
    with pytest.raises(ValueError, match="reader.file_root: .* -> "):
        by_root(batch_size=1).set_state(saved)
    (folder / "c.jpg").rename(folder / "b.jpg")
    by_root(batch_size=1).set_state(saved)


@pytest.mark.parametrize("call", ("set_state", "reset"))
def test_pipelines_are_not_rebuilt_over_a_folder_that_has_grown(tmp_path, call):
    """DALI would continue over the new files, without a warning."""

    def write(k):
        np.save(tmp_path / f"{k}.npy", np.array([k], np.int32))

    @data_iterator(output_map=["x"], reader_name="reader")
    def read():
        return fn.readers.numpy(file_root=str(tmp_path), name="reader", pad_last_batch=True)

    for k in range(4):
        write(k)
    iterator = read(batch_size=2, num_threads=1)
    start = iterator.get_state()
    next(iterator)
    write(4)
    for _ in range(2):
        with pytest.raises(StateError, match=r"data of read\(\) have changed .* 4 -> 5 samples"):
            iterator.set_state(start) if call == "set_state" else iterator.reset()
            next(iterator)
    (tmp_path / "4.npy").unlink()  # a refused state has changed nothing
    left = [batch["x"].ravel().tolist() for batch in iterator]
    assert left == [[0, 1], [2, 3]][call == "set_state" :]


def test_threads_prefetching_and_devices_may_change(jpegs_many):
    iterator = make(jpegs_many, call=dict(prefetch_queue_depth=1, num_threads=1))
    next(iterator)
    other = make(jpegs_many, call=dict(prefetch_queue_depth=3, num_threads=3))
    other.set_state(iterator.get_state())
    assert numbers_and_draws(next(other)) == numbers_and_draws(next(iterator))


def given(files, pipeline=None, **changed):
    made = pipeline_def(graph)(
        files,
        **{**BASE, **changed},
        **{"batch_size": 3, "num_threads": 2, "device_id": None, **(pipeline or {})},
    )
    return DALIGenericIterator(made, ["x", "u"], reader_name="reader", mask="mask")


def epochs(count, n=10, batch=3):
    whole = [list(range(k, min(k + batch, n))) for k in range(0, n, batch)]
    epoch = [
        {
            "x": np.array(own + [n - 1] * (batch - len(own)))[:, None],
            "mask": np.arange(batch) < len(own),
        }
        for own in whole
    ]
    return [epoch] * count


@pytest.mark.parametrize(
    "pipeline",
    [
        dict(enable_checkpointing=True, seed=3),
        dict(seed=3),
        dict(),
        dict(exec_dynamic=False, seed=1),
        dict(exec_pipelined=False, exec_async=False),
        dict(prefetch_queue_depth=3),
    ],
    ids=str,
)
def test_hand_made_pipelines_have_every_property(jpegs_many, pipeline):
    check(lambda: given(jpegs_many, pipeline), Expected(epochs(3)))


def test_hand_made_pipelines_start_at_the_checkpoint_they_were_given(jpegs_many):
    options = dict(seed=3, enable_checkpointing=True)
    iterator = given(jpegs_many, options)
    for _ in range(3):
        next(iterator)
    (saved,) = iterator.checkpoints()
    again = given(jpegs_many, {**options, "checkpoint": saved})
    assert again.get_state() == iterator.get_state()
    for a, b in zip(again, iterator, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_hand_made_pipelines_without_a_state_raise():
    def source(info):
        return [np.array([info], np.int32)] * 2

    def pipe():
        return fn.external_source(source)

    def hand_made(**options):
        made = pipeline_def(pipe)(batch_size=2, num_threads=1, device_id=None, **options)
        return DALIGenericIterator(made, ["x"], 20)

    iterator = hand_made()
    next(iterator)
    with pytest.raises(ValueError, match="enable_checkpointing=True"):
        iterator.get_state()
    saving = hand_made(enable_checkpointing=True)
    next(saving)
    saving.get_state()
    next(saving)
    with pytest.raises(RuntimeError, match="can't be rebuilt.*data_iterator"):
        saving.reset()
    assert int(next(saving)["x"][0, 0]) == 2


def test_hand_made_pipelines_refuse_a_state_before_anything_changes():
    def pipe():
        numbers = fn.external_source(lambda info: np.array([info.idx_in_epoch]), batch=False)
        return numbers, fn.random.uniform()

    def hand_made(**more):
        made = pipeline_def(pipe, enable_checkpointing=True, seed=0)
        made = made(batch_size=2, num_threads=1, device_id=None, **more)
        return DALIGenericIterator(made, ["x", "u"], 20, as_numpy=True)

    iterator = hand_made()
    next(iterator)
    state, checkpoints = iterator.get_state(), iterator.checkpoints()
    iterator.set_state(state)  # at its position
    second = next(iterator)
    with pytest.raises(ValueError, match="can't be rebuilt.*data_iterator.*can restore this state"):
        iterator.set_state(state)
    assert next(iterator)["x"].tolist() == [[4], [5]] and iterator.step == 3
    # Its states are for the function's iterator, and for new pipelines created there.
    by_function = data_iterator(pipe, ["x", "u"], 20, as_numpy=True)(batch_size=2, num_threads=1)
    by_function.set_state(state)
    for other in (by_function, hand_made(checkpoint=checkpoints[0])):
        batch = next(other)
        assert all(np.array_equal(batch[name], second[name]) for name in ("x", "u"))


def test_graphs_with_python_functions(jpegs_many):
    def pipe():
        label = read_files(jpegs_many[:10], pad_last_batch=True)[1]
        doubled = fn.python_function(label, function=lambda x: x * 2)
        return label, fn.random.uniform(), doubled

    def build():
        return data_iterator(pipe, ["x", "u", "y"], reader_name="reader", mask="mask")(batch_size=3)

    state = build().get_state()
    assert "Python function" in state["unchecked"]
    assert "reader.pad_last_batch: True" in reader_state.decode(state).fingerprint["sources"]
    check(build, Expected(epochs(2)))


def test_element_spec(jpegs_many):
    for policy in LastBatchPolicy:
        iterator = make(jpegs_many, config=dict(last_batch_policy=policy))
        spec = {k: (v.shape, str(v.dtype)) for k, v in iterator.element_spec.items()}
        assert spec == {
            "x": ((3, 1), "int32"),
            "u": ((3,), "float32"),
            "mask": ((3,), "bool"),
        }
        assert numbers_and_draws(next(iterator))[0] == [0, 1, 2]
        # At the end of an epoch, too, without moving.
        ended = make(jpegs_many, config=dict(last_batch_policy=policy))
        again = make(jpegs_many, config=dict(last_batch_policy=policy))
        left = list(ended)
        again.set_state(ended.get_state())
        assert again.element_spec == iterator.element_spec
        assert again.get_state() == ended.get_state()
        assert next(again, "stop") == "stop" and left


def test_any_thread_may_call(jpegs_many):
    iterator = make(jpegs_many, config=dict(auto_reset=True, as_numpy=True))
    reference = make(jpegs_many, config=dict(auto_reset=True, as_numpy=True))
    got, failures, done = [], [], threading.Event()

    def look():
        while not done.is_set():
            try:
                peeked, state = iterator.peek(), iterator.get_state()
                assert set(peeked) == {"x", "u", "mask"} and state["epoch"] >= 0
            except StopIteration:
                pass
            except BaseException as error:
                failures.append(error)
                return

    def take():
        for _ in range(100):
            with lock:  # so that the order of the list matches the calls
                got.append(next(iterator, "stop"))

    lock = threading.Lock()
    lookers = [threading.Thread(target=look) for _ in range(2)]
    takers = [threading.Thread(target=take) for _ in range(3)]
    for thread in (*lookers, *takers):
        thread.start()
    for thread in takers:
        thread.join()
    done.set()
    for thread in lookers:
        thread.join()
    assert not failures
    want = [next(reference, "stop") for _ in range(300)]
    assert [b if b == "stop" else numbers_and_draws(b) for b in got] == [
        b if b == "stop" else numbers_and_draws(b) for b in want
    ]


def test_types_of_fingerprints_are_the_same_before_the_pipelines_exist(jpegs_many):
    known = reader_state.decode(make(jpegs_many).get_state()).fingerprint
    assert {k: type(v) for k, v in unknown().items()} == {k: type(v) for k, v in known.items()}


@pytest.mark.parametrize("shuffle", (in_full(False), True))
def test_states_over_many_files_are_small(tmp_path, shuffle):
    file = tmp_path / "file.bin"
    file.write_bytes(b"x")
    count = 100_000 if FULL else 10_000  # whose names have 100 times as many bytes as a state

    @data_iterator(output_map=["x"], reader_name="reader", mask="mask", as_numpy=True)
    def many():
        return read_files([str(file)] * count, random_shuffle=shuffle, initial_fill=1000)[1]

    iterator = many(batch_size=64)
    iterator.get_state()  # the first state reads the graph
    sizes = []
    for _ in range(50):
        next(iterator)
        state = iterator.get_state()
        sizes.append(len(json.dumps(state)))
    assert max(sizes) <= 4096
    again = many(batch_size=64)
    again.set_state(state)
    for _ in range(3):
        assert np.array_equal(next(again)["x"], next(iterator)["x"])
    TALLY.notes.append(f"state of {count:,} files, random_shuffle={shuffle}: {max(sizes)} bytes")


def test_states_of_dozens_of_operators_are_small_and_name_differences(jpegs_many):
    """At most 4 KiB for a pipeline of 60 operators, half of them with a state."""

    def many(last):
        x = read_files(jpegs_many[:10], pad_last_batch=True)[1]
        for gain in (*[1.0] * 29, last):
            x = x + fn.random.uniform(range=(0.0, gain))
        return x

    def build(last=1.0):
        return data_iterator(many, ["x"], reader_name="reader", mask="mask")(last, batch_size=3)

    masks = [[{"mask": batch["mask"]} for batch in epoch] for epoch in epochs(2)]
    check(build, Expected(masks))
    state = build().get_state()
    assert len(json.dumps(state)) <= 4096
    with pytest.raises(ValueError, match=r"operators.random.uniform\[29\].range: \[0.0,1.0\] -> "):
        build(2.0).set_state(state)
    iterator = build()
    next(iterator)
    again = data_iterator(many, ["x"], reader_name="reader", mask="mask")(
        1.0, batch_size=3, checkpoints=iterator.checkpoints()
    )
    assert again.get_state() == iterator.get_state()


@pytest.mark.parametrize("python", [False, True])  # a graph that doesn't serialize
def test_graphs_with_different_connections_are_refused(jpegs_many, python):
    def graph(swap, turn):
        number = read_files(jpegs_many[:10])[1]
        if python:
            number = fn.python_function(number, function=lambda one: one)
        student = fn.cast(number, dtype=types.FLOAT)
        teacher = fn.reinterpret(student, shape=[1])
        views = (teacher, student) if swap else (student, teacher)
        return *views, student - number if turn else number - student

    make = data_iterator(graph, ["student", "teacher", "x"], reader_name="reader")
    iterator = make(False, False, batch_size=2)
    next(iterator)
    state = iterator.get_state()
    for other in ((True, False), (False, True)):
        with pytest.raises(StateError, match=r"operators\.connections"):
            make(*other, batch_size=2).set_state(state)
        make(*other, batch_size=2).set_state(state, allow=["operators.connections"])
    again = make(False, False, batch_size=2)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["x"], next(iterator)["x"])


def test_a_deserialized_pipeline_has_states(jpegs_many):
    @pipeline_def(batch_size=2, num_threads=1, device_id=None, enable_checkpointing=True)
    def graph():
        return read_files(jpegs_many[:10])[1]

    text = graph().serialize()

    pipeline = Pipeline.deserialize(text, enable_checkpointing=True)
    iterator = DALIGenericIterator(pipeline, ["x"], reader_name="reader")
    next(iterator)
    assert iterator.get_state()["step"] == 1
    assert len(iterator.checkpoints()) == 1
