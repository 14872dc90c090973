"""Pipelines that Python feeds: with a source's records by number, or with a stream of records.

`fed_engine` runs pipelines that are fed with the rows of a supply: `source_engine` with those of a
`source_supply`, and `stream_engine` with those of a `record_supply`, for streams such as Grain's.
`stand_ins` replaces bad records. These modules do not import `core.iterator`.
"""
