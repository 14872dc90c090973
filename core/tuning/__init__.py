"""Which settings make an iterator fastest on this machine.

`dalijax.tune` is the door; it uses the iterator as any caller would.
"""
