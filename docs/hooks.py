"""Hooks of MkDocs: adds notebooks as pages, and checks that pages need no network."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import make_notebooks  # noqa: E402 - a module of this folder

ELSEWHERE = re.compile(r"<(?:script|img|iframe|link rel=.stylesheet.)[^>]*https?://[^>]*>")
_log = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages of notebooks."""
    for path in sorted(make_notebooks.NOTEBOOKS.glob("*.ipynb")):
        page = File.generated(
            config, f"notebooks/{path.stem}.md", content=make_notebooks.markdown(path)
        )
        files.append(page)
    return files


def on_post_page(output: str, *, page: Any, **kwargs: Any) -> None:
    """Warns if a page loads files from other hosts; warnings fail the build."""
    for tag in ELSEWHERE.findall(output):
        _log.warning("%s loads from elsewhere: %s", page.file.src_uri, tag)
