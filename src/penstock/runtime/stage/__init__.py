"""Forward, backward and update of one stage on one device. Nothing here sends or schedules.

- ``stage``: computes a microbatch and keeps what its backward needs.
- ``weights``: versions of the weights; ``optimizers``: the job's optimizers and schedulers.
- ``losses``: the loss of a microbatch, as a mean or as a sum with its weight.
- ``deferred``: backwards in halves; ``recompute``: forwards that are computed again; ``compiling``: torch.compile.
- ``precision``: autocast and the loss scale.
- ``batch_norm``, ``buffers``: statistics over the replicas of a stage.
"""
