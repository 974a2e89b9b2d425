"""The loop over a worker's actions, and what a worker is put together from.

- ``worker``: takes the next action, waits for its inputs, computes, hands on its outputs, records the event.
- ``assemble``: a worker made from a job and a plan.
- ``data``: microbatches from the job's data; ``events``: what the worker did and when.
- ``evaluate``: held-out data through the same workers; ``reference``: the model in one process, to compare with.
- ``release``: frees the layers that other workers have.
"""
