"""Pipelines that Python feeds: with a source's records by number, or with a stream of records.

`source_engine` runs pipelines over a source, and `stream_engine` over a stream of records, such as
Grain's. `stand_ins` replaces bad records. These modules do not import `core.iterator`.
"""
