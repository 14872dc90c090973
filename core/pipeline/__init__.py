"""DALI's pipelines: how they are made, how they run, and how their outputs become batches.

Sources make pipelines (`pipeline_source`, of functions and of hand-made ones), `runner` runs them,
`batch` makes what is delivered, `reader` reads epochs from DALI's metadata. The
iterator, the records and the functions stand on it; it imports `core.state` and the pure modules.
"""
