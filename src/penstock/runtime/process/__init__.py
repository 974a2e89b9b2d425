"""Worker processes: how they start, train, report and end.

- ``launch``: starts workers on this machine and ends them; ``joining``: a worker's place among them.
- ``train``: the training loop of one worker; ``options``: the options of a run; ``opening``: the run directory of all.
- ``jobs``: the user's job file.
- ``verify``: gradients of a plan against one process; ``survey``: measuring a cluster.
- ``placement``: where workers are, beside where the plan puts them; ``clocks``: how their clocks compare.
- ``progress``, ``scalars``: reports during a run; ``loss_file``: losses on disk; ``worker_files``: what each worker
  leaves in the run directory at the end.
"""
