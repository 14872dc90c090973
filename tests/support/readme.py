"""Blocks of Python of the README and the docs, as they run without a GPU."""

import pathlib

import dalijax


def block(heading: str, page: str = "README.md") -> str:
    """The first block below a page's heading, with the pixels on the CPU."""
    text = (pathlib.Path(dalijax.__file__).parent / page).read_text()
    code = text.split(f"# {heading}\n")[1].split("```python\n")[1].split("```")[0]
    return code.replace('device="mixed"', 'device="cpu"').replace(".gpu()", "")
