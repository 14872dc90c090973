"""Python functions in the graph: of JAX, Numba, and any library that knows DLPack.

`dalijax.fn` is the door. They leave notes with the pipeline that is being defined
(`core.pipeline.function_notes`) and know nothing of who runs it.
"""
