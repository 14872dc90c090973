"""Pipelines over DALI's readers as an iterator with one position.

`data_iterator` is the door; the engine has the position, the iterator the protocol, the epoch
stream joins epochs for adapters that know none. Siblings (`core.records`, `core.functions`) are
not imported.
"""
