"""Dtypes and devices of arrays, and functions on whole batches.

`placement` computes which rows belong to which device and process, and puts arrays on devices.
`dtypes` converts dtypes of NumPy, JAX and DALI. `batch_map` applies users' functions to batches.
"""
