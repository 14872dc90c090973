"""States: positions, fingerprints of the data, and their encoding as JSON.

`envelope` encodes every state and checks its fields, `differences` compares the fingerprint of a
state with the iterator's, and `random_state` edits DALI's checkpoints. No pipeline is built or run
here.
"""
