"""Engines of pipelines that Python feeds with records, through ``fn.external_source``.

`fed_engine` is the common base. `source_engine` feeds the records of a `dalijax.sources` source,
which `source_supply` reads by number. `stream_engine` feeds a stream of records that is read in
order, such as Grain's, which `record_supply` reads. `graph` defines the ``external_source`` inputs,
and `schema` maps the keys of Grain's records to them. These modules do not import `core.iterator`.

Bad records: the supplies reject records that can't be read, or whose images DALI can't decode
(`core.formats.image_size`), and replace them by good records (`stand_ins`), which the mask
excludes. (If Grain itself can't read a record, `stream_engine` raises Grain's error.) If DALI fails
nevertheless, `fed_engine` runs each record of the batch alone to find the bad ones, and feeds the
batch again without them. Depending on ``on_error``, it then delivers the batch, skips it, or raises
an error that names the bad records. (Files of DALI's own readers: `core.iterator.bad_files`.)

Words of this package:

- record: an entry of the data set, e.g. an image with its label.
- sample: an index in the endless stream of records that the batches take, over all epochs.
- run: an execution of the pipelines, which makes one batch; DALI requests runs ahead of the
  consumer.
- row: an index in a batch, or in the part of a batch that one pipeline makes.
- stand-in: a good record that takes the row of a bad record.
- input: an ``external_source`` of the graph, which is fed with one value of each record. Other
  values, such as text, bypass the graph.
"""
