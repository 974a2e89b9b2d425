"""The command line: ``penstock VERB``.

- ``app``: the typer app; ``verbs/``: the verbs, a module for each family; ``options``: options that several share.
- ``checks``: what can be checked before torch is loaded; ``exit_codes``: errors as lines and exit codes.
- ``launcher``: starts worker processes; ``tasks``: what they are told; ``worker``: one such process.
- ``profiling``: profiles and plans a job; ``resuming``: how to go on after a run that ended early.
- ``steps``: progress; ``answers``: prints an answer; ``show``, ``simulations``, ``comparisons``, ``watch``: its tables
  and JSON; ``cells``: the cells of tables.
"""

from penstock.cli.app import main

__all__ = ["main"]
