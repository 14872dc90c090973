"""Tools for users: `show` draws batches, `profile` finds bottlenecks, `tune` searches settings.

The modules ``*_command`` are the commands of ``python -m dalijax.sources``. No other layer imports
the tools, and they are imported at first use.
"""
