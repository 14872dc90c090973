"""What `import dalijax` finds on a machine: installed packages, and the queues of CUDA.

Imports nothing of this package, and neither DALI nor JAX until `extras.check_dali` looks for DALI:
it runs before both are imported.
"""
