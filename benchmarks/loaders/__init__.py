"""Adapters of data loaders for ``benchmarks/resume.py``, with a module for each loader."""
