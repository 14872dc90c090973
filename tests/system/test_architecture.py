"""The layers: modules import only lower layers, and parts of a layer do not import each other."""

import ast
import gc
import pathlib
import sys

import grain
import numpy as np
import pytest
from nvidia.dali import fn

import dalijax
from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "src" / "dalijax"
# From bottom to top. Only modules of the first row may import one another.
LAYERS = (
    (
        *("core.arguments", "core.arrays", "core.config", "core.environment", "core.errors"),
        *(
            "core.messages",
            "core.native",
            "core.order",
            "core.random",
            "core.stats",
            "core.threads",
        ),
    ),
    ("core.remote",),
    ("core.formats",),
    ("core.state",),
    ("core.pipeline", "core.sources"),
    ("core.augment", "core.functions", "core.robots"),
    ("core.feeding", "core.iterator"),
    ("core.api",),
    ("core.tools",),
    ("adapters",),
    ("__init__", "augment", "errors", "fn", "profile", "show", "sources", "tune"),
)
SOURCES = sorted(
    file
    for pattern in ("*.py", "core/**/*.py", "adapters/**/*.py")
    for file in PACKAGE.glob(pattern)
)


def part_of(module):
    """Returns the number of a module's layer and its part; None for modules of other packages."""
    for number, parts in enumerate(LAYERS):
        for part in parts:
            if module == part or module.startswith(part + "."):
                return number, part
    return None


def imports_of(file):
    """Yields the modules, or names of modules, that a file imports from this package."""
    package = file.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{module}.{alias.name}" if module else alias.name


def misplaced_imports(file):
    """Yields a text for each import of a module that breaks the rules of the layers."""
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    if module in ("core.__init__", "adapters.__init__"):
        return
    here = part_of(module)
    if here is None:
        yield f"{module} is in no layer: give it a part"
        return
    for other in imports_of(file):
        there = part_of(other)
        if there is None:
            yield f"{module} imports {other}, which is in no layer"
        elif there[0] > here[0]:
            yield f"{module} imports {other}, which is above it"
        elif there[0] == here[0] and there[1] != here[1] and here[0] not in (0, len(LAYERS) - 1):
            yield f"{module} imports {other} beside it"


def test_modules_import_only_lower_layers():
    assert len(SOURCES) > 200
    assert [text for file in SOURCES for text in misplaced_imports(file)] == []


@pytest.mark.parametrize("part", ("pipeline", "state", "formats"))
def test_code_below_the_supplies_knows_no_draws(part):
    files = [file for file in SOURCES if file.parts[-2] == part]
    assert len(files) > 5
    importing = {
        f.name for f in files for name in imports_of(f) if name.startswith("core.random.draw")
    }
    assert not importing


def modules_imported(file):
    """Returns the modules of the package that a file imports anywhere."""
    for name in imports_of(file):
        while name and not (PACKAGE / name.replace(".", "/")).with_suffix(".py").exists():
            name = name.rpartition(".")[0]  # a class or a function of a module
        if name:
            yield name


def find_cycle(imports):
    """Returns modules that import one another in a circle; empty if there is no circle."""
    free, path = set(), []

    def visit(module):
        if module in free:
            return []
        if module in path:
            return [*path[path.index(module) :], module]
        path.append(module)
        for other in imports[module]:
            if cycle := visit(other):
                return cycle
        free.add(path.pop())
        return []

    return next(filter(None, map(visit, imports)), [])


def test_no_module_or_package_imports_itself_through_others():
    """Finds import cycles, also those that an import within a function hides from Python."""
    names = {file: ".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in SOURCES}
    imports = {name: {*modules_imported(file)} - {name} for file, name in names.items()}
    assert len(imports) > 150 and sum(map(len, imports.values())) > 600
    assert find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert not find_cycle(imports)

    between = {part: set() for parts in LAYERS for part in parts}
    for name, others in imports.items():
        if (importer := part_of(name)) is not None:  # not core/__init__.py or adapters/__init__.py
            parts = [part_of(other) for other in others]
            between[importer[1]] |= {found[1] for found in parts if found} - {importer[1]}
    assert len(between["core.feeding"]) > 5
    assert not find_cycle(between)


def test_packages_describe_their_modules():
    for folder in sorted({file.parent for file in SOURCES} - {PACKAGE}):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text and len(text) > 100, f"{folder.name}/__init__.py does not say what lives there"


def files_passed(call):
    """Returns this package's files whose functions a call enters, and the call's result."""
    files = set()
    package = pathlib.Path(dalijax.__file__).parent  # in site-packages, unless it is editable
    names = {
        str(package / file.relative_to(PACKAGE)): file.relative_to(PACKAGE) for file in SOURCES
    }

    def note(frame, event, _):
        file = names.get(frame.f_code.co_filename)
        if event == "call" and file is not None:
            files.add(file.as_posix())

    gc.collect()  # objects of other tests would be freed during the call
    gc.disable()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return files, result


def over_reader(folder):
    @data_iterator(output_map=["x"], reader_name="reader")
    def read(folder):
        return fn.readers.numpy(file_root=folder, name="reader", pad_last_batch=True)

    return read(folder, batch_size=2, num_threads=1)


def plus_zero(x):
    return x + 0


def over_source(folder):
    source = sources.Arrays({"x": np.arange(8)})
    return data_iterator(plus_zero, ["x"], source=source)(batch_size=2, num_threads=1)


def over_grain(folder):
    records = grain.MapDataset.source([{"x": np.array([k])} for k in range(8)])
    transform = DALITransform(plus_zero, batch_size=2, output_map=["x"], num_threads=1)
    return iter(records.pipe(transform))


# The files of a call: to construct, next(), get_state() and set_state() of another position.
ROUTES = {
    over_reader: (15, 6, 8, 17),
    over_source: (29, 10, 8, 10),
    over_grain: (12, 10, 5, 10),
}


@pytest.mark.parametrize("make", ROUTES, ids=lambda make: make.__name__)
def test_a_call_passes_few_files(make, arrays_dir):
    """Limits the files that a reader of the code opens to follow a call.

    Making an iterator over a reader or a source builds its pipelines; Grain's builds them later.
    """
    construct, following, get, set_ = ROUTES[make]
    files, iterator = files_passed(lambda: make(arrays_dir))
    assert "core/pipeline/engine.py" in files and len(files) <= construct, sorted(files)
    first = iterator.get_state()
    next(iterator)
    next(iterator)
    files, _ = files_passed(lambda: next(iterator))
    assert "core/pipeline/runner.py" in files and len(files) <= following, sorted(files)
    files, _ = files_passed(iterator.get_state)
    assert "core/pipeline/engine.py" in files and len(files) <= get, sorted(files)
    files, _ = files_passed(lambda: iterator.set_state(first))
    assert "core/pipeline/engine.py" in files and len(files) <= set_, sorted(files)
