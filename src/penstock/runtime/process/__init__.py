"""Worker processes: how they start, train, report and end.

- ``launch``: starts workers on this machine and ends them; ``joining``: a worker's place among them.
- ``train``: the training loop of one worker; ``options``: the options of a run; ``jobs``: the user's job file.
- ``verify``: gradients of a plan against one process; ``survey``: measuring a cluster.
- ``placement``: where workers are, beside where the plan puts them; ``clocks``: how their clocks compare.
- ``progress``, ``scalars``: what is told while a run goes; ``loss_file``, ``handed_in``: what is kept of it.
"""
