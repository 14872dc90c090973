"""Records in, batches out: pipelines that are fed from Python, for Grain.

The decoder takes batches of records from a queue and gives what the pipelines make of them.
Siblings (`core.iterator`, `core.functions`) are not imported.
"""
