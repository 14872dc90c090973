"""Functions in the graph on a GPU: values compared with NumPy, streams, and resuming."""

import contextlib
import gc
import json
import random
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import backend, pipeline_def, types
from nvidia.dali import fn as dali_fn
from nvidia.dali import python_function_plugin as plugin

import function_cells
from dalijax import data_iterator, fn

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)

BATCH = 8


def run(graph, runs=20, pause=0.0, **options):
    """Runs a plain DALI pipeline; returns the outputs as lists of the samples' arrays."""
    options = {"batch_size": BATCH, "num_threads": 4, "device_id": 0, "seed": 3} | options
    pipeline = pipeline_def(graph, **options)()
    pipeline.build()
    batches = []
    for _ in range(runs):
        outputs = pipeline.run()
        time.sleep(pause)
        batches.append([[np.array(one) for one in output.as_cpu()] for output in outputs])
    return batches


def check(graph, expected, runs=20, **options):
    compare(run(graph, runs, **options), expected)


def compare(batches, expected):
    for first, *others in batches:
        for other in others:
            for sample, got in zip(first, other, strict=True):
                np.testing.assert_allclose(got, expected(sample), rtol=1e-5, atol=1e-6)


def uniform(shape=(64, 48, 3)):
    return dali_fn.random.uniform(shape=list(shape), device="gpu")


def ragged():
    rows = dali_fn.cast(dali_fn.random.uniform(range=(1, 9), shape=[1]), dtype=types.INT32)
    return dali_fn.random.uniform(shape=dali_fn.cat(rows, types.Constant([3], device="cpu"))).gpu()


@pytest.mark.parametrize("compiled", (False, True))
def test_jax_function(compiled):
    def flip(x):
        assert compiled or x.devices() == {jax.devices()[0]}
        return x[:, ::-1] * 2

    flip = jax.jit(flip) if compiled else flip
    cpu = jax.devices("cpu")[0]

    def graph():
        x = uniform()
        made = [flip, lambda x: np.asarray(flip(x)), lambda x: jax.device_put(flip(x), cpu)]
        return x, *(fn.jax_function(one)(x) for one in made)

    check(graph, lambda x: x[::-1] * 2)


def test_jax_function_after_heavy_work_on_both_streams():
    @jax.jit
    def heavy(x):
        flat = x.reshape(x.shape[0], -1)
        square = flat @ flat.T / flat.shape[1]
        for _ in range(30):
            square = square @ square
            square = square / jnp.abs(square).max()
        return x + 0 * square.sum()  # finite

    def graph():
        x = uniform((256, 256, 3))
        return x, dali_fn.flip(fn.jax_function(heavy)(dali_fn.flip(x)))

    check(graph, lambda x: x, runs=60)


@pytest.mark.parametrize("mode", ("pad", "group"))
def test_ragged(mode):
    def padded(x, *, lengths):
        return x.sum((1, 2)) + 0 * lengths[:, 0].astype(np.float32)

    total = padded if mode == "pad" else lambda x: x.sum((1, 2))

    def graph():
        x = ragged()
        return x, fn.jax_function(total, ragged=mode)(x)

    check(graph, lambda x: x.sum())


@pytest.mark.parametrize("batch", (False, True))
@pytest.mark.parametrize("library", ("jax", "cupy", "torch", "capsules by cupy"))
def test_dlpack_functions(library, batch):
    module = jax.dlpack if library == "jax" else pytest.importorskip(library.split()[-1])

    def take(x):
        return module.from_dlpack(x.__dlpack__() if "capsules" in library else x)

    def double(x):
        return take(x) * 2

    def doubles(xs):
        return [take(x) * 2 for x in xs]

    def graph():
        x = uniform()
        made = fn.dl_tensor_python_function(
            x, function=doubles if batch else double, batch_processing=batch
        )
        return x, dali_fn.copy(made)

    check(graph, lambda x: x * 2)


def doubling_after_work(cupy, private):
    """A slow function of a sample, on its own stream or on CuPy's default stream."""
    with cupy.cuda.Device(0):
        busy = cupy.cuda.Stream(non_blocking=True) if private else cupy.cuda.Stream.null
        work = cupy.full((2048, 2048), 1e-3, cupy.float32)

    def double(x):
        busy.use()
        own, idle = cupy.from_dlpack(x), work
        for _ in range(20):
            idle = idle @ work
        return own * 2 + 0 * idle[0, 0]

    return double


@pytest.mark.parametrize("batch", (False, True))
def test_dali_waits_for_cupys_current_stream(batch):
    """Also if a single event covers all arrays of a batch."""
    double = doubling_after_work(pytest.importorskip("cupy"), private=True)

    def doubles(xs):
        made = [double(x) for x in xs]
        return made, [one * 1 for one in made]

    def graph():
        x = uniform((32, 32, 3))
        options = {"batch_processing": batch, "num_outputs": 2 if batch else 1}
        function = doubles if batch else double
        made = fn.dl_tensor_python_function(x, function=function, stateful=False, **options)
        return x, *(dali_fn.copy(one) for one in (made if batch else [made]))

    check(graph, lambda x: x * 2, runs=30)


def test_work_on_dalis_stream_needs_no_waiting():
    cupy = pytest.importorskip("cupy")

    class Stream:  # CUDA's stream protocol
        def __cuda_stream__(self):
            return 0, int(plugin.current_dali_stream())

    def double(x):
        with cupy.cuda.Stream.from_external(Stream()):
            return cupy.from_dlpack(x) * 2

    def graph():
        x = uniform((256, 256, 3))
        own = fn.dl_tensor_python_function(
            dali_fn.flip(x), function=double, synchronize_stream=False, batch_processing=False
        )
        return x, dali_fn.flip(own)

    check(graph, lambda x: x * 2, runs=60)


def test_wrong_outputs_are_named():
    def keyed(x, *, key):
        return x

    with pytest.raises(ValueError, match="Omit synchronize_stream"):
        run(
            lambda: fn.dl_tensor_python_function(
                uniform((2,)), function=keyed, synchronize_stream=False, batch_processing=False
            )
        )

    def graph():
        return fn.dl_tensor_python_function(
            uniform((2,)), function=lambda x: np.zeros(2), batch_processing=False
        )

    with pytest.raises(RuntimeError, match="Return an array of JAX, CuPy or PyTorch"):
        next(data_iterator(graph, ["x"])(batch_size=2))
    with pytest.raises(ValueError, match=r"call .gpu\(\)"):
        run(lambda: fn.jax_function(lambda x, y: x)(uniform(), dali_fn.random.uniform()))


def test_numba_kernels():
    cuda = pytest.importorskip("numba.cuda")

    def double(out, x):
        row, column, channel = cuda.grid(3)
        if row < x.shape[0] and column < x.shape[1] and channel < x.shape[2]:
            out[row, column, channel] = x[row, column, channel] * 2

    def graph():
        x = uniform((16, 16, 3))
        return x, fn.numba_function(
            x,
            run_fn=double,
            in_types="float32",
            ins_ndim=3,
            blocks=[4, 4, 1],
            threads_per_block=[4, 4, 3],
        )

    check(graph, lambda x: x * 2)


def test_keys_and_states_resume():
    @fn.jax_function
    @jax.jit
    def jittered(x, *, key):
        return x + jax.random.uniform(key, x.shape)

    def drawn(x, *, rng, key):
        return jax.dlpack.from_dlpack(x) + float(rng.random()) + jax.random.uniform(key, (4,))

    def graph():
        x = uniform((4,))
        return (
            x,
            jittered(x),
            fn.dl_tensor_python_function(x, function=drawn, batch_processing=False),
        )

    made = data_iterator(graph, ["x", "j", "d"], size=40 * BATCH)
    iterator, states, batches = made(batch_size=BATCH), [], []
    for _ in range(8):
        states.append(json.dumps(iterator.get_state()))
        batches.append({k: np.asarray(v) for k, v in next(iterator).items()})
    assert len({b["j"].tobytes() for b in batches}) == 8
    for at in (0, 3, 7):
        other = made(batch_size=BATCH)
        other.set_state(json.loads(states[at]))
        for expected in batches[at:]:
            batch = next(other)
            for name, value in expected.items():
                np.testing.assert_array_equal(np.asarray(batch[name]), value)


@pytest.mark.parametrize("make", function_cells.ADAPTERS)
def test_every_function_in_every_adapter_resumes_everywhere(jpegs_many, make):
    pytest.importorskip("numba.cuda")
    function_cells.check(make, jpegs_many, "gpu")


@pytest.mark.parametrize("dtype", (types.INT64, types.FLOAT64, types.UINT64))
@pytest.mark.parametrize("ragged", (None, "pad"))
def test_inputs_that_jax_would_narrow(dtype, ragged):
    def graph():
        x = dali_fn.cast(uniform((4,)), dtype=dtype)
        return fn.jax_function(lambda x, **_: x, ragged=ragged)(x)

    with pytest.raises(RuntimeError, match="which JAX would narrow to"):
        run(graph)


@pytest.mark.parametrize("size", (1, 3, 4, 5, 7))
def test_samples_at_addresses_that_xla_refuses(size):
    def twice(x):
        return jax.jit(lambda x: x * 2)(jax.dlpack.from_dlpack(x))

    def graph():
        x = uniform((size,))
        return x, fn.dl_tensor_python_function(x, function=twice, batch_processing=False)

    check(graph, lambda x: x * 2)


@pytest.mark.parametrize("dtype", (types.INT64, types.FLOAT64, types.UINT8))
@pytest.mark.parametrize("size", (1, 3, 4))
def test_samples_at_any_address_are_whole_on_any_stream(size, dtype):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(0):
        busy = cupy.cuda.Stream(non_blocking=True)

    def same(x):
        with busy:
            own = cupy.from_dlpack(x) + 0
        cupy.cuda.get_current_stream().wait_event(busy.record())
        return own

    def graph():
        large = dali_fn.cast(uniform((size,)) * 200, dtype=types.FLOAT64)
        scale = 1 if dtype == types.UINT8 else 1 << 40  # more than 32 bits hold
        x = dali_fn.cast(large * types.Constant(scale, dtype=types.FLOAT64), dtype=dtype)
        return x, fn.dl_tensor_python_function(x, function=same, batch_processing=False)

    for x, made in run(graph):
        for sample, got in zip(x, made, strict=True):
            np.testing.assert_array_equal(got, sample, strict=True)


@pytest.mark.parametrize("batch", (False, True))
def test_copies_at_even_addresses_last_as_long_as_a_busy_stream_needs_them(batch):
    """JAX owns the copies, and does not know the stream."""
    double = doubling_after_work(pytest.importorskip("cupy"), private=True)

    def graph():
        x = uniform((1,))
        function = (lambda xs: list(map(double, xs))) if batch else double
        options = {"batch_processing": batch, "stateful": False}
        return x, dali_fn.copy(fn.dl_tensor_python_function(x, function=function, **options))

    check(graph, lambda x: x * 2, runs=30)


@contextlib.contextmanager
def writing(full):
    """Arrays that another thread creates continuously, in any free memory."""
    stop, sizes, count = threading.Event(), random.Random(0), 0

    def write():
        nonlocal count
        while not stop.is_set():
            made = [full() for _ in range(sizes.randint(1, 10))]
            count += 1
            time.sleep(0.0007)
            del made

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert count > 20


SHAPE = (256, 256, 3)


@pytest.fixture(scope="module")
def double():
    """Doubles an array, in milliseconds."""
    work = jnp.full((2048, 2048), 1e-3)

    @jax.jit
    def double(x):
        idle = work
        for _ in range(12):
            idle = jnp.matmul(idle, work, precision="highest")
        return x * 2 + 0 * idle[0, 0]

    return double


KINDS = ("jax_function", "padded", "no inputs", "samples", "batch", "nothing", "not awaited")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_whole_while_jax_computes_something_else(double, kind):
    """DALI drops its inputs before it has read them, and JAX would overwrite them at once.

    Of 100 batches of DALI's own jax_function, 77 were wrong in this way on an H200.
    """
    halves = (BATCH, *SHAPE)

    def taken(x):
        return double(jax.dlpack.from_dlpack(x))

    def graph():
        x = uniform(SHAPE)
        if kind == "jax_function":
            made = fn.jax_function(double)(x)
        elif kind == "padded":
            made = fn.jax_function(lambda x, *, lengths: double(x), ragged="pad")(x)
        elif kind == "no inputs":
            x = dali_fn.constant(fdata=0.5, shape=list(SHAPE), device="gpu")
            made = fn.jax_function(lambda: double(jnp.full(halves, 0.5)), device="gpu")()
        elif kind in ("nothing", "not awaited"):
            x = dali_fn.constant(fdata=0.5, shape=list(SHAPE), device="gpu")
            made = fn.dl_tensor_python_function(
                function=lambda: double(jnp.full(SHAPE, 0.5)),
                device="gpu",
                stateful=False,
                synchronize_stream=kind == "nothing",
                batch_processing=False,
            )
        else:
            options = {"batch_processing": kind == "batch", "stateful": False}
            function = (lambda xs: list(map(taken, xs))) if kind == "batch" else taken
            made = fn.dl_tensor_python_function(x, function=function, **options)
        return x, dali_fn.flip(dali_fn.flip(made))

    shape = halves if kind in ("jax_function", "no inputs") else SHAPE  # what DALI reads
    full = jax.jit(lambda: jnp.full(shape, 7.0))
    with writing(full):
        batches = run(graph, 40)
    compare(batches, lambda x: x * 2)


@pytest.mark.parametrize("batch", (False, True))
def test_outputs_are_whole_while_cupy_computes_something_else(batch):
    cupy = pytest.importorskip("cupy")
    double = doubling_after_work(cupy, private=False)

    def graph():
        x = uniform(SHAPE)
        function = (lambda xs: list(map(double, xs))) if batch else double
        options = {"batch_processing": batch, "stateful": False}
        made = fn.dl_tensor_python_function(x, function=function, **options)
        return x, dali_fn.flip(dali_fn.flip(made))

    def full():
        with cupy.cuda.Device(0):
            return cupy.full(SHAPE, 7.0, cupy.float32)

    with writing(full):
        batches = run(graph, 40)
    compare(batches, lambda x: x * 2)


@pytest.mark.parametrize("kind", ("jax_function", "batch", "samples"))
def test_outputs_are_kept_for_as_long_as_dali_reads_them_only(kind):
    made = []

    def double(x):
        out = jax.dlpack.from_dlpack(x) * 2
        made.append(weakref.ref(out))
        return out

    def doubles(xs):
        return list(map(double, xs))

    def graph():
        x = uniform((4,))
        if kind == "jax_function":
            return x, fn.jax_function(double, stateful=False)(x)
        options = {"batch_processing": kind == "batch", "stateful": False}
        function = doubles if kind == "batch" else double
        return x, fn.dl_tensor_python_function(x, function=function, **options)

    pipeline = pipeline_def(graph, batch_size=BATCH, num_threads=4, device_id=0)()
    for _ in range(20):
        pipeline.run()
    assert len(made) >= 20
    # Some more, as long as the pipeline works on the batches that it prepares.
    most = 2 if kind == "jax_function" else BATCH
    deadline = time.monotonic() + 300
    while not 0 < (alive := sum(one() is not None for one in made)) <= most:
        assert time.monotonic() < deadline, f"{alive} outputs are kept"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ("jax_function", "batch"))
def test_a_closed_iterator_frees_everything(kind):
    made = []

    def double(x):
        made.append(weakref.ref(out := jax.dlpack.from_dlpack(x) * 2))
        return out

    def graph():
        x = uniform((4,))
        if kind == "jax_function":
            return fn.jax_function(double, stateful=False)(x)
        options = {"batch_processing": True, "stateful": False}
        return fn.dl_tensor_python_function(x, function=lambda xs: list(map(double, xs)), **options)

    iterator = data_iterator(graph, ["x"], size=-1)(batch_size=BATCH)
    next(iterator)
    gc.disable()  # which would find them later
    try:
        iterator.close()
        deadline = time.monotonic() + 300
        while any(one() is not None for one in made) and time.monotonic() < deadline:
            jnp.zeros(()).block_until_ready()  # an older JAX frees dropped arrays here
            time.sleep(0.01)
    finally:
        gc.enable()
    assert made and not any(one() is not None for one in made)


@pytest.mark.parametrize("library", ("jax", "cupy", "torch"))
def test_one_array_of_the_whole_batch(library):
    module = pytest.importorskip(library)
    take = jax.dlpack.from_dlpack if library == "jax" else module.from_dlpack
    stack = jnp.stack if library == "jax" else module.stack

    def double(xs):
        return stack([take(x) * 2 for x in xs])

    def graph():
        x = uniform()
        return x, fn.dl_tensor_python_function(x, function=double, batch_processing=True)

    check(graph, lambda x: x * 2)


@pytest.mark.parametrize("mode", ("pad", "group"))
def test_ragged_functions_may_return_arrays_on_another_device(mode):
    cpu = jax.devices("cpu")[0]

    def doubled(x, place):
        return place(x * 2)

    def graph():
        x = uniform((4,))
        padded = (lambda f: lambda x, *, lengths: f(x)) if mode == "pad" else (lambda f: f)
        places = (np.asarray, lambda own: jax.device_put(own, cpu))
        functions = [padded(lambda x, place=place: doubled(x, place)) for place in places]
        return x, *(fn.jax_function(one, ragged=mode)(x) for one in functions)

    check(graph, lambda x: x * 2)


@pytest.mark.parametrize("dynamic", (True, False))
def test_outputs_that_are_inputs(dynamic):
    """The older executors overwrite the inputs' memory at once."""

    def both(x):
        return x, x * 2

    def graph():
        x = uniform()
        same = fn.jax_function(lambda x: x)(x)
        forwarded, _ = fn.jax_function(jax.jit(both), num_outputs=2)(x)
        return dali_fn.copy(x), same, forwarded

    check(graph, lambda x: x, runs=20, pause=0.05, exec_dynamic=dynamic)


@pytest.mark.parametrize("dynamic", (True, False))
def test_outputs_on_the_cpu_are_whole_when_a_gpu_reads_them(dynamic):
    """The older executors overwrite the inputs' memory earlier.

    With DALI's own function, 40 of 40 batches whose outputs are inputs were wrong on an H200 with
    these queues, and 3 of 40 with a depth of 4.
    """
    cpu = jax.devices("cpu")[0]
    functions = [
        fn.jax_function(lambda x: x),
        fn.jax_function(lambda x: np.asarray(x)),
        fn.jax_function(lambda x: x, ragged="group"),
        lambda x: fn.dl_tensor_python_function(x, function=lambda x: x, batch_processing=False),
        fn.jax_function(jax.jit(lambda x: -x)),
        fn.jax_function(jax.jit(lambda x, *, lengths: -x), ragged="pad"),
        lambda x: fn.dl_tensor_python_function(x, function=lambda x: -x, batch_processing=False),
    ]

    def graph():
        x = dali_fn.random.uniform(shape=list(SHAPE))
        made = [one(x).gpu() for one in functions]
        blurred = made[0]
        for _ in range(15):  # so that the operators before it run ahead
            blurred = dali_fn.gaussian_blur(blurred, sigma=3.0, window_size=21)
        return dali_fn.copy(x).gpu(), *made, blurred

    def full():
        with jax.default_device(cpu):
            return jnp.full((BATCH, *SHAPE), 7.0)

    depth = 4 if dynamic else {"cpu_size": 4, "gpu_size": 2}
    with writing(full):
        batches = run(graph, 30, exec_dynamic=dynamic, prefetch_queue_depth=depth)
    for x, *made, _ in batches:
        for number, one in enumerate(made):
            sign = 1 if number < 4 else -1
            np.testing.assert_array_equal(one, sign * np.array(x), err_msg=f"of {number}")


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("mode", (None, "pad", "group"))
def test_functions_without_outputs_read_their_own_batch(double, mode, dynamic):
    sums = []

    def total(x):
        sums.append(jax.numpy.sum(double(x)))

    def padded(x, *, lengths):
        total(x)

    def graph():
        x = uniform(SHAPE)
        function = padded if mode == "pad" else total
        fn.jax_function(function, num_outputs=0, ragged=mode, stateful=False)(x)
        return dali_fn.copy(x)

    batches = run(graph, 30, exec_dynamic=dynamic)
    assert len(sums) >= 30
    for (x,), made in zip(batches, sums):
        np.testing.assert_allclose(
            float(made), 2 * np.sum(x, dtype=np.float64), rtol=1e-4, atol=0.05
        )


@pytest.mark.parametrize("mode", ("pad", "group"))
def test_ragged_functions_may_donate_their_batches(mode):
    if mode == "pad":
        double = jax.jit(lambda x, *, lengths: x * 2, donate_argnums=0)
    else:
        double = jax.jit(lambda x: x * 2, donate_argnums=0)

    def graph():
        x = uniform((4,))
        return x, fn.jax_function(double, ragged=mode)(x)

    check(graph, lambda x: x * 2)


@pytest.mark.parametrize(
    "dtype", ("bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
)
def test_ragged_rows_are_cut_and_padded(dtype):
    samples = [np.ones((k, 4), dtype) for k in range(BATCH)]

    def graph():
        data = dali_fn.external_source(source=lambda: samples, batch=True)
        return fn.pad_rows(data.gpu(), 5, fill=3)

    for rows, counts in run(graph, runs=3):
        for k, (padded, count) in enumerate(zip(rows, counts, strict=True)):
            wanted = np.full((5, 4), 3, dtype)
            wanted[:k] = 1
            np.testing.assert_array_equal(padded, wanted)
            assert padded.dtype == wanted.dtype and count == min(k, 5)
