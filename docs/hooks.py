"""What the site's build does beside MkDocs' own: notebooks as pages."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import make_notebooks  # noqa: E402 - it lies beside this file, and is no module of a package

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
    """Warns, which fails the build, where reading the page would need the network."""
    for tag in ELSEWHERE.findall(output):
        _log.warning("%s loads from elsewhere: %s", page.file.src_uri, tag)
