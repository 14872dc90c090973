"""The order of samples, as pure functions.

`epochs` assigns the samples of an epoch to batches and masks. `samples` does the same for positions
in an endless stream of samples. `shuffle` maps the positions of an epoch to records. The records of
these samples are computed by `core.sources.source.epoch_order`, or by the ``order`` of a `Mixture`,
whose samples `proportions` assigns to sources. `packing` and `buckets` group the records of an
epoch into rows and batches by their sizes.

Padding of an incomplete last batch is decided by ``last_batch_policy`` (FILL fills the batch up,
DROP omits it, PARTIAL shortens it), and by whether the epoch is padded. A padded epoch ends with
repetitions of its last sample. Otherwise, the batch takes the first samples of the next epoch,
which begins after them. This also holds under DROP and PARTIAL. There are three cases, depending on
the origin of the data:

- DALI's readers: the reader decides (``pad_last_batch``), or ``last_batch_padded`` if no
  ``reader_name`` is given. `core.pipeline.reader.epochs_of` creates an `epochs.EpochPlan`, whose
  `valid` counts the samples of the epoch in a batch, and `core.pipeline.batch.BatchMaker` makes
  the mask or cuts the batch.
- Record sources: ``last_batch_padded`` decides, by default `samples.pads_by_default`.
  `samples.SamplePlan.rows` returns the samples of a batch, padding included, and their mask.
- Grain: a transform knows no epochs. ``drop_remainder`` and ``pad`` of the adapters decide, and
  `core.feeding.record_reader.RecordBatch.padded` repeats the last record, also for
  `adapters.grain.batch_operation`. A `DALIDataLoader` pads in `adapters.grain.loader_steps.Steps`.
  Several processes with unequal slices of a dataset add whole batches of padding:
  `core.feeding.stream_part.PartReader` decides when, and `adapters.grain.reading.Reader.padding`
  makes them of the first record.

Some adapters choose these arguments for their caller: `adapters.grain.iter_dataset`,
`adapters.t5x`, and `adapters.pax` in ``DALIInput._checked_call``.
"""
