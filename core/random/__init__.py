"""Random numbers that depend only on the seed, the epoch and the record.

`hashing` mixes integers, `seeds` chooses the seeds of pipelines, and `draw` passes random numbers
to graph functions. DALI requests them by the callback of an ``external_source``; over a source,
the reading threads have computed most of them ahead (`core.feeding.read_rows`). Functions of
`Source.random_map` draw from `record_generators`, and `global_states` detects functions that draw
from global generators.
"""
