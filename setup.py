"""The optional helper in C; pyproject.toml has everything else."""

from setuptools import Extension, setup

# A plain shared library that ctypes loads: it needs no Python headers, and one build serves all
# versions of Python. If it can't be compiled, the package reads files in Python instead.
setup(
    ext_modules=[
        Extension(
            "dalijax.core.formats._read_ranges",
            ["src/dalijax/core/formats/read_ranges.c"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
