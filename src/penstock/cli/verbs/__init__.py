"""The verbs of the command line, a module for each family.

A verb checks its input, calls the library, writes a file and prints a table or JSON. Modules that need torch are
imported inside the verbs that use them, after everything that can be checked without: loading torch takes seconds.

- ``profile``: measures a job's model; ``plan``: finds the best plan.
- ``files``: ``import``, ``export`` and ``show``.
- ``simulate``: ``simulate``, ``sweep`` and ``emulate``.
- ``train``: ``train`` and ``verify``.
- ``report``: ``report`` and ``watch``.
- ``bench``, ``demo``; ``cluster``: ``cluster measure``.
"""
