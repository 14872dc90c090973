"""Random augmentation whose numbers belong to records: crops, flips, colors, and learned policies.

`windows` and `policies` are NumPy alone: the choices for each record. `crops`, `colors` and
`auto` are the functions of a graph, which hand these choices to DALI's operators.
"""
