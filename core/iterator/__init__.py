"""The public iterator over the batches of an engine, and the engine of DALI's readers.

`iterator` implements the iterator protocol for every engine of epochs, including the engine of
record sources in `core.feeding`; its base class contains the methods that iterators and streams
share. `batch_stream` joins the epochs of an engine to a stream, for ``data_iterator(...).stream``
and the adapters. `reader_engine` runs pipelines with DALI's readers or with the user's own
``fn.external_source``, and holds their position; `restoring` builds them at a saved position.
`core.api` composes iterators; this package doesn't import `core.feeding` and `core.functions`.

If a batch of a reader fails, the whole batch is lost: `ReaderEngine._run_at` returns the error, and
`core.pipeline.engine` raises it or skips the batch, depending on ``on_error``. `reader_errors`
contains the messages, and `bad_files` finds the corrupt images of the batch. If the reader itself
fails, e.g. at a missing file, the error is raised, and the batch stays the next batch.
"""
