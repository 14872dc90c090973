"""Creation and execution of DALI pipelines, and conversion of their outputs to batches.

`pipeline_factory` and `handmade_pipelines` create pipelines, `runner` runs them, `batch` converts
their outputs, and `reader` derives epochs from DALI's metadata. `engine` is the base class of the
engines of iterators: it retries and skips failed batches.
"""
