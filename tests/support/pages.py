"""Pages of Markdown: their blocks as one program, their sentences, headings and links."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
import shlex
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOT_RUN = "# not run here:"
MOST_CHARACTERS, MOST_WORDS = 100, 30
NO_PROSE = ("#", "|", "!!!", "???", "===", ":::", "--8<--", "<")
_LINK = re.compile(r"\]\(<?([^()\s>]+)")  # the text may begin on the line before
_DALIJAX = re.compile(r"\s*python -m dalijax")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, and its lines."""

    language: str
    first: int
    lines: list[str]


class Page:
    """A page of the documentation."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self.lines = path.read_text().splitlines()
        self.blocks = list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        opened: tuple[str, str, int] | None = None
        for number, line in enumerate(self.lines, 1):
            fence = re.match(r"\s*(```+|~~~+)\s*(.*)", line)
            if opened is None and fence:
                opened = fence[1], fence[2], number + 1
            elif opened and fence and not fence[2] and fence[1].startswith(opened[0]):
                lines = self.lines[opened[2] - 1 : number - 1]
                language = opened[1].split(" ")[0]  # highlighted lines may follow the language
                yield Block(language, opened[2], textwrap.dedent("\n".join(lines)).split("\n"))
                opened = None
        if opened:
            raise ValueError(f"{self.name}:{opened[2] - 1}: the block has no end")

    @property
    def module(self) -> str:
        """Returns the name of the page's program, which is not the name of another module."""
        name = self.name.removesuffix(".md")
        return "page_" + re.sub(r"\W", "_", name).lower()

    def block(self, heading: str) -> str:
        """Returns the first Python block below a heading."""
        start = next(n for n, line in self.prose if line.lstrip("# ") == heading)
        block = next(b for b in self.blocks if b.first > start and b.language == "python")
        return "\n".join(block.lines) + "\n"

    def program(self) -> str | None:
        """Returns the page's blocks, at their line numbers in the page."""
        code = [""] * len(self.lines)
        for block in self.blocks:
            if block.lines and block.lines[0].startswith(NOT_RUN):
                continue
            if block.language == "python":
                code[block.first - 1 : block.first - 1 + len(block.lines)] = block.lines
            elif block.language == "sh":
                for number, command in commands(block):
                    if _DALIJAX.match(command):
                        arguments = shlex.split(command, comments=True)[1:]
                        code[number - 1] = f"__import__('page_commands').run({arguments!r})"
        if not any(code):
            return None
        assert not code[0], f"{self.name} begins with a heading"
        return "\n".join(code) + "\n"

    def outputs(self) -> list[Block]:
        """Returns the text blocks directly after a Python block that runs: its output."""
        pairs = [
            (before, block)
            for before, block in itertools.pairwise(self.blocks)
            if (before.language, block.language) == ("python", "text")
            and not before.lines[0].startswith(NOT_RUN)
        ]
        gaps = [(before.first + len(before.lines), block.first - 2) for before, block in pairs]
        return [
            block
            for (_, block), (start, stop) in zip(pairs, gaps, strict=True)
            if not "".join(self.lines[start:stop]).strip()
        ]

    @functools.cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Yields numbers and texts of the lines outside of blocks."""
        code = {n for b in self.blocks for n in range(b.first - 1, b.first + len(b.lines) + 1)}
        return [(n, line) for n, line in enumerate(self.lines, 1) if n not in code]

    def sentences(self) -> Iterator[tuple[int, str]]:
        """Yields each sentence, with the first line of its paragraph."""
        paragraph: list[str] = []
        start = 0
        for number, line in [*self.prose, (len(self.lines) + 1, "")]:
            text = line.strip()
            item = re.match(r"([-*+]|\d+\.)\s+", text)
            ends = not text or text.startswith(NO_PROSE) or re.match(r"\[.*\]: ", text)
            if (ends or item) and paragraph:
                for sentence in split_sentences(" ".join(paragraph)):
                    yield start, sentence
                paragraph = []
            if ends:
                continue
            start = start if paragraph else number
            paragraph.append(text[item.end() :] if item else text)

    def too_long(self) -> Iterator[str]:
        """Yields lines and sentences that are too long, except tables and link targets."""
        for number, line in enumerate(self.lines, 1):
            bare = re.sub(r"\]\([^)]*\)|\]: \S+$", "]()", line)
            if len(bare) > MOST_CHARACTERS and not line.lstrip().startswith("|"):
                yield f"{self.name}:{number}: {len(bare)} characters: {line}"
        for number, sentence in self.sentences():
            if words(sentence) > MOST_WORDS:
                yield f"{self.name}:{number}: {words(sentence)} words: {sentence}"

    def links(self) -> Iterator[tuple[int, str]]:
        """Returns the links within the documentation."""
        for number, line in self.prose:
            for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if not re.match(r"[a-z]+:", target):
                    yield number, target

    def anchors(self) -> set[str]:
        """Returns the anchors of headings (as in MkDocs and GitHub) and of API entries."""
        anchors = {line[4:] for _, line in self.prose if line.startswith("::: ")}
        for _, line in self.prose:
            heading = re.match(r"#+\s+(.*?)(?:\s*\{.*#([\w.-]+).*\})?\s*$", line)
            if heading:
                text = re.sub(r"[^\w\s-]", "", heading[1]).strip().lower()
                anchors.add(heading[2] or re.sub(r"[\s]+", "-", text))
        return anchors


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """Yields each command of an sh block with its line; a backslash continues a command."""
    command, start = "", 0
    for number, line in enumerate(block.lines, block.first):
        start = start if command else number
        command += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            yield start, command.strip()
            command = ""


def split_sentences(paragraph: str) -> list[str]:
    """Splits text at full stops before a space; code and links count as their text."""
    text = re.sub(r"(`+).*?[^`]\1(?!`)", "code", paragraph)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [s for s in re.split(r"(?<=[.!?])[)\"'*_]*\s+(?=\S)", text) if s.strip()]


def words(sentence: str) -> int:
    """Counts words."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


README = ROOT / "README.md"
PAGES = [*sorted(DOCS.rglob("*.md")), README]
