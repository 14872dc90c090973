"""Creation and execution of DALI pipelines, and conversion of their outputs to batches.

`pipeline_factory` creates pipelines from a graph function, and `handmade_pipelines` takes those
that the caller has created, and creates them again. `dali_pipeline` builds pipelines with DALI.
`function_notes` and `output_notes` are notes on a pipeline about its Python functions and its
outputs. `runner` runs pipelines, `calls` counts the threads inside DALI, `batch` converts the
outputs to arrays, and `reader` derives epochs from DALI's metadata.

`engine` has the base classes of the engines of iterators: `Engine` keeps the position, and raises
or skips failed batches, and `EpochEngine` adds epochs. `failure` classifies DALI's errors,
`failing_rows` finds the records that fail, `failure_errors` makes the errors that users see, and
`advice` adds fixes to them. `processes` exchanges descriptions of iterators between processes,
which `core.state.agreement` compares. `traced` rejects calls while JAX traces.
"""
