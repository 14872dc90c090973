"""Pipelines fed with rows from Python: records of a source by number, or of a stream in order.

`source_engine` runs pipelines over a source, `stream_engine` over a stream of records, as from
Grain. `stand_ins` replaces bad records. `core.iterator` is not imported.
"""
