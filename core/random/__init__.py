"""Random numbers that depend only on the seed, the epoch and the record.

`hashing` mixes integers, `seeds` chooses the seeds of pipelines, and `draw` passes random numbers
to graph functions.
"""
