"""The optional library in C, which ctypes loads.

`library` has its path, and `operators` calls its functions in graphs. `read_ranges.c` reads parts
of local files, `resize.c` resizes and normalizes images on the CPU, and `split.c` splits inputs.
"""
