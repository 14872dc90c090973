"""States: a position, the fingerprint of its data, and both as JSON.

May be used by everything above (pipeline, iterator, records, functions, adapters); imports only the
pure modules of `core`. No pipeline is built or run here.
"""
