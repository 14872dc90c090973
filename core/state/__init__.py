"""States: positions, fingerprints of the data, and their encoding as JSON.

`envelope` encodes every state and checks its fields. `reader_state` contains the states of
iterators over DALI's readers, with a `position`, and `core.sources.state` those over sources.

A `fingerprint` describes the data of a state: its `operators` and the files of its readers
(`reader_files`). `differences` compares the fingerprint of a state with the iterator's, and
`agreement` compares the iterators of several processes. `random_state` and `dali_checkpoints` read
and edit checkpoints of DALI. No pipeline is built or run here.
"""
