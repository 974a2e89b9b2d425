"""Workers on devices that are not there: real runtime, timed waits instead of computing.

- ``emulate``: runs a plan's workers as threads.
- ``stand_ins``: the stage, weights, averaging and transport of such a worker.
- ``network``: when messages and all-reduces arrive.
"""
