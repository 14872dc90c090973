"""Libraries that pack images into rows of tokens, compared by ``benchmarks/packed_rows.py``."""
