"""Pipelines over DALI's readers as an iterator with one position.

The engine has the position, the iterator implements the protocol, and the epoch stream joins epochs
for adapters without epochs. `core.api` composes iterators. Siblings (`core.feeding`,
`core.functions`) are not imported.
"""
