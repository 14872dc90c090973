"""Creation and execution of DALI pipelines, and conversion of their outputs to batches.

`pipeline_factory` and `handmade_pipelines` create pipelines, and `dali_pipeline` builds them with
DALI. `function_notes` and `output_notes` are notes on a pipeline about its Python functions and its
outputs. `runner` runs pipelines, `calls` counts the threads inside DALI, `batch` converts the
outputs to arrays, and `reader` derives epochs from DALI's metadata.

`engine` is the base class of the engines of iterators: it keeps the position, and raises or skips
failed batches. `failure` classifies DALI's errors, `failing_rows` finds the records that fail,
`failure_errors` makes the errors that users see, and `advice` adds fixes to them. `processes`
compares the iterators of several processes, and `traced` rejects calls while JAX traces.
"""
