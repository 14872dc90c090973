"""The public iterator over the batches of an engine, and the engine of DALI's readers.

`iterator` implements the iterator protocol for every engine of epochs, also for those of record
sources (`core.feeding`). `reader_engine` runs pipelines with DALI's readers, holds their position
and restores it, and `bad_files` finds the files that broke a batch. `batch_stream` joins epochs for
adapters whose iterators don't have epochs, and `step_loops` detects loops that count steps over an
iterator that ends with the epoch. `core.api` composes iterators; this package doesn't import
`core.feeding` and `core.functions`.
"""
