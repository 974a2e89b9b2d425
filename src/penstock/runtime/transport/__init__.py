"""Moving tensors between workers. All transports have the contract of ``base``; one test suite covers them.

- ``base``: the contract.
- ``process_group``: between processes, by torch.distributed (gloo or nccl).
- ``shared_memory``: between processes of one host, through memory that both map; ``shared_file`` is that memory.
- ``threads``: between threads of one process, for tests, emulation and measuring.

Which of them a pair of workers uses is chosen in ``runtime/links``.
"""
