"""Seconds and bytes of a captured model: how a profile is made.

- ``measure``: puts a profile together from all that is measured.
- ``passes``: takes passes through all layers (``layer_times``) and whole steps by turns (``worker_times``).
- ``part_times``: what whole steps of parts of the model say of its layers.
- ``made_values``: bytes and types of the values between layers.
- ``update_times``: updates by call, tensor and byte.
"""
