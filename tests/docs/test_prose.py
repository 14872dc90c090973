"""Ceilings for unusual phrases in documentation, docstrings and comments, and for vague names.

The patterns match habits that make sentences hard to read: pronouns instead of nouns, inverted word
order, and "where" instead of "if". The ceilings are occurrences per 10,000 words. A high rate is a
reason to rewrite a page, not to replace words.
"""

import ast
import re

import pytest

from pages import ROOT

PHRASES = re.compile(
    "|".join(
        (
            r"\bones\b",
            r"\bone(?=[.,;:)])",
            r"\bone(?= (?:that|which|who|whose|is|was|has|had|can|may|must|would|will)\b)",
            r"\bone (?:from|with)\b",
            r"\b(?:the|this|that|another|other|new|old|no|a|an|each|its|own|\w+er) one\b",
            r"\b(?:those|such)\b(?! (?:as|a)\b)",
            r"\b(?:nobody|nothing|none)\b",
            r"\b(?:beside|behind|anew|alike)\b",
            r"\b(?:says?|said)\b",
            r"\bwhere (?:it|they|there|that|nobody|nothing)\b",
            r"\bwhat (?:it|is|a|the|an|they|was|were|DALI|its|gets|goes)\b",
            r"\b(?:of|by|at|in|for|with|from|to|on) (?:which|whom|whose)\b",
            r"\b(?:wants|goes on|go on|made of)\b",
        )
    )
)
CEILINGS = {
    "pages": 40,
    "examples": 60,
    "benchmarks": 60,
    "core": 50,
    "adapters": 50,
    "tests": 60,
}
# Names that do not say what they hold, and names such as of_files.
VAGUE = re.compile(
    r"_*(?:asked|beyond|each|given|held|here|how|kept|known|like|made|more|now|ones?|others|own|rest"
    r"|seen|taken|told|wanted|what|where|whole|of_\w+)_*"
)
MOST_VAGUE = 2  # names per 1,000 lines
_TRIPLE_QUOTED = re.compile(r'(^[ \t]*)?"""(.*?)"""', re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(?:^[ \t]*|  )# (.*)$", re.MULTILINE)
_CODE_OR_TABLE = re.compile(r"```.*?```|`[^`]*`|^\|[^\n]*$", re.DOTALL | re.MULTILINE)


def docstrings_and_comments(source: str) -> list[str]:
    """Returns the triple-quoted strings that begin a line, and the comments."""
    quoted = [match for match in _TRIPLE_QUOTED.finditer(source) if match[1] is not None]
    return [match[2] for match in quoted] + _COMMENT.findall(_TRIPLE_QUOTED.sub("", source))


def texts(group: str) -> list[str]:
    """Returns the prose of a folder of Python files, or of the pages of the documentation."""
    folder = "docs" if group == "pages" else group
    sources = [file.read_text() for file in sorted((ROOT / folder).rglob("*.py"))]
    prose = [text for source in sources for text in docstrings_and_comments(source)]
    if group == "pages":
        pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        prose += [_CODE_OR_TABLE.sub("", page.read_text()) for page in pages]
    return prose


@pytest.mark.parametrize("group", CEILINGS)
def test_texts_are_in_plain_english(group):
    prose = texts(group)
    found = [(match[0], text) for text in prose for match in PHRASES.finditer(text)]
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in prose)
    rate = 10_000 * len(found) / words
    examples = "\n".join(f"{phrase!r}: {' '.join(text.split())[:90]}" for phrase, text in found[:9])
    assert rate <= CEILINGS[group], f"{rate:.0f} per 10,000 words, for example\n{examples}"


def test_only_prose_is_measured():
    source = '''
"""Says what the module is made of."""
TEXT = """nobody"""
x = 1  # where it is none
'''
    found = [text for text in docstrings_and_comments(source) if PHRASES.search(text)]
    assert found == ["Says what the module is made of.", "where it is none"]
    assert not PHRASES.search("Resumes a run of one epoch, such as the first run.")


def names_bound(source: str) -> list[str]:
    """Returns the names of the variables, arguments, attributes and functions that code defines."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
    return names


@pytest.mark.parametrize("folder", ("core", "adapters"))
def test_names_say_what_they_hold(folder):
    sources = {file: file.read_text() for file in sorted((ROOT / folder).rglob("*.py"))}
    vague = [
        f"{file.name}: {name}"
        for file, source in sources.items()
        for name in names_bound(source)
        if VAGUE.fullmatch(name)
    ]
    lines = sum(source.count("\n") for source in sources.values())
    assert 1000 * len(vague) < MOST_VAGUE * lines, vague


def test_every_binding_is_measured():
    source = (
        "def kept(known, *, of_x):\n    for one in self: (here := 1)\n    self._own, x = 1, more\n"
    )
    found = [name for name in names_bound(source) if VAGUE.fullmatch(name)]
    assert sorted(found) == ["_own", "here", "kept", "known", "of_x", "one"]
