"""The environment of `import dalijax`: installed packages, and CUDA's queues.

These modules import nothing of this package, and neither DALI nor JAX before
`extras.check_dali` checks for DALI: they run before either is imported.
"""
