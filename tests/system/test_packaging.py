"""The wheel and the source distribution contain every module, and the import is light."""

import email
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import tomllib
from shared import shared

from programs import run_python

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dalijax"
HELPER = "core/native/_native.abi3.so"  # if there is a C compiler
DATA = {"py.typed", "core/tools/show/page.html"}
# Imported in tests/pax, which needs another Python.
ELSEWHERE = {"dalijax.adapters.pax"}


def run(*arguments, cwd, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | env
    return run_python(*arguments, cwd=cwd, env=env).stdout


def run_git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def sources():
    """The package's files, relative to its folder."""
    found = [
        file for glob in ("*.py", "core/**/*.py", "adapters/**/*.py") for file in PACKAGE.glob(glob)
    ]
    return {file.relative_to(PACKAGE).as_posix() for file in found}


def modules():
    parts = [pathlib.PurePath("dalijax", file).with_suffix("").parts for file in sources()]
    return sorted(".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts)


def copied_sources(tmp_path_factory):
    """Copies the sources, since a build creates folders in them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("core", "adapters", "src"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the sources."""
    return pathlib.Path(shared(tmp_path_factory, "wheel", lambda: build_wheel(tmp_path_factory)))


def build_wheel(tmp_path_factory):
    source, out = copied_sources(tmp_path_factory), tmp_path_factory.mktemp("wheel")
    try:
        here = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        here = False
    offline = ["--no-build-isolation"] if here else []
    run("-m", "pip", "wheel", "-q", "--no-deps", *offline, "-w", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return str(built)


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The folder of the installed wheel."""
    site = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "-t", site, wheel, cwd=site)
    return site


@pytest.fixture(scope="module")
def python(site, tmp_path_factory):
    """Runs code that imports the installed wheel, and neither the repository nor its folder."""
    empty = tmp_path_factory.mktemp("empty")

    # The finder of an editable install would add modules that the wheel lacks.
    check = f"""
import pathlib, sys
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "dalijax":
        assert pathlib.Path({str(site)!r}) in pathlib.Path(module.__file__).parents, module
"""

    def execute(code, *arguments):
        return run("-c", code + check, *arguments, cwd=empty, PYTHONPATH=str(site))

    return execute


def packed_in(wheel):
    """The files of the package in a wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix("dalijax/") for name in names if ".dist-info/" not in name}


def test_the_wheel_has_exactly_the_sources(wheel):
    assert packed_in(wheel) - {HELPER} == sources() | DATA


def test_the_wheel_has_a_helper_for_all_versions_of_python(wheel, python):
    compiler = os.environ.get("CC", "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip("there is no C compiler")
    assert HELPER in packed_in(wheel) and "-cp310-abi3-" in wheel.name
    code = "from dalijax.core.formats import read_ranges as r; print(r._read.__qualname__)"
    assert python(code).startswith("read_in_c")


def test_a_wheel_is_built_without_a_compiler(tmp_path_factory):
    source, out = copied_sources(tmp_path_factory), tmp_path_factory.mktemp("wheel")
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    run("-c", code, out, cwd=source, CC="/bin/false")
    (built,) = out.glob("*.whl")
    assert packed_in(built) == sources() | DATA


def test_the_wheel_has_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        license = archive.read(f"{info}/licenses/LICENSE").decode()
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert license == (ROOT / "LICENSE").read_text()
    assert license.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_tests_run_from_the_source_distribution(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("the files of a repository are those that git lists")
    tracked = [name for name in run_git("ls-files").split() if os.path.lexists(ROOT / name)]
    source = tmp_path / "source"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name, follow_symlinks=False)
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    run("-c", code, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("dalijax-*/")
    packed = {f.relative_to(unpacked).as_posix() for f in unpacked.rglob("*") if f.is_file()}
    # The two links are packed as folders, at their places in the package.
    links = {name for name in tracked if (ROOT / name).is_symlink()}
    moved = {re.sub("^(core|adapters)/", r"src/dalijax/\1/", name) for name in tracked}
    assert moved - links <= packed
    unpacked.rename(tmp_path / "dalijax")
    arguments = (
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/rules/test_printable.py",
    )
    text = run(*arguments, cwd=tmp_path / "dalijax", PYTHONPATH="src")
    assert " passed" in text and " failed" not in text


# Run in this order in a single process, since each process imports JAX and DALI for two seconds.
STEPS = {
    "packages": """
import jax.numpy, numpy, nvidia.dali.fn, nvidia.dali.plugin.base_iterator
before = set(sys.modules)
import dalijax
result = sorted(set(sys.modules) - before)
""",
    "version": """
import dalijax, importlib.metadata as m
result = [dalijax.__version__, m.version("dalijax")]
""",
    "first use": """
import dalijax
late = {f"dalijax.{name}" for name in ("augment", "profile", "show", "sources", "tune")}
late |= {"dalijax.core.tools", "dalijax.core.sources.tar", "dalijax.core.augment"}
assert not late & set(sys.modules), "the import of the package brings them"
assert {"sources", "augment", "profile", "show", "tune"} <= set(dir(dalijax))
assert callable(dalijax.profile.profile) and "dalijax.core.tools.profile" in sys.modules
assert not hasattr(dalijax, "source")
dalijax.augment.flip
result = [len(dalijax.sources.Arrays({"x": [1, 2, 3]})), "dalijax.augment" in sys.modules]
""",
    "wheels": """
import warnings
from dalijax.core.environment import extras
path, result = list(sys.path), []
for folder in sys.argv[2:]:
    sys.path[:] = [folder]  # what is installed is what lies there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extras.check_dali()
    result.append([str(w.message) for w in caught if "same directory" in str(w.message)])
sys.path[:] = path
""",
    "modules": """
import importlib
for name in modules: importlib.import_module(name)
result = "imported"
""",
}
# A step that fails has its traceback as its result, and the next steps run.
RUN_STEPS = """
import json, sys, traceback
given = json.loads(sys.argv[1])
results = {}
for step, code in given["steps"].items():
    scope = {"sys": sys, "modules": given["modules"]}
    try:
        exec(code, scope)
        results[step] = scope["result"]
    except BaseException:
        results[step] = traceback.format_exc()
print(json.dumps(results))
"""
WHEELS = ("none", "120", "130", "120 130")


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    """The result of each step."""
    return shared(tmp_path_factory, "imports", lambda: run_steps(python, tmp_path_factory))


def run_steps(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for wheels in WHEELS:
        for version in re.findall(r"\d+", wheels):  # like pip
            info = folder / wheels / f"nvidia_dali_cuda{version}-2.4.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: nvidia-dali-cuda{version}\nVersion: 2.4.0\n")
    names = [name for name in modules() if name not in ELSEWHERE]
    given = json.dumps({"steps": STEPS, "modules": names})
    said = python(RUN_STEPS, given, *(folder / wheels for wheels in WHEELS))
    return json.loads(said.splitlines()[-1])


def test_every_module_imports(results):
    assert set(modules()) > ELSEWHERE
    assert results["modules"] == "imported"


def test_the_version_is_that_of_the_metadata(results):
    version, installed = results["version"]
    assert version == installed


def test_import_needs_dali_jax_and_numpy_only(results):
    loaded = results["packages"]
    assert "dalijax.core" in loaded
    assert "nvidia.dali.plugin.jax" not in loaded  # it asserts a newer JAX than Pax has
    packages = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"dalijax", "jax", "numpy", "nvidia"}


def test_without_dali_the_extras_are_named(python):
    code = """
import sys
sys.modules["nvidia.dali"] = None  # as where it is not installed
try:
    import dalijax
except ImportError as error:
    print(error)
for name in [name for name in sys.modules if name.split(".")[0] == "dalijax"]:
    del sys.modules[name]
"""
    text = python(code)
    assert "DALI is not installed" in text
    extras = set(re.findall(r"dalijax\[(\w+)\]", text))
    assert extras == {"cuda12", "cuda13", "cpu"}
    with open(ROOT / "pyproject.toml", "rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    assert all(any("nvidia-dali" in line for line in known[name]) for name in extras)


def test_both_of_dalis_wheels_are_one_too_many(results):
    *fine, both = results["wheels"]
    assert fine == [[], [], []]
    (warning,) = both
    assert "nvidia-dali-cuda120 and nvidia-dali-cuda130 install into the same directory" in warning


def test_modules_are_imported_when_first_used(results):
    assert results["first use"] == [3, True]


# What a user's type checker reports. Expected errors have an ignore, and strict mypy reports
# every ignore that is not needed.
TYPED = """
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

import dalijax
from dalijax import BatchStream, DALIGenericIterator, Draw, FailedBatch, InputStats
from dalijax import IteratorFunction, data_iterator
from dalijax.adapters.clu import DALIDatasetIterator


def graph(data_dir: str) -> object: ...


def each(sharding: NamedSharding) -> dict[str, Sharding | PartitionSpec]:
    return {"x": sharding, "y": PartitionSpec("data")}


def use(sharding: NamedSharding) -> None:
    train = data_iterator(output_map=["x", "y"], sharding=sharding, on_error="skip")(graph)
    data_iterator(graph, ["x", "y"], sharding=each(sharding), on_error="raise")
    data_iterator(graph, ["x", "y"], sharding=PartitionSpec())
    data_iterator(graph, ["x"], on_error="skipp")  # type: ignore[call-overload]
    data_iterator(graph, ["x"], auto_rest=True)  # type: ignore[call-overload]
    train("train", batch_size="8")  # type: ignore[arg-type]
    train("train", batch_size=8, device_id="gpu")  # type: ignore[arg-type]
    train("train", batch_size=8, seed=None, num_threads=2, shard_id=3, mask="mask")
    with train("train", batch_size=8) as iterator:
        kept: DALIGenericIterator = iterator
        again: DALIGenericIterator = iter(iterator)
        other: DALIDatasetIterator = iterator  # type: ignore[assignment]
    data_iterator(graph, ["x"], sharding=8)  # type: ignore[call-overload]
    DALIGenericIterator([], ["x"], on_error="mask")  # type: ignore[arg-type]


def graph_of_records(data: object, *, draw: Draw) -> object: ...


def names(source: dalijax.sources.Source) -> None:
    train: IteratorFunction = data_iterator(graph_of_records, ["x"], source=source)
    iterator = train(batch_size=8)
    stream: BatchStream = train.stream(batch_size=8)
    stats: InputStats = iterator.watch()
    failed: tuple[FailedBatch, ...] = iterator.errors
    page: dalijax.show.Page = dalijax.show.show(iterator)
    tuned: dalijax.tune.Tuned = dalijax.tune.tune(train, batch_size=8)
    with dalijax.profile.profile(iterator) as report:
        same: dalijax.profile.Report = report
    try:
        next(stream)
    except (dalijax.errors.StateError, dalijax.errors.BatchError):
        pass
    dalijax.nonsense  # type: ignore[attr-defined]
    dalijax.augment.RandomFlip  # type: ignore[attr-defined]
    dalijax.errors.NonsenseError  # type: ignore[attr-defined]
    dalijax.fn.resize  # type: ignore[attr-defined]
    dalijax.profile.nonsense  # type: ignore[attr-defined]
    dalijax.show.nonsense  # type: ignore[attr-defined]
    dalijax.sources.ImageFolder  # type: ignore[attr-defined]
    dalijax.tune.nonsense  # type: ignore[attr-defined]
    dalijax.adapters.clu.nonsense  # type: ignore[attr-defined]
    iterator.nonsense  # type: ignore[attr-defined]
    dalijax.profile(iterator)  # type: ignore[operator]


def unlike(array: Array, sharding: NamedSharding, spec: PartitionSpec, any: Sharding) -> None:
    array.nonsense  # type: ignore[attr-defined]
    sharding.nonsense  # type: ignore[attr-defined]
    spec.nonsense  # type: ignore[attr-defined]
    any.nonsense  # type: ignore[attr-defined]
"""


# Mypy does not report errors within an installed package; `make lint` reports those of dalijax. It
# would need 20 seconds for the other modules of JAX and other packages, which define none of these
# types.
OVERRIDES = """
[[tool.mypy.overrides]]
module = ["dalijax.*"]
follow_imports = "silent"

[[tool.mypy.overrides]]
module = [
  "PIL.*", "absl.*", "av.*", "etils.*", "fsspec.*", "grain.*", "jax._src.*", "jax.experimental.*",
  "jax.scipy.*", "jaxlib.*", "matplotlib.*", "ml_dtypes.*", "numba.*", "numpy.*", "optree.*",
  "pyarrow.*", "tqdm.*",
]
follow_imports = "skip"
follow_imports_for_stubs = true

[[tool.mypy.overrides]]
module = [
  "jax._src.basearray", "jax._src.mesh", "jax._src.named_sharding", "jax._src.partition_spec",
  "jax._src.sharding", "jax._src.sharding_impls",
]
follow_imports = "normal"
"""


def test_the_types_that_a_user_sees(site, tmp_path):
    pytest.importorskip("mypy", reason="mypy is in the extra lint")
    config = (ROOT / "pyproject.toml").read_text() + OVERRIDES
    (tmp_path / "pyproject.toml").write_text(config)
    (tmp_path / "typed.py").write_text(TYPED)
    told = run(
        "-m", "mypy", "--cache-dir", os.devnull, "typed.py", cwd=tmp_path, MYPYPATH=str(site)
    )
    assert "Success: no issues found in 1 source file" in told
