"""Record sources: records by index, so that a batch is a function of (seed, epoch, sample).

To add a source, subclass `source.Source`, or `base.BaseSource` for image sizes and an identity.

`dalijax.sources` contains the public names; everything else in this package is private.
"""
