"""Checks of the environment at `import dalijax`: installed packages, and CUDA's queues.

`import dalijax` runs these modules first. They import no other module of this package, and DALI
only in `extras.check_dali`, which reports a missing wheel.
"""
