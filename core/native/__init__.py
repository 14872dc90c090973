"""The optional library in C, which ctypes loads.

`library` has its path. `read_ranges.c` reads parts of local files, and `resize.c` resizes and
normalizes images on the CPU.
"""
