"""The optional library in C; pyproject.toml has everything else."""

from setuptools import Extension, setup

# A plain shared library that ctypes loads: it needs no Python headers, and one build serves all
# versions of Python. If it can't be compiled, the package reads files in Python, and DALI resizes
# images, instead.
setup(
    ext_modules=[
        Extension(
            "dalijax.core.native._native",
            [f"src/dalijax/core/native/{name}.c" for name in ("read_ranges", "resize", "split")],
            # Without the last, processors that fuse operations would compute other weights.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
