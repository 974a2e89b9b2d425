"""Averaging over the replicas of a stage, and over stages that share a weight.

- ``sync``: all-reduces the gradients of a round in buckets, overlapped with the last backward; clips the global norm.

Who averages with whom is decided in ``penstock.sync``.
"""
