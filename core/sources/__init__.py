"""Sources of records with random access, so that a batch depends only on seed, epoch and step.

To add a source, write a module with a subclass of `base.BaseSource`, such as `arrays`. It passes
its fields and the argument ``identity`` to ``super().__init__``, and defines ``__len__`` and
``read``, which returns the values of some records. It also defines ``_content``, if the identity
should depend on more than some records. A source of byte ranges of files extends
`byte_records.ByteRecords`. A source of the records of another source extends `wrapper.Wrapper`, as
`map.Map` does, which calls a `record_function` for each record.
Grain may pickle a source for other processes, so it opens its files when it first reads
(`core.threads.per_process`). Export the class in `dalijax.sources`, and update ``SOURCES`` in
`core.messages.replacements`. Parsers of file formats belong to `core.formats`.

`dalijax.sources` contains the public names; all other names in this package are private. Users
subclass `source.Source`, which explains each method.
"""
