"""The examples run as a user runs them."""

import pathlib
import subprocess
import sys

from PIL import Image

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_getting_started(tmp_path):
    # From a copy, so that its pictures are drawn anew and land there.
    folder = tmp_path / "examples"
    folder.mkdir()
    for script in EXAMPLES.glob("*.py"):
        (folder / script.name).write_text(script.read_text())
    done = subprocess.run(
        [sys.executable, "-W", "error", folder / "getting_started.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pictures = sorted((folder / "out" / "getting_started").glob("*.png"))
    assert len(pictures) >= 10
    for picture in pictures:
        low, high = Image.open(picture).convert("L").getextrema()
        assert high - low > 50, picture  # something is drawn on it
    assert "NamedSharding" in done.stdout and "images/s" in done.stdout
