"""Every page of the documentation: its blocks run, its sentences are short, its links resolve."""

import ast
import os
import pathlib
import re
import shlex

import pytest
import tomllib
from forks import run_fork

from full import FULL
from pages import PAGES, ROOT, Page, commands, words
from programs import run_python

LANGUAGES = {"python", "sh", "text", "json", "yaml", "toml", "html", "diff", "ini"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages of modules that dalijax does not require.
PACKAGES = {
    **{name: name for name in ("clu", "flax", "grain", "numba", "obstore", "optax", "soundfile")},
    "orbax": "orbax-checkpoint",
    "tensorflow": "tensorflow-cpu",
    "PIL": "pillow",
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.slow
@each_page
def test_its_blocks_run(path, tmp_path):
    """In a single namespace and an empty folder, on 8 CPU devices, as a separate program.

    `make test-full` runs each page in a new process.
    """
    page = Page(path)
    code = page.program()
    if code is None:
        return
    (tmp_path / "scratch").mkdir()
    program = tmp_path / f"{page.module}.py"
    program.write_text(code)
    folders = [ROOT / "tests" / "support", ROOT / "examples", tmp_path / "scratch"]
    python_path = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "MPLBACKEND": "agg",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if FULL:
        done = run_python(program, cwd=tmp_path / "scratch", env=env)
    else:
        done = run_fork(program, modules=slow_modules(code), cwd=tmp_path / "scratch", env=env)
    printed = iter((done.stdout + done.stderr).splitlines())
    for block in page.outputs():  # each line of the page after the previous line
        for number, line in enumerate(block.lines, block.first):
            assert "..." in line or any(line in p for p in printed), f"{path.name}:{number}: {line}"


def slow_modules(code):
    """Returns the modules of a page that forks should share."""
    tensorflow = re.search("tfdata|metric_writers|ReportInput|tensorflow", code)
    return ["grain", "orbax.checkpoint", *(["tensorflow"] if tensorflow else [])]


@each_page
def test_its_blocks_are_labelled(path):
    """The language is set; Python that is not run compiles, and commands name existing files."""
    for block in Page(path).blocks:
        where = f"{path.name}:{block.first}"
        assert block.language in LANGUAGES, f"{where}: {block.language!r}"
        if block.language == "python":
            ast.parse("\n".join(block.lines), where)
        if block.language == "sh":
            for number, command in commands(block):
                check_command(f"{path.name}:{number}", command)


def check_command(where, command):
    """Checks that the extras, targets and files of a command exist in the repository."""
    for extras in re.findall(r"""(?:dalijax|\.)\[([\w,]+)\]""", command):
        assert set(extras.split(",")) <= EXTRAS.keys(), f"{where}: {extras}"
    tokens = shlex.split(command, comments=True)
    if tokens[:1] == ["make"]:
        assert {t for t in tokens[1:] if re.fullmatch("[a-z-]+", t)} <= TARGETS, where
    for token in tokens:
        if re.fullmatch(r"(examples|benchmarks|docs|tests|\.ci)/[\w./-]+", token):
            assert (ROOT / token).exists() or "/out/" in token, f"{where}: {token}"


@each_page
def test_its_lines_and_sentences_are_short(path):
    assert list(Page(path).too_long()) == []


@each_page
def test_it_names_the_extras_of_its_imports(path):
    """Pages with a command that installs dalijax: new users paste it, and then the blocks."""
    page = Page(path)
    named = re.findall(r'pip install\s"\.\[([a-z0-9,]+)\]"', path.read_text())
    code = page.program()
    if not named or code is None:
        return
    extras = set(",".join(named).split(","))
    if "all" in extras:
        extras |= set(re.findall(r"[a-z]+", EXTRAS["all"][0].partition("[")[2]))
    installed = str([EXTRAS[extra] for extra in extras])
    imported = {
        name.name.partition(".")[0]
        if isinstance(node, ast.Import)
        else node.module.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
        if isinstance(node, ast.Import) or node.module
    }
    missing = {m for m in imported & set(PACKAGES) if PACKAGES[m] not in installed}
    assert not missing, f"the extras {sorted(extras)} of {path.name} do not install {missing}"


@each_page
def test_its_links_resolve(path):
    page = Page(path)
    for number, link in page.links():
        file, _, anchor = link.partition("#")
        target = path if not file else pathlib.Path(os.path.normpath(path.parent / file))
        assert target.exists(), f"{path.name}:{number}: {link}"
        if anchor:
            assert anchor in Page(target).anchors(), f"{path.name}:{number}: {link}"


BROKEN = """# A page

Its first sentence has a [link](missing.md) and one to [a heading](#a-page).

=== "Tab"

    ```python
    # not run here: nothing of this name
    import nothing
    ```

    ```python
    print("line", __import__("inspect").currentframe().f_lineno)
    ```

    ```text
    line 13
    ```

- An item of three words. Another sentence of `x = 1. y` five words
  that goes on to [a
  page](missing-
  too.md).
"""


def test_a_page_is_read_as_it_is_meant(tmp_path, monkeypatch):
    monkeypatch.setattr("pages.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(BROKEN)
    page = Page(path)
    blocks = [(b.language, b.first) for b in page.blocks]
    assert blocks == [("python", 8), ("python", 13), ("text", 17)]
    assert [b.lines for b in page.outputs()] == [["line 13"]]
    code = page.program()
    assert "nothing" not in code
    file = tmp_path / "page.py"
    file.write_text(code)
    assert run_python(file).stdout == "line 13\n"
    assert list(page.links()) == [(3, "missing.md"), (3, "#a-page"), (22, "missing-")]
    assert page.anchors() == {"a-page"}
    assert [(n, words(s)) for n, s in page.sentences()] == [(3, 11), (20, 5), (20, 12)]
