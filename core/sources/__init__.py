"""Sources with random access, so that a batch is a function of (seed, epoch, sample).

`dalijax.sources` contains the public names; everything else in this package is private.
"""
