"""Engines of pipelines that Python feeds with records, through ``fn.external_source``.

`fed_engine` is the common base. `source_engine` feeds the records of a `dalijax.sources` source,
which `source_supply` reads by number. `stream_engine` feeds a stream of records that is read in
order, such as Grain's, which `record_supply` reads. `stand_ins` replaces bad records. These modules
do not import `core.iterator`.

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
