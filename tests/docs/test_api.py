"""The API reference: each public name has an entry on its module's page, and no other name has."""

import ast
import importlib
import pathlib
import re

import pytest

from dalijax import errors
from dalijax.core import errors as core_errors
from pages import DOCS, ROOT

PACKAGE = ROOT / "src" / "dalijax"

MODULES = {
    "dalijax": "dalijax",
    "dalijax.errors": "errors",
    "dalijax.fn": "fn",
    "dalijax.sources": "sources",
    "dalijax.augment": "augment",
    "dalijax.show": "show",
    "dalijax.tune": "tune",
    "dalijax.profile": "profile",
    "dalijax.adapters.grain": "grain",
    "dalijax.adapters.grain.orbax": "grain",
    "dalijax.adapters.clu": "clu",
    "dalijax.adapters.t5x": "t5x",
    "dalijax.adapters.tfdata": "tfdata",
    "dalijax.adapters.pax": "pax",
    "dalijax.adapters.prometheus": "prometheus",
}


def public_names(file: pathlib.Path) -> list[str]:
    """Returns the names in a module's ``__all__``; Pax's module can't be imported here."""
    for node in ast.parse(file.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return ast.literal_eval(node.value)
    return []


def module_file(module: str) -> pathlib.Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def entries(page: str) -> set[str]:
    """Returns the names that a page documents."""
    text = (DOCS / "api" / f"{page}.md").read_text()
    return set(re.findall(r"^(?:::: |## .*\{ #)([\w.]+)", text, re.MULTILINE))


def names_of(page: str) -> set[str]:
    modules = [module for module, its_page in MODULES.items() if its_page == page]
    names = {f"{m}.{name}" for m in modules for name in public_names(module_file(m))}
    return (names - set(MODULES)) | set(modules)


@pytest.mark.parametrize("page", sorted(set(MODULES.values())))
def test_each_public_name_has_an_entry(page):
    assert entries(page) == names_of(page)


@pytest.mark.parametrize("page", sorted(set(MODULES.values())))
def test_the_overview_links_to_each_entry(page):
    linked = re.findall(rf"\({page}\.md#([\w.]+)\)", (DOCS / "api" / "index.md").read_text())
    assert sorted(linked) == sorted(names_of(page) - set(MODULES))


# Changes of this list are changes for users: mention them in CHANGELOG.md.
PUBLIC_NAMES = {
    "dalijax": (
        "BatchStream Bucket DALIGenericIterator Draw FailedBatch InputStats IteratorFunction "
        "LastBatchPolicy Pack augment data_iterator errors fn profile show sources tune"
    ),
    "dalijax.errors": (
        "BatchError BatchMapError EpochError GraphError ProcessError RaggedError RecordError "
        "StateError UnfitRecordError"
    ),
    "dalijax.fn": "cast dl_tensor_python_function jax_function numba_function pad_rows read_file",
    "dalijax.sources": (
        "Arrays Buckets Coco Field Files Mixture MultiImage Named Packed Parquet RLDS Records "
        "Selection Source TFRecord Tar"
    ),
    "dalijax.augment": (
        "PatchWindow Window affine_window auto_augment center_crop center_window color_jitter "
        "crop_window fit_window flip gaussian_blur grayscale iou_window normalize patch_window "
        "patches "
        "rand_augment random_crop random_erasing random_resized_crop random_window "
        "resize_window scale_window solarize trivial_augment"
    ),
    "dalijax.show": "Page show",
    "dalijax.tune": "Tuned tune",
    "dalijax.profile": "Report profile",
    "dalijax.adapters.grain": (
        "DALIBatch DALIDataLoader DALIIterDataset DALITransform PackedRecords RandomInputs "
        "pack_records"
    ),
    "dalijax.adapters.grain.orbax": "ElasticHandler ElasticRestore ElasticSave",
    "dalijax.adapters.clu": (
        "DALIDatasetIterator DALIGenericPeekableIterator ReportInput peekable_data_iterator"
    ),
    "dalijax.adapters.t5x": "eval_get_dataset_fn get_dataset_fn",
    "dalijax.adapters.tfdata": "DALIDataset",
    "dalijax.adapters.pax": "DALIInput DALIInputSpecsProvider",
    "dalijax.adapters.prometheus": "InputCollector",
}


def test_public_names():
    assert {m: sorted(public_names(module_file(m))) for m in MODULES} == {
        module: sorted(names.split()) for module, names in PUBLIC_NAMES.items()
    }


def test_public_names_are_there():
    for module in set(PUBLIC_NAMES) - {"dalijax.adapters.pax"}:  # it needs another Python
        found = importlib.import_module(module)
        for name in PUBLIC_NAMES[module].split():
            assert getattr(found, name) is not None
        assert {n for n in dir(found) if not n.startswith("_")} == set(found.__all__)


STATE = "get_state set_state "
PUBLIC_ATTRIBUTES = {
    "dalijax.augment.Window": "boxes extent image mask matrix points",
    "dalijax.augment.PatchWindow": "boxes extent image mask matrix patches points",
    "dalijax.DALIGenericIterator": STATE
    + (
        "batch_size checkpoints close closed element_spec epoch epochs errors next num_errors peek "
        "record reset seek seek_step size skip start_prefetch step total watch"
    ),
    "dalijax.BatchStream": STATE
    + (
        "close closed element_spec epoch errors peek record reset seek_step skip start_prefetch "
        "step watch"
    ),
    "dalijax.IteratorFunction": "stream",
    "dalijax.Draw": "choice coin_flip compute normal sized uniform",
    "dalijax.InputStats": "batches copy epoch errors examples padding since step wait_seconds",
    "dalijax.sources.Source": "identity map name random_map read read_threads sizes",
    "dalijax.sources.Files": "identity map name random_map read read_threads sizes",
    "dalijax.sources.Tar": "identity map name random_map read read_threads sizes",
    "dalijax.sources.Mixture": "identity map name order random_map read read_threads sizes then",
    "dalijax.adapters.clu.DALIDatasetIterator": STATE
    + (
        "close element_spec get_next load peek peek_async reset restore save seek_step "
        "start_prefetch watch"
    ),
    "dalijax.adapters.grain.DALITransform": "map",
    "dalijax.adapters.grain.DALIDataLoader": "num_steps",
}


@pytest.mark.parametrize("path", PUBLIC_ATTRIBUTES)
def test_public_attributes(path):
    """Attributes that users should not see begin with an underscore."""
    module, name = path.rsplit(".", 1)
    found = dir(getattr(importlib.import_module(module), name))
    assert {n for n in found if not n.startswith("_")} == set(PUBLIC_ATTRIBUTES[path].split())


def test_each_exception_that_users_meet_is_public():
    """Exceptions outside of core/errors.py are caught within the package, or private."""
    found = {
        name
        for name, value in vars(core_errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert found == set(errors.__all__)
    assert {getattr(errors, name).__module__ for name in found} == {"dalijax.errors"}


def test_each_public_module_has_a_page():
    doors = {
        f
        for glob in ("*.py", "adapters/*.py", "adapters/*/__init__.py")
        for f in PACKAGE.glob(glob)
    }
    # ReportInput is a name of dalijax.adapters.clu; its file is not a module of the API.
    doors.remove(PACKAGE / "adapters" / "clu_report.py")
    documented = {module_file(module) for module in MODULES}
    assert {file for file in doors if public_names(file)} == documented - {
        PACKAGE / "adapters" / "grain" / "orbax.py"
    }
