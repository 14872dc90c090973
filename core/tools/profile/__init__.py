"""Measures whether a training loop waits for its input, and finds the part that is too slow.

`dalijax.profile` is the public name. `loop` measures the loop, `replay` runs the graph alone and
truncated after its operators, `verdict` expresses both in words, and `profile` is the context
manager around the loop.
"""
