"""Workers on devices that are not there: real runtime, timed waits instead of computing.

- ``emulate``: runs a plan's workers as threads.
- ``emulated``: the stage, weights, averaging and transport of such a worker.
- ``network``: when what is sent has arrived.
"""
