"""The order of samples, as pure functions.

`epochs` assigns the samples of an epoch to batches and masks. `samples` does the same for positions
in an endless stream of samples. `shuffle` permutes the samples of an epoch.
"""
