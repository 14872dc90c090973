"""The environment: installed packages, CUDA's queues, and failures of machines and networks.

`import dalijax` runs `extras` and `cuda_queues` first. These modules import no other module of this
package, and DALI only in `extras.check_dali`, which reports a missing wheel.
"""
