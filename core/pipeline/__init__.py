"""DALI's pipelines: who makes them, how they run, and what becomes of their outputs.

The iterator, the records and the functions stand on it and never import one another. It knows
states, and nothing above it: what a function leaves to do is an object that it calls.
"""
