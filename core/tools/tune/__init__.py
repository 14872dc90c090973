"""Search for the fastest settings of an iterator on this machine.

`dalijax.tune` has the public names: `tune` measures, `command` is ``python -m dalijax.tune``.
"""
