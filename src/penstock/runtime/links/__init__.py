"""How each pair of workers talks, and what that costs.

- ``choice``: times gloo and shared memory between workers of a host, and takes the faster.
- ``trials``: timed messages, streams and all-reduces over any transport, as ``penstock cluster measure`` needs them.
- ``message_times``: what a message takes of a worker's own time in training.
"""
