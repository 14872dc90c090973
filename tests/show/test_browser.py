"""Pages in a browser, at the widths of a laptop and of a notebook's cell."""

import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from dalijax.show import show

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
COUNT = 12
COLOR = (7, 200, 90)  # of the images
HOSTILE = (
    "<script>document.title='OWNED'</script><img src=x onerror=alert(1)>\0\u202e שלום 😀"
    + "x" * 500
)


def screenshot(page, folder, width):
    """Returns the pixels of a page in a window of a width, [height, width, 3]."""
    page.save(folder / "page.html")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    window = (f"--window-size={width},9000", "--force-device-scale-factor=1")
    folders = (f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'page.png'}")
    command = [BROWSER, *options, *window, *folders, (folder / "page.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return np.asarray(Image.open(folder / "page.png").convert("RGB"))


def spans(is_inside):
    """Returns the first and last index of each run of True, [runs, 2]."""
    edges = np.diff(np.concatenate([[0], is_inside.astype(int), [0]]))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1366, 780])
@pytest.mark.parametrize("kind", ["image", "boxes and mask", "hostile texts"])
def test_records_fill_the_width(kind, width, tmp_path):
    batch = {"image": np.full((COUNT, 48, 64, 3), COLOR, np.uint8), "label": np.arange(COUNT)}
    options = {}
    if kind != "image":
        batch["mask"] = np.full((COUNT, 48, 64), 1, np.uint8)
        batch["mask"][:, 40:] = 0
        batch["boxes"] = np.full((COUNT, 1, 4), (0, 40, 10, 47), np.float32)
        del batch["label"]
    if kind == "hostile texts":
        batch |= {HOSTILE: [HOSTILE] * COUNT, "labels": np.zeros((COUNT, 1), int)}
        options = {"classes": [HOSTILE]}
    page = show(batch, **options)
    pixels = screenshot(page, tmp_path, width)
    is_image = (pixels == COLOR).all(-1)
    columns = spans(is_image.any(0))
    panels = 1 if kind == "image" else 2
    assert len(columns) >= (2 if width == 780 and panels == 1 else 1)
    lines = spans(is_image.any(1))
    assert len(columns) * len(lines) >= COUNT > len(columns) * (len(lines) - 1)
    # The records of a line, with their panels, fill the page up to its margins.
    assert columns[0][0] < 40
    right = columns[-1][1] + (panels - 1) * (columns[0][1] - columns[0][0])
    assert width - 60 < right < width


@pytest.mark.slow
def test_texts_run_no_scripts(tmp_path):
    page = show({HOSTILE: [HOSTILE] * 2, "image": np.zeros((2, 9, 9, 3), np.uint8)})
    page.save(tmp_path / "page.html")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "<title>Batch of 2 records: &lt;script&gt;" in dom
    assert "<script" not in dom and dom.count("<img") == 2
