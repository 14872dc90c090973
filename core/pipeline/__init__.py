"""DALI's pipelines: who makes them, how they run, and what becomes of their outputs.

Sources make pipelines (`pipeline_source`, of functions and of hand-made ones), `runner` runs them,
`batch` makes what is delivered, `reader` reads epochs from DALI's metadata. The
iterator, the records and the functions stand on it; it imports `core.state` and the pure modules.
"""
