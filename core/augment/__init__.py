"""Random augmentation that depends only on the record: crops, flips, colors and learned policies.

`windows` and `policies` compute the random choices of each record in NumPy. `crops`, `colors` and
`auto` are functions for DALI graphs that pass these choices to DALI operators. `layouts` gives
arrays the layout that these operators need.
"""
