"""The library in C, which setup.py builds if there is a compiler."""

from __future__ import annotations

import pathlib

LIBRARY = pathlib.Path(__file__).with_name("_native.abi3.so")
# An environment variable; "dali" lets DALI change images instead of the library.
VARIABLE = "DALIJAX_RESIZE"
