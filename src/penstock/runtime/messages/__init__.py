"""Values and gradients between stages: what travels when, and in which form.

- ``mailbox``: derives a worker's messages from the schedule, posts receives ahead, and keeps what is sent alive.
- ``payload``: layouts and headers, so that both ends know the shapes.
- ``compress``: float32 tensors rounded to fewer bytes on their way, where the plan says so.
"""
