"""Seconds and bytes of a captured model: how a profile is made.

- ``measure``: puts a profile together from all that is measured.
- ``layer_times``: passes through all layers; ``part_times``: what halves and quarters of the model say of layers.
- ``made_values``: bytes and types of the values between layers.
- ``worker_times``: the steps of a worker that is timed; ``update_times``: updates by call, tensor and byte.
"""
