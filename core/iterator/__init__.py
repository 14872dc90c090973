"""Iterators over pipelines with DALI readers.

`reader_engine` holds the position and the pipelines, `iterator` implements the iterator protocol,
and `batch_stream` joins epochs for adapters whose iterators have none. `core.api` composes
iterators; this package imports neither `core.feeding` nor `core.functions`.
"""
