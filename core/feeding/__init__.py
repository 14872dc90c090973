"""Engines of pipelines that Python feeds with records, through ``fn.external_source``.

`fed_engine` is the common base. An engine takes its records from a supply, whose protocol is in
`supply`:

- `source_engine` feeds the records of a `dalijax.sources` source. `binding` checks the iterator's
  arguments. `source_supply` reads the records by number, in threads, and `read_rows` prepares the
  records for DALI. `announcer` requests the bytes of remote records ahead. `core.sources.reuse`
  detects sources that overwrite records which are still in use.
- `stream_engine` feeds a stream of records that is read in order, such as Grain's, and checks the
  iterator's arguments. `record_reader` is the protocol of the stream, and `record_supply` reads it.
  With several processes, `stream_part` reads the part of each process.

`graph` defines the ``external_source`` inputs of the graph, `joined_draws` feeds several draws by
one input, and `schema` maps the keys of Grain's records to inputs. These modules do not import
`core.iterator`.

A bad record is handled in these steps:

1. The supplies find bad records. `read_rows` finds records of a source that can't be read or are
   truncated, and `record_supply` finds records of a stream that lack an input. Both find images,
   videos and sounds that DALI can't decode (`core.formats.image_size`) or augment, and records on
   which DALI failed before. If Grain itself can't read a record, `stream_engine` raises Grain's
   error.
2. The supplies replace these records by good records, which `stand_ins` chooses, so that the
   pipelines run.
3. If DALI fails nevertheless, `FedEngine._failed` finds the bad records: it halves the batch until
   the parts succeed (`core.pipeline.failing_rows`), and `core.pipeline.failure.cause_of` tells
   whether records, the graph or the machine are at fault. If the batch is to be delivered, or
   random operators must advance as in other runs, it runs the batch again with stand-ins.
4. ``on_error`` determines the result: an error that names the bad records ("raise"), the next batch
   ("skip"), or the batch with a mask that excludes the stand-ins ("mask"). An error that is not the
   fault of some records is raised in any case, such as a graph that fails for every record.

Bad files of DALI's own readers are described in `core.iterator`.

Words of this package:

- record: an entry of the data set, e.g. an image with its label.
- sample: an index in the endless stream of records that the batches take, over all epochs.
- run: an execution of the pipelines, which makes one batch; DALI requests runs ahead of the
  consumer.
- row: an index in a batch, or in the part of a batch that a pipeline makes.
- part: the rows of a batch that a pipeline makes; in `stream_part`, the rows of a process.
- chunk: the records of a source that a task reads.
- index: the number of an entry of a chunk or another list, which is not the row in the batch.
- stand-in: a good record that takes the row of a bad record.
- input: an ``external_source`` of the graph, which is fed with one value of each record. Other
  values, such as text, bypass the graph.
"""
