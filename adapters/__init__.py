"""Adapters for CLU, Grain, Pax, T5X, tf.data and Prometheus: a module or package for each.

An adapter translates an iterator to the protocol of its ecosystem and makes no other decisions.
Install its dependencies by ``pip install dalijax[grain]``. The names in the docstring of a module
or package are public.
"""
