"""Indexed sources: records by number, so that a batch is a function of (seed, epoch, sample).

`order`, `mixture` and `plan` are pure. `dalijax.sources` has the public names; nothing
else of this folder may be relied on.
"""
