"""How each pair of workers talks, and what that costs.

- ``links``: times gloo and shared memory between workers of a host, and takes the faster.
- ``trials``: timed messages, streams and all-reduces over any transport, as ``penstock cluster measure`` needs them.
- ``handling``: what a message costs a worker that has something else to do.
"""
