"""Emulated devices: the real runtime, with timed waits in place of computing.

- ``emulate``: runs a plan's workers as threads.
- ``stand_ins``: the stage, weights, averaging and transport of such a worker.
- ``network``: when messages and all-reduces arrive.
"""
