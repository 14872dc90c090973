"""Iterators over pipelines with DALI readers.

`reader_engine` holds the position and the pipelines, `iterator` implements the iterator protocol,
and `batch_stream` joins epochs for adapters whose iterators don't have epochs. `core.api` composes
iterators; this package doesn't import `core.feeding` and `core.functions`.
"""
