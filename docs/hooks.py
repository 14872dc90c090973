"""What the site's build does beside MkDocs' own: the package as a folder, notebooks as pages."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = re.compile(r"<(?:script|img|iframe|link rel=.stylesheet.)[^>]*https?://[^>]*>")
_log = logging.getLogger("mkdocs.hooks")


def link_package(folder: Path) -> None:
    """Links the sources as they are once installed: the repository's root is the package."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "dalijax"
    package.mkdir(parents=True)
    for path in [*ROOT.glob("*.py"), ROOT / "core", ROOT / "adapters"]:
        (package / path.name).symlink_to(path)


def on_startup(**kwargs: Any) -> None:
    """Runs before mkdocstrings looks for the package."""
    link_package(ROOT / ".cache" / "docs")


def on_post_page(output: str, *, page: Any, **kwargs: Any) -> None:
    """Warns, which fails the build, where reading the page would need the network."""
    for tag in ELSEWHERE.findall(output):
        _log.warning("%s loads from elsewhere: %s", page.file.src_uri, tag)
