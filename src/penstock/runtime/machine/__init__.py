"""What a worker has of its machine. Nothing here knows of other workers.

- ``machine``: the worker's share of devices, cores and file descriptors, and the names of host and clock.
- ``memory``: bytes that the process holds in tensors, read while it trains.
- ``out_of_memory``: how often the kernel has killed a process because memory ran out.
"""
