"""Private names of other libraries that the package uses: a release that moves one fails here."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import threading

import grain
import numpy as np
import pytest
from nvidia.dali import Pipeline, backend, fn, ops, pipeline_def
from nvidia.dali.plugin import base_iterator

import dalijax
from dalijax.adapters.grain import lengths

PACKAGE = pathlib.Path(dalijax.__file__).parent
PATTERNS = ("*.py", "core/**/*.py", "adapters/**/*.py")
TRANSFORMATIONS = "grain._src.python.dataset.transformations"


@functools.cache
def built():
    """A built pipeline with an external source, indexing, and a Python function."""

    @pipeline_def(batch_size=2, num_threads=1, device_id=None, enable_checkpointing=True)
    def graph():
        x = fn.external_source(lambda info: np.zeros(2, np.float32), batch=False, name="source")
        return fn.dl_tensor_python_function(x[0], function=lambda y: y, batch_processing=True)

    pipeline = graph()
    pipeline.build()
    return pipeline


def operator(name):
    """An operator of the built pipeline whose printed arguments contain a text."""
    return next(one for one in built()._ops if name in str(one.spec))


def module(name):
    return lambda: importlib.import_module(name)


def optional(name, *attributes):
    """The owner of names in a package that may not be installed."""

    def owner():
        value = pytest.importorskip(name)
        return functools.reduce(getattr, attributes, value)

    return owner


def dataset():
    return grain.MapDataset.range(4)


def repeated():
    return grain.experimental.RepeatIterDataset(dataset().to_iter_dataset(), num_epochs=2)


# The owners of private names, and the names.
USED = {
    "os": (module("os"), "_exit"),
    "Pipeline": (
        built,
        "_checkpoint _concurrency _executor_flags _first_iter _graph_out _names_and_devices _ops "
        "_pipe _pipes _py_pool_started _shutdown _sinks",
    ),
    "operator": (lambda: operator("source"), "_group _op"),
    "operator._op": (lambda: operator("source")._op, "_init_args"),
    "Python function": (
        lambda: operator("PythonFunction")._op,
        "_function_wrapper_dlpack _init_args _preserve",
    ),
    "pipeline_def": (lambda: pipeline_def(lambda: None), "_is_pipeline_def"),
    "nvidia.dali.fn": (lambda: fn, "_conditional _wrap_op_fn"),
    "nvidia.dali.plugin.jax.fn": (module("nvidia.dali.plugin.jax.fn"), "_jax_function_impl"),
    "DALI's jax_function": (
        module("nvidia.dali.plugin.jax.fn._jax_function_impl"),
        "_JaxFunction",
    ),
    "nvidia.dali.plugin.numba": (
        optional("nvidia.dali.plugin.numba"),
        "_get_shape_view minimal_numba_version njit cfunc Version",
    ),
    "NumbaFunction": (
        optional("nvidia.dali.plugin.numba", "NumbaFunction"),
        "_get_run_fn_cpu _get_run_fn_gpu _get_setup_fn_cpu _setup_fn_sig",
    ),
    "nvidia.nvimgcodec": (module("nvidia.nvimgcodec"), "CodeStream"),
    "DALI's TensorFlow plugin": (optional("nvidia.dali.plugin.tf"), "_has_external_source"),
    "MapDataset": (lambda: dataset().seed(1), "_parents _seed_rng_seed"),
    "shuffled MapDataset": (lambda: dataset().shuffle(seed=1), "_seed"),
    "sliced MapDataset": (lambda: dataset()[1::2], "_start"),
    "batched MapDataset": (lambda: dataset().batch(2), "_batch_fn"),
    "IterDataset": (repeated, "_element_spec _num_epochs _parents"),
    "DatasetIterator": (
        lambda: iter(repeated()),
        "_assert_not_closed _get_next_index _parents _set_next_index",
    ),
    "interleaved IterDataset": (
        lambda: grain.experimental.InterleaveIterDataset([repeated()], cycle_length=1),
        "_datasets",
    ),
    "IndexSampler": (
        lambda: grain.samplers.IndexSampler(2, grain.sharding.NoSharding(), num_epochs=1),
        "_shard_options",
    ),
    "Grain's batch": (module(f"{TRANSFORMATIONS}.batch"), "BatchIterDataset make_batch"),
    "Grain's slice": (module(f"{TRANSFORMATIONS}.slice"), "SliceMapDataset"),
    "Grain's prefetch": (module(f"{TRANSFORMATIONS}.prefetch"), "is_prefetch_iterator"),
    "Grain's workers": (
        module(f"{TRANSFORMATIONS}.process_prefetch"),
        "is_in_worker_process",
    ),
    "JAX's service": (
        lambda: importlib.import_module("jax._src.distributed").global_state,
        "client",
    ),
    "JAX's traces": (module("jax._src.core"), "trace_state_clean"),
    "JAX's meshes": (module("jax._src.mesh"), "thread_resources"),
    "PeriodicAction of CLU": (
        optional("clu.periodic_actions", "PeriodicAction"),
        "_apply _init_and_check _should_trigger",
    ),
    "instance of PeriodicAction": (
        lambda: optional("clu.periodic_actions")().PeriodicCallback(every_steps=1, callback_fn=id),
        "_previous_step _previous_time",
    ),
    "input of Pax": (
        optional("praxis.base_input", "BaseInput"),
        "_get_state_internal _set_state_internal",
    ),
    "PythonState of TensorFlow": (
        optional("tensorflow", "train", "experimental", "PythonState"),
        "_copy_trackable_to_cpu",
    ),
    "data set of HuggingFace": (
        lambda: optional("datasets", "Dataset")().from_dict({"x": [1]}),
        "_indices",
    ),
    "obstore": (optional("obstore"), "_obstore"),
    "extension of obstore": (
        optional("obstore._obstore"),
        "_store get get_ranges head list list_with_delimiter",
    ),
    "threading": (lambda: threading, "_DummyThread"),
}
# Public methods of namedtuples, which begin with an underscore.
NAMEDTUPLES = {"_asdict", "_fields", "_replace"}
# Texts in what DALI prints or saves.
PRINTED = {"_display_name", "_module"}
OF_PYTHON = ("_abc_", "_is_protocol", "_is_runtime_protocol")
SAVED = ("_counter", "_counter_per_gpu", "_shard_sizes_per_gpu", "_shards_id")


@pytest.mark.parametrize("owner", USED)
def test_private_names_exist(owner):
    get, names = USED[owner]
    assert [name for name in names.split() if not hasattr(get(), name)] == []


def test_private_texts_exist():
    assert set(PRINTED) <= set(str(operator("source").spec).replace(":", " ").split())
    assert "_tensor_subscript" in str([str(one.spec) for one in built()._ops])
    assert backend.GetSchema("_conditional__Split").HasArgument("_if_stmt")
    text = inspect.getsource(base_iterator)
    assert [name for name in SAVED if f"{name}" not in text] == []
    assert hasattr(Pipeline, "_pipes") and hasattr(ops, "DLTensorPythonFunction")


def test_datasets_that_are_recognized_by_name_exist():
    folder = pathlib.Path(importlib.import_module("grain._src.python.dataset").__path__[0])
    text = "".join(file.read_text() for file in folder.rglob("*.py"))
    known = (*lengths._LENGTH_PRESERVING, *lengths._WITH_HOLES, "RepeatIterDataset")
    assert [name for name in known if f"class {name}(" not in text] == []


# No other private name is used


def is_private(name):
    return isinstance(name, str) and name[:1] == "_" and name[:2] != "__" and len(name) > 1


def names_in(tree):
    """The private names that a module defines, and those that it uses."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            is_new = isinstance(node.ctx, ast.Store) and is_self
            (defined if is_new else used).add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            used |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.keyword):
            used.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            names = [alias.name for alias in node.names]
            used |= {part for name in names for part in name.split(".")}
    return set(filter(is_private, defined)), set(filter(is_private, used))


def test_every_private_name_of_another_library_is_listed():
    files = [file for pattern in PATTERNS for file in PACKAGE.glob(pattern)]
    found = [names_in(ast.parse(file.read_text())) for file in files]
    defined = set().union(*(names for names, _ in found))
    used = set().union(*(names for _, names in found))
    listed = {name for _, names in USED.values() for name in names.split()}
    assert used - defined - listed - NAMEDTUPLES == set()
    assert {name for name in listed if is_private(name)} <= used | defined


def package_classes():
    """The classes of the package's modules that can be imported here."""
    for found in pkgutil.walk_packages(dalijax.__path__, "dalijax."):
        try:
            loaded = importlib.import_module(found.name)
        except ImportError:  # an extra is missing
            continue
        for value in vars(loaded).values():
            if isinstance(value, type) and value.__module__ == found.name:
                yield value


def test_every_private_method_that_is_overridden_is_listed():
    listed = {name for _, names in USED.values() for name in names.split()} | NAMEDTUPLES
    overridden = {
        (kind.__qualname__, name)
        for kind in package_classes()
        for base in kind.__mro__[1:]
        if base.__module__.partition(".")[0] not in ("dalijax", "typing", "abc", "builtins", "enum")
        for name in vars(kind)
        if is_private(name) and name in vars(base) and not name.startswith(OF_PYTHON)
    }
    assert {pair for pair in overridden if pair[1] not in listed} == set()
