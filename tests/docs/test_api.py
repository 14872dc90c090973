"""The API reference: each public name has an entry, on its module's page, and no other has."""

import ast
import pathlib
import re

import pytest

from pages import DOCS, ROOT

PACKAGE = ROOT / "src" / "dalijax"

MODULES = {
    "dalijax": "dalijax",
    "dalijax.fn": "fn",
    "dalijax.sources": "sources",
    "dalijax.augment": "augment",
    "dalijax.show": "show",
    "dalijax.tune": "tune",
    "dalijax.adapters.grain": "grain",
    "dalijax.adapters.grain.orbax": "grain",
    "dalijax.adapters.clu": "clu",
    "dalijax.adapters.t5x": "t5x",
    "dalijax.adapters.tfdata": "tfdata",
    "dalijax.adapters.pax": "pax",
    "dalijax.adapters.prometheus": "prometheus",
}


def public_names(file: pathlib.Path) -> list[str]:
    """What a module lists in ``__all__``; Pax's can't be imported here."""
    for node in ast.parse(file.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return ast.literal_eval(node.value)
    return []


def module_file(module: str) -> pathlib.Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def entries(page: str) -> set[str]:
    """What a page documents, but for the classes of the core that public names hand out."""
    text = (DOCS / "api" / f"{page}.md").read_text()
    documented = re.findall(r"^(?:::: |## .*\{ #)([\w.]+)", text, re.MULTILINE)
    return {name for name in documented if not name.startswith("dalijax.core.")}


def names_of(page: str) -> set[str]:
    modules = [module for module, its_page in MODULES.items() if its_page == page]
    names = {f"{m}.{name}" for m in modules for name in public_names(module_file(m))}
    return names | set(modules)


@pytest.mark.parametrize("page", sorted(set(MODULES.values())))
def test_each_public_name_has_an_entry(page):
    assert entries(page) == names_of(page)


@pytest.mark.parametrize("page", sorted(set(MODULES.values())))
def test_the_overview_links_to_each_entry(page):
    linked = re.findall(rf"\({page}\.md#([\w.]+)\)", (DOCS / "api" / "index.md").read_text())
    assert sorted(linked) == sorted(names_of(page) - set(MODULES))


def test_each_public_module_has_a_page():
    doors = {
        f
        for glob in ("*.py", "adapters/*.py", "adapters/*/__init__.py")
        for f in PACKAGE.glob(glob)
    }
    # ReportInput is a name of dalijax.adapters.clu; its file is no module of its own.
    doors.remove(PACKAGE / "adapters" / "clu_report.py")
    documented = {module_file(module) for module in MODULES}
    assert {file for file in doors if public_names(file)} == documented - {
        PACKAGE / "adapters" / "grain" / "orbax.py"
    }
