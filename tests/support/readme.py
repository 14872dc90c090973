"""The README's blocks of Python, as they run without a GPU."""

import pathlib

import dalijax


def block(heading: str) -> str:
    """The first block below a heading, with the pixels on the CPU."""
    text = (pathlib.Path(dalijax.__file__).parent / "README.md").read_text()
    code = text.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    return code.replace('device="mixed"', 'device="cpu"').replace(".gpu()", "")
