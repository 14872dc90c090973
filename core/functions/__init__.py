"""Python functions in the graph: of JAX, Numba, and any library with DLPack.

`dalijax.fn` has the public names. A function leaves notes with the pipeline that is being defined
(`core.pipeline.function_notes`), and does not know the iterator that runs it. Siblings
(`core.iterator`, `core.feeding`) are not imported. Functions of the placed batch are in
`core.batch_map`.
"""
