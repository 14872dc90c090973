"""Python functions in the graph: of JAX, Numba, and any library with DLPack.

`dalijax.fn` exports the public names. A function stores notes on the pipeline that is being defined
(`core.pipeline.function_notes`), and doesn't know the iterator that runs it. The sibling packages
`core.iterator` and `core.feeding` are not imported. Functions of placed batches are in
`core.arrays.batch_map`.
"""
