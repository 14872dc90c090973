"""Sources of records with random access, so that a batch depends only on seed, epoch and step.

To add a source, write a module with a subclass of `source.Source`, or of `base.BaseSource`, which
computes an identity and image sizes. Export the class in `dalijax.sources`. Parsers of file formats
belong to `core.formats`. `dalijax.sources` contains the public names; all other names in this
package are private.
"""
