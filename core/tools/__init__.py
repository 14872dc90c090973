"""Tools for users: `show` draws batches, `profile` finds bottlenecks, `tune` searches settings.

They use iterators through the public interface, and are imported at first use.
"""
