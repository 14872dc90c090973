"""Record sources: records by index, so that a batch is a function of (seed, epoch, sample).

To add a source, write a module with a subclass of `source.Source`, or of `base.BaseSource`, which
computes an identity and image sizes, and export it in `dalijax.sources`. Parsers of file formats
belong to `core.formats`. `dalijax.sources` contains the public names; everything else in this
package is private.
"""
