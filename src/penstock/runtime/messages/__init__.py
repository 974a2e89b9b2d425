"""Values and gradients between stages: what travels when, and in which form.

- ``mailbox``: derives a worker's messages from the schedule, posts receives ahead, and keeps what is sent alive.
- ``values``: the codecs, one for each kind of value, and the gradients of values.
- ``dense`` and ``nested``: the codecs of tensors and of containers with tensors.
- ``packing``: the values of a message as tensors, with their layout.
- ``compress``: a packing that rounds float32 tensors to fewer bytes, where the plan says so.
- ``header``: layouts on the wire, so that both ends know the shapes.
"""
