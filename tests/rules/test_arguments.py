"""Arguments: names and order as in DALI's plugin, and an error with a fix for each mistake."""

import dataclasses
import functools
import inspect
import pickle
import pydoc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin import jax as dali_jax
from nvidia.dali.plugin.base_iterator import LastBatchPolicy as DALIPolicy

import dalijax
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator, sources
from dalijax.core.config import (
    FunctionIteratorArguments,
    IteratorConfig,
    PipelineIteratorArguments,
)
from numbered import read_files

COUNT = 6


def counter():
    return fn.external_source(lambda info: np.array([info.idx_in_epoch], np.int32), batch=False)


def files(jpegs, pad=False, shard_id=0, num_shards=1):
    return read_files(jpegs, pad_last_batch=pad, shard_id=shard_id, num_shards=num_shards)[1]


@data_iterator(output_map=["x"], size=COUNT)
def module_level(scale=1):
    return counter() * scale


@data_iterator(output_map=["x"], size=COUNT, mask="mask")
def bare():
    return counter()


plain_call = data_iterator(counter, ["x"], COUNT)


@pytest.mark.parametrize("name", ("data_iterator", "DALIGenericIterator"))
def test_signatures_extend_dalis_by_keyword_only_arguments(name):
    theirs = dict(inspect.signature(getattr(dali_jax, name)).parameters)
    ours = dict(inspect.signature(getattr(dalijax, name)).parameters)
    added = [k for k in ours if k not in theirs]
    assert list(ours)[: len(theirs)] == list(theirs)
    defaults = {k: p.default for k, p in theirs.items()}
    assert defaults["last_batch_padded"] is False
    defaults["last_batch_padded"] = None  # False, except over a source
    if name == "DALIGenericIterator":
        defaults["output_map"] = ()  # required, except for a graph that returns a dict
    assert {k: ours[k].default for k in theirs} == defaults
    assert {"mask", "as_numpy"} <= set(added)
    assert all(ours[k].kind is inspect.Parameter.KEYWORD_ONLY for k in added)


def test_each_argument_is_checked_by_the_configuration():
    """The types of arguments equal the fields that check them."""
    fields = [field.name for field in dataclasses.fields(IteratorConfig)]
    internal = ["epoch_rules", "on_host", "hosts", "epochs"]
    typed = set(FunctionIteratorArguments.__annotations__)
    assert sorted({"output_map", *typed, *internal}) == sorted(fields)
    assert typed > set(PipelineIteratorArguments.__annotations__)
    ours = inspect.signature(data_iterator).parameters
    assert [name for name in ours if name != "pipeline_fn"] == fields[: -len(internal)]


def test_the_policy_is_dalis_enum():
    assert LastBatchPolicy is DALIPolicy


def test_decorator_with_and_without_arguments_and_plain_call():
    def first(iterator):
        return np.asarray(next(iterator)["x"]).ravel().tolist()

    assert first(module_level(scale=3, batch_size=2)) == [0, 3]
    assert first(module_level(2, batch_size=2)) == [0, 2]  # positional pipeline arguments
    assert first(bare(batch_size=2)) == [0, 1]
    assert first(plain_call(batch_size=2)) == [0, 1]
    assert module_level.__name__ == "module_level"

    decorate = data_iterator(output_map=["x"], size=COUNT)
    assert first(decorate(pipeline_def(counter))(batch_size=2)) == [0, 1]
    # DALI would deliver empty batches.
    nameless = data_iterator(lambda: counter())
    with pytest.raises(ValueError, match="output_map is empty.*return a dict"):
        nameless(batch_size=2)

    @data_iterator
    def named():
        return {"x": counter()}

    assert first(named(batch_size=2)) == [0, 1]


def test_a_bare_pipeline_and_a_list():
    for wrap in (lambda p: p, lambda p: [p], lambda p: (p,)):
        pipeline = pipeline_def(counter)(batch_size=2, num_threads=1, device_id=None)
        iterator = DALIGenericIterator(wrap(pipeline), ["x"], COUNT)
        assert len(iterator) == 3 and iterator.size == COUNT and iterator.batch_size == 2
        assert iterator.next()["x"].tolist() == [[0], [1]]


def test_defaults_of_threads_seed_and_device():
    seen = []

    def graph():
        from nvidia.dali import Pipeline

        p = Pipeline.current()
        seen.append((p.num_threads, p.seed, p.device_id, p.exec_dynamic))
        return counter()

    data_iterator(graph, ["x"], COUNT)(batch_size=2)
    data_iterator(graph, ["x"], COUNT)(batch_size=2, num_threads=None, seed=None, device_id=None)
    data_iterator(graph, ["x"], COUNT)(batch_size=2, num_threads=1, seed=7)
    data_iterator(pipeline_def(num_threads=3)(graph), ["x"], COUNT)(batch_size=2)
    assert seen[:3] == [(4, 0, None, True), (4, 0, None, True), (1, 7, None, True)]
    assert seen[-1] == (3, 0, None, True)


@pytest.mark.parametrize(
    "value,expected",
    [
        ("yes", True),
        (True, True),
        ("no", False),
        (False, False),
        (None, False),
        ("True", ValueError),
    ],
)
def test_auto_reset(value, expected):
    make = lambda: data_iterator(counter, ["x"], 4, auto_reset=value)(batch_size=2)  # noqa: E731
    if expected is ValueError:
        with pytest.raises(ValueError, match="auto_reset must be 'yes', 'no'"):
            make()
        return
    iterator = make()
    assert len(list(iterator)) == 2
    again = next(iterator, None)
    assert (again is not None) == expected


def test_the_signature_has_the_arguments_of_the_function_and_of_the_call():
    found = inspect.signature(data_iterator(files, ["x"])).parameters
    assert list(found)[:4] == ["jpegs", "pad", "shard_id", "num_shards"]
    assert {found[k].kind for k in list(found)[4:-1]} == {inspect.Parameter.KEYWORD_ONLY}
    assert found["batch_size"].annotation is int and found["checkpoints"].default is None
    own = ("num_threads", "seed", "prefetch_queue_depth", "exec_dynamic")
    defaults = {k: found[k].default for k in own}
    made = data_iterator(counter, ["x"], COUNT)._prepared((), {"batch_size": 2})[0].build()[0]
    assert defaults == {k: getattr(made, k) for k in defaults}
    assert found["batch_size"].default is inspect.Parameter.empty
    assert repr(found["device_id"].default) == "<0 with a GPU, else None>"
    assert found["enable_conditionals"].default is False
    # Parameters of the function are not the iterator's; pipeline_def may have other defaults.
    own = inspect.signature(data_iterator(lambda seed="a": counter(), ["x"])).parameters
    assert own["seed"].default == "a" and next(iter(own)) == "seed"
    decorated = inspect.signature(data_iterator(pipeline_def(num_threads=3)(counter), ["x"]))
    assert repr(decorated.parameters["num_threads"].default) == "<the pipeline_def's>"


def test_the_defaults_of_the_signature_may_be_passed():
    train = data_iterator(counter, ["x"], COUNT)
    call = inspect.signature(train).bind(batch_size=2)
    call.apply_defaults()
    with train(**call.kwargs) as iterator, train(batch_size=2) as plain:
        assert next(iterator)["x"].tolist() == next(plain)["x"].tolist()


def test_help_combines_both_docstrings_and_is_correct():
    def documented(folder):
        """Images of a folder."""

    text = pydoc.render_doc(data_iterator(documented, ["x"]), renderer=pydoc.plaintext)
    assert "Images of a folder." in text and "documented(folder, *, batch_size: int" in text
    parameters = inspect.signature(data_iterator(documented, ["x"])).parameters
    assert all(
        f"\n        {name}: " in text
        for name in parameters
        if name not in ("folder", "pipeline_args")
    )
    assert "the keys of a dict" in data_iterator.__doc__
    with pytest.raises(TypeError, match=r"not \['x'\]. Pass other.*such as output_map="):
        data_iterator(["x"])


MISTAKES = [
    (
        dict(size="300"),
        {},
        TypeError,
        "size must be a positive number.*or -1, not '300'",
    ),
    (dict(size=6.0), {}, TypeError, r"size must be a positive number.*not 6\.0"),
    (dict(output_map=[]), {}, ValueError, "output_map is empty"),
    (dict(output_map=["a", "b"]), {}, ValueError, "names 2 outputs.*the pipeline has 1"),
    (dict(output_map=["a", "a"]), {}, ValueError, "'a'.* more than once"),
    (dict(output_map="x"), {}, TypeError, r"Pass \['x'\]"),
    (dict(mask="x"), {}, ValueError, r"named '(mask|x|plus)' already.*mask='valid'"),
    (dict(size=0), {}, ValueError, "size must be a positive number"),
    (dict(size=3, reader_name="reader"), {}, ValueError, "size=3 together with reader_name"),
    (dict(reader_name="nobody"), {}, ValueError, r"'nobody' is not in .* \['reader'\]"),
    (dict(reader_name="reader", last_batch_padded=True), {}, ValueError, "pad_last_batch=False"),
    (dict(last_batch_policy="keep"), {}, ValueError, "'fill', 'drop' or 'partial'.*'keep'"),
    (dict(last_batch_policy=None), {}, ValueError, "'fill', 'drop' or 'partial'.*None"),
    (dict(last_batch_policy="fill", drop_remainder=True), {}, ValueError, "policy=FILL disagree"),
    (
        dict(last_batch_policy="partial"),
        dict(drop_remainder=True),
        ValueError,
        r"drop_remainder=True in the call of files\(\), but .* policy PARTIAL",
    ),
    (
        dict(last_batch_policy="partial"),
        dict(last_batch_policy="fill"),
        ValueError,
        "last_batch_policy='fill' in the call.* Omit it in data_iterator",
    ),
    (dict(last_batch_policy="drop", drop_remainder=False), {}, ValueError, "DROP disagree"),
    (
        dict(drop_remainder=True),
        dict(drop_remainder=False),
        ValueError,
        "=False in the .* DROP, by",
    ),
    (
        dict(drop_remainder=True),
        dict(last_batch_policy="fill"),
        ValueError,
        "'fill' in .* DROP, by",
    ),
    (
        dict(drop_remainder=True),
        dict(mask=True),
        ValueError,
        r"mask=True in the call of files\(\), but .* DROP, .* not padded .* only in calls for",
    ),
    (dict(last_batch_policy="drop"), dict(mask="valid"), ValueError, "mask='valid' in the call"),
    (
        dict(last_batch_policy=LastBatchPolicy.DROP),
        dict(mask=True, last_batch_padded=True),
        ValueError,
        "mask=True in the call",
    ),
    (dict(drop_remainder=True, mask=True), dict(mask="valid"), ValueError, "given both to"),
    (dict(drop_remainder="yes"), {}, TypeError, "drop_remainder must be True or False"),
    (dict(mask=1), {}, TypeError, "mask must be True for the name 'mask', or a name, not 1"),
    (
        dict(output_map=["mask"], mask=True),
        {},
        ValueError,
        r"named '(mask|x|plus)' already.*mask='valid'",
    ),
    (dict(), dict(size=2, reader_name="reader"), ValueError, "size=2 together"),
    (dict(reader_name="reader"), dict(reader_name="reader"), ValueError, "given both to"),
    (dict(reader_name="reader"), dict(flavour=1), TypeError, r"no argument \['flavour'\]"),
    (
        dict(reader_name="reader", devices=[]),
        {},
        ValueError,
        "devices must be non-empty and distinct",
    ),
]


@pytest.mark.parametrize("config,call,error,words", MISTAKES)
def test_mistakes_name_the_value_and_the_fix(jpegs, config, call, error, words):
    with pytest.raises(error, match=words):
        data_iterator(files, **{"output_map": ["x"], **config})(jpegs, batch_size=2, **call)


@pytest.mark.parametrize(
    ("config", "call"),
    [
        (dict(mask=True), dict(drop_remainder=True)),
        (dict(mask=True, last_batch_policy="drop"), dict()),
        (dict(), dict(mask=True, drop_remainder=True)),
        (dict(drop_remainder=True), dict(mask=True, drop_remainder=True)),
        (dict(drop_remainder=True), dict(mask=True, on_error="mask")),
    ],
    ids=str,
)
def test_training_may_drop_the_last_batch_and_have_a_mask(config, call):
    make = data_iterator(lambda x: x + 0, ["x"], as_numpy=True, **config)
    records = sources.Arrays({"x": np.arange(5, dtype=np.int32)})
    with make(source=records, batch_size=2, shuffle=False, **call) as iterator:
        batches = [(batch["x"].tolist(), batch["mask"].tolist()) for batch in iterator]
    assert batches == [([0, 1], [True, True]), ([2, 3], [True, True])]


def test_an_evaluation_by_a_function_that_drops_is_refused():
    train = data_iterator(lambda x: x + 0, ["x"], drop_remainder=True)
    evaluation = {"source": sources.Arrays({"x": np.arange(5)}), "batch_size": 2, "shuffle": False}
    for create in (train, train.stream, functools.partial(train.stream, 1)):
        with pytest.raises(ValueError, match="mask='valid' in the call .* DROP"):
            next(iter(create(mask="valid", **evaluation)))


@pytest.mark.parametrize("policy", LastBatchPolicy)
@pytest.mark.parametrize("form", (str.upper, str.lower, str.title))
def test_policies_may_be_names(jpegs, policy, form):
    call = {"last_batch_policy": form(policy.name), "batch_size": 4, "reader_name": "reader"}
    expected = {**call, "last_batch_policy": policy}
    with (
        data_iterator(files, ["x"], **_config(call))(jpegs, batch_size=4) as iterator,
        data_iterator(files, ["x"], **_config(expected))(jpegs, batch_size=4) as other,
    ):
        rows = [np.asarray(batch["x"]).ravel().tolist() for batch in iterator]
        assert rows == [np.asarray(batch["x"]).ravel().tolist() for batch in other]
        assert iterator.get_state() == other.get_state()


def _config(call):
    return {name: value for name, value in call.items() if name != "batch_size"}


@pytest.mark.parametrize("more", ({}, {"last_batch_policy": "drop"}, {"last_batch_policy": "Drop"}))
def test_drop_remainder_is_the_policy_drop(jpegs, more):
    iterator_fn = data_iterator(files, ["x"], reader_name="reader", **more)
    with (
        iterator_fn(jpegs, batch_size=5, drop_remainder=True) as iterator,
        data_iterator(files, ["x"], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP)(
            jpegs, batch_size=5
        ) as other,
    ):
        assert len(iterator) == len(other) == len(jpegs) // 5
        assert [b["x"].tolist() for b in iterator] == [b["x"].tolist() for b in other]


def test_mask_true_is_named_mask(jpegs):
    iterator_fn = data_iterator(files, ["x"], reader_name="reader")
    with iterator_fn(jpegs, batch_size=5, mask=True) as iterator:
        assert sorted(next(iterator)) == ["mask", "x"]
    with iterator_fn(jpegs, batch_size=5, mask=False) as iterator:
        assert sorted(next(iterator)) == ["x"]


def sharding():
    return NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))


@pytest.mark.parametrize(
    "config,call,words",
    [
        (dict(devices="d", sharding="s"), {}, "exclude each other"),
        (dict(sharding="s"), dict(device_id=0), "device_id=0 together with sharding or devices"),
        (dict(devices="d"), dict(device_id=1), "device_id=1 together with sharding or devices"),
        (dict(sharding="s", as_numpy=True), {}, "as_numpy=True with sharding"),
        (dict(devices="d", as_numpy=True), {}, "as_numpy=True with devices"),
        (dict(sharding="s", pmap_compatible=True), {}, "pmap_compatible=True with sharding"),
        (
            dict(sharding="s", last_batch_policy=LastBatchPolicy.PARTIAL),
            {},
            "Use 'fill' with mask=True",
        ),
    ],
)
def test_placement_mistakes(jpegs, config, call, words):
    named = {"s": sharding(), "d": jax.devices()[:2]}
    config = {k: named.get(v, v) if isinstance(v, str) else v for k, v in config.items()}
    with pytest.raises(ValueError, match=words):
        data_iterator(files, ["x"], reader_name="reader", **config)(jpegs, batch_size=2, **call)


def test_an_explicit_device_id_of_none_is_used(jpegs):
    iterator_fn = data_iterator(files, ["x"], reader_name="reader", sharding=sharding())
    assert next(iterator_fn(jpegs, batch_size=2, device_id=None))["x"].shape == (2, 1)


def test_a_gpu_operator_without_a_gpu_is_an_error(jpegs):
    def graph():
        data, _ = fn.readers.file(files=jpegs, name="reader")
        return fn.decoders.image(data, device="mixed")

    with pytest.raises(RuntimeError, match="needs a GPU.* finds none .* device='cpu'"):
        data_iterator(graph, ["x"], reader_name="reader")(batch_size=2)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        plain_call(batch_size=2, device_id=0)


@pytest.mark.parametrize("iterator_fn", (module_level, plain_call, bare))
def test_iterator_functions_pickle(iterator_fn):
    copy = pickle.loads(pickle.dumps(iterator_fn))
    assert next(copy(batch_size=2))["x"].tolist() == [[0], [1]]


def test_len_is_unknown_if_only_the_source_knows_it():
    iterator = data_iterator(counter, ["x"])(batch_size=2)
    with pytest.raises(TypeError, match="length is unknown"):
        len(iterator)
    assert iterator.size == -1
    assert bool(iterator)


def test_dtypes_and_labels(jpegs):
    def graph():
        label = files(jpegs)
        return label, fn.cast(label, dtype=types.FLOAT16), label > 3

    batch = next(data_iterator(graph, ["a", "b", "c"], reader_name="reader")(batch_size=4))
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "a": ((4, 1), "int32"),
        "b": ((4, 1), "float16"),
        "c": ((4, 1), "bool"),
    }
    assert all(isinstance(v, jax.Array) for v in batch.values())
