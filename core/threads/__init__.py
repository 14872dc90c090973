"""Threads that survive signals and forks, for reading and for blocking calls.

`workers` runs tasks in threads that end with their owner. `per_process` keeps objects that a forked
child must not use, such as threads and open files, and creates them again in the child.
"""
