"""A run's state on disk, keyed by the model's own names.

- ``state``: reads a worker's state off its stages, and sets it.
- ``keeper``: takes checkpoints while the pipeline runs; ``checkpoint``: their form on disk.
- ``resume``: which checkpoint a run may go on from.
- ``portable``: weights in files that other tools read and write.
"""
