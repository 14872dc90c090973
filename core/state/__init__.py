"""States: positions, fingerprints of the data, and their encoding as JSON.

`envelope` encodes every state and checks its fields; its docstring lists the kinds of states.
`reader_state` contains the states of iterators over DALI's readers, with a `position`.

A `fingerprint` describes the data of a reader's state: the epochs, the `operators` and the files of
its readers (`reader_files`). Sources describe theirs in `core.sources.state`. `differences`
compares the fingerprint of a state with the iterator's, and `agreement` compares the iterators of
several processes. `purity` detects functions that keep state. `random_state` and `dali_checkpoints`
read and edit checkpoints of DALI. No pipeline is built or run here.
"""
